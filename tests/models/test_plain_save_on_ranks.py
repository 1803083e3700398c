"""Plain modules of which each rank has a part: saved and pushed by all, with the config and the card of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import hfshard
from hfshard.errors import InvalidArgumentError, RankFailedError
from hfshard.hub.directory.directory_hub import DirectoryHub
from tests.distributed.gloo import check_ranks
from tests.models.nets import Simple
from tests.saving.helpers import files_in
from tests.zoo.compare import contents

pytestmark = pytest.mark.compat


class Net(hfshard.ShardedModelMixin, Simple):
    """Arguments with defaults."""

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x_BW)
        return made


def made() -> Any:
    torch.manual_seed(0)
    model: Any = Net(width=16)
    return model


def save_and_push(rank: int, place: Path) -> None:
    model = made()
    fully_shard(model)
    assert type(model).__name__ == "FSDPNet"
    model.save_pretrained(place / "out", max_shard_size=600)
    model.push_to_hub(place / "hub", max_shard_size=600)
    target = made()
    with torch.no_grad():
        target.layer.weight.zero_()
    fully_shard(target)
    hfshard.load_model(target, place / "out", verify="full")
    assert torch.equal(target.layer.weight.to_local(), model.layer.weight.to_local())


def push_after_a_forward_pass(rank: int, place: Path) -> None:
    model = made()
    fully_shard(model, reshard_after_forward=False)
    model(torch.ones(1, 16))
    model.push_to_hub(place / "hub", max_shard_size=600)


def test_a_push_right_after_a_forward_pass_is_that_of_all_ranks(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, push_after_a_forward_pass, tmp_path)
    made().push_to_hub(tmp_path / "alone", max_shard_size=600)

    hubs = [DirectoryHub.open(str(tmp_path / name)) for name in ("hub", "alone")]
    assert hubs[0].resolve() == hubs[1].resolve()


def test_every_rank_saves_and_pushes_what_one_process_would(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, save_and_push, tmp_path)
    model = made()
    model.save_pretrained(tmp_path / "alone", max_shard_size=600)

    alone = files_in(tmp_path / "alone")
    assert files_in(tmp_path / "out") == alone
    assert contents(Path(DirectoryHub.open(str(tmp_path / "hub")).snapshot(None))) == alone
    assert json.loads(alone["config.json"])["width"] == 16
    assert torch.equal(Net.from_pretrained(tmp_path / "out").layer.weight, model.layer.weight)


def push_with_a_mistake(rank: int, place: Path) -> None:
    model = made()
    fully_shard(model)
    mistake = {"allow_patterns": "*.json"} if rank == 1 else {}
    with pytest.raises(InvalidArgumentError if rank == 1 else RankFailedError, match="allow_patterns"):
        model.push_to_hub(place / "hub", **mistake)


def test_a_mistake_of_one_rank_ends_the_push_of_all(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, push_with_a_mistake, tmp_path)
    assert not (tmp_path / "hub").exists()
