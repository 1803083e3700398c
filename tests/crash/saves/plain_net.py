"""A plain module as large as the small BERT, whose config changes no tensor's name or shape."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from huggingface_hub import PyTorchModelHubMixin
from torch import nn


class PlainNet(nn.Module):
    """Its arguments have the names that the sweep looks for in a config, which it keeps like a transformers model."""

    def __init__(self, hidden_act: str = "gelu", num_hidden_layers: int = 1, hidden_size: int = 8) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            hidden_act=hidden_act, num_hidden_layers=num_hidden_layers, hidden_size=hidden_size
        )
        self.first = nn.Embedding(32, hidden_size)
        self.second = nn.Embedding(32, hidden_size)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden_size, 16), nn.Linear(16, hidden_size)) for _ in range(num_hidden_layers)
        )
        self.head = nn.Linear(hidden_size, 32)
        self.tied = self.first


@cache
def stock_class() -> Any:
    """With huggingface_hub's mixin."""
    return type("PlainNet", (PlainNet, PyTorchModelHubMixin), {"__module__": __name__})
