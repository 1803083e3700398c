"""An empty state dict never replaces weights, in one process or on ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from transformers import BertModel

import hfshard
from hfshard.errors import InvalidArgumentError
from tests.distributed.gloo import check_ranks, waiting
from tests.helpers.tiny_bert import Bert, bert


class Net(hfshard.ShardedModelMixin, nn.Linear):
    """A plain module."""


CLASSES: dict[str, Any] = {"mixin": Bert, "install": BertModel}
CALLS: dict[str, Callable[[Path], object]] = {
    "function": lambda out: hfshard.save_model(bert(3), out, state_dict={}),
    "plain module": lambda out: hfshard.save_model(nn.Linear(2, 2), out, state_dict={}),
    "plain method": lambda out: Net(2, 2).save_pretrained(out, state_dict={}),
    "and push": lambda out: bert(3).save_pretrained(out, state_dict={}, push_to_hub=True, repo_id=str(out / "hub")),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_saves_only_weights_refuses_it(name: str, tmp_path: Path) -> None:
    hfshard.save_model(bert(5), tmp_path)

    with pytest.raises(InvalidArgumentError, match="state_dict is empty: a checkpoint without weights would replace"):
        CALLS[name](tmp_path)

    assert len(hfshard.load_state_dict(tmp_path, verify="full")) == 23
    assert not (tmp_path / "hub").exists()


def test_a_module_without_tensors_is_saved(tmp_path: Path) -> None:
    hfshard.save_model(nn.ReLU(), tmp_path, state_dict={})

    assert hfshard.load_state_dict(tmp_path) == {}


def save_empty(rank: int, place: Path) -> None:
    """Save the config alone: by all ranks, by the first one, and by all but one, which has the weights."""
    with hfshard.install(quiet=True), waiting(0.1):
        for name, cls in CLASSES.items():
            model, out = bert(3, cls=cls), place / name
            if rank == 0:
                model.save_pretrained(out)
            dist.barrier()
            model.save_pretrained(out, state_dict={})
            dist.barrier()
            if rank == 0:
                model.save_pretrained(out, state_dict={})
            dist.barrier()
            full: Any = bert(7, cls=cls).state_dict() if rank == 0 else {}
            model.save_pretrained(place / f"{name} full", state_dict=full)


def test_ranks_keep_the_weights(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, save_empty, tmp_path)

    for cls in CLASSES:
        for name, value in ((cls, 3), (f"{cls} full", 7)):
            weights = hfshard.load_state_dict(tmp_path / name, verify="full")
            assert {float(one) for tensor in weights.values() for one in tensor.unique()} == {value}
            assert len(weights) == 23
