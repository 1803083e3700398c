"""What the checkpoints of a run take: by part, and what is linked from the one before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from hfshard.training import CheckpointManager, TrainingState
from hfshard.viewing.run_listing import checkpoints_of, list_checkpoints, part_of, unchanged_bytes


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of a model of which the first layer is frozen; the weights do not change at the third."""
    root = tmp_path_factory.mktemp("runs") / "run"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model[1].parameters())
    with CheckpointManager(root) as manager:
        for step in (1, 2, 3):
            if step < 3:
                model(torch.ones(1, 64)).sum().backward()
                optimizer.step()
            manager.save(step, TrainingState(model=model, optimizer=optimizer))
    return root


def test_linked_files_count_as_unchanged(run: Path) -> None:
    found = checkpoints_of(str(run))

    unchanged = unchanged_bytes(found)

    first, second, third = (unchanged[one.path] for one in found)
    assert first == 0
    frozen = ["model-00002-of-00002.safetensors", "state.safetensors"]  # no random number was drawn
    assert second == sum((run / "checkpoint-00000002" / name).stat().st_size for name in frozen)
    everything = [*frozen, "model-00001-of-00002.safetensors", "optimizer.safetensors"]
    assert third == sum((run / "checkpoint-00000003" / name).stat().st_size for name in everything)
    total = sum(_bytes_of(one.path) for one in found)
    on_disk = {os.stat(path).st_ino: os.stat(path).st_size for one in found for path in Path(one.path).iterdir()}
    assert total - sum(unchanged.values()) == sum(on_disk.values())


def test_each_file_is_of_one_part(run: Path) -> None:
    listed = list_checkpoints(checkpoints_of(str(run)))

    for one in listed:
        assert sorted(part.part for part in one.parts) == ["model", "optimizer", "other", "state"]
        sizes = [part.nbytes for part in one.parts]
        assert sizes == sorted(sizes, reverse=True)
        assert (one.size, one.files) == (_bytes_of(one.path), len(os.listdir(one.path)))
    assert part_of("model-00001-of-00002-0123456789abcdef.safetensors") == "model"
    assert part_of("model.safetensors.index.json") == "model"
    assert part_of("optimizer.safetensors") == "optimizer"
    assert part_of("model.txt") == part_of("tokenizer.model") == "other"


def test_the_first_that_is_left_counts_as_written(run: Path) -> None:
    found = checkpoints_of(str(run))[1:]

    assert unchanged_bytes(found)[found[0].path] == 0


def _bytes_of(path: str) -> int:
    return sum(file.stat().st_size for file in Path(path).iterdir())
