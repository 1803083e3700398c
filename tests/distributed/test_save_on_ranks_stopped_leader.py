"""The committing rank is stopped and goes on, when the others have given up: it asks them before it commits."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hfshard
from hfshard.distributed.rendezvous import session
from hfshard.distributed.save_on_ranks import save_on_ranks
from hfshard.errors import RankFailedError
from hfshard.places.place import place_to_save
from hfshard.saving.save_request import SaveOptions, SaveRequest
from tests.distributed.gloo import DEATH_SECONDS, free_port, run_ranks

UNKNOWN = "took effect completely, or not at all"


def save(place: Path, value: float, check: Callable[[], None]) -> None:
    """Save a tensor that is spread over the ranks, all of whose elements have this value."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    spread = distribute_tensor(torch.full((8,), value), mesh, [Shard(0)], src_data_rank=None)
    request = SaveRequest(tensors={"w": spread}, options=SaveOptions(checksum=None))
    with session(str(place), needs_all=True, death_seconds=DEATH_SECONDS) as ranks:
        save_on_ranks(request, place_to_save(place), ranks, check)


def stop_before_the_commit(rank: int) -> Callable[[], None]:
    """Rank 0 stops itself when all files are written."""
    calls = iter((lambda: None, lambda: os.kill(os.getpid(), signal.SIGSTOP)))
    return lambda: next(calls)()


def stop_in_the_commit(rank: int) -> Callable[[], None]:
    """Rank 0 stops itself when it is about to put the new file in place of the old one."""
    stops = iter([signal.SIGSTOP])

    def hook(event: str, words: tuple[Any, ...]) -> None:
        if event == "os.rename" and str(words[1]).endswith("model.safetensors"):
            for number in stops:
                os.kill(os.getpid(), number)

    if rank == 0:
        sys.addaudithook(hook)
    return lambda: None


def lose_the_leader_for_a_while(rank: int, place: Path, stop: Callable[[int], Callable[[], None]]) -> None:
    """Save twice; the second time rank 0 is stopped, and the last survivor lets it go on."""
    (place / f"{rank}.pid").write_text(str(os.getpid()))
    save(place / "out", 1, lambda: None)
    check = stop(rank)
    is_committed = stop is stop_in_the_commit
    if rank == 0 and is_committed:
        save(place / "out", 2, check)
        os._exit(0)
    with pytest.raises(RankFailedError) as caught:
        save(place / "out", 2, check)
    assert (UNKNOWN in str(caught.value)) == is_committed, str(caught.value)
    if rank == 0:
        os._exit(0)
    assert caught.value.rank == 0, str(caught.value)
    (place / f"{rank}.raised").touch()
    if all((place / f"{other}.raised").exists() for other in (1, 2)):
        os.kill(int((place / "0.pid").read_text()), signal.SIGCONT)
    os._exit(0)  # the first rank can't meet the others any more


@pytest.mark.parametrize(
    ("stop", "keeps_store", "found"),
    [
        (stop_before_the_commit, True, 1.0),
        pytest.param(stop_before_the_commit, False, 1.0, marks=pytest.mark.slow),
        (stop_in_the_commit, True, 2.0),
        pytest.param(stop_in_the_commit, False, 2.0, marks=pytest.mark.slow),
    ],
)
def test_the_others_know_whether_a_leader_that_goes_on_may_have_committed(
    tmp_path: Path, stop: Callable[[int], Callable[[], None]], keeps_store: bool, found: float
) -> None:
    ports = (free_port(),) if keeps_store else ()

    ends = run_ranks(tmp_path / "ranks", 3, lose_the_leader_for_a_while, tmp_path, stop, ports=ports)

    assert [end.status for end in ends] == [0, 0, 0], "\n".join(end.words for end in ends)
    assert hfshard.load_state_dict(tmp_path / "out")["w"].tolist() == [found] * 8
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
