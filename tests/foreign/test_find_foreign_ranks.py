"""Ranks of a model that is spread over them read their own ranges of weights in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hfshard
from tests.distributed.gloo import check_ranks
from tests.foreign import like_deepspeed
from tests.foreign.dcp_files import halves, save_dcp


def weights() -> dict[str, torch.Tensor]:
    """The same in every process."""
    return {"weight": torch.arange(35.0).reshape(7, 5), "bias": torch.arange(7.0)}


def load(rank: int, saved: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(nn.Linear(5, 7), mesh=init_device_mesh("cpu", (2,)))

    hfshard.load_model(model, saved / "parts")
    like = hfshard.load_state_dict(saved / "zero", like={"embed": torch.empty(5, 3)})

    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.full_tensor(), weights()[name]), name
    assert torch.equal(like["embed"], like_deepspeed.expected()["embed"])


def test_each_rank_reads_its_part(tmp_path: Path) -> None:
    state = {f"model.{name}": tensor for name, tensor in weights().items()}
    save_dcp(tmp_path / "parts", state, {"model.weight": halves((7, 5), 1)})
    like_deepspeed.write(tmp_path / "zero" / "global_step3", like_deepspeed.contents(3, 2))

    check_ranks(tmp_path / "ranks", 2, load, tmp_path)
