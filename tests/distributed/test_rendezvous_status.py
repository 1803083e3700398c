"""Ranks that tell each other how they stand: real processes that fail, die, are stopped, or keep the store."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hfshard.distributed.rendezvous import SaveStatus
from hfshard.errors import RankFailedError, RankMissingError
from tests.distributed.gloo import DEATH_SECONDS, check_ranks, end_with, free_port, hear, run_ranks, say


def count_keys() -> int:
    """How many keys the store of the group has."""
    store: Any = dist.group.WORLD
    return int(store.get_group_store().num_keys())


def _raised_by(work: Callable[[], object]) -> RankFailedError:
    with pytest.raises(RankFailedError) as caught:
        work()
    return caught.value


def _say_and_hear(rank: int, world_size: int) -> None:
    everyone = list(range(world_size))
    with SaveStatus("say", everyone, rank) as status:
        assert status.leader == 0
        assert status.meet("names", b"of %d" % rank) == {other: b"of %d" % other for other in everyone}
        assert status.meet("names") == dict.fromkeys(everyone, b"")  # the second time, not the first one's words
        size = 9 << 20 if world_size == 4 else 3 << 20  # the server of torch takes 8 MiB; these are kept in a file
        large = random.Random(1).randbytes(size)  # which is not compressed
        for name, value in (("large", large), ("zeros", bytes(size))):
            assert status.meet(name, value if rank == world_size - 1 else b"small")[world_size - 1] == value
        status.tell("raw", b"\x00\xff%d" % rank)
        assert status.wait_for("raw", (rank + 1) % world_size) == b"\x00\xff%d" % ((rank + 1) % world_size)
        total = torch.tensor([rank])
        time.sleep(0.4 if rank == world_size - 1 else 0)  # the others look after each other meanwhile
        status.await_work(dist.all_reduce(total, async_op=True))
        assert total.item() == sum(everyone)
        assert status.finish(b"done" if rank == 0 else b"ignored") == b"done"


def _save_often(rank: int, world_size: int, times: int) -> None:
    dist.barrier()
    before = count_keys()
    for number in range(times):
        with SaveStatus(f"often/{number}", range(world_size), rank) as status:
            status.meet("names", b"n")
            status.tell("large", random.Random(rank).randbytes(2 << 20)) if number == 0 else None
            status.finish(b"done")
    dist.barrier()
    assert count_keys() <= before + 2  # what the barriers take up


def _fail_on_each(rank: int, world_size: int) -> None:
    """Every rank in turn fails, in each kind of waiting; then the same group goes on."""
    errors = (OSError(28, "No space left on device"), KeyboardInterrupt())
    waits: tuple[Callable[[SaveStatus, int], object], ...] = (
        lambda status, failing: status.meet("never"),
        lambda status, failing: status.wait_for("never", failing),
        lambda status, failing: status.finish() if rank else status.meet("never"),
    )
    for number, wait in enumerate(waits):
        failing = (number + 1) % world_size
        error = errors[number % 2]

        def save(wait: Any = wait, error: BaseException = error, failing: int = failing, number: int = number) -> None:
            with SaveStatus(f"fail/{number}", range(world_size), rank) as status:
                status.meet("begin")
                if rank == failing:
                    raise error
                wait(status, failing)

        if rank == failing:
            with pytest.raises(type(error)):
                save()
        else:
            told = _raised_by(save)
            assert told.rank == failing
            assert str(told).startswith(f"Rank {failing} failed, so the other ranks gave up: {type(error).__name__}")
            assert str(error) in str(told)


def _do_other_things(rank: int, world_size: int) -> None:
    def save() -> None:
        with SaveStatus("other", range(world_size), rank) as status:
            status.meet("exchange" if rank == 1 else "plan")

    told = _raised_by(save)
    assert told.rank == 1
    assert "Rank 1 is at 'exchange', but rank 0 is at 'plan'" in str(told)

    def wait() -> None:
        patience_seconds = 60 if rank else 0.5
        with SaveStatus("dawdle", range(world_size), rank, patience_seconds=patience_seconds) as status:
            if rank == 0:
                status.wait_for("never", 1)
            status.finish()

    told = _raised_by(wait)
    assert (type(told), told.rank) == (RankMissingError, 1)


def _fail_too_late(rank: int, world_size: int) -> None:
    """A rank fails while the leader does its step: the others hear from the leader that it is done."""
    failing = world_size - 1
    raised = pytest.raises(KeyboardInterrupt) if rank == failing else contextlib.nullcontext()
    with raised, SaveStatus("late", range(world_size), rank) as status:
        status.meet("begin")
        if rank == failing:
            raise KeyboardInterrupt
        if rank == 0:
            time.sleep(0.7)  # the others look twice
        assert status.finish(b"done") == b"done"


def _talk(rank: int, world_size: int) -> None:
    _say_and_hear(rank, world_size)
    if world_size > 1:
        _fail_on_each(rank, world_size)
        _do_other_things(rank, world_size)
        _fail_too_late(rank, world_size)
    _save_often(rank, world_size, 10)


@pytest.mark.parametrize(("world_size", "is_file"), [(4, False), (2, True), (1, True)])
def test_ranks_hear_each_other_and_who_failed(tmp_path: Path, world_size: int, is_file: bool) -> None:
    check_ranks(tmp_path, world_size, _talk, world_size, ports=() if is_file else (free_port(),))


def _stop_and_die(rank: int) -> None:
    """Rank 2 is stopped, and goes on; then rank 3 is killed in a collective, and rank 2 while the others wait."""
    pids: dict[int, int] = {}

    def stop() -> None:
        with SaveStatus("stop", range(4), rank, death_seconds=DEATH_SECONDS) as status:
            pids.update({other: int(pid) for other, pid in status.meet("pids", b"%d" % os.getpid()).items()})
            if rank == 2:
                os.kill(os.getpid(), signal.SIGSTOP)
            status.meet("after")

    told = _raised_by(stop)
    assert told.rank == 2
    assert re.match(r"Rank 2 sent no heartbeat for 1\d s", str(told))
    if rank == 0:
        os.kill(pids[2], signal.SIGCONT)

    def die(kind: str, dying: int, ranks: range) -> None:
        with SaveStatus(kind, ranks, rank) as status:
            status.meet("begin")
            if rank == dying:
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "collective":
                status.await_work(dist.all_reduce(torch.zeros(1), async_op=True))
            else:
                status.finish() if rank else status.meet("written")

    for kind, dying, ranks in (("collective", 3, range(4)), ("store", 2, range(3))):
        told = _raised_by(partial(die, kind, dying, ranks))
        assert told.rank == dying, str(told)
        assert f"Rank {dying} sent no more heartbeats: its process has ended" in str(told)
    end_with(rank, 0, 1)


def test_ranks_that_are_stopped_or_killed_are_named(tmp_path: Path) -> None:
    ends = run_ranks(tmp_path, 4, _stop_and_die, ports=(free_port(),))

    assert [end.status for end in ends] == [0, 0, -9, -9], "\n".join(end.words for end in ends)


def _lose_the_store(rank: int, kind: signal.Signals) -> None:
    def save() -> None:
        with SaveStatus("lose", range(3), rank, death_seconds=DEATH_SECONDS) as status:
            host = int(status.meet("pids", b"%d" % os.getpid())[0])
            hosts.append(host)
            status.tell("heard")
            if rank == 0:
                status.wait_for("heard", 1)
                status.wait_for("heard", 2)
                os.kill(os.getpid(), kind)
                os._exit(0)
            status.wait_for("never", 2) if rank == 1 else status.finish()

    hosts: list[int] = []
    told = _raised_by(save)
    assert told.rank == 0
    assert "rank 0, which hosts it," in str(told)
    assert ("The outcome is unknown" in str(told)) == (rank == 2)
    told = _raised_by(lambda: SaveStatus("again", range(3), rank, death_seconds=1).__enter__())
    assert told.rank == 0
    if rank == 1:
        say("rank 1 has tried again")
    elif kind is signal.SIGSTOP:
        hear("rank 1 has tried again")
        os.kill(hosts[0], signal.SIGCONT)
    os._exit(0)


@pytest.mark.parametrize(("kind", "status"), [(signal.SIGKILL, -9), (signal.SIGSTOP, 0)])
def test_a_store_whose_host_is_gone_or_stopped_is_an_error(tmp_path: Path, kind: signal.Signals, status: int) -> None:
    ends = run_ranks(tmp_path, 3, _lose_the_store, kind, ports=(free_port(),))

    assert [end.status for end in ends] == [status, 0, 0], "\n".join(end.words for end in ends)


def _host_leaves_first(rank: int) -> None:
    with SaveStatus("leave", range(3), rank) as status:
        if rank == 2:
            time.sleep(0.2)  # a slow one
        assert status.finish(b"done") == b"done"
    os._exit(0)


def test_the_host_of_the_store_leaves_when_all_know_the_outcome(tmp_path: Path) -> None:
    ends = run_ranks(tmp_path, 3, _host_leaves_first, ports=(free_port(),))

    assert [end.status for end in ends] == [0, 0, 0], "\n".join(end.words for end in ends)


def _meet_after_a_stop(rank: int) -> None:
    """Rank 0 is stopped until rank 1, which has come to the second meeting, has given up."""
    with pytest.raises(RankFailedError) as caught, SaveStatus("s", [0, 1], rank, death_seconds=DEATH_SECONDS) as status:
        leader = int(status.meet("begin", b"%d" % os.getpid())[0])
        if rank == 0:
            status.await_key("meet/2/1", 1)  # it has come to the next meeting
            os.kill(leader, signal.SIGSTOP)
        status.meet("checked")
    assert caught.value.rank == 1 - rank, str(caught.value)
    if rank == 1:
        os.kill(leader, signal.SIGCONT)
    os._exit(0)


def test_a_leader_that_goes_on_does_not_count_on_those_who_came_before(tmp_path: Path) -> None:
    ends = run_ranks(tmp_path, 2, _meet_after_a_stop, ports=(free_port(),))

    assert [end.status for end in ends] == [0, 0], "\n".join(end.words for end in ends)
