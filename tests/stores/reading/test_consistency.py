"""A reader beside writers: whenever they come, what it gets is of one save, or it says that it could not."""

from __future__ import annotations

import _thread
import json
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfshard
from hfshard._util.threads import sleep_unless_cancelled
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.errors import CheckpointChangedError
from hfshard.format.index import Verify
from hfshard.places import store_files, store_mirror
from hfshard.places.source import CheckpointSource, use_checkpoint
from hfshard.saving.save_request import SaveOptions, SaveRequest, request_from_state_dict
from hfshard.training.run import run_store
from tests.stores.saving.checkpoints import save_into
from tests.stores.saving.memory_store import MemoryStore

ADDRESS = "s3://models/bert"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    place = MemoryStore()
    monkeypatch.setattr(store_mirror, "open_store", lambda address: place)
    return place


def save(
    store: MemoryStore, number: int, *, has_new_config: bool = False, generation: dict[str, bytes] | None = None
) -> None:
    """Save weights that are all a number, in a few files of another size each time; quietly."""
    before, store.before = store.before, lambda kind, name: None
    save_loudly(store, number, has_new_config=has_new_config, generation=generation)
    store.before = before


def save_loudly(
    store: MemoryStore, number: int, *, has_new_config: bool = False, generation: dict[str, bytes] | None = None
) -> None:
    tensors = {f"layer.{i}.weight": torch.full((1, 20_000), float(number)) for i in range(4)}
    options = SaveOptions(max_shard_size=(1, 200_000, 1_000_000)[number % 3], progress=False)
    plain = request_from_state_dict(tensors, options)
    config = json.dumps({"number": number if has_new_config else -1}).encode()
    request = SaveRequest(tensors=plain.tensors, options=options, config=config, model_files=generation or {})
    save_into(store, request)


def load_with_config() -> tuple[set[float], int]:
    """The numbers in a checkpoint, and that in its config, as a model is built from them."""
    source = CheckpointSource(ADDRESS)
    local = source.fetch()

    def use(checkpoint: OpenCheckpoint) -> tuple[set[float], int]:
        config = json.loads(Path(local.directory, "config.json").read_bytes())
        tensors = checkpoint.read(checkpoint.keys)
        return {value for tensor in tensors.values() for value in tensor.unique().tolist()}, config["number"]

    return use_checkpoint(source, LoadOptions(), use, local)


@pytest.mark.parametrize("has_new_config", [False, True])
def test_a_save_between_any_two_requests_gives_the_old_or_the_new_one(
    store: MemoryStore, *, has_new_config: bool
) -> None:
    numbers = count(1)
    save(store, 0, has_new_config=has_new_config)
    seen: list[float] = []
    for stop in range(1, 40):
        asked = count(1)
        number = next(numbers)

        def before(kind: str, name: str, asked: Iterator[int] = asked, stop: int = stop, number: int = number) -> None:
            if next(asked) == stop:
                save(store, number, has_new_config=has_new_config)

        store.before = before
        (value,), configured = load_with_config()
        assert value in (number - 1, number)
        assert configured == (value if has_new_config else -1)
        seen.append(value - number)
        if next(asked) <= stop:
            break  # the load was over before
    assert 0.0 in seen
    assert seen[-1] == -1.0
    assert len(seen) == 6  # a save between the listing, the index, the header and the rest of one file


def generation_of(number: int) -> dict[str, bytes]:
    """What a save puts beside its weights."""
    text = json.dumps({"max_new_tokens": number + 1}).encode()
    return {"generation_config.json": text, "custom_generate/generate.py": b"NUMBER = %d\n" % number}


def load_whole(verify: Verify = "structure") -> set[float]:
    """All numbers in a checkpoint: of its weights, its config, and what lies beside."""
    source = CheckpointSource(ADDRESS, CheckpointQuery(needs_code=True))
    local = source.fetch()

    def use(checkpoint: OpenCheckpoint) -> set[float]:
        directory = Path(local.directory)
        tensors = checkpoint.read(checkpoint.keys)
        values = {value for tensor in tensors.values() for value in tensor.unique().tolist()}
        configured = json.loads((directory / "config.json").read_bytes())["number"]
        generation = json.loads((directory / "generation_config.json").read_bytes())["max_new_tokens"] - 1
        code = (directory / "custom_generate" / "generate.py").read_text().split()[-1]
        return values | {generation, int(code)} | ({configured} if configured >= 0 else set())

    return use_checkpoint(source, LoadOptions(verify=verify), use, local)


@pytest.mark.parametrize("verify", ["structure", "full"])
def test_two_saves_between_any_requests_of_a_load(store: MemoryStore, verify: Verify) -> None:
    save(store, 0, generation=generation_of(0))
    numbers = count(1)
    for first in range(1, 14, 3):
        for second in range(first + 1, first + 12, 3):
            asked = count(1)

            def before(
                kind: str, name: str, asked: Iterator[int] = asked, at: tuple[int, int] = (first, second)
            ) -> None:
                if next(asked) in at:
                    number = next(numbers)
                    save(store, number, generation=generation_of(number))

            store.before = before
            assert len(load_whole(verify)) == 1


@pytest.mark.parametrize("has_new_config", [False, True])
@pytest.mark.parametrize("verify", ["structure", "full"])
def test_a_load_after_any_request_of_a_save(store: MemoryStore, verify: Verify, *, has_new_config: bool) -> None:
    save(store, 1, has_new_config=has_new_config, generation=generation_of(1))
    seen = []

    def after(kind: str, name: str) -> None:
        seen.append(load_whole(verify))

    store.after = after
    save_loudly(store, 2, has_new_config=has_new_config, generation=generation_of(2))
    store.after = lambda kind, name: None

    assert load_whole(verify) == {2.0}
    assert all(numbers in ({1.0}, {2.0}) for numbers in seen), seen
    assert [numbers for numbers in seen if numbers == {1.0}]


def test_a_push_of_what_a_killed_save_has_left_is_of_one_save(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(Exception):
        pass

    def fail(kind: str, name: str) -> None:
        raise KilledError

    def kill(kind: str, name: str) -> None:
        if name == "model.safetensors.index.json":
            store.before = fail

    save(store, 1, generation=generation_of(1))
    store.after = kill
    with pytest.raises(KilledError):
        save_loudly(store, 2, generation=generation_of(2))
    store.before = store.after = lambda kind, name: None
    for room in (run_store, store_files):
        monkeypatch.setattr(room, "open_store", lambda address: store)

    hfshard.push_checkpoint(ADDRESS, str(tmp_path / "hub"))
    pulled = Path(hfshard.pull_checkpoint(str(tmp_path / "hub"), tmp_path / "pulled", verify="full"))
    assert {name: (pulled / name).read_bytes() for name in generation_of(2)} == generation_of(2)
    assert hfshard.load_state_dict(pulled)["layer.0.weight"][0, 0] == 2.0
    assert hfshard.verify_checkpoint(ADDRESS).ok


def test_a_reader_that_is_always_overtaken_gives_up(store: MemoryStore) -> None:
    numbers = count(1)
    save(store, 0)
    store.before = lambda kind, name: save(store, next(numbers)) if kind == "read" else None
    module = nn.ModuleDict({"layer": nn.ModuleList([nn.Linear(20_000, 1, bias=False) for _ in range(4)])})
    with pytest.raises(CheckpointChangedError, match=r"was replaced 20 times while it was being opened"):
        hfshard.load_model(module, ADDRESS)

    store.before = lambda kind, name: save(store, next(numbers)) if next(numbers) % 9 == 0 else None
    loaded = hfshard.load_state_dict(ADDRESS)
    assert len({value for tensor in loaded.values() for value in tensor.unique().tolist()}) == 1


class LoadedByItself(hfshard.ShardedModelMixin, nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 30_000)  # more than comes with a header

    @classmethod
    def _from_pretrained(cls, **kwargs: Any) -> Any:
        return super()._from_pretrained(**kwargs)


def test_a_module_that_loads_by_itself_is_loaded_again(store: MemoryStore, tmp_path: Path) -> None:
    for width in (5, 6):
        LoadedByItself(width).save_pretrained(tmp_path / str(width))
    saves = [{path.name: path.read_bytes() for path in (tmp_path / str(width)).iterdir()} for width in (5, 6)]
    found = []
    for stop in range(1, 9):
        asked = count(1)
        store.objects = dict(saves[0])

        def before(kind: str, name: str, asked: Iterator[int] = asked, stop: int = stop) -> None:
            if next(asked) == stop:
                store.objects = dict(saves[1])

        store.before = before
        found.append(LoadedByItself.from_pretrained(ADDRESS).layer.in_features)
    assert found == [6, 6, 6, 6, 6, 6, 5, 5]


def test_ctrl_c_ends_a_load_whose_store_makes_it_wait(store: MemoryStore) -> None:
    save(store, 0)  # four files of 80 kB, of which a part comes with the header
    reads = count(1)

    def before(kind: str, name: str) -> None:
        if kind == "read" and next(reads) > 6:  # config, index, headers
            _thread.interrupt_main()
            sleep_unless_cancelled(600)  # as a store does between two tries

    store.before = before
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        hfshard.load_state_dict(ADDRESS)
    assert time.monotonic() - begin < 120
    store.before = lambda kind, name: None
    assert len(hfshard.load_state_dict(ADDRESS)) == 4


def test_a_reader_beside_a_writer_never_gets_a_mixture(store_address: str) -> None:
    def numbered(number: int) -> dict[str, torch.Tensor]:
        return {f"layer.{i}": torch.full((20_000,), float(number)) for i in range(4)}

    hfshard.save_state_dict(numbered(0), store_address, max_shard_size="100KB")
    stop = threading.Event()

    def write() -> None:
        for number in range(1, 13):
            hfshard.save_state_dict(numbered(number), store_address, max_shard_size=["100KB", "200KB"][number % 2])
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    while not stop.is_set() and writer.is_alive():
        loaded = hfshard.load_state_dict(store_address)
        (value,) = {value for tensor in loaded.values() for value in tensor.unique().tolist()}
        seen.append(value)
    writer.join()
    assert seen == sorted(seen)
    assert stop.is_set()
    assert hfshard.load_state_dict(store_address)["layer.3"][0] == 12
