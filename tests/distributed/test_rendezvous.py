"""Who takes part: real ranks that come together, alone, late, not at all, or die on the way."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hfshard
from hfshard._util.call_ranks import Role
from hfshard.distributed.liveness import announce_arrival, group_timeout_seconds
from hfshard.distributed.rendezvous import GroupSession, session
from hfshard.errors import RankFailedError, RankMissingError
from tests.distributed.gloo import DEATH_SECONDS, check_ranks, count_keys, end_with, free_port, hear, run_ranks, say

NEVER_SECONDS = 1000.0
"""A test that waits so long is ended before, as one that hangs."""


def _take_part(
    place: str, outcome: bytes = b"", *, needs_all: bool = False, may_join: bool = True, **settings: float
) -> tuple[str, list[int], bytes]:
    """Take part in a session; gives the role, the members and the outcome."""
    with session(place, needs_all=needs_all, may_join=may_join, **settings) as ranks:
        if ranks.role is Role.DECLINED:
            return str(ranks.role), ranks.ranks, b""
        if ranks.role is not Role.LATE:
            ranks.meet("begin")
        return str(ranks.role), ranks.ranks, ranks.finish(outcome)


def test_without_other_ranks_a_session_is_local_and_immediate() -> None:
    with session("/alone", needs_all=True) as ranks:
        assert (ranks.role, ranks.ranks, ranks.is_alone) == (Role.LEADER, [0], True)
        assert (ranks.position, ranks.world_size) == (0, 1)
        assert ranks.meet("names", b"mine") == {0: b"mine"}
        ranks.tell("name", b"told")
        assert ranks.wait_for("name", 0) == b"told"
        value = object()  # not JSON
        assert ranks.all_of(value) == [value]
        assert ranks.first(lambda: value) is value
        assert ranks.each(lambda: value) is value
        with pytest.raises(KeyboardInterrupt):
            ranks.agree(KeyboardInterrupt())
        ranks.check()
        ranks.look()
        ranks.fail(ValueError("of nobody's concern"))
        ranks.begin_step()
        assert ranks.finish(b"done") == b"done"


def _role(rank: int) -> str:
    return "member" if rank else "leader"


def _when_waiting(work: Callable[[], object]) -> None:
    """Do something, once, when this thread has come and is about to sleep, as it waits for other ranks."""

    def look(_: object, event: str, called: object) -> None:
        if event == "c_call" and called is time.sleep:
            sys.setprofile(None)
            work()

    sys.setprofile(look)


def _die_here() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _come_together(rank: int, world_size: int) -> None:
    everyone = list(range(world_size))
    for number in range(10):  # a quick rank is never in the same session twice
        told = _take_part("/together", b"%d" % number, needs_all=number % 2 == 0)
        assert told == (_role(rank), everyone, b"%d" % number)
    # One that needs all is enough; those that have everything follow it.
    if rank:
        hear("rank 0 comes")
        time.sleep(0.5)
    say("rank 0 comes")
    told = _take_part("/mixed", b"all", needs_all=rank == 0, wait_seconds=0 if rank == 0 else 60)
    assert told == (_role(rank), everyone, b"all")


def _come_alone(rank: int, world_size: int) -> None:
    if rank == 0:  # `if rank == 0: save(...)`
        assert _take_part("/alone", b"mine", wait_seconds=0.1) == ("leader", [0], b"mine")
    dist.barrier()
    # The others say that they do not write: nobody waits for them.
    if rank:
        assert _take_part("/alone", may_join=False) == ("declined", [], b"")
    dist.barrier()
    if rank == 0:
        assert _take_part("/alone", b"mine", wait_seconds=NEVER_SECONDS) == ("leader", [0], b"mine")
    # A directory for each.
    dist.barrier()
    assert _take_part(f"/of_{rank}", b"mine", wait_seconds=0.1) == ("leader", [rank], b"mine")
    # A rank that needs all takes part although it does not write.
    assert _take_part("/alone", b"all", needs_all=True, may_join=rank == 0)[:2] == (_role(rank), [*range(world_size)])


def _come_late(rank: int, world_size: int) -> None:
    def lead(outcome: bytes, error: Exception | None, awaited: str = "") -> None:
        with session("/late", needs_all=False, wait_seconds=0.1) as ranks:
            assert (ranks.role, ranks.ranks) == (Role.LEADER, [0])
            dist.barrier()
            for other in range(1, world_size if awaited else 1):
                hear(f"{awaited} {other}")
            if error is not None:
                raise error
            ranks.finish(outcome)

    def follow(word: str) -> bytes:
        dist.barrier()
        with session("/late", needs_all=False) as ranks:
            assert (ranks.role, ranks.ranks) == (Role.LATE, [0])
            say(f"{word} {rank}")
            return ranks.finish()

    for error in (None, OSError(28, "No space left on device")):
        word = "late for an error" if error else "late"
        if rank == 0 and error is None:
            lead(b"theirs", error, word)
        elif rank == 0:
            with pytest.raises(OSError, match="No space left"):
                lead(b"", error, word)
        elif error is None:
            assert follow(word) == b"theirs"
        else:
            with pytest.raises(RankFailedError, match=r"Rank 0 failed, .*No space left on device"):
                follow(word)
        dist.barrier()
    # What is late for a session of one rank, and needs all, is the next session.
    if rank == 0:
        lead(b"mine", None)
    else:
        dist.barrier()
    assert _take_part("/late", b"all", needs_all=True) == (_role(rank), list(range(world_size)), b"all")


def _come_in_threads(rank: int, world_size: int) -> None:
    """Two places at once, in another order on each rank; and one place twice."""
    found: dict[int, Any] = {}

    def save(number: int) -> None:
        place = f"/thread_{min(number, 1)}"
        found[number] = _take_part(place, b"%d" % min(number, 1), needs_all=True)

    threads = [threading.Thread(target=save, args=(number,)) for number in ((0, 1, 2) if rank % 2 else (2, 1, 0))]
    for one in threads:
        one.start()
    for one in threads:
        one.join(100)
    everyone = list(range(world_size))
    assert found == {number: (_role(rank), everyone, b"%d" % min(number, 1)) for number in range(3)}


def _miss(rank: int, world_size: int) -> None:
    if rank < world_size - 1:
        seconds = 0.5 if world_size == 2 else DEATH_SECONDS  # in which others come
        with pytest.raises(
            RankMissingError, match=rf"Rank {world_size - 1} did not arrive within {seconds:g} s"
        ) as caught:
            _take_part("/missed", needs_all=True, timeout_seconds=seconds)
        assert caught.value.rank == world_size - 1
    dist.barrier()
    if rank == world_size - 1:  # it comes to a session that is over: this is the next one
        assert _take_part("/missed", b"mine", wait_seconds=0.1) == ("leader", [rank], b"mine")
    dist.barrier()
    assert _take_part("/missed", b"all", needs_all=True) == (_role(rank), list(range(world_size)), b"all")


def _miss_for_the_timeout_of_the_group(rank: int, world_size: int) -> None:
    """How long a rank is waited for, users say where they say it for collectives; meanwhile they are told for whom."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    tensor = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (world_size,)), [Shard(0)])
    if rank == 0:
        group: Any = dist.group.WORLD
        before = group_timeout_seconds()
        words: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("hfshard").addHandler(handler)
        seconds = 1
        while not words:  # a process that is held up meanwhile says nothing
            seconds *= 2
            group.set_timeout(timedelta(seconds=seconds))
            with pytest.raises(RankMissingError, match=f"Rank 1 did not arrive within {seconds} s"):
                hfshard.save_state_dict({"a": tensor}, "/nowhere/to/be/found")
        group.set_timeout(timedelta(seconds=before))
        logging.getLogger("hfshard").removeHandler(handler)
        expected = rf"Rank 0 has waited \d+ s for rank 1.* '/nowhere/to/be/found'. It gives up after {seconds} s"
        assert re.match(expected, words[0])
        assert "init_process_group(timeout=...)" in words[0]
        assert len(words) <= 2
    dist.barrier()


def _fail(rank: int, world_size: int) -> None:
    """An error of one rank after it joined; the next session works."""

    def save() -> None:
        with session("/failed", needs_all=True) as ranks:
            if rank == 1:
                raise KeyboardInterrupt
            ranks.meet("written")

    with pytest.raises(KeyboardInterrupt if rank == 1 else RankFailedError):
        save()
    assert _take_part("/failed", b"all", needs_all=True) == (_role(rank), list(range(world_size)), b"all")


def _come_often(rank: int, world_size: int, times: int) -> None:
    _take_part("/often", needs_all=True)
    dist.barrier()
    before = count_keys()
    dist.barrier()
    for _ in range(times):
        _take_part("/often", needs_all=True)
    dist.barrier()
    assert count_keys() == before


def _come(rank: int, world_size: int) -> None:
    _come_together(rank, world_size)
    _come_alone(rank, world_size)
    if world_size > 1:
        _come_late(rank, world_size)
        _miss(rank, world_size)
        _miss_for_the_timeout_of_the_group(rank, world_size)
        _fail(rank, world_size)
    _come_in_threads(rank, world_size)
    _come_often(rank, world_size, 30)


@pytest.mark.parametrize(
    ("world_size", "is_file"), [pytest.param(4, False, marks=pytest.mark.slow), (2, True), (1, True)]
)
def test_ranks_find_out_who_takes_part(tmp_path: Path, world_size: int, is_file: bool) -> None:
    check_ranks(tmp_path, world_size, _come, world_size, ports=() if is_file else (free_port(),))


def _die(rank: int) -> None:
    """Rank 3 dies before it comes, rank 2 while it waits for others, rank 1 once it has joined; rank 0 goes on."""

    def save() -> None:
        _take_part("/die", needs_all=True, timeout_seconds=NEVER_SECONDS, wait_seconds=1)

    dist.barrier()
    if rank == 3:
        _die_here()
    if rank == 2:
        _when_waiting(_die_here)
    with pytest.raises(RankFailedError) as caught:
        save()
    assert (type(caught.value), caught.value.rank) == (RankFailedError, 2), str(caught.value)
    # It is known to be dead, and not waited for with patience again.
    with pytest.raises(RankMissingError) as caught:
        save()
    assert caught.value.rank == 2, str(caught.value)
    assert "had stopped sending heartbeats" in str(caught.value)
    # What needs nobody goes on, once both are here again: who keeps a session stays a second for those who look.
    with GroupSession("here", [0, 1], rank) as both:
        both.meet("here")
    assert _take_part("/plain", b"saved", wait_seconds=DEATH_SECONDS) == (_role(rank), [0, 1], b"saved")
    with (
        pytest.raises(RankFailedError) as caught,
        session("/plain", needs_all=False, wait_seconds=DEATH_SECONDS) as ranks,
    ):
        assert ranks.ranks == [0, 1]
        if rank == 1:
            _die_here()
        ranks.meet("written")
    assert caught.value.rank == 1, str(caught.value)
    assert _take_part("/plain", b"alone", wait_seconds=1) == ("leader", [0], b"alone")
    os._exit(0)


@pytest.mark.slow
def test_ranks_that_die_on_the_way_are_named(tmp_path: Path) -> None:
    ends = run_ranks(tmp_path, 4, _die, ports=(free_port(),))

    assert [end.status for end in ends] == [0, -9, -9, -9], "\n".join(end.words for end in ends)


def _die_on_the_way(rank: int) -> None:
    """Rank 1 prepares its call for longer than a dead one would be silent, and the next time it is killed."""
    with announce_arrival(rank, DEATH_SECONDS):
        time.sleep(1.1 * DEATH_SECONDS if rank == 1 else 0)
    everyone = _take_part("/way", needs_all=True, death_seconds=DEATH_SECONDS)
    assert everyone == (_role(rank), [0, 1, 2], b"")
    with announce_arrival(rank, DEATH_SECONDS):
        if rank == 1:
            _die_here()
    with pytest.raises(RankMissingError, match="Rank 1 had stopped sending heartbeats, and did not arrive") as caught:
        _take_part("/way", needs_all=True, timeout_seconds=NEVER_SECONDS, wait_seconds=1)
    assert caught.value.rank == 1
    end_with(rank, 0, 2)


def test_a_rank_that_dies_while_it_prepares_its_call_is_named(tmp_path: Path) -> None:
    ends = run_ranks(tmp_path, 3, _die_on_the_way, ports=(free_port(),))

    assert [end.status for end in ends] == [0, -9, 0], "\n".join(end.words for end in ends)


def _die_between(rank: int) -> None:
    """Rank 1 is killed when it has left the first call, and does not come to the next one."""
    assert _take_part("/between", needs_all=True) == (_role(rank), [0, 1], b"")
    if rank == 1:
        _die_here()
    with pytest.raises(RankMissingError, match="Rank 1 had stopped sending heartbeats, and did not arrive") as caught:
        _take_part("/between", needs_all=True, timeout_seconds=NEVER_SECONDS, wait_seconds=1)
    assert caught.value.rank == 1
    os._exit(0)


def test_a_rank_of_this_machine_that_died_between_two_calls_is_named_at_once(tmp_path: Path) -> None:
    ends = run_ranks(tmp_path, 2, _die_between, ports=(free_port(),))

    assert [end.status for end in ends] == [0, -9], "\n".join(end.words for end in ends)


def _lose_the_first(rank: int) -> None:
    """Rank 1 comes first, and dies when rank 0, too, waits for the others; the store is kept by rank 0."""

    def die() -> None:
        say("rank 1 waits")
        hear("rank 0 waits")
        _die_here()

    if rank == 0:
        hear("rank 1 waits")
        _when_waiting(lambda: say("rank 0 waits"))
    elif rank == 1:
        _when_waiting(die)
    else:
        end_with(rank, 0)
    with pytest.raises(RankFailedError, match="its process has ended") as caught:
        _take_part("/first", needs_all=True, timeout_seconds=NEVER_SECONDS)
    assert caught.value.rank == 1, str(caught.value)
    assert _take_part("/first", b"mine", wait_seconds=0.5) == ("leader", [0], b"mine")
    end_with(rank)


def test_the_death_of_the_first_to_come_ends_the_session_for_all(tmp_path: Path) -> None:
    ends = run_ranks(tmp_path, 3, _lose_the_first, ports=(free_port(),))

    assert [end.status for end in ends] == [0, -9, 0], "\n".join(end.words for end in ends)
