"""Classes of other libraries, such as diffusers: what hfshard can do for them, and what it says otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfshard
from hfshard.errors import InvalidArgumentError


class UNet(nn.Module):
    """A model of another library: with a config, a from_pretrained and a save_pretrained of its own."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.width = width
        self.layer = nn.Linear(width, width)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(**config)

    @classmethod
    def from_pretrained(cls, path: Path) -> Any:
        return cls.from_config(json.loads((path / "config.json").read_text()))

    def save_pretrained(self, save_directory: Path) -> None:
        (save_directory / "config.json").write_text(json.dumps({"width": self.width}))


class ShardedUNet(hfshard.ShardedModelMixin, UNet):
    """As a user may try it."""


def test_the_mixin_refuses_them_before_anything_is_written(tmp_path: Path) -> None:
    model: Any = ShardedUNet()
    other: Any = ShardedUNet
    calls: list[Callable[[], Any]] = [
        lambda: model.save_pretrained(tmp_path / "out"),
        lambda: model.push_to_hub(tmp_path / "hub"),
        lambda: other.from_pretrained(tmp_path),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError, match=r"ShardedUNet is not a transformers model.*hfshard\.save_model"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_load_model_says_how_to_load_them(tmp_path: Path) -> None:
    UNet().save_pretrained(tmp_path)
    hfshard.save_model(UNet(), tmp_path)
    with pytest.raises(
        InvalidArgumentError, match=r"and UNet of tests\.models\.test_patching_other_classes is none.*module"
    ):
        hfshard.load_model(UNet, tmp_path)


def test_what_it_says_works(tmp_path: Path) -> None:
    saved = UNet()
    saved.save_pretrained(tmp_path)
    hfshard.save_model(saved, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "diffusion_pytorch_model.safetensors")

    built = UNet.from_pretrained(tmp_path)
    hfshard.load_model(built, tmp_path / "diffusion_pytorch_model.safetensors")

    assert torch.equal(built.layer.weight, saved.layer.weight)
