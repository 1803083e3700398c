"""Each rule of stores left out: the code is changed so that it breaks it, and the explorer must find that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from threading import Event
from typing import Any
from unittest.mock import patch

from hfshard.checkpoint.ranged_folder import RangedFolder
from hfshard.commit import store_commit
from hfshard.commit.store_commit import SaveObjects
from hfshard.commit.store_plan import lower_objects
from hfshard.errors import HfshardError, StoreConnectionError
from hfshard.format import stored_save
from hfshard.format.file_names import WeightNames
from hfshard.format.stored_save import SaveId, finished_saves, saves_among, split_object_name
from hfshard.shards.write_shards import digest_shard
from hfshard.training.run import run_store
from tests.sweeps.exploring import programs
from tests.sweeps.exploring.programs import Manager, Reader
from tests.sweeps.exploring.spaces import HIGH, LOW, THIRD, Space, writer

NAMES = WeightNames()
Change = AbstractContextManager[object]


@dataclass(frozen=True)
class Mutant:
    """A rule that is left out."""

    change: Callable[[], Change]
    """Gives a context in which the code breaks the rule."""
    space: Space
    broken: str
    """How the message of what is found begins."""


def _count_indexes_only() -> Change:
    def mutated(found: Collection[str]) -> SaveId:
        return SaveId.after(saves_among(name for name in found if name.endswith(".json")))

    return patch.object(store_commit, "next_id", mutated)


def _put_index_without_shards() -> Change:
    send = SaveObjects.send

    def mutated(self: SaveObjects, jobs: Any, *rest: Any) -> None:
        with suppress(StoreConnectionError):
            send(self, jobs, *rest)
        for name, job in jobs.items():
            self.digests.setdefault(name, digest_shard(job, "sha256", None, Event())[0])

    return patch.object(SaveObjects, "send", mutated)


def _be_sure_without_an_answer() -> Change:
    return patch.object(SaveObjects, "_look_for_index", lambda *_: None)


def _delete_when_nobody_can_tell() -> Change:
    look = SaveObjects._look_for_index

    def mutated(self: SaveObjects, list_names: Any, error: Any) -> None:
        found = self.store.list_objects()
        uploaded = [name for name in found if NAMES.has_standard_shard_name(name)]
        self.store.delete([*lower_objects(found, NAMES, self.save_id), *uploaded])
        look(self, list_names, error)

    return patch.object(SaveObjects, "_look_for_index", mutated)


def _delete_what_is_not_lower() -> Change:
    def mutated(found: Collection[str], names: WeightNames, save_id: SaveId) -> list[str]:
        splits = ((name, split_object_name(name)) for name in found)
        return [name for name, split in splits if split is not None and split[1] != save_id]

    return patch.object(store_commit, "lower_objects", mutated)


def _delete_own_after_a_raise() -> Change:
    put = SaveObjects.put_index

    def mutated(self: SaveObjects, *rest: Any) -> None:
        try:
            put(self, *rest)
        except HfshardError:
            self.store.delete([self.save_id.object_name(name) for name in (self.entry, *self.digests)])
            raise

    return patch.object(SaveObjects, "put_index", mutated)


@contextmanager
def _read_once() -> Iterator[None]:
    with (
        patch.object(RangedFolder, "traits", replace(RangedFolder.traits, retries=1)),
        patch.object(programs, "_LOADS", 1),
    ):
        yield


def _leave_copies() -> Change:
    settle = store_commit.settle_copies

    def mutated(store: Any, entry: str, save_id: SaveId, copies_of: Any) -> Any:
        with patch("hfshard.commit.store_commit.put_copies", lambda *_: None):
            return settle(store, entry, save_id, copies_of)

    return patch.object(store_commit, "settle_copies", mutated)


def _count_in_each_folder() -> Change:
    def mutated(self: Any) -> set[SaveId]:
        return saves_among(self.folders.get("checkpoint-00000002", ()))

    return patch.object(run_store._Seen, "ids", mutated)


def _delete_marked_saves_of_others() -> Change:
    finished = finished_saves
    delete = run_store.RunStore._delete_lower

    def mutated(self: Any, seen: Any, transaction: SaveObjects, marks: Any, *rest: Any) -> None:
        delete(self, seen, transaction, marks, *rest)
        for mark, folder in marks.items():
            if mark <= transaction.save_id:
                continue
            listed = [name.rpartition("/")[2] for name in self._store.list_objects(folder)]
            if mark not in finished(listed):
                self._store.delete([f"{folder}/{name}" for name in listed if mark in saves_among([name])])

    return patch.object(run_store.RunStore, "_delete_lower", mutated)


def _trust_the_first_listing() -> Change:
    """Take what the first listing shows without a manifest for unfinished, and delete all of it, marked or not."""
    delete = run_store.RunStore._delete_lower

    def mutated(self: Any, seen: Any, *rest: Any) -> None:
        for folder, files in seen.folders.items():
            left = saves_among(files) - finished_saves(files)
            names = [f"{folder}/{name}" for name in files if not saves_among([name]).isdisjoint(left)]
            if names:
                self._store.delete(names)
        delete(self, seen, *rest)

    return patch.object(run_store.RunStore, "_delete_lower", mutated)


@contextmanager
def _count_manifests_alone() -> Iterator[None]:
    def mutated(files: Any) -> set[SaveId]:
        return {split[1] for name in files if (split := split_object_name(name)) and split[0] == "checkpoint.json"}

    with patch.object(run_store, "finished_saves", mutated), patch.object(stored_save, "finished_saves", mutated):
        yield


def mutants() -> dict[str, Mutant]:
    """Rule -> what leaves it out, where that is explored, and what is found."""
    two = [writer(1, ids=[HIGH]), writer(2, ids=[LOW])]
    turned = [writer(1, 2, ids=[HIGH, LOW])]
    equal = [writer(1, ids=[LOW]), writer(2, ids=[LOW])]
    each = [writer(1, 3, ids=[HIGH, THIRD]), writer(2, ids=[LOW])]
    steps = [Manager([(3, 3.0), (2, 2.0)], [HIGH, LOW], None)]
    managers = [Manager([(2, 1.0)], [LOW], 1), Manager([(3, 2.0)], [HIGH], 1)]
    keeping = [Manager([(2, 1.0)], [LOW], None), Manager([(3, 2.0)], [HIGH], None)]
    late = [Manager([(2, 1.0), (3, 3.0)], [LOW, HIGH], None)]
    return {
        "1: the number is above any object's": Mutant(_count_indexes_only, Space(turned, 1), "I2"),
        "1: ids are random": Mutant(nullcontext, Space(equal, 0), "I"),
        "3: the index follows the shards": Mutant(_put_index_without_shards, Space(two, 1), "I1"),
        "4: without an answer, list": Mutant(_be_sure_without_an_answer, Space(two, 1), "I"),
        "5: only a save that is certain deletes": Mutant(_delete_when_nobody_can_tell, Space(two, 1), "I1"),
        "5: only what is lower goes": Mutant(_delete_what_is_not_lower, Space(two, 0), "I1"),
        "5: not even its own": Mutant(_delete_own_after_a_raise, Space(two, 2), "I1"),
        "6: a reader lists again": Mutant(_read_once, Space([*two, Reader()], 0), "a program ended by"),
        "7: an upload goes last": Mutant(_delete_when_nobody_can_tell, Space(two, 1, "uploaded"), "I1"),
        "8: copies are those of the highest": Mutant(_leave_copies, Space(each, 0), "I6"),
        "run: one order over all folders": Mutant(_count_in_each_folder, Space(steps, 1), "I"),
        "run: marks of higher saves stay": Mutant(_delete_marked_saves_of_others, Space(managers, 0), "I1"),
        "run: a manifest alone is none": Mutant(_count_manifests_alone, Space(late, 1), "I7"),
        "run: unfinished by a listing from after": Mutant(_trust_the_first_listing, Space(keeping, 0), "I1"),
    }
