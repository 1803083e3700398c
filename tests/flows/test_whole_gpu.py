"""CUDA tensors: saved block by block with the bytes of a CPU save, and loaded. Skipped aloud without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

import hfshard
from hfshard.shards.read_tensors import ReadMode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT RUN: this machine has no CUDA device"),
]


class Bert(hfshard.ShardedModelMixin, BertModel):
    """The stock encoder, saved by hfshard."""


def test_a_model_goes_through_cuda_and_back(tmp_path: Path) -> None:
    model = _bert()
    model.to("cuda").save_pretrained(tmp_path, max_shard_size="100KB")
    again = Bert.from_pretrained(tmp_path, device_map="cuda")
    assert next(again.parameters()).device.type == "cuda"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.cpu(), again.state_dict()[name].cpu())


def test_a_model_that_would_not_fit_twice_is_loaded_by_way_of_the_cpu(tmp_path: Path) -> None:
    model = _bert()
    model.save_pretrained(tmp_path)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    taken = torch.empty(max(0, free_bytes - 2**30), dtype=torch.uint8, device="cuda")  # less than what is to stay free
    try:
        again = Bert.from_pretrained(tmp_path, device_map="cuda")
        assert all(torch.equal(tensor, again.state_dict()[name].cpu()) for name, tensor in model.state_dict().items())
    finally:
        del taken
    assert total_bytes >= free_bytes


def _bert() -> Any:
    return Bert(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=99))


def _tensors() -> dict[str, torch.Tensor]:
    square = torch.randn(512, 512, generator=torch.Generator().manual_seed(7))
    half = square.to(torch.bfloat16)[::2]
    return {"whole": square, "transposed": square.t(), "half": half, "scalar": torch.tensor(3)}


def _large_tensors() -> dict[str, torch.Tensor]:
    """Pieces of several stages, an end that is no multiple of anything, and many small tensors between them."""
    generator = torch.Generator().manual_seed(8)
    return {
        "large": torch.randn(3001, 3001, generator=generator),
        **{f"small.{i}": torch.full((i % 50,), float(i)) for i in range(500)},
        "turned": torch.randn(2001, 1501, generator=generator).t(),
    }


@pytest.mark.parametrize(("make", "limit"), [(_tensors, "1MB"), (_large_tensors, "20MB")], ids=["few", "many"])
def test_a_save_from_cuda_has_the_same_bytes_as_one_from_the_cpu(
    make: Callable[[], dict[str, torch.Tensor]], limit: str, tmp_path: Path
) -> None:
    tensors = make()
    hfshard.save_state_dict(tensors, tmp_path / "cpu", max_shard_size=limit)
    hfshard.save_state_dict({n: t.to("cuda") for n, t in tensors.items()}, tmp_path / "cuda", max_shard_size=limit)
    cpu, cuda = ({path.name: path.read_bytes() for path in (tmp_path / one).iterdir()} for one in ("cpu", "cuda"))
    assert cpu.keys() == cuda.keys()
    assert [name for name in cpu if cpu[name] != cuda[name]] == []


@pytest.mark.parametrize("read", ["auto", "mmap", "pread"])
@pytest.mark.parametrize(("make", "limit"), [(_tensors, "1MB"), (_large_tensors, "20MB")], ids=["few", "many"])
def test_a_state_dict_is_loaded_to_cuda_bit_for_bit(
    make: Callable[[], dict[str, torch.Tensor]], limit: str, read: ReadMode, tmp_path: Path
) -> None:
    tensors = make()
    hfshard.save_state_dict(tensors, tmp_path, max_shard_size=limit)
    loaded = hfshard.load_state_dict(tmp_path, device="cuda", read=read)
    assert all(loaded[name].device.type == "cuda" for name in tensors)
    assert all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in tensors.items())
