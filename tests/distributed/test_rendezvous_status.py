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

from hfshard._util.call_ranks import Session
from hfshard.distributed.rendezvous import GroupSession
from hfshard.errors import RankFailedError, RankMissingError
from tests.distributed.gloo import DEATH_SECONDS, check_ranks, count_keys, end_with, free_port, hear, run_ranks, say


def _raised_by(work: Callable[[], object]) -> RankFailedError:
    with pytest.raises(RankFailedError) as caught:
        work()
    return caught.value


def _say_and_hear(rank: int, world_size: int) -> None:
    everyone = list(range(world_size))
    with GroupSession("say", everyone, rank) as ranks:
        assert ranks.leader == 0
        assert ranks.meet("names", b"of %d" % rank) == {other: b"of %d" % other for other in everyone}
        assert ranks.meet("names") == dict.fromkeys(everyone, b"")  # the second time, not the first one's words
        size = 9 << 20 if world_size == 4 else 3 << 20  # the server of torch takes 8 MiB; these are kept in a file
        large = random.Random(1).randbytes(size)  # which is not compressed
        for name, value in (("large", large), ("zeros", bytes(size))):
            assert ranks.meet(name, value if rank == world_size - 1 else b"small")[world_size - 1] == value
        ranks.tell("raw", b"\x00\xff%d" % rank)
        assert ranks.wait_for("raw", (rank + 1) % world_size) == b"\x00\xff%d" % ((rank + 1) % world_size)
        assert ranks.all_of([rank, "é"]) == [[other, "é"] for other in everyone]
        assert ranks.first(lambda: f"of {rank}") == "of 0"
        assert ranks.each(lambda: rank) == rank
        total = torch.tensor([rank])
        time.sleep(0.4 if rank == world_size - 1 else 0)  # the others look after each other meanwhile
        ranks.await_work(dist.all_reduce(total, async_op=True))
        assert total.item() == sum(everyone)
        assert ranks.finish(b"done" if rank == 0 else b"ignored") == b"done"


def _save_often(rank: int, world_size: int, times: int) -> None:
    dist.barrier()
    before = count_keys()
    for number in range(times):
        with GroupSession(f"often/{number}", range(world_size), rank) as ranks:
            ranks.meet("names", b"n")
            ranks.tell("large", random.Random(rank).randbytes(2 << 20)) if number == 0 else None
            ranks.finish(b"done")
    dist.barrier()
    assert count_keys() <= before + 2  # what the barriers take up


def _fail_on_each(rank: int, world_size: int) -> None:
    """Every rank in turn fails, in each kind of waiting; then the same group goes on."""
    errors = (OSError(28, "No space left on device"), KeyboardInterrupt())
    waits: tuple[Callable[[Session, int], object], ...] = (
        lambda session, failing: session.meet("never"),
        lambda session, failing: session.wait_for("never", failing),
        lambda session, failing: session.finish() if rank else session.meet("never"),
    )
    for number, wait in enumerate(waits):
        failing = (number + 1) % world_size
        error = errors[number % 2]

        def save(wait: Any = wait, error: BaseException = error, failing: int = failing, number: int = number) -> None:
            with GroupSession(f"fail/{number}", range(world_size), rank) as ranks:
                ranks.meet("begin")
                if rank == failing:
                    raise error
                wait(ranks, failing)

        if rank == failing:
            with pytest.raises(type(error)):
                save()
        else:
            told = _raised_by(save)
            assert told.rank == failing
            assert str(told).startswith(f"Rank {failing} failed, so the other ranks gave up: {type(error).__name__}")
            assert str(error) in str(told)


def _fail_in_work(rank: int, world_size: int) -> None:
    """An error in work of the leader, and then in that of the last rank: it is raised there, and named on the others.

    Nobody leaves the session for it.
    """
    last = world_size - 1

    def fail_on(failing: int) -> None:
        if rank == failing:
            raise OSError(28, "No space left on device")

    with GroupSession("work", range(world_size), rank) as ranks:
        for failing, call in ((0, ranks.first), (last, ranks.each)):
            work = partial(fail_on, failing)
            with pytest.raises(
                OSError if rank == failing else RankFailedError, match="No space left on device"
            ) as told:
                call(work)
            if rank != failing:
                assert str(told.value).startswith(f"Rank {failing} failed, so all {world_size} ranks stop: ")
        with pytest.raises(KeyboardInterrupt if rank == last else RankFailedError):
            ranks.agree(KeyboardInterrupt() if rank == last else None)
        assert ranks.each(lambda: "on") == "on"
        ranks.finish()


def _do_other_things(rank: int, world_size: int) -> None:
    def save() -> None:
        with GroupSession("other", range(world_size), rank) as ranks:
            ranks.meet("exchange" if rank == 1 else "plan")

    told = _raised_by(save)
    assert told.rank == 1
    assert "Rank 1 is at 'exchange', but rank 0 is at 'plan'" in str(told)

    def wait() -> None:
        timeout_seconds = 60 if rank else 0.5
        with GroupSession("dawdle", range(world_size), rank, timeout_seconds=timeout_seconds) as ranks:
            if rank == 0:
                ranks.wait_for("never", 1)
            ranks.finish()

    told = _raised_by(wait)
    assert (type(told), told.rank) == (RankMissingError, 1)


def _fail_too_late(rank: int, world_size: int) -> None:
    """A rank fails while the leader does its step: the others hear from the leader that it is done."""
    failing = world_size - 1
    raised = pytest.raises(KeyboardInterrupt) if rank == failing else contextlib.nullcontext()
    with raised, GroupSession("late", range(world_size), rank) as ranks:
        ranks.meet("begin")
        if rank == failing:
            raise KeyboardInterrupt
        if rank == 0:
            time.sleep(0.7)  # the others look twice
        assert ranks.finish(b"done") == b"done"


def _talk(rank: int, world_size: int) -> None:
    _say_and_hear(rank, world_size)
    if world_size > 1:
        _fail_on_each(rank, world_size)
        _fail_in_work(rank, world_size)
        _do_other_things(rank, world_size)
        _fail_too_late(rank, world_size)
    _save_often(rank, world_size, 10)


@pytest.mark.parametrize(
    ("world_size", "is_file"), [pytest.param(4, False, marks=pytest.mark.slow), (2, True), (1, True)]
)
def test_ranks_hear_each_other_and_who_failed(tmp_path: Path, world_size: int, is_file: bool) -> None:
    check_ranks(tmp_path, world_size, _talk, world_size, ports=() if is_file else (free_port(),))


def _stop_and_die(rank: int) -> None:
    """Rank 2 is stopped, and goes on; then rank 3 is killed in a collective, and rank 2 while the others wait."""
    pids: dict[int, int] = {}

    def stop() -> None:
        with GroupSession("stop", range(4), rank, death_seconds=DEATH_SECONDS) as ranks:
            pids.update({other: int(pid) for other, pid in ranks.meet("pids", b"%d" % os.getpid()).items()})
            if rank == 2:
                os.kill(os.getpid(), signal.SIGSTOP)
            ranks.meet("after")

    told = _raised_by(stop)
    assert told.rank == 2
    assert re.match(r"Rank 2 sent no heartbeat for 1\d s", str(told))
    if rank == 0:
        os.kill(pids[2], signal.SIGCONT)

    def die(kind: str, dying: int, members: range) -> None:
        with GroupSession(kind, members, rank) as ranks:
            ranks.meet("begin")
            if rank == dying:
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "collective":
                ranks.await_work(dist.all_reduce(torch.zeros(1), async_op=True))
            else:
                ranks.finish() if rank else ranks.meet("written")

    for kind, dying, members in (("collective", 3, range(4)), ("store", 2, range(3))):
        told = _raised_by(partial(die, kind, dying, members))
        assert told.rank == dying, str(told)
        assert f"Rank {dying} sent no more heartbeats: its process has ended" in str(told)
    end_with(rank, 0, 1)


def test_ranks_that_are_stopped_or_killed_are_named(tmp_path: Path) -> None:
    ends = run_ranks(tmp_path, 4, _stop_and_die, ports=(free_port(),))

    assert [end.status for end in ends] == [0, 0, -9, -9], "\n".join(end.words for end in ends)


def _lose_the_store(rank: int, kind: signal.Signals) -> None:
    def save() -> None:
        with GroupSession("lose", range(3), rank, death_seconds=DEATH_SECONDS) as ranks:
            host = int(ranks.meet("pids", b"%d" % os.getpid())[0])
            hosts.append(host)
            ranks.tell("heard")
            if rank == 0:
                ranks.wait_for("heard", 1)
                ranks.wait_for("heard", 2)
                os.kill(os.getpid(), kind)
                os._exit(0)
            ranks.wait_for("never", 2) if rank == 1 else ranks.finish()

    hosts: list[int] = []
    told = _raised_by(save)
    assert told.rank == 0
    assert "rank 0, which hosts it," in str(told)
    assert ("The outcome is unknown" in str(told)) == (rank == 2)
    told = _raised_by(lambda: GroupSession("again", range(3), rank, death_seconds=1).__enter__())
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
    with GroupSession("leave", range(3), rank) as ranks:
        if rank == 2:
            time.sleep(0.2)  # a slow one
        assert ranks.finish(b"done") == b"done"
    os._exit(0)


def test_the_host_of_the_store_leaves_when_all_know_the_outcome(tmp_path: Path) -> None:
    ends = run_ranks(tmp_path, 3, _host_leaves_first, ports=(free_port(),))

    assert [end.status for end in ends] == [0, 0, 0], "\n".join(end.words for end in ends)


def _meet_after_a_stop(rank: int) -> None:
    """Rank 0 is stopped until rank 1, which has come to the second meeting, has given up."""
    with (
        pytest.raises(RankFailedError) as caught,
        GroupSession("s", [0, 1], rank, death_seconds=DEATH_SECONDS) as ranks,
    ):
        leader = int(ranks.meet("begin", b"%d" % os.getpid())[0])
        if rank == 0:
            ranks.await_key("meet/2/1", 1)  # it has come to the next meeting
            os.kill(leader, signal.SIGSTOP)
        ranks.meet("checked")
    assert caught.value.rank == 1 - rank, str(caught.value)
    if rank == 1:
        os.kill(leader, signal.SIGCONT)
    os._exit(0)


def test_a_leader_that_goes_on_does_not_count_on_those_who_came_before(tmp_path: Path) -> None:
    ends = run_ranks(tmp_path, 2, _meet_after_a_stop, ports=(free_port(),))

    assert [end.status for end in ends] == [0, 0], "\n".join(end.words for end in ends)
