"""Models that tests push and pull: random weights from a seed, saved in directories, and digests of state dicts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM, BertModel, PreTrainedModel

import hfshard


class Bert(hfshard.ShardedModelMixin, BertModel):
    """As a user writes it."""


class TiedBert(hfshard.ShardedModelMixin, BertForMaskedLM):
    """Its decoder is its embedding."""


# Size -> what makes it; 4-byte weights.
SIZES: dict[str, Any] = {
    # 23 tensors, 52,352 bytes.
    "small": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 32},
    # 23 tensors, 15.8 MB; the largest has 4.2 MB.
    "large": {"vocab_size": 1000, "hidden_size": 512, "intermediate_size": 2048, "max_position_embeddings": 32},
}
STOCK = {Bert: BertModel, TiedBert: BertForMaskedLM}


def make_model(seed: int, *, kind: str = "bert", size: str = "small", stock: bool = False) -> PreTrainedModel:
    """A model of random weights.

    Args:
        seed: Of the weights.
        kind: "bert"; "tied" (decoder and embedding are one tensor); "transposed" (its matrices are not contiguous).
        size: A key of `SIZES`.
        stock: The class without hfshard.
    """
    cls: type[PreTrainedModel] = TiedBert if kind == "tied" else Bert
    config = BertConfig(num_hidden_layers=1, num_attention_heads=2, **SIZES[size])
    model: PreTrainedModel = (STOCK[cls] if stock else cls)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            if kind == "transposed" and parameter.dim() == 2:
                parameter.data = parameter.t().contiguous().t()
    return model


def digest_of(state_dict: Mapping[str, torch.Tensor]) -> str:
    """One digest of names, dtypes, shapes and bytes."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(state_dict.items()):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hasher.update(tensor.contiguous().numpy().tobytes())
    return hasher.hexdigest()


@cache
def digest_of_seed(seed: int, **options: Any) -> str:
    """The digest that a model of this seed must have, wherever it was."""
    return digest_of(make_model(seed, stock=True, **options).state_dict())


def saved(folder: Path, seed: int, limit: str | int = "10MB", *, variant: str | None = None, **model: Any) -> Path:
    """A directory with a checkpoint of `make_model`: one that is not there gets the files of what was saved once."""
    if folder.exists():
        make_model(seed, **model).save_pretrained(folder, max_shard_size=limit, variant=variant)
        return folder
    folder.mkdir(parents=True)
    for name, raw in _saved_files(seed, limit, variant, **model).items():
        (folder / name).write_bytes(raw)
    return folder


@cache
def _saved_files(seed: int, limit: str | int, variant: str | None, **model: Any) -> dict[str, bytes]:
    with TemporaryDirectory() as directory:
        make_model(seed, **model).save_pretrained(directory, max_shard_size=limit, variant=variant)
        return files_of(Path(directory))


def files_of(folder: Path) -> dict[str, bytes]:
    """Path in a directory -> bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def contents(folder: Path) -> dict[str, bytes]:
    """Path in a directory -> bytes, without what hfshard and huggingface_hub keep there for themselves."""
    return {path: raw for path, raw in files_of(folder).items() if ".cache" not in Path(path).parts}
