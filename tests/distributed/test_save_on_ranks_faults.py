"""A rank fails while several save together: all raise, the old checkpoint stays, and the same ranks save again."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hfshard
from hfshard.distributed.save_on_ranks import save_together
from hfshard.errors import (
    HfshardError,
    InvalidArgumentError,
    RankFailedError,
    SaveDirectoryError,
    UnstorableTensorError,
)
from hfshard.places.place import place_to_save
from hfshard.saving.save_request import SaveOptions, SaveRequest
from hfshard.tensors.stored_tensor import RawTensor, TensorLayout
from tests.distributed.gloo import check_ranks, run_ranks
from tests.distributed.test_save_on_ranks_state_dicts import contents

ROWS = 3 << 19
"""Of 8 bytes: each rank's part takes several rounds."""


def save(place: Path, tensors: dict[str, Any], **options: Any) -> None:
    """Save rows that are spread over the ranks, and what only this rank has."""
    request = SaveRequest(tensors=rows() | tensors, options=SaveOptions(max_shard_size="13MB", **options))
    save_together(request, place_to_save(place))


def rows() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(ROWS, dtype=torch.int64)
    return {
        f"rows{number}": distribute_tensor(whole + number, mesh, [Shard(0)], src_data_rank=None) for number in range(2)
    }


def tensor_that(does: Callable[[], object]) -> RawTensor:
    """A tensor that does something when its bytes are read."""

    def blocks(_: int) -> Iterator[memoryview]:
        does()
        yield memoryview(b"12345678")

    return RawTensor(TensorLayout("U8", (8,), 8), blocks)


def raise_error() -> None:
    raise ZeroDivisionError("a tensor that can't be read")


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@dataclass(frozen=True)
class Fault:
    """What one of two ranks fails by, as seen on this one."""

    is_own: bool
    failing: int
    kind: type[BaseException]
    words: str
    tensors: dict[str, RawTensor]
    """To be saved by this rank, beside its others."""

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Of a call of all ranks: the one that fails raises its own error, the others one that names it."""
        with pytest.raises(self.kind if self.is_own else RankFailedError) as caught:
            yield
        if not self.is_own:
            assert isinstance(caught.value, RankFailedError)
            assert (caught.value.rank, self.words in str(caught.value)) == (self.failing, True)


def fail_in_turn(rank: int) -> Iterator[Fault]:
    """Each of two ranks fails: by an error, and by Ctrl-C."""
    for does, kind, words in (
        (raise_error, ZeroDivisionError, "ZeroDivisionError: a tensor that can't be read"),
        (press_ctrl_c, KeyboardInterrupt, "KeyboardInterrupt"),
    ):
        for failing in (1, 0):
            tensors = {f"of rank {rank}": tensor_that(does)} if rank == failing else {}
            yield Fault(rank == failing, failing, kind, words, tensors)


def save_with_faults(rank: int, place: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    save(place, {})
    before = contents(place)
    assert len(before) == 3

    for fault in fail_in_turn(rank):
        with fault.expected():
            save(place, fault.tensors)
        dist.barrier()
        assert contents(place) == before

    with pytest.raises(OSError if rank == 1 else RankFailedError, match="File too large"):
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, resource.RLIM_INFINITY))
        save(place, {"more": torch.zeros(2)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    assert contents(place) == before

    with pytest.raises(InvalidArgumentError, match="disagree about 'w'"):
        save(place, {"w": torch.zeros(2 + rank)})
    dist.barrier()
    assert contents(place) == before

    # Before the ranks have met: one can't even list its tensors.
    unfilled = {"lazy": torch.nn.UninitializedBuffer()} if rank else {}
    with pytest.raises(UnstorableTensorError if rank else RankFailedError, match="'lazy' has no shape yet"):
        hfshard.save_state_dict(rows() | unfilled, place)

    (place.parent / "file").touch()
    with pytest.raises(RankFailedError if rank else SaveDirectoryError, match="is a file") as caught:
        save(place.parent / "file", {})
    assert isinstance(caught.value, HfshardError)

    save(place, {"more": torch.zeros(2)})
    dist.barrier()
    assert sorted(path.name for path in place.iterdir()) == sorted(contents(place))
    assert hfshard.verify_checkpoint(place).ok
    assert hfshard.load_state_dict(place)["rows1"].equal(torch.arange(ROWS) + 1)


def test_all_raise_and_the_same_ranks_save_again(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, save_with_faults, tmp_path / "out")


def save_and_die(rank: int, place: Path, dying: int) -> None:
    save(place, {})
    dist.barrier()
    before = contents(place)
    fault = {"fault": tensor_that(lambda: os.kill(os.getpid(), signal.SIGKILL))} if rank == dying else {}
    with pytest.raises(RankFailedError) as caught:
        save(place, fault)
    assert caught.value.rank == dying
    assert contents(place) == before
    os._exit(0)  # no barrier: one is dead


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    ends = run_ranks(tmp_path / "ranks", 2, save_and_die, tmp_path / "out", 1)
    assert [end.status for end in ends] == [0, -signal.SIGKILL], ends[0].words
