"""Restores into spread runs that one rank refuses, each in turn and in each stage: no rank is changed."""

from __future__ import annotations

import copy
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hfshard.errors import (
    DamagedCheckpointError,
    HfshardError,
    MissingShardError,
    RankFailedError,
    StateDictMismatchError,
)
from hfshard.training import CheckpointManager, TrainingState
from tests.distributed.gloo import check_ranks
from tests.sweeps.run_states import Counter
from tests.training.models import Run
from tests.training.restoring.test_resume_on_ranks import RefusingCounter, refuse_weights

ODD_DESCRIPTOR = 200
"""A path that is the same on every rank, and leads to a directory of its own."""


class Restoring:
    """What a rank restores into, and how the rank that refuses does it."""

    def __init__(self, place: Path, layout: str, rank: int) -> None:
        self.place, self.layout, self.rank = place, layout, rank
        self.run = Run(layout)
        self.counter: Any = Counter()
        for seed in (7, 8):
            torch.manual_seed(seed)
            self.run.train(1)
        self.run.loss().backward()  # gradients that a restore lets go
        random.seed(rank)

    def state(self) -> TrainingState:
        return TrainingState(self.run.net, self.run.optimizer, self.run.scheduler, counter=self.counter)

    def everything(self) -> dict[str, Any]:
        """All that a restore changes."""
        named = self.run.net.named_parameters()
        found: dict[str, Any] = {name: _local(one.grad).clone() for name, one in named if one.grad is not None}
        for group in self.run.optimizer.param_groups:
            found |= {f"group/{key}": value for key, value in group.items() if key != "params"}
        found |= {"scheduler": self.run.scheduler.state_dict(), "counter": self.counter.values}
        return {**copy.deepcopy(found), **self.run.local(), "rng": random.getstate(), "torch": torch.get_rng_state()}

    def restore(self) -> None:
        """From a copy of the checkpoint that only this rank sees."""
        own = os.open(self.place / f"copy-{self.rank}", os.O_RDONLY)
        os.dup2(own, ODD_DESCRIPTOR)
        manager = CheckpointManager(self.place / "run")
        manager.restore(self.state(), f"/proc/self/fd/{ODD_DESCRIPTOR}", verify="structure")


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def lose_a_shard(one: Restoring) -> None:
    next((one.place / f"copy-{one.rank}").glob("model*.safetensors")).unlink()


def cut_the_optimizer(one: Restoring) -> None:
    path = next((one.place / f"copy-{one.rank}").glob("optimizer*.safetensors"))
    os.truncate(path, path.stat().st_size - 1)


def build_another_model(one: Restoring) -> None:
    one.run.net.extra = nn.Linear(2, 2)


def build_another_optimizer(one: Restoring) -> None:
    parameters = [parameter for parameter in one.run.net.parameters() if parameter.requires_grad]
    one.run.optimizer = torch.optim.SGD(parameters, lr=0.1)


def lack_an_object(one: Restoring) -> None:
    one.state = lambda: TrainingState(one.run.net, one.run.optimizer, one.run.scheduler)  # type: ignore[method-assign]


def refuse_an_object(one: Restoring) -> None:
    one.counter = RefusingCounter()


def refuse_by_hook(one: Restoring) -> None:
    one.run.net.blocks["1"].register_load_state_dict_post_hook(refuse_weights)


def draw_from_another_generator(one: Restoring) -> None:
    import numpy

    numpy.random.set_bit_generator(numpy.random.PCG64(1))  # type: ignore[attr-defined,unused-ignore]


CASES: dict[Callable[[Restoring], None], type[HfshardError]] = {
    lose_a_shard: MissingShardError,
    cut_the_optimizer: DamagedCheckpointError,
    build_another_model: StateDictMismatchError,
    build_another_optimizer: StateDictMismatchError,
    lack_an_object: StateDictMismatchError,
    refuse_an_object: StateDictMismatchError,
    refuse_by_hook: StateDictMismatchError,
    draw_from_another_generator: StateDictMismatchError,
}
"""What is wrong on one rank -> what it says. In the order of the stages of a restore."""


@contextmanager
def own_generator() -> Iterator[None]:
    import numpy

    kept = numpy.random.get_bit_generator()  # type: ignore[attr-defined,unused-ignore]
    try:
        yield
    finally:
        numpy.random.set_bit_generator(kept)  # type: ignore[attr-defined,unused-ignore]


def refuse_in_turn(rank: int, place: Path, layout: str, every: bool) -> None:
    world_size = dist.get_world_size()
    saved = Run(layout)
    torch.manual_seed(1)
    saved.train(3)
    counter = Counter()
    counter.values = {"count": 7, "mean": torch.ones(2)}
    with CheckpointManager(place / "run") as manager:
        path = manager.save(3, TrainingState(saved.net, saved.optimizer, saved.scheduler, counter=counter))
    for number, (refuse, kind) in enumerate(CASES.items()):
        for failing in range(world_size) if every else [number % world_size]:
            with own_generator():
                one = Restoring(place, layout, rank)
                shutil.copytree(path, place / f"copy-{rank}")
                if rank == failing:
                    refuse(one)
                before = one.everything()

                with pytest.raises(kind if rank == failing else RankFailedError) as caught:
                    one.restore()

                case = refuse.__name__, failing, str(caught.value)
                if isinstance(caught.value, RankFailedError):
                    assert caught.value.rank == failing, case
                    assert kind.__name__ in str(caught.value), case
                words = partial("{0}: {1}".format, case)
                torch.testing.assert_close(one.everything(), before, rtol=0, atol=0, msg=words)
                shutil.rmtree(place / f"copy-{rank}")
                dist.barrier()
    shutil.copytree(path, place / f"copy-{rank}")
    one = Restoring(place, layout, rank)
    one.restore()
    torch.testing.assert_close(one.run.local(), saved.local(), rtol=0, atol=0)
    assert one.counter.values["count"] == 7


def test_what_a_rank_under_fsdp_refuses_changes_nothing_on_any(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, refuse_in_turn, tmp_path, "fsdp", False)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "world_size"), [("fsdp", 2), ("2d", 4)])
def test_each_rank_refuses_in_each_stage(tmp_path: Path, layout: str, world_size: int) -> None:
    check_ranks(tmp_path / "ranks", world_size, refuse_in_turn, tmp_path, layout, True)
