"""The store whose calls end: keys, values of any length, and one connection for a group."""

from __future__ import annotations

import os
import random
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from hfshard.distributed.group_store import TimeoutStore, open_group_store
from hfshard.errors import RankFailedError
from tests.distributed.gloo import free_port, run_ranks
from tests.helpers import processes

# torch lists its stores in its documentation only
_HASH_STORE: Any = dist.HashStore  # type: ignore[attr-defined]
_TCP_STORE: Any = dist.TCPStore  # type: ignore[attr-defined]


class _StoreWithoutClone:
    """As the stores of users, and of torch before 2.8, are."""

    def __init__(self) -> None:
        self._store = _HASH_STORE()

    def __getattr__(self, name: str) -> Any:
        if name in ("clone", "underlying_store"):
            raise AttributeError(name)
        return getattr(self._store, name)


class _SilentStore(_StoreWithoutClone):
    """One that does not answer before it is told to; it counts the questions."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.questions = 0

    def check(self, keys: list[str]) -> bool:
        self.questions += 1
        return not self.answers.wait(100)


@pytest.mark.parametrize("kind", [_HASH_STORE, _StoreWithoutClone])
def test_keys_are_read_without_waiting(kind: type[Any]) -> None:
    store = TimeoutStore(kind())

    assert store.get("missing") is None
    assert store.put("empty", b"") == ["empty"]
    large = random.Random(1).randbytes((2 << 20) - 1)  # which can't be compressed
    assert store.put("large", large) == ["large", "large#0", "large#1"]
    assert store.put("names", b"ab" * (1 << 20)) == ["names"]
    assert store.get_many(["large", "names", "missing", "empty"]) == [large, b"ab" * (1 << 20), None, b""]
    assert [store.swap("key", "", "one"), store.swap("key", "", "two"), store.swap("key", "one", "")] == [
        "one",
        "one",
        "",
    ]
    assert [store.holds("key", ""), store.holds("missing", "")] == [True, False]
    assert [store.add("count", 2), store.add("count", -1)] == [2, 1]
    assert store.has_many(["count", "missing"]) == [True, False]
    store.delete(["count", "missing"])
    store.delete_values(["large", "missing"])
    assert store.has_many(["count", "large", "large#0", "large#1", "empty"]) == [False, False, False, False, True]
    store.close()


def test_a_store_that_does_not_answer_is_an_error_at_once_the_second_time() -> None:
    silent = _SilentStore()
    store = TimeoutStore(silent)
    vars(store)["_answer_seconds"] = 0.5  # now that it is connected

    with pytest.raises(RankFailedError, match=r"did not respond for 0\.5 s") as caught:
        store.has_many(["key"])
    with pytest.raises(RankFailedError, match="did not respond"):
        store.has_many(["key"])

    assert caught.value.rank is None
    silent.answers.set()
    store.close()
    vars(store)["_thread"].result(100)
    assert silent.questions == 1


def _make_groups(rank: int, port: int) -> None:
    """A kept connection does not outlive its group, nor keep its port in use."""
    dist.destroy_process_group()
    kept = []
    for value in (b"first", b"second"):
        store = _TCP_STORE("127.0.0.1", port, 1, is_master=True)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
        del store
        kept.append(open_group_store())
        assert kept[-1].get("key") is None
        kept[-1].put("key", value)
        kept[-1].close()
        assert open_group_store() is kept[-1]
        dist.destroy_process_group()
    assert kept[0] is not kept[1]
    dist.init_process_group("gloo", store=_HASH_STORE(), rank=0, world_size=1)


def test_each_group_has_a_connection_of_its_own(tmp_path: Path) -> None:
    ends = run_ranks(tmp_path, 1, _make_groups, free_port())

    assert [end.status for end in ends] == [0], ends[0].words


def _start_again(rank: int, port: int) -> None:
    store = _TCP_STORE("127.0.0.1", port, 1, is_master=True)
    for restarts, found in (("0", None), ("1", None), ("1", b"1"), ("2", None)):
        dist.init_process_group("gloo", store=dist.PrefixStore("default", store), rank=0, world_size=1)  # type: ignore[attr-defined]
        with patch.dict(os.environ, {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": restarts}):
            ours = open_group_store()
            assert ours.get("said") == found, restarts
            ours.put("said", restarts.encode())
        dist.destroy_process_group()
    os._exit(0)


def test_what_ranks_said_that_torchrun_has_ended_is_not_heard(tmp_path: Path) -> None:
    end = processes.end_of(tmp_path / "words", _start_again, 0, free_port())
    assert end.status == 0, end.words
