"""State dicts to re-shard, and what lies in a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.helpers.random_state_dicts import random_tensor

SIZES = ("6KB", "9KB", "1MB")
"""Of the 9,216 bytes of tensors of `floats`: five files, three, and one."""


def floats() -> dict[str, torch.Tensor]:
    """Nine tensors of 1,024 bytes."""
    return {f"layer.{number}.weight": random_tensor(number, torch.float32, (16, 16)) for number in range(9)}


def odd() -> dict[str, torch.Tensor]:
    """What formats and torch differ about."""
    tied = random_tensor(1, torch.bfloat16, (40, 8))
    return {
        "complex": random_tensor(2, torch.complex128, (7, 3)),
        "half complex": random_tensor(3, torch.complex32, (5,)),
        "fp8": random_tensor(4, torch.float8_e4m3fn, (100,)),
        "fp4": random_tensor(5, torch.float4_e2m1fn_x2, (3, 8)),
        "tied": tied,
        "also tied": tied,
        "empty": torch.empty(0, 4, dtype=torch.float16),
        "0-d": torch.tensor(7),
        "bool": random_tensor(6, torch.bool, (33,)),
    }


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def weights_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix in (".safetensors", ".bin"))


def write_bins(directory: Path, state_dict: dict[str, Any], *, files: int = 1) -> Path:
    directory.mkdir(exist_ok=True)
    if files == 1:
        torch.save(state_dict, directory / "pytorch_model.bin")
        return directory
    weight_map: dict[str, str] = {}
    for number in range(files):
        name = f"pytorch_model-{number + 1:05d}-of-{files:05d}.bin"
        part = dict(
            list(state_dict.items())[number * len(state_dict) // files : (number + 1) * len(state_dict) // files]
        )
        torch.save(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 9}, "weight_map": weight_map}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return directory


def flip(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)
