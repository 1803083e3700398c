"""Saves, loads, checks, pushes and pulls while Python exits, when no thread pool takes work any more."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import forkserver

AT_EXIT = """
import atexit, os, threading
import torch, hfshard

tensors = {f"t{number}": torch.full((1_100_000,), float(number)) for number in range(3)}
hfshard.save_state_dict(tensors, "before", max_shard_size="5MB")
state = hfshard.training.TrainingState(model=torch.nn.Linear(4, 4))
manager = hfshard.CheckpointManager("run")


def check(directory):
    report = hfshard.verify_checkpoint(directory)
    assert report.ok and report.checked_bytes > 13_200_000, report
    loaded = hfshard.load_state_dict(directory, read="pread", verify="full")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def work(name):
    hfshard.save_state_dict(tensors, name, max_shard_size="5MB")
    hfshard.reshard_checkpoint(name, f"{name}-larger", max_shard_size="9MB")
    hfshard.push_checkpoint(f"{name}-larger", f"./hubs/{name}")
    hfshard.pull_checkpoint(f"./hubs/{name}", f"{name}-pulled")
    for directory in ("before", name, f"{name}-pulled"):
        check(directory)
    print(name, len(os.listdir(name)), len(os.listdir(f"{name}-pulled")))


def work_without_threads():
    def refuse(thread):
        raise RuntimeError("can't start new thread")  # as since Python 3.12 at this time

    threading.Thread.start = refuse
    work("unthreaded")


def train():
    for step in (1, 2):
        manager.save(step, state, blocking=False)
    manager.close()
    print("steps", manager.all_steps())


for one in (train, work_without_threads, lambda: work("threaded")):
    atexit.register(one)
"""


def test_everything_works_while_python_exits(child_environment: dict[str, str], tmp_path: Path) -> None:
    done = forkserver.run(["-c", AT_EXIT], env=child_environment, cwd=tmp_path)

    assert done.stderr == ""
    assert done.stdout == "threaded 4 3\nunthreaded 4 3\nsteps [1, 2]\n"
