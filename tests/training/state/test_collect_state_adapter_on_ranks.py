"""The adapter of a model that several ranks hold, or each a part of: PEFT opens what they save together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import BertModel

from hfshard.training import CheckpointManager, TrainingState
from tests.distributed.gloo import check_ranks
from tests.training.state.test_collect_state_adapter import RENAMED, adapted, base, output

peft = pytest.importorskip("peft")
pytestmark = RENAMED
__all__ = ["base"]


def save_together(rank: int, place: Path, kind: str) -> None:
    model = adapted(place / "base")
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with CheckpointManager(place / "run") as manager:
        manager.save(1, TrainingState(model=model))


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_save_it_as_one_process_does(base: Path, tmp_path: Path, kind: str) -> None:
    check_ranks(tmp_path / "ranks", 2, save_together, tmp_path, kind)

    checkpoint = tmp_path / "run" / "checkpoint-00000001"
    opened = peft.PeftModel.from_pretrained(BertModel.from_pretrained(base), checkpoint).eval()
    assert torch.equal(output(opened), output(adapted(base)))
