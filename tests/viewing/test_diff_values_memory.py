"""Two checkpoints of any size are compared in the memory of a few blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hfshard
from tests.helpers.memory import MIB, peak_during, resident_bytes

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


@pytest.mark.parametrize("total_mib", [96, pytest.param(960, marks=pytest.mark.slow)])
def test_pickles_are_read_in_the_memory_of_a_few_blocks(tmp_path: Path, total_mib: int) -> None:
    for folder, more in (("a", 0), ("b", 1)):
        (tmp_path / folder).mkdir()
        weights = {f"layers.{number}.weight": torch.full((3 * MIB,), float(number + more)) for number in range(8)}
        names = [f"{copy}.{name}" for copy in range(total_mib // 96) for name in weights]
        torch.save(
            {name: weights[name.split(".", 1)[1]].clone() for name in names}, tmp_path / folder / "pytorch_model.bin"
        )
    del weights
    hfshard.diff_checkpoints(tmp_path / "a", tmp_path / "a")  # imports
    reports = []

    peak = peak_during(
        lambda: reports.append(hfshard.diff_checkpoints(tmp_path / "a", tmp_path / "b", values=True)), resident_bytes
    )

    print(f"\ntwo pickles of {total_mib} MiB: {peak / MIB:.0f} MiB")
    assert reports[0].read_bytes == 2 * total_mib * MIB
    assert {tensor.values.max_abs for tensor in reports[0].tensors if tensor.values} == {1.0}
    assert peak < MOST_MIB * MIB
