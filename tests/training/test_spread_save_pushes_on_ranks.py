"""Checkpoints of runs that are spread over ranks, on hubs: the first rank pushes, and the others go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from hfshard.errors import HubError, RankFailedError
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.training import CheckpointManager
from tests.distributed.gloo import await_file, check_ranks
from tests.hub.on_ranks import talking_to
from tests.servers.hub.hub_server import Fault, HubServer
from tests.training.models import Run
from tests.training.test_spread_save_runs_on_ranks import assert_same

REPO = "org/run"


def save_and_push(rank: int, endpoint: str, place: Path) -> None:
    run = Run("fsdp")
    run.train(1)
    with talking_to(endpoint, place / f"cache-{rank}", "hf_write" if rank == 0 else "hf_read"):
        manager = CheckpointManager(place / "run", push_to_hub=REPO)
        manager.save(1, run.state)
        if rank == 1:
            (place / "went on").touch()
        first = run.whole()
        run.train(1)
        manager.save(2, run.state, blocking=False)
        manager.wait_until_finished()
        dist.barrier()

        pushed = manager.push(place / "hub", "all")
        assert [one.is_new for one in pushed] == [True, True]
        assert DirectoryHub.open(place / "hub").resolve() == pushed[1].commit
        again = manager.push(REPO)
        assert not again.is_new
        (place / f"pushed-{rank}.txt").write_text(f"{pushed} {again}")

        for source in (f"{place}/hub@{pushed[0].commit}", f"{REPO}@{again.commit}"):
            manager.restore(run.state, source)
        assert_same(run.whole(), second_of(place).whole())
        manager.restore(run.state, f"{place}/hub@{pushed[0].commit}")
        assert_same(run.whole(), first)
        manager.close()

    (place / "file").touch()
    refusing = CheckpointManager(place / "other", push_to_hub=place / "file")
    refusing.save(3, run.state)
    assert refusing.latest_step() == 3
    if rank == 0:
        with pytest.raises(HubError, match="Cannot create a hub"):
            refusing.wait_until_finished()
    refusing.wait_until_finished()
    with pytest.raises(RankFailedError if rank else HubError, match="Cannot create a hub"):
        refusing.push(place / "file")


def second_of(place: Path) -> Run:
    run = Run("fsdp")
    CheckpointManager(place / "run").restore(run.state, 2)
    return run


def test_the_first_rank_pushes_and_the_others_go_on(hub_server: HubServer, tmp_path: Path) -> None:
    went_on = []

    def wait() -> None:
        await_file(tmp_path / "went on")
        went_on.append(True)

    hub_server.fail(Fault(match="commit", kind="race", action=wait))
    check_ranks(tmp_path / "ranks", 2, save_and_push, hub_server.endpoint, tmp_path)
    assert went_on == [True]
    assert {request.token for request in hub_server.log} <= {None, "hf_write"}
    view = hub_server.repo(REPO)
    assert [one.title for one in view.commits()][:2] == ["Checkpoint at step 2", "Checkpoint at step 1"]
    saved = {path.name: path.read_bytes() for path in (tmp_path / "run" / "checkpoint-00000002").iterdir()}
    assert {name: view.read(name) for name in view.files() if name != ".gitattributes"} == saved
    assert (tmp_path / "pushed-0.txt").read_text() == (tmp_path / "pushed-1.txt").read_text()
