"""Files that somebody put into a checkpoint: a restore goes by the manifest, and a check tells of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import hfshard
from hfshard.training import CheckpointManager, TrainingState


def test_a_single_file_beside_the_shards_is_not_restored_and_is_told_of(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with CheckpointManager(tmp_path / "run", max_shard_size=400) as manager:
        place = Path(manager.save(1, TrainingState(model=model)))
        assert len(list(place.glob("model-*-of-*.safetensors"))) > 1
        hfshard.save_state_dict({name: torch.zeros_like(one) for name, one in weights.items()}, tmp_path / "other")
        (tmp_path / "other" / "model.safetensors").rename(place / "model.safetensors")
        nn.init.ones_(model.get_parameter("0.weight"))
        manager.restore(TrainingState(model=model), 1)
        [problem] = manager.verify(1)[1]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert str(problem).endswith("model.safetensors' is not of the checkpoint, and other tools load it in place of the "
                                 "files that are. Move it elsewhere.")  # fmt: skip
