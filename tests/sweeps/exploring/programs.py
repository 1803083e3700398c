"""Programs that save and load by hfshard's own code, one request at a time.

A program is run again from its beginning with the answers that it has had so far, until it asks for more. So its state
is the list of its answers, and what it does next is computed once for each such list.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from hfshard._util import threads
from hfshard._util.arguments import StoreAddress
from hfshard.checkpoint.open_checkpoint import open_checkpoint
from hfshard.checkpoint.ranged_folder import RangedFolder, StoreFolder
from hfshard.commit import store_plan
from hfshard.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    CommitUnfinishedError,
    HfshardError,
    RemoteChangedError,
    StoreConnectionError,
)
from hfshard.format.stored_save import SaveId, split_object_name
from hfshard.places import store_mirror
from hfshard.saving.save_request import SaveRequest
from hfshard.stores.store import StoredObject
from hfshard.training import CheckpointManager, TrainingState
from hfshard.training.run import run_store
from tests.stores.runs.bucket_run import Net
from tests.stores.saving.checkpoints import save_into

ADDRESS = StoreAddress("s3", "models", "explored")
CHANGED = "changed"
"""The answer to a read or copy of an object that has other bytes, or is gone."""
FAILED = "failed"
"""No answer came."""
_LOADS = 20


class Request(NamedTuple):
    """What a program asks of the store."""

    kind: str
    """list, find, read, put, copy, or delete."""
    names: tuple[str, ...] = ()
    """Of objects; of a list, its folder and whether it is recursive; of a copy, source and target."""
    raw: bytes = b""
    etag: str = ""

    @property
    def changes(self) -> bool:
        """Whether it changes the store, so that its loss is not the same as its failure."""
        return self.kind in ("put", "copy", "delete")


class Event(NamedTuple):
    """What a program has been told."""

    kind: str
    """put: an index was put, and answered; saved, overtaken, untold, failed: how a save ended; loaded, nothing."""
    save_id: SaveId | None = None
    value: object = None


class _PausedError(BaseException):
    """Raised into a program that asks for more than was answered."""


@dataclass
class _Replay:
    """Answers what was answered before."""

    answers: Sequence[Any]
    asked: int = 0
    pending: Request | None = None
    events: list[Event] = field(default_factory=list)
    last_index: SaveId | None = None

    def ask(self, request: Request) -> Any:
        if self.pending is not None or self.asked == len(self.answers):
            self.pending = self.pending or request
            raise _PausedError
        answer = self.answers[self.asked]
        self.asked += 1
        if request.kind == "put":
            split = split_object_name(request.names[0])
            if split is not None and split[0].rpartition("/")[2] in ("model.safetensors.index.json", "checkpoint.json"):
                self.last_index = split[1]
                if answer != FAILED:
                    self.events.append(Event("put", split[1]))
        if answer == FAILED:
            error = StoreConnectionError("No answer came.")
            error.may_be_done = True
            raise error
        if answer == CHANGED:
            raise CheckpointChangedError(f"{request.names} has changed.")
        return answer


class ReplayedStore:
    """A `Store` whose requests are answered by a replay."""

    def __init__(self, replay: _Replay, address: StoreAddress = ADDRESS) -> None:
        self._replay = replay
        self.address = address
        self._start = address.prefix.removeprefix(ADDRESS.prefix).lstrip("/")
        self._start += "/" if self._start else ""

    def list_objects(self, folder: str = "", *, recursive: bool = False) -> dict[str, StoredObject]:
        below = f"{self._start}{folder}/" if folder else self._start
        listed = self._replay.ask(Request("list", (below, "deep" if recursive else "")))
        return {(one := name[len(self._start) :]): StoredObject(one, size, etag) for name, size, etag in listed}

    def folders(self, folder: str = "") -> list[str]:
        raise AssertionError("no save and no load asks for folders")

    def neighbors(self) -> list[str]:
        raise AssertionError("no save and no load that ends well asks for neighbors")

    def find(self, name: str) -> StoredObject | None:
        raise AssertionError("no save and no load asks for one object")

    def read_into(self, found: StoredObject, begin: int, target: memoryview) -> None:
        target[:] = self.read(found)[begin : begin + len(target)]

    def read(self, found: StoredObject) -> bytes:
        raw: bytes = self._replay.ask(Request("read", (self._start + found.name,), etag=found.etag))
        return raw

    def put(self, name: str, raw: bytes) -> StoredObject:
        self._replay.ask(Request("put", (self._start + name,), bytes(raw)))
        return StoredObject(name, len(raw), etag_of(bytes(raw)))

    def open_writer(self, name: str, size: int, replaced: StoredObject | None = None) -> _Writer:
        return _Writer(self, name)

    def copy(self, source: StoredObject, target: str) -> StoredObject:
        self._replay.ask(Request("copy", (self._start + source.name, self._start + target), etag=source.etag))
        return StoredObject(target, source.size, source.etag)

    def delete(self, names: Collection[str]) -> None:
        self._replay.ask(Request("delete", tuple(self._start + name for name in names)))

    def sweep_uploads(self, is_left: Callable[[str], bool]) -> int:
        return 0  # uploads that were not finished are no objects


class _Writer:
    def __init__(self, store: ReplayedStore, name: str) -> None:
        self._store, self._name, self._raw = store, name, bytearray()

    def write(self, block: memoryview) -> None:
        self._raw += block

    def finish(self) -> StoredObject:
        return self._store.put(self._name, bytes(self._raw))

    def abort(self) -> None:
        pass


def etag_of(raw: bytes) -> str:
    """The ETag of an object, as S3 has it."""
    return hashlib.md5(raw).hexdigest()


class Program:
    """What a process does; `run` is called anew for each step."""

    ids: Sequence[str]
    """Of its saves, in their order."""

    def run(self, replay: _Replay) -> None:
        """Do all of it."""
        raise NotImplementedError

    def advance(self, answers: Sequence[Any]) -> tuple[Request | None, tuple[Event, ...]]:
        """Return what it asks next (None: it has ended) and what it was told, after these answers."""
        store_plan.forget_puts()
        replay = _Replay(answers)
        ids = iter(self.ids)
        with patch("hfshard.format.stored_save.secrets.token_hex", lambda _: next(ids)), suppress(_PausedError):
            self.run(replay)
        assert replay.asked == len(answers), "a program does not ask the same again"
        return replay.pending, tuple(replay.events)


class Writer(Program):
    """Saves checkpoints one after another into one place."""

    def __init__(self, requests: Sequence[SaveRequest], ids: Sequence[str]) -> None:
        self.requests, self.ids = requests, ids

    def run(self, replay: _Replay) -> None:
        """Save each; an error ends only its own save."""
        for request in self.requests:
            replay.last_index = None
            replay.events.append(_outcome(replay, partial(self._save, replay, request)))

    def _save(self, replay: _Replay, request: SaveRequest) -> None:
        save_into(ReplayedStore(replay), request)


class Manager(Program):
    """Saves steps of a run with one `CheckpointManager`, which keeps so many."""

    def __init__(self, steps: Sequence[tuple[int, float]], ids: Sequence[str], keep: int | None) -> None:
        self.steps, self.ids, self.keep = steps, ids, keep

    def run(self, replay: _Replay) -> None:
        """Save each; an error ends only its own save."""
        _seed()
        with _opening(replay):
            manager = CheckpointManager(str(ADDRESS), max_to_keep=self.keep)
            for step, value in self.steps:
                replay.last_index = None
                state = TrainingState(model=Net(value))
                replay.events.append(_outcome(replay, partial(manager.save, step, state)))


class Reader(Program):
    """Loads the checkpoint of a place."""

    ids = ()

    def run(self, replay: _Replay) -> None:
        """Load, as `use_checkpoint` does: again where a save replaced it."""
        for _ in range(_LOADS):
            folder = StoreFolder(ReplayedStore(replay), str(ADDRESS))
            try:
                with open_checkpoint(folder) as checkpoint:
                    tensors = checkpoint.read(checkpoint.keys)
                    values = {float(tensor[0]) for tensor in tensors.values()}
                    config = folder.read_small("config.json", 1000) if folder.has("config.json") else None
            except CheckpointChangedError:
                continue
            except CheckpointNotFoundError:
                replay.events.append(Event("nothing"))
                return
            except StoreConnectionError:
                replay.events.append(Event("failed"))
                return
            replay.events.append(Event("loaded", value=(values.pop() if len(values) == 1 else values, config)))
            return
        replay.events.append(Event("error", value="each load was overtaken"))


class RunReader(Program):
    """Restores the latest checkpoint of a run."""

    ids = ()

    def run(self, replay: _Replay) -> None:
        """Restore it."""
        net = Net()
        with _opening(replay):
            try:
                step = CheckpointManager(str(ADDRESS)).restore_latest(TrainingState(model=net))
            except StoreConnectionError:
                replay.events.append(Event("failed"))
                return
        replay.events.append(Event("nothing") if step is None else Event("loaded", value=(net.value(), step)))


class RunLister(Program):
    """Lists the checkpoints of a run: the last event has folder -> save."""

    ids = ()

    def run(self, replay: _Replay) -> None:
        """List them."""
        with _opening(replay):
            found = run_store.RunStore(str(ADDRESS)).checkpoints()
        replay.events.append(Event("listed", value={one.path.rpartition("/")[2]: one.save_id for one in found}))


def _seed() -> None:
    """Let a checkpoint, which has the states of all generators, have the same bytes each time."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def _outcome(replay: _Replay, save: Callable[[], object]) -> Event:
    try:
        save()
    except RemoteChangedError:
        return Event("overtaken", replay.last_index)
    except CommitUnfinishedError:
        return Event("untold", replay.last_index)
    except StoreConnectionError:
        return Event("failed", replay.last_index)
    except HfshardError as error:
        return Event("error", replay.last_index, f"{type(error).__name__}: {error}")
    return Event("saved", replay.last_index)


@contextmanager
def _opening(replay: _Replay) -> Iterator[None]:
    """Open all stores as those of a replay."""

    def opened(address: str | StoreAddress) -> ReplayedStore:
        place = address if isinstance(address, StoreAddress) else _parsed(address)
        return ReplayedStore(replay, place)

    with patch.object(run_store, "open_store", opened), patch.object(store_mirror, "open_store", opened):
        yield


def _parsed(address: str) -> StoreAddress:
    below = address.removeprefix(str(ADDRESS)).strip("/")
    return ADDRESS.joined(below) if below else ADDRESS


@contextmanager
def one_thread() -> Iterator[None]:
    """Let no program start threads, or wait."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(threads, "start_worker", lambda *_, **__: None))
        stack.enter_context(patch.object(RangedFolder, "traits", replace(RangedFolder.traits, wait_seconds=0)))
        yield
