"""A save that is not committed: the place stays as it was, whatever was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfshard.commit.directory_commit import directory_transaction
from hfshard.commit.store_commit import store_transaction
from hfshard.commit.transaction import OwnShardWriter
from hfshard.load import load_state_dict
from hfshard.saving.pipeline import Save
from tests.stores.saving.checkpoints import loaded, request, save_into, saved, settled
from tests.stores.saving.memory_store import MemoryStore


def files_in(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def save_to(directory: Path, save: Save) -> None:
    with directory_transaction(str(directory), save.new, OwnShardWriter()) as target:
        save.into(target)


def refuse() -> None:
    raise InterruptedError("not now")


@pytest.mark.parametrize("limit", [1, 1000], ids=["shards", "single"])
def test_a_directory_that_is_left_without_commit_is_as_it_was(tmp_path: Path, limit: int) -> None:
    save_to(tmp_path, Save({"model": request(1, 1, limit=limit)}))
    before = files_in(tmp_path)

    save = Save({"model": request(2, 2, limit=limit)})
    with directory_transaction(str(tmp_path), save.new, OwnShardWriter()) as target:
        save.prepare(target)
        save.write(target)
        assert len(files_in(tmp_path)) > len(before)  # staged

    assert files_in(tmp_path) == before


def test_a_directory_is_as_it_was_when_the_last_moment_refuses(tmp_path: Path) -> None:
    save_to(tmp_path, Save({"model": request(1, 1)}))
    before = files_in(tmp_path)

    save = Save({"model": request(2, 2)})
    with directory_transaction(str(tmp_path), save.new, OwnShardWriter()) as target:
        save.prepare(target)
        save.write(target)
        with pytest.raises(InterruptedError, match="not now"):
            save.commit(target, refuse)

    assert files_in(tmp_path) == before
    assert {float(tensor[0]) for tensor in load_state_dict(tmp_path).values()} == {1.0}


def test_a_store_that_is_left_without_commit_loads_as_before_and_the_next_save_cleans_up() -> None:
    objects = saved(request(1, 1))
    store = MemoryStore(objects)
    save = Save({"model": request(2, 2)})
    with store_transaction(store, save.new, OwnShardWriter()) as target:
        save.prepare(target)
        save.write(target)
        with pytest.raises(InterruptedError, match="not now"):
            save.commit(target, refuse)
    assert loaded(objects) == (1, {1.0})

    save_into(store, request(3, 3))
    assert loaded(objects) == (3, {3.0})
    assert objects.keys() == settled(objects)


def test_a_store_that_has_exactly_this_is_asked_for_no_confirmation() -> None:
    store = MemoryStore(saved(request(1, 1)))
    save = Save({"model": request(1, 1)})
    with store_transaction(store, save.new, OwnShardWriter()) as target:
        save.prepare(target)
        save.write(target)
        assert not save.commit(target, refuse)
    assert [one for one in store.requests if one.split()[0] in ("put", "open", "copy", "delete", "sweep")] == []
