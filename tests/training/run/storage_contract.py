"""What holds of every storage of a run, wherever it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from hfshard.commit.transaction import OwnShardWriter
from hfshard.errors import HfshardError
from hfshard.training import TrainingState
from hfshard.training.run.find_checkpoint import open_run
from hfshard.training.run.run_storage import RunStorage
from hfshard.training.run.run_writer import RunWriter
from hfshard.training.state.collect_state import SavePayload, collect, collect_rank, encode_components, save_options


def payload(model: nn.Module | None = None) -> SavePayload:
    """What a save of a model writes; None: of a tiny one with weights of its own."""
    model = model or nn.Linear(2, 2)
    state = TrainingState(model)
    options = save_options("1GB", "xxh3", progress=False)
    return collect(encode_components(state), model, [collect_rank(state, 0)], None, options)


def check_listings_and_removals(root: str) -> None:
    """A writer and a reader see each save and removal, and what another writer does after the first one's release."""
    own, reader = open_run(root), open_run(root)
    assert (own.checkpoints(), reader.checkpoints(), own.is_acquired) == ([], [], False)

    writer = _writer(own)
    for step in (1, 2):
        writer.save(step, payload(), {}, {}, blocking=True)
    assert (own.is_acquired, reader.is_acquired) == (True, False)
    assert _steps(own) == _steps(reader) == [2, 1]

    removed = own.checkpoints()[:1]
    for _ in range(2):  # the second time there is nothing left to remove
        own.remove(removed)
        assert _steps(own) == _steps(reader) == [1]

    writer.close()
    assert not own.is_acquired
    other = _writer(open_run(root))
    other.save(3, payload(), {}, {}, blocking=True)
    assert _steps(own) == _steps(reader) == [3, 1]
    other.close()


def check_folders(root: str) -> None:
    """A checkpoint opens its own folder, whether it was listed or was just written, and notices that it is replaced."""
    writer = _writer(open_run(root))
    writer.begin()
    saved = writer.write(1, payload(), {}, {"notes.txt": b"x"}, blocking=True)
    [listed] = open_run(root).checkpoints()
    for one in (saved, listed):
        assert one.path == f"{root}/checkpoint-00000001"
        assert one.folder().read_small("notes.txt", 10) == b"x"
        assert one.is_current()

    writer.write(1, payload(), {}, {"notes.txt": b"y"}, blocking=True)
    assert (saved.is_current(), listed.is_current()) == (False, False)
    assert listed.reread().is_current()
    assert listed.reread().folder().read_small("notes.txt", 10) == b"y"
    writer.close()


def check_refused_save(root: str) -> None:
    """A save that is refused at its last moment leaves the checkpoints as they were, and the next one succeeds.

    That replaces the same weights, whose metrics it keeps.
    """

    def refuse() -> None:
        raise HfshardError("rank 3 failed")

    storage = open_run(root)
    writer = _writer(storage)
    model = nn.Linear(2, 2)
    writer.save(1, payload(model), {"loss": 1.0}, {}, blocking=True)
    with pytest.raises(HfshardError, match=r"^rank 3 failed$"):
        writer.write(1, payload(), {"loss": 2.0}, {}, blocking=True, writer=OwnShardWriter(refuse))
    assert _losses(root) == [1.0]

    writer.save(1, payload(model), None, {}, blocking=True)
    writer.save(2, payload(), {"loss": 3.0}, {}, blocking=True)
    assert _losses(root) == [3.0, 1.0]
    writer.close()


def check_metrics_of_other_weights(root: str) -> None:
    """A save of other weights without metrics has none, though it replaces a checkpoint that has."""
    writer = _writer(open_run(root))
    writer.save(1, payload(), {"loss": 1.0}, {}, blocking=True)

    assert writer.write(1, payload(), None, {}, blocking=True).require_manifest().metrics == {}
    writer.close()


def check_metrics_of_a_copy(root: str, rename: Callable[[str, str], None]) -> None:
    """A save without metrics keeps those of the checkpoint that it replaces, not those of a copy that a user named.

    Args:
        root: The run.
        rename: Renames a folder of the run.
    """
    writer = _writer(open_run(root))
    model = nn.Linear(2, 2)
    writer.save(4, payload(model), {"loss": 4.0}, {}, blocking=True)
    writer.close()
    rename("checkpoint-00000004", "checkpoint-4")
    assert _losses(root) == [4.0]

    writer.save(4, payload(model), None, {}, blocking=True)
    [saved] = [one.manifest for one in open_run(root).checkpoints() if one.is_own]
    assert saved is not None
    assert saved.metrics == {}
    writer.close()


def _writer(storage: RunStorage) -> RunWriter:
    return RunWriter(storage, None, pusher=None, progress=False)


def _steps(storage: RunStorage) -> list[int]:
    return [one.step for one in storage.checkpoints()]


def _losses(root: str) -> list[float]:
    return [one.manifest.metrics["loss"] for one in open_run(root).checkpoints() if one.manifest is not None]
