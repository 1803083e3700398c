"""Two checkpoints of any size are compared in the memory of a few blocks."""

from __future__ import annotations

from pathlib import Path

import torch

import hfshard
from tests.helpers.memory_child import MIB, peak_during

MOST_MIB = 40
"""Two threads, each with blocks of both checkpoints read ahead, take 33 MiB for checkpoints of 1 GB as well."""


def test_values_are_measured_in_the_memory_of_a_few_blocks(tmp_path: Path) -> None:
    before = {f"layers.{number}.weight": torch.full((3 * MIB,), float(number)) for number in range(8)}
    hfshard.save_state_dict(before, tmp_path / "a", max_shard_size="40MB", checksum="xxh3")
    hfshard.save_state_dict({name: tensor + 1 for name, tensor in before.items()}, tmp_path / "b", checksum="xxh3")
    del before
    hfshard.diff_checkpoints(tmp_path / "a", tmp_path / "b")  # imports
    reports = []

    peak = peak_during(lambda: reports.append(hfshard.diff_checkpoints(tmp_path / "a", tmp_path / "b", values=True)))

    assert reports[0].read_bytes == 2 * 8 * 12 * MIB
    assert {tensor.values.max_abs for tensor in reports[0].tensors if tensor.values} == {1.0}
    assert peak < MOST_MIB * MIB
