"""Saves and restores of spread runs at any moment, beside the training, and when a rank fails or refuses."""

from __future__ import annotations

import os
import threading
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hfshard import load_state_dict
from hfshard.errors import HfshardError, InvalidArgumentError, RankFailedError, StateDictMismatchError
from hfshard.training import CheckpointManager, Gradients, TrainingState
from tests.distributed.gloo import check_ranks
from tests.training.models import Run, built, whole
from tests.training.test_spread_save_runs_on_ranks import assert_same


def save_after_forward(rank: int, place: Path, *, blocking: bool) -> None:
    straight = Run("fsdp", reshard_after_forward=False)
    straight.train(3)

    run = Run("fsdp", reshard_after_forward=False)
    run.train(2)
    loss = run.loss()
    assert not any(hasattr(one, "full_tensor") for one in run.net.parameters())  # gathered
    with CheckpointManager(place / f"{blocking}") as manager:
        step: Any = np.int64(2)  # of any library
        manager.save(step, run.state, blocking=blocking)
        loss.backward()
        run.update()
        assert_same(run.local(), straight.local())

        manager.save(3, run.state, blocking=blocking)
        again = Run("fsdp", reshard_after_forward=False)
        again.loss()
        assert manager.restore_latest(again.state) == 3
        assert_same(again.local(), straight.local())


def save_beside_training(rank: int, place: Path) -> None:
    run = Run("2d")
    manager = CheckpointManager(place / "run", max_to_keep=2)
    saved: dict[int, dict[str, torch.Tensor]] = {}
    for step in range(1, 4):
        run.train(1)
        saved[step] = run.whole()
        manager.save(step, run.state, blocking=False)
    run.train(1)
    manager.wait_until_finished()
    assert manager.all_steps() == [2, 3]
    for step in (2, 3):
        again = Run("2d")
        manager.restore(again.state, step)
        assert_same(again.whole(), saved[step])
    manager.save(4, run.state, blocking=False)
    assert manager.restore_latest(run.state) == 4  # which waits for the save
    manager.close()
    assert sorted(path.name for path in (place / "run").iterdir()) == ["checkpoint-00000003", "checkpoint-00000004"]


def save_gradients(rank: int, place: Path, layout: str) -> None:
    run = Run(layout)
    state = TrainingState(model=run.net, optimizer=run.optimizer, gradients=Gradients(run.net))
    manager = CheckpointManager(place / "run")
    if layout == "fsdp":
        run.loss().backward()
        manager.save(1, state)
    else:
        run.optimizer.zero_grad()
        manager.restore(state, 1)
        assert run.net.head.weight.grad is not None
    gradients = {name: one.grad for name, one in run.net.named_parameters() if one.grad is not None}
    found = {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in gradients.items()}
    if layout == "fsdp" and rank == 0:
        torch.save(found, place / "gradients.pt")
    if layout != "fsdp":
        assert_same(found, torch.load(place / "gradients.pt"))

    without = TrainingState(model=run.net, optimizer=run.optimizer)
    manager.save(2, without)
    run.optimizer.zero_grad()
    manager.restore(without, 2)
    for name, one in run.net.named_parameters():
        assert (one.grad is not None) == (name in gradients)
        assert one.grad is None or not getattr(one.grad, "full_tensor", lambda one=one: one.grad)().any()


def refuse_unreduced_gradients(rank: int, place: Path, layout: str, **fsdp: Any) -> None:
    run = Run(layout, **fsdp)
    net: Any = run.net
    manager = CheckpointManager(place)
    state = TrainingState(model=net, gradients=Gradients(net))
    plain = TrainingState(model=net)
    switches = [net.set_requires_gradient_sync] + ([net.set_requires_all_reduce] if layout == "hsdp" else [])
    for switch in switches:
        run.optimizer.zero_grad()
        manager.save(1, state)  # nothing has accumulated yet
        switch(False)
        run.loss().backward()
        message = r"the gradient of '(blocks\.0\.up|head)\.weight' is not reduced over the ranks yet"
        with pytest.raises(HfshardError, match=f"Cannot save between these micro-batches: {message}"):
            manager.save(2, state)
        for one in (state, plain):
            with pytest.raises(HfshardError, match=f"Cannot restore between these micro-batches: {message}"):
                manager.restore_latest(one)

        switch(True)
        run.loss().backward()
        gradients = {name: one.grad.to_local().clone() for name, one in net.named_parameters() if one.grad is not None}
        assert len(gradients) == 7
        manager.save(1, state)
        run.optimizer.zero_grad()
        assert manager.restore_latest(state) == 1
        assert_same({name: net.get_parameter(name).grad.to_local() for name in gradients}, gradients)


class Refusing:
    """A part whose state can't be stored, or that refuses the one that it gets."""

    def __init__(self, *, stores: bool = True, loads: bool = True) -> None:
        self.stores, self.loads = stores, loads

    def state_dict(self) -> dict[str, Any]:
        return {"value": 1 if self.stores else object()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.loads:
            raise ValueError("no")


class ReadFiles(UserDict[str, bytes]):
    """Small files that know the threads that read them: once a save has returned, the loop may change them."""

    def __init__(self, *args: Any) -> None:
        self.threads: set[int] = set()
        super().__init__(*args)

    def __getitem__(self, name: str) -> bytes:
        self.threads.add(threading.get_ident())
        return super().__getitem__(name)


def fail_on_one(rank: int, place: Path) -> None:
    run = Run("fsdp")
    run.train(1)
    manager = CheckpointManager(place / "run")

    def state(*, run: Run = run, **refuses: bool) -> TrainingState:
        return TrainingState(model=run.net, optimizer=run.optimizer, part=Refusing(**refuses))

    manager.save(1, state())
    with pytest.raises(HfshardError, match=r"part/value|Rank 1 failed.*part/value"):
        manager.save(2, state(stores=rank != 1))
    with pytest.raises(InvalidArgumentError if rank == 0 else RankFailedError, match="same step"):
        manager.save(2 + rank, state())
    with pytest.raises(InvalidArgumentError if rank == 0 else RankFailedError, match=r"checkpoint\.json"):
        manager.save(2, state(), files={"checkpoint.json": b""} if rank == 0 else {})
    no_state: Any = {}
    with pytest.raises(InvalidArgumentError if rank == 1 else RankFailedError, match="must be a TrainingState"):
        manager.save(2, no_state if rank == 1 else state())
    assert manager.all_steps() == [1]
    files = ReadFiles({"note.txt": b"second"})
    manager.save(2, state(), files=files, blocking=False)
    manager.wait_until_finished()
    assert files.threads == {threading.get_ident()}
    assert (place / "run" / "checkpoint-00000002" / "note.txt").read_bytes() == b"second"
    assert manager.all_steps() == [1, 2] and len(os.listdir(place / "run")) == 2

    fresh = Run("fsdp")
    fresh.train(2)
    before = fresh.local()
    with pytest.raises(StateDictMismatchError if rank == 1 else HfshardError, match=r"refused its state.*no"):
        manager.restore(state(run=fresh, loads=rank != 1))
    assert_same(fresh.local(), before)
    with pytest.raises(HfshardError, match="All ranks must restore the same step"):
        manager.restore(state(run=fresh), 1 + rank)
    with pytest.raises(RankFailedError, match=r"'save'.*'restore'|'restore'.*'save'"):
        manager.save(3, state()) if rank else manager.restore(state(run=fresh))
    assert manager.restore(state(run=fresh)) == 2
    assert_same(fresh.local(), run.local())


def refuse_what_is_not_supported(rank: int, place: Path) -> None:
    manager = CheckpointManager(place / "run")
    stages = [torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)]
    with pytest.raises(HfshardError, match=r"different copies of parameters.*'model/weight'"):
        manager.save(1, TrainingState(model=stages[rank]))
    spread_stage = built("fsdp").blocks if rank else built("fsdp")
    with pytest.raises(HfshardError, match=r"The ranks do not have all of 'model/.*up\.weight'"):
        manager.save(1, TrainingState(model=spread_stage))
    for model in (built("fsdp"), torch.nn.Linear(2, 3)):
        with pytest.raises(HfshardError, match=r"Rank 1 saves into '.*', but rank 0 saves into"):
            CheckpointManager(place / f"run-{rank}").save(1, TrainingState(model=model))
    assert not [*place.glob("run-*")]
    assert not (place / "run").exists()


def link_what_is_frozen(rank: int, place: Path) -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3)))
    net[:2].requires_grad_(False)
    fully_shard(net)
    weights: list[Any] = list(net.parameters())
    c, a, b = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))  # what is trained comes first

    def counts_of_names(step: int, *, blocking: bool = True) -> dict[str, int]:
        saved = Path(manager.save(step, TrainingState(model=net), blocking=blocking))
        manager.wait_until_finished()
        return {name: (saved / name).stat().st_nlink for name in (a, b, c)}

    with CheckpointManager(place / "run", max_shard_size="20KB") as manager, torch.no_grad():
        assert counts_of_names(1) == {a: 1, b: 1, c: 1}
        weights[2].add_(1)
        assert counts_of_names(2) == {a: 2, b: 2, c: 1}
        assert counts_of_names(3, blocking=False) == {a: 3, b: 3, c: 2}

        if rank == 1:
            weights[0].to_local()[-1, -1] = 9  # behind what the fingerprint is of
        assert counts_of_names(4) == {a: 1, b: 4, c: 3}

        if rank == 0:
            (place / "run/checkpoint-00000004" / b).write_bytes(b"rotten")
        assert counts_of_names(5) == {a: 2, b: 1, c: 4}
        assert manager.verify(5) == {5: []}
        last = load_state_dict(place / "run/checkpoint-00000005")
        assert_same(last, {name: whole(one.detach()) for name, one in net.named_parameters()})
        assert last["0.weight"][-1, -1] == 9


def work_of_two_ranks(rank: int, place: Path) -> None:
    for blocking in (True, False):
        save_after_forward(rank, place / "forward", blocking=blocking)
    link_what_is_frozen(rank, place / "frozen")
    (place / "gradients").mkdir(exist_ok=True)
    save_gradients(rank, place / "gradients", "fsdp")
    dist.barrier()
    save_gradients(rank, place / "gradients", "tp")
    refuse_unreduced_gradients(rank, place / "unreduced", "fsdp")
    lower = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    refuse_unreduced_gradients(rank, place / "unreduced in bfloat16", "fsdp", mp_policy=lower)
    fail_on_one(rank, place / "failures")
    refuse_what_is_not_supported(rank, place / "refusals")


def test_two_ranks_save_at_any_moment_and_refuse_together(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, work_of_two_ranks, tmp_path)
    save_gradients(0, tmp_path / "gradients", "whole")


def work_of_four_ranks(rank: int, place: Path) -> None:
    save_beside_training(rank, place)
    refuse_unreduced_gradients(rank, place / "unreduced", "hsdp")


def test_four_ranks_save_beside_the_collectives_of_the_training(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 4, work_of_four_ranks, tmp_path)


def save_alone(rank: int, place: Path) -> None:
    run = Run("alone")
    run.train(2)
    with CheckpointManager(place / "run") as manager:
        manager.save(2, run.state)
        again = Run("alone")
        assert manager.restore(again.state) == 2
        assert_same(again.local(), run.local())


def test_a_process_group_of_one_rank_saves_and_restores(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 1, save_alone, tmp_path)
