"""The small models that attacked checkpoints are loaded into."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from tests.attacks.files import raw
from tests.helpers.tensor_bytes import bytes_of


class TinyModule(nn.Module):
    """A plain module whose weights have the names and shapes of `raw.LAYOUT`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.block = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)


class TinyConfig(PreTrainedConfig):
    """The config of `TinyPretrained`."""

    model_type = "hfshard_attack"


class TinyPretrained(PreTrainedModel):
    """The same weights as a model of transformers."""

    config_class = TinyConfig

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(8, 4)
        self.block = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.post_init()  # type: ignore[no-untyped-call]


class TinyGenerating(TinyPretrained, GenerationMixin):
    """The same as a model that generates, and so reads generation_config.json."""


def truth(seed: int = 1) -> dict[str, torch.Tensor]:
    """The weights of `raw.tensors(seed)` as torch sees them."""
    return {
        name: torch.frombuffer(bytearray(blob.data), dtype=torch.float32).reshape(blob.shape)
        for name, blob in raw.tensors(seed).items()
    }


def same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    """Whether two state dicts are equal bit for bit."""

    def facts(state_dict: Mapping[str, torch.Tensor]) -> dict[str, object]:
        return {name: (one.dtype, one.shape, bytes_of(one)) for name, one in state_dict.items()}

    return facts(found) == facts(wanted)
