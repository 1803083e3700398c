"""Two checkpoints that differ in each way: some layers trained, one cast, one renamed, one reshaped, a hostile name."""

from __future__ import annotations

from pathlib import Path

import torch

import hfshard

HOSTILE = "</script><img src=x onerror=alert(1)>\u202eevil"


def make_two(directory: Path) -> tuple[Path, Path]:
    """Save both; layers 8 to 11 have another query."""
    generator = torch.Generator().manual_seed(0)
    old = {
        f"model.layers.{layer}.{kind}": torch.randn(8, 8, generator=generator)
        for layer in range(12)
        for kind in ("attn.q.weight", "attn.v.weight", "mlp.up.weight", "mlp.down.weight")
    } | {"embed.weight": torch.randn(16, 8, generator=generator), "head.weight": torch.randn(4, 8, generator=generator)}
    new = dict(old)
    for layer in range(8, 12):
        new[f"model.layers.{layer}.attn.q.weight"] = old[f"model.layers.{layer}.attn.q.weight"] * 1.01
    new["embed.weight"] = old["embed.weight"].to(torch.bfloat16)
    new["lm_head.weight"] = new.pop("head.weight")
    new["model.layers.0.mlp.up.weight"] = old["model.layers.0.mlp.up.weight"].reshape(4, 16)
    new[HOSTILE] = torch.ones(3)
    hfshard.save_state_dict(old, directory / "old")
    hfshard.save_state_dict(new, directory / "new")
    return directory / "old", directory / "new"
