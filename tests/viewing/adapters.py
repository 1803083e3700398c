"""A small base, and LoRA adapters of it as PEFT saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import hfshard

Q, V = "h.{}.q.weight", "h.{}.v.weight"


def make_base(directory: Path, front: str = "", dtype: torch.dtype = torch.float32) -> Path:
    """Two layers of two weights of 3 x 4 and a bias: all 2."""
    tensors = {front + name.format(layer): torch.full((3, 4), 2.0) for name in (Q, V) for layer in (0, 1)}
    tensors |= {f"{front}h.{layer}.q.bias": torch.full((3,), 2.0) for layer in (0, 1)}
    hfshard.save_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, directory)
    return directory


def make_adapter(directory: Path, more: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    """Of rank 2 and alpha 4 on q: its update is 2 x (1 x 2) x 0.25 = 1 in layer 0, and nothing in layer 1."""
    tensors = {}
    for layer in (0, 1):
        module = f"base_model.model.h.{layer}.q"
        tensors[f"{module}.lora_A.weight"] = torch.full((2, 4), 0.25)
        tensors[f"{module}.lora_B.weight"] = torch.full((3, 2), 1.0 - layer)
    directory.mkdir()
    save_file({**tensors, **(more or {})}, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    whole = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"], **config}
    (directory / "adapter_config.json").write_text(json.dumps(whole))
    return directory
