"""What the golden checkpoints hold, in literals. `python -m tests.golden.cases NAME` writes a new one, once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hfshard.save import save_state_dict

HERE = Path(__file__).parent
_SHARED = torch.tensor([[1.5, -2.0], [0.0, 3.25]])

CASES: Mapping[str, tuple[Callable[[], dict[str, torch.Tensor]], dict[str, Any]]] = {
    "single": (lambda: {"weight": torch.tensor([1.0, 2.0]), "bias": torch.tensor([3], dtype=torch.int8)}, {}),
    "sharded": (
        lambda: {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([True, False]), "c": torch.tensor(7)},
        {"max_shard_size": 4108, "metadata": {"step": 3}},
    ),
    "tied": (lambda: {"lm_head": _SHARED, "embed": _SHARED, "transposed": _SHARED.t()}, {"max_shard_size": 1}),
    "tied-single": (lambda: {"lm_head": _SHARED, "embed": _SHARED}, {"checksum": "xxh3"}),
    "dtypes": (
        lambda: {
            "bf16": torch.tensor([1.0, -1.0], dtype=torch.bfloat16),
            "f8": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
            "f64": torch.tensor(0.1, dtype=torch.float64),
            "empty": torch.empty(0, 3, dtype=torch.float16),
            "c64": torch.tensor([1 + 2j], dtype=torch.complex64),
            "c128": torch.tensor([3 - 4j], dtype=torch.complex128),
            "u16": torch.tensor([65535], dtype=torch.uint16),
            "größe": torch.tensor([1], dtype=torch.uint8),
        },
        {},
    ),
    "variant": (
        lambda: {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])},
        {"variant": "fp16", "max_shard_size": 1, "packing": "balanced", "checksum": None},
    ),
}
"""Name -> (the state dict, arguments of save_state_dict)."""


def write(name: str, folder: Path) -> None:
    make, arguments = CASES[name]
    save_state_dict(make(), folder, **arguments)


if __name__ == "__main__":
    for case in sys.argv[1:]:
        assert not (HERE / case).exists(), "golden files are never written again"
        write(case, HERE / case)
