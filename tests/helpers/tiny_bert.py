"""A tiny BERT whose every weight is one number, and what stock readers make of a directory."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import load_checkpoint_in_model
from huggingface_hub import load_torch_model
from transformers import BertConfig, BertModel

import hfshard

SHARDED, SINGLE = 4096 + 600, 10**7
"""Limits: a dozen files; one."""


class Bert(hfshard.ShardedModelMixin, BertModel):
    """As a user writes it."""


def bert(value: float, *, hidden: int = 8, cls: type[BertModel] = Bert) -> Any:
    """A model filled with one number; 23 tensors.

    Its type is left open: upstream's types of `to` and `push_to_hub` are wrong.
    """
    config = BertConfig(
        vocab_size=10, hidden_size=hidden, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16,
        max_position_embeddings=8,
    )  # fmt: skip
    model: Any = cls(config).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    return model


def warm_up() -> None:
    """Save and load once: transformers compiles a thousand patterns for the first, which no fork need do again."""
    with TemporaryDirectory() as folder:
        bert(0).save_pretrained(folder)
        Bert.from_pretrained(folder)


def value_of(model: torch.nn.Module) -> float:
    """The number that a model is filled with."""
    (value,) = {float(number) for tensor in model.state_dict().values() for number in tensor.unique()}
    return value


def read_by_all(folder: Path) -> dict[str, float]:
    """What every reader sees: hfshard twice, transformers, huggingface_hub, accelerate."""
    by_hub, by_accelerate = bert(-1, cls=BertModel), bert(-1, cls=BertModel)
    load_torch_model(by_hub, folder)
    load_checkpoint_in_model(by_accelerate, str(folder))
    functional = bert(-1, cls=BertModel)
    hfshard.load_model(functional, folder)
    return {
        "mixin": value_of(Bert.from_pretrained(folder)),
        "hfshard": value_of(functional),
        "transformers": value_of(BertModel.from_pretrained(folder)),
        "huggingface_hub": value_of(by_hub),
        "accelerate": value_of(by_accelerate),
    }


def all_see(value: float) -> dict[str, float]:
    """What `read_by_all` returns when all is well."""
    return dict.fromkeys(("mixin", "hfshard", "transformers", "huggingface_hub", "accelerate"), value)
