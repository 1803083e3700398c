"""Ranks whose checkpoint in a store is replaced: they start again together, or all are told."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import LlamaConfig, LlamaForCausalLM

import hfshard
from hfshard.distributed import StorageReader
from hfshard.errors import CheckpointChangedError, RankFailedError
from tests.distributed.gloo import check_ranks
from tests.stores.reading.test_ranks import ADDRESS, Net, _mesh, _objects, _saved, _store, _uploaded, in_a_store
from tests.zoo.mixin_classes import with_mixin

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MODEL: Any = with_mixin(LlamaForCausalLM)


def _spread(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=_mesh())


def _gathered(said: Any) -> list[Any]:
    """What the ranks say."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, said)
    return told


def _replaced_at(request: int, old: Path, new: Path) -> None:
    """Make a store whose checkpoint is replaced before a request."""
    store = _store(_objects(old))
    asked, later = count(1), _objects(new)

    def replace(kind: str, name: str) -> None:
        if next(asked) == request:
            store.objects = dict(later)

    store.before = replace


def _always_replaced(old: Path, new: Path) -> None:
    """Make a store whose checkpoint is replaced before the first read of a shard after each look."""
    saves = (_objects(old), _objects(new))
    store = _store(saves[0])
    looks, replaced_at = 0, 0

    def replace(kind: str, name: str) -> None:
        nonlocal looks, replaced_at
        if kind == "list" and looks == replaced_at:
            looks += 1
        elif kind == "read" and name.endswith(".safetensors"):
            replaced_at = looks  # by any of the threads that read
            store.objects = dict(saves[looks % 2])

    store.before = replace


def _load_pretrained() -> Any:
    return MODEL.from_pretrained(ADDRESS, parallelize=_spread)


def _load_by_torch() -> Any:
    state = {name: torch.zeros_like(tensor) for name, tensor in _spread(Net()).state_dict().items()}
    load(state, storage_reader=StorageReader(ADDRESS))


def _load_module() -> Any:
    hfshard.load_model(_spread(Net()), ADDRESS)


WAYS = {"pretrained": _load_pretrained, "torch": _load_by_torch, "module": _load_module}
AGAIN = "was replaced 20 times while it was being opened. Retry when no save is running."


def _words(way: str) -> str:
    """Of the error that a load raises."""
    try:
        WAYS[way]()
    except (CheckpointChangedError, RankFailedError) as error:
        return f"{type(error).__name__}: {error}"
    except CheckpointException as error:
        (first, _), *_ = error.failures.values()
        return f"{type(first).__name__}: {first}"
    return "loaded"


def _load(rank: int, way: str, old: Path, new: Path, requests: tuple[int, ...]) -> None:
    for request in requests:
        _replaced_at(request if rank == 1 else 1000, old, new)
        told = _gathered(_words(way))
        assert all("CheckpointChangedError: " in words for words in told), (request, told)

    _always_replaced(old, new if rank == 1 else old)
    told = _gathered(_words(way))
    assert told[1] == f"CheckpointChangedError: The checkpoint in '{ADDRESS}' {AGAIN}"
    theirs = f"RankFailedError: Rank 1 failed, so the other ranks gave up: {told[1]} Call again on every rank."
    assert told[0] == (told[1] if way == "torch" else theirs)


def _llama(
    directory: Path, *, is_new: bool = False, words: int = 32, max_shard_size: str = "5KB", is_uploaded: bool = False
) -> Path:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": words}
    model = MODEL(LlamaConfig(**sizes, intermediate_size=48 if is_new else 32, num_hidden_layers=1))
    if is_uploaded:
        model.save_pretrained(directory, max_shard_size=max_shard_size)
        return directory
    return in_a_store(
        directory, lambda place: model.save_pretrained(place, max_shard_size=max_shard_size), is_new=is_new
    )


def _load_overtaken(rank: int, verify: str, old: Path, new: Path, *, is_uploaded: bool) -> None:
    """Have a save come at each request of one rank, and later for the other one."""
    expected = {path: hfshard.load_state_dict(path) for path in (old, new)}
    found: list[Path] = []
    tries: list[int] = []
    for request in range(1, 12):
        spread: list[Any] = []

        def parallelize(model: Any, spread: list[Any] = spread) -> Any:
            assert [earlier for earlier in spread if earlier() is not None] == []  # there is memory for one model only
            spread.append(weakref.ref(model))
            return _spread(model)

        _replaced_at(request if rank == request % 2 else request + 2, old, new)
        model = MODEL.from_pretrained(ADDRESS, parallelize=parallelize, verify=verify)

        width = model.config.intermediate_size
        tensors = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
        (saved,) = [path for path in expected if width == (32 if path == old else 48)]
        assert all(torch.equal(tensor, expected[saved][name]) for name, tensor in tensors.items())
        found.append(saved)
        tries.append(len(spread))
        del model
    assert found[0] == new
    assert found[-1] == old
    assert found == sorted(found, key=[new, old].index)
    # The bytes of a save are compared before the model is built; what was uploaded may be replaced after that, too.
    assert set(tries) == ({1, 2} if is_uploaded or verify == "structure" else {1})
    assert tries[-1] == 1


@pytest.mark.parametrize(
    ("verify", "is_uploaded"),
    [
        ("structure", True),
        ("full", False),
        pytest.param("structure", False, marks=pytest.mark.slow),
        pytest.param("full", True, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_build_a_model_start_again_together(tmp_path: Path, verify: str, *, is_uploaded: bool) -> None:
    sizes: dict[str, Any] = {"words": 3000, "max_shard_size": "1MB"}  # two tensors that do not come with the header
    old, new = (
        _llama(tmp_path / name, is_new=name == "new", is_uploaded=is_uploaded, **sizes) for name in ("old", "new")
    )
    load = partial(_load_overtaken, is_uploaded=is_uploaded)
    check_ranks(tmp_path / "ranks", 2, load, verify, old, new)


@pytest.mark.parametrize(
    ("way", "made", "requests"),
    [
        ("pretrained", _llama, (4, 12)),
        ("torch", _saved, (2, 5)),
        ("torch", _uploaded, (4, 7)),
        ("module", _saved, ()),
    ],
)
def test_all_ranks_are_told_of_a_save_that_only_one_of_them_saw(
    tmp_path: Path, way: str, made: Callable[..., Path], requests: tuple[int, ...]
) -> None:
    old, new = made(tmp_path / "one"), made(tmp_path / "two", is_new=True)
    check_ranks(tmp_path / "ranks", 2, _load, way, old, new, requests)
