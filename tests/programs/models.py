"""Tiny models and tokenizers for the programs; what shows that files are ours, whole, and read by everyone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hfshard
from hfshard.errors import IntegrityError

WORDS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "cat", "sat", "there")


class Llama(hfshard.ShardedModelMixin, LlamaForCausalLM):
    """As a user writes it."""


class Bert(hfshard.ShardedModelMixin, BertModel):
    """As a user writes it."""


def llama(cls: Any = Llama, seed: int = 0) -> Any:
    """A language model of 8 words: 7.7 KB."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return cls(config)


def bert(cls: Any = Bert, seed: int = 0) -> Any:
    """An encoder of 8 words."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16,
    )  # fmt: skip
    return cls(config)


SETTINGS: dict[str, Any] = {
    "save_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 0.01, "use_cpu": True, "report_to": [],
    "disable_tqdm": True, "seed": 3, "dataloader_pin_memory": False,
}  # fmt: skip
"""Of every Trainer."""


def tokenizer() -> PreTrainedTokenizerFast:
    """One word, one token."""
    words = {word: number for number, word in enumerate(WORDS)}
    made = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]",
        eos_token="[SEP]", model_max_length=16,
    )  # fmt: skip


def assert_same(one: Any, other: Any) -> None:
    """Two modules, or state dicts, have the same tensors."""
    mine, theirs = (each if isinstance(each, Mapping) else each.state_dict() for each in (one, other))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) and mine[name].dtype == theirs[name].dtype for name in mine)


def assert_ours(directory: Path, *, shards: int | None = 1) -> None:
    """A directory holds a checkpoint of hfshard: every byte has a checksum, a flipped bit is refused.

    Args:
        directory: What to look at.
        shards: How many; None: several.
    """
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) == shards if shards else len(files) > 1
    report = hfshard.verify_checkpoint(directory)
    assert report.ok and report.warnings == () and report.checked_bytes > 0
    with flipped(files[-1]), pytest.raises(IntegrityError, match=files[-1].name):
        hfshard.load_state_dict(directory, verify="full")


@contextmanager
def flipped(path: Path) -> Iterator[None]:
    """A file whose last bit is another one."""
    raw = path.read_bytes()
    try:
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        os.utime(path)
        yield
    finally:
        path.write_bytes(raw)
