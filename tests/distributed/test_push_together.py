"""All ranks push what they hold together: one commit by the first rank, or the hub as it was and an error on each."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hfshard._util.call_ranks import Session
from hfshard.distributed.push_together import StagingFolder, agree_on_repo, push_together, send, stage, staging_folder
from hfshard.errors import HubError, InvalidArgumentError, RankFailedError
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.hub.push_files import PushRequest, collect_directory, push_files
from hfshard.hub.repo import PushResult
from hfshard.saving.save_request import SaveOptions, SaveRequest
from tests.distributed.gloo import await_file, check_ranks, run_ranks
from tests.distributed.test_save_on_ranks_faults import fail_in_turn, tensor_that

ROWS = 1 << 10
"""Of 8 bytes: each tensor has a file of its own."""


def push(
    hub: Path, tensors: dict[str, Any], *, before: Callable[[Session], object] = lambda ranks: None
) -> tuple[PushResult, tuple[int, ...]]:
    """Push rows that are spread over the ranks, and what only this rank has; gives the result, and who could write.

    Args:
        hub: A directory.
        tensors: Beside the rows.
        before: Called by the sender before it speaks to the hub.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(ROWS, dtype=torch.int64)
    rows = {
        f"rows{number}": distribute_tensor(whole + number, mesh, [Shard(0)], src_data_rank=None) for number in range(2)
    }
    request = SaveRequest(tensors=rows | tensors, options=SaveOptions(max_shard_size=10_000))
    with push_together() as ranks:
        agree_on_repo(ranks, str(hub))
        with staging_folder(ranks) as folder:
            index = stage(ranks, request, folder)
            assert (index is not None) == ranks.is_leader

            def push_it() -> list[PushResult]:
                before(ranks)
                contents, indexes = collect_directory(folder.path)
                asked = PushRequest(contents=contents, variants=frozenset(indexes), check=ranks.look)
                return [push_files(asked, hub)]

            return send(ranks, push_it)[0], folder.seen_by


def head_of(hub: Path) -> str:
    return DirectoryHub.open(hub).resolve()


def signal_after(path: Path, number: signal.Signals) -> None:
    """Begin to wait for a file; then this process gets the signal."""

    def wait() -> None:
        await_file(path)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait).start()


def check_until_told(ranks: Session, path: Path) -> None:
    path.touch()
    end = time.monotonic() + 100
    while time.monotonic() < end:
        ranks.look()
        time.sleep(0.01)


def push_with_faults(rank: int, place: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    temporary = place / "temporary"
    tempfile.tempdir = str(temporary)
    hub = place / "hub"
    first, seen_by = push(hub, {})
    assert (first.is_new, first.commit, seen_by) == (True, head_of(hub), (0, 1))

    for fault in fail_in_turn(rank):
        with fault.expected():
            push(hub, fault.tensors)
        dist.barrier()
        assert (head_of(hub), list(temporary.iterdir())) == (first.commit, [])

    with pytest.raises(InvalidArgumentError, match=r"Rank 0 pushes to .*hub0', but rank 1 to .*hub1'"):
        push(place / f"hub{rank}", {})
    (place / "file").touch()
    with pytest.raises(RankFailedError if rank else HubError) as refused:
        push(place / "file", {})
    assert "hfshard verify" not in str(refused.value)
    dist.barrier()
    assert list(temporary.iterdir()) == []

    with push_together() as ranks:
        agree_on_repo(ranks, str(place / "hub\udcff"))  # a byte of a path that is no UTF-8
        send(ranks, list)

    # While the sender sends, it looks what the others say.
    if rank:
        signal_after(place / "sending", signal.SIGINT)
    with pytest.raises(KeyboardInterrupt if rank else RankFailedError) as stopped:
        push(hub, {"more": torch.zeros(2)}, before=lambda ranks: check_until_told(ranks, place / "sending"))
    assert rank or "Rank 1 failed" in str(stopped.value)
    dist.barrier()
    assert (head_of(hub), list(temporary.iterdir())) == (first.commit, [])

    # The same path leads each process to a directory of its own.
    (place / f"machine{rank}").mkdir()
    os.chdir(place / f"machine{rank}")
    tempfile.tempdir = "/proc/self/cwd"
    again, seen_by = push(hub, {})
    assert (again.is_new, again.commit, seen_by) == (False, first.commit, (0,))
    dist.barrier()
    assert list(Path().iterdir()) == []
    with push_together() as ranks, staging_folder(ranks) as folder:
        with pytest.raises(InvalidArgumentError, match=r"Rank 1 does not see .* of rank 0.*Set TMPDIR"):
            folder.reject_unseen()
        send(ranks, list)


def test_all_ranks_raise_or_have_pushed(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    check_ranks(tmp_path / "ranks", 2, push_with_faults, tmp_path)


def test_a_directory_that_the_rank_which_made_it_cannot_write_into_is_named() -> None:
    folder = StagingFolder("/there", owner=0, seen_by=(), unseen_by=(0, 1))
    with pytest.raises(InvalidArgumentError, match=r"^Rank 0 cannot write into '/there'.*it can write into"):
        folder.reject_unseen()


def push_and_die(rank: int, place: Path, dying: int) -> None:
    tempfile.tempdir = str(place / "temporary")
    fault = {"fault": tensor_that(lambda: os.kill(os.getpid(), signal.SIGKILL))} if rank == dying else {}
    with pytest.raises(RankFailedError) as caught:
        push(place / "hub", fault)
    assert caught.value.rank == dying
    os._exit(0)  # no barrier: one is dead


@pytest.mark.parametrize("dying", [0, 1])
def test_nothing_is_left_where_a_rank_is_killed_that_stages_its_part(dying: int, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    ends = run_ranks(tmp_path / "ranks", 2, push_and_die, tmp_path, dying)
    assert ends[1 - dying].status == 0, ends[1 - dying].words
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not (tmp_path / "hub").exists()


def die_while_the_sender_sends(rank: int, place: Path, dying: int) -> None:
    tempfile.tempdir = str(place / "temporary")
    sending = place / "sending"

    def before(ranks: Session) -> None:
        if dying == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        check_until_told(ranks, sending)

    if rank == dying == 1:
        signal_after(sending, signal.SIGKILL)
    with pytest.raises(RankFailedError) as caught:
        push(place / "hub", {}, before=before)
    assert caught.value.rank == dying
    assert ("The outcome is unknown" in str(caught.value)) == (rank == 1)
    os._exit(0)  # no barrier: one is dead


@pytest.mark.slow
@pytest.mark.parametrize("dying", [0, 1])
def test_nothing_is_left_where_a_rank_is_killed_while_the_first_one_sends(dying: int, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    ends = run_ranks(tmp_path / "ranks", 2, die_while_the_sender_sends, tmp_path, dying)
    assert ends[1 - dying].status == 0, ends[1 - dying].words
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not (tmp_path / "hub").exists()
