"""What lies in a store loads as it does from a directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfshard
from hfshard.errors import CheckpointNotFoundError, DamagedCheckpointError, InvalidArgumentError, StateDictMismatchError
from hfshard.stores.open_store import open_store
from hfshard.viewing.inspection import inspect_checkpoint
from tests.stores.reading.conftest import put_directory

STATE = {
    "encoder.weight": torch.arange(70_000.0).reshape(700, 100),
    "encoder.bias": torch.arange(100, dtype=torch.float16),
    "head.weight": torch.full((64, 5), 0.5, dtype=torch.bfloat16),
    "steps": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "waves": torch.complex(torch.ones(3), torch.arange(3.0)),
}


def test_shards_load_as_from_their_directory(store_address: str, tmp_path: Path) -> None:
    tied = STATE | {"decoder.weight": STATE["encoder.weight"]}
    hfshard.save_state_dict(tied, tmp_path / "a", max_shard_size="100KB")
    put_directory(tmp_path / "a", store_address)

    for verify in ("none", "structure", "full"):
        loaded = hfshard.load_state_dict(store_address, verify=verify)
        assert list(loaded) == list(hfshard.load_state_dict(tmp_path / "a"))
        assert all(torch.equal(loaded[name], tied[name]) and loaded[name].dtype == tied[name].dtype for name in tied)
        assert loaded["decoder.weight"] is loaded["encoder.weight"]
    assert list(hfshard.load_state_dict(store_address, keys="encoder.b*")) == ["encoder.bias"]
    assert hfshard.load_state_dict(store_address, ranges=True, keys=["steps"]) == {"steps": torch.tensor(7)}


def test_a_module_takes_a_single_file_and_a_subfolder(store_address: str, tmp_path: Path) -> None:
    saved = nn.Linear(4, 3)
    hfshard.save_model(saved, tmp_path / "deep" / "er")
    put_directory(tmp_path, store_address)

    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        (f"{store_address}/deep/er", {}),
        (f"{store_address}/deep/er/model.safetensors", {"verify": "full"}),
        (f"{store_address}/deep", {"subfolder": "er"}),
    )
    for path, more in cases:
        module = nn.Linear(4, 3)
        hfshard.load_model(module, path, **more)
        assert torch.equal(module.weight, saved.weight)
        assert torch.equal(module.bias, saved.bias)


def test_the_error_of_an_address_where_nothing_is_names_what_is_next_to_it(store_address: str) -> None:
    for name in ("run", "albert", "bert", "opt", "t5", "gpt"):
        open_store(f"{store_address}/{name}").put("config.json", b"{}")

    with pytest.raises(CheckpointNotFoundError) as misspelled:
        hfshard.load_state_dict(f"{store_address}/brt")
    with pytest.raises(CheckpointNotFoundError) as deeper:
        hfshard.load_state_dict(f"{store_address}/bert/deeper/model")

    assert misspelled.value.message == (
        f"There is nothing at '{store_address}/brt'. Next to it are bert, albert, gpt, opt, run and 1 more: check the "
        "address."
    )
    assert deeper.value.message == f"There is nothing at '{store_address}/bert/deeper/model'. Check the address."


def test_what_is_not_there_or_can_not_be_read_is_refused(store_address: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=f"There is nothing at '{store_address}'"):
        hfshard.load_state_dict(store_address)
    with pytest.raises(InvalidArgumentError, match="local_files_only=True, but 's3://"):
        hfshard.load_state_dict(store_address, local_files_only=True)

    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    put_directory(tmp_path, store_address)
    for path in (store_address, f"{store_address}/pytorch_model.bin"):
        with pytest.raises(DamagedCheckpointError, match=f"'{store_address}/pytorch_model.bin'"):
            hfshard.load_state_dict(path)


class Odd(nn.Module):
    """Two names for one tensor, a part of another one, half precision, and a column-major weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(700, 100, bias=False)
        self.again = self.inner
        self.small = nn.Linear(3, 3).half()
        self.turned = nn.Parameter(torch.zeros(40, 30).t())
        whole = torch.zeros(10)
        self.register_buffer("whole", whole)
        self.register_buffer("part", whole[2:5])


def test_a_module_is_filled_in_place_whatever_its_memory_is_like(store_address: str, tmp_path: Path) -> None:
    state = {
        "inner.weight": torch.randn(100, 700),
        "small.weight": torch.randn(3, 3),
        "small.bias": torch.randn(3),
        "turned": torch.randn(30, 40),
        "whole": torch.arange(10.0),
        "part": torch.arange(2.0, 5.0),
    }
    state["again.weight"] = state["inner.weight"].clone()
    hfshard.save_state_dict(state, tmp_path / "a", max_shard_size="50KB")
    put_directory(tmp_path / "a", store_address)

    for verify in ("none", "full"):
        module = Odd()
        weight = module.inner.weight
        hfshard.load_model(module, store_address, verify=verify)
        assert module.inner.weight is weight
        assert torch.equal(weight, state["inner.weight"])
        assert torch.equal(module.small.weight, state["small.weight"].half())
        assert torch.equal(module.turned, state["turned"])
        assert torch.equal(module.get_buffer("part"), torch.tensor([2.0, 3.0, 4.0]))

    on_meta = nn.Linear(700, 100, bias=False, device="meta")
    hfshard.load_model(nn.ModuleDict({"inner": on_meta}), store_address, strict=False)
    assert torch.equal(on_meta.weight, state["inner.weight"])


def test_two_tensors_that_are_one_in_the_module_are_refused(store_address: str, tmp_path: Path) -> None:
    hfshard.save_state_dict({"inner.weight": torch.ones(100, 700), "again.weight": torch.zeros(100, 700)}, tmp_path)
    put_directory(tmp_path, store_address)
    module = Odd()
    before = module.inner.weight.clone()
    with pytest.raises(StateDictMismatchError, match=r"'inner.weight' and 'again.weight' share memory in the"):
        hfshard.load_model(module, store_address, strict=False)
    assert torch.equal(module.inner.weight, before)


@pytest.mark.parametrize("verb", [hfshard.load_state_dict, hfshard.verify_checkpoint, inspect_checkpoint])
def test_parts_of_ranks_in_a_store_are_not_called_no_weights(verb: Callable[[str], object], store_address: str) -> None:
    store = open_store(store_address)
    for name in ("pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp", "scheduler.bin"):
        store.put(name, b"x")

    with pytest.raises(CheckpointNotFoundError) as caught:
        verb(store_address)

    assert str(caught.value).startswith(
        f"'{store_address}' contains tensors that torch.distributed.checkpoint (DCP) saved in parts in "
        "'pytorch_model_fsdp_0'. Download it to a directory DIR. To load the weights, pass 'DIR/pytorch_model_fsdp_0'"
    )
