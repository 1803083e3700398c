"""A save takes a few buffers beside the model, however its tensors lie in memory (`pytest -s` shows the figures)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import hfshard
from tests.helpers import forkserver
from tests.helpers.memory import MIB, peak_during

TENSORS = 16
LIMIT_MIB = 64
"""What a save may take beyond the model."""


def contiguous(total_bytes: int) -> dict[str, torch.Tensor]:
    rows = total_bytes // TENSORS // 4 // 1024
    return {f"layer.{i}.weight": torch.full((rows, 1024), float(i)) for i in range(TENSORS)}


def transposed(total_bytes: int) -> dict[str, torch.Tensor]:
    return {name: tensor.t() for name, tensor in contiguous(total_bytes).items()}


def flat_buffer(total_bytes: int) -> dict[str, torch.Tensor]:
    flat = torch.ones(total_bytes // 4)
    pieces = flat.chunk(TENSORS)
    return {f"layer.{i}.weight": piece.view(-1, 1024) for i, piece in enumerate(pieces)}


class Stack(nn.Module):
    """Linear layers whose weights are those of a state dict."""

    def __init__(self, state_dict: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ParameterList(list(state_dict.values()))


def save(kind: str, total_mib: int, folder: str) -> None:
    """Save two files, in a process that has saved nothing before; print the most bytes that it took meanwhile."""
    torch.set_num_threads(1)
    hfshard.save_state_dict({"warm": torch.ones(10)}, os.path.join(folder, "warm"))  # imports, pools
    total = total_mib * MIB
    if kind == "module":
        model = Stack(contiguous(total))
        print(peak_during(lambda: hfshard.save_model(model, folder, max_shard_size=total // 2)))
        return
    state_dict = {"contiguous": contiguous, "transposed": transposed, "flat": flat_buffer}[kind](total)
    print(peak_during(lambda: hfshard.save_state_dict(state_dict, folder, max_shard_size=total // 2)))


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "flat", "module"])
@pytest.mark.parametrize("total_mib", [160, pytest.param(1024, marks=pytest.mark.slow)])
def test_a_save_takes_at_most_64_mib_more(
    total_mib: int, kind: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    """Of either size, each of the two files is larger than that."""
    child = forkserver.call(
        save,
        kind,
        total_mib,
        str(tmp_path / kind),
        env=child_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    said, complaints = child.communicate(120)
    assert child.returncode == 0, complaints
    print(f"\nsave of {total_mib} MiB, {kind}: +{int(said) / MIB:.1f} MiB")
    assert int(said) <= LIMIT_MIB * MIB
