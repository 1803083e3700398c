"""The model that is measured: a Llama of a named size in bfloat16, its weights random by a seed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaConfig, PreTrainedModel

SEED = 20251121
FILL_BYTES = 8 * 2**20
BELOW_TWO = 0xBFFF_BFFF_BFFF_BFFF
"""Clears the top bit of each bfloat16's exponent: any bits are a finite number below 2 then."""


@dataclass(frozen=True)
class Size:
    """The shapes of one model, and how its checkpoint is cut."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    shard_size: str
    """File size of the checkpoint that is saved and loaded."""
    reshard_size: str
    """File size of the one that it is re-sharded into."""


SIZES = {
    "tiny": Size(128, 2, 4, 2, 256, 2000, "300KB", "600KB"),
    "45m": Size(512, 8, 8, 8, 1408, 38500, "500MB", "1GB"),  # 90.8 MB, as much as all-MiniLM-L6-v2
    "100m": Size(768, 12, 12, 4, 2048, 32000, "50MB", "100MB"),
    "374m": Size(1024, 24, 16, 16, 2816, 32000, "500MB", "1GB"),  # with an output layer of its own
    "645m": Size(1024, 18, 16, 8, 4096, 38912, "41MB", "80MB"),  # sixteen files, for four ranks
    "deep": Size(1024, 28, 16, 8, 4096, 32000, "1MB", "2MB"),  # 946 MB in 198 files
    "1b": Size(2048, 16, 32, 8, 8192, 128256, "500MB", "1GB"),  # Llama-3.2-1B: 2.47 GB
    "3b": Size(3072, 28, 24, 8, 8192, 128256, "500MB", "1GB"),  # Llama-3.2-3B: 6.43 GB
}


def config_of(size: Size) -> LlamaConfig:
    """The configuration, tied as Llama 3.2 is."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_hidden_layers,
        num_attention_heads=size.num_attention_heads,
        num_key_value_heads=size.num_key_value_heads,
        intermediate_size=size.intermediate_size,
        vocab_size=size.vocab_size,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def write_specs(size: Size, path: Path) -> None:
    """Note the names and shapes of the model's tensors, for peers that do without transformers."""
    state_dict = _skeleton(size).state_dict()
    specs = [(name, list(tensor.shape)) for name, tensor in state_dict.items() if name != "lm_head.weight"]
    path.write_text(json.dumps(specs))


def total_bytes(specs: Path) -> int:
    """Bytes of all tensors."""
    total: int = 2 * sum(math.prod(shape) for _, shape in json.loads(specs.read_text()))
    return total


def make_tensors(specs: Path) -> dict[str, Tensor]:
    """Every tensor in memory of its own, its bits a function of the seed and its place alone."""
    import torch

    tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in json.loads(specs.read_text())}
    _fill(list(tensors.values()))
    return tensors


def make_flat_tensors(specs: Path) -> dict[str, Tensor]:
    """The same tensors as views of one buffer."""
    import torch

    shapes: dict[str, list[int]] = dict(json.loads(specs.read_text()))
    counts = [math.prod(shape) for shape in shapes.values()]
    pieces = torch.empty(sum(counts), dtype=torch.bfloat16).split(counts)
    tensors = {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces)}
    _fill(list(tensors.values()))
    return tensors


def make_model(size: Size, specs: Path) -> PreTrainedModel:
    """The model with those tensors as its parameters."""
    model = _skeleton(size)
    model.load_state_dict(make_tensors(specs), assign=True, strict=False)
    model.tie_weights()
    model.eval()
    return model


def _skeleton(size: Size) -> PreTrainedModel:
    import torch
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model: PreTrainedModel = LlamaForCausalLM(config_of(size)).bfloat16()
        return model


def _fill(tensors: list[Tensor]) -> None:
    import numpy as np
    import torch

    for number, tensor in enumerate(tensors):
        generator = np.random.Generator(np.random.SFC64([SEED, number]))
        words: Any = tensor.view(-1).view(torch.int64).numpy().view(np.uint64)
        for at in range(0, words.size, FILL_BYTES // 8):
            block = words[at : at + FILL_BYTES // 8]
            block[:] = generator.integers(0, 2**64, size=block.size, dtype=np.uint64)
            block &= np.uint64(BELOW_TWO)
