"""CUDA tensors: saved block by block with the bytes of a CPU save, and loaded. Skipped aloud without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

import hfshard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT RUN: this machine has no CUDA device"),
]


class Bert(hfshard.ShardedModelMixin, BertModel):
    """The stock encoder, saved by hfshard."""


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    square = torch.randn(512, 512, generator=generator)
    return {
        "whole": square,
        "transposed": square.t(),
        "half": square.to(torch.bfloat16)[::2],
        "scalar": torch.tensor(3),
    }


def test_a_save_from_cuda_has_the_same_bytes_as_one_from_the_cpu(tmp_path: Path) -> None:
    tensors = _tensors()
    hfshard.save_state_dict(tensors, tmp_path / "cpu", max_shard_size="1MB")
    hfshard.save_state_dict({n: t.to("cuda") for n, t in tensors.items()}, tmp_path / "cuda", max_shard_size="1MB")
    names = sorted(path.name for path in (tmp_path / "cpu").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "cuda").iterdir())
    for name in names:
        assert (tmp_path / "cpu" / name).read_bytes() == (tmp_path / "cuda" / name).read_bytes()


def test_a_state_dict_loads_to_cuda_bit_for_bit(tmp_path: Path) -> None:
    tensors = _tensors()
    hfshard.save_state_dict(tensors, tmp_path, max_shard_size="1MB")
    loaded = hfshard.load_state_dict(tmp_path, device="cuda")
    assert all(loaded[name].device.type == "cuda" for name in tensors)
    assert all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in tensors.items())


def test_a_model_goes_through_cuda_and_back(tmp_path: Path) -> None:
    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=99)
    model: Any = Bert(config)
    model.to("cuda").save_pretrained(tmp_path, max_shard_size="100KB")
    again = Bert.from_pretrained(tmp_path, device_map="cuda")
    assert next(again.parameters()).device.type == "cuda"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.cpu(), again.state_dict()[name].cpu())


def _large_tensors() -> dict[str, torch.Tensor]:
    """Pieces of several stages, an end that is no multiple of anything, and many small tensors between them."""
    generator = torch.Generator().manual_seed(8)
    return {
        "large": torch.randn(3001, 3001, generator=generator),
        **{f"small.{i}": torch.full((i % 50,), float(i)) for i in range(500)},
        "turned": torch.randn(2001, 1501, generator=generator).t(),
    }


def test_large_and_many_tensors_go_to_cuda_and_back_with_the_bytes_of_the_cpu(tmp_path: Path) -> None:
    tensors = _large_tensors()
    hfshard.save_state_dict(tensors, tmp_path / "cpu", max_shard_size="20MB")
    for read in ("auto", "mmap", "pread"):
        loaded = hfshard.load_state_dict(tmp_path / "cpu", device="cuda", read=read)
        assert all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in tensors.items())
    on_device = {name: tensor.to("cuda") for name, tensor in tensors.items()}
    hfshard.save_state_dict(on_device, tmp_path / "cuda", max_shard_size="20MB")
    for path in (tmp_path / "cpu").iterdir():
        assert path.read_bytes() == (tmp_path / "cuda" / path.name).read_bytes()


def test_a_model_that_would_not_fit_twice_is_loaded_by_way_of_the_cpu(tmp_path: Path) -> None:
    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=99)
    model = Bert(config)
    model.save_pretrained(tmp_path)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    taken = torch.empty(max(0, free_bytes - 2**30), dtype=torch.uint8, device="cuda")  # less than what is to stay free
    try:
        again = Bert.from_pretrained(tmp_path, device_map="cuda")
        assert all(torch.equal(tensor, again.state_dict()[name].cpu()) for name, tensor in model.state_dict().items())
    finally:
        del taken
    assert total_bytes >= free_bytes
