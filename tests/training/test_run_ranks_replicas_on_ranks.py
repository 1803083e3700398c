"""What is not the same on all ranks comes back on each as it was; copies of parameters that differ are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from hfshard.errors import HfshardError, StateDictMismatchError, UnstorableTensorError
from hfshard.training import CheckpointManager, ResumableDataLoader, TrainingState
from tests.distributed.gloo import check_ranks
from tests.training.ingredients import Keeps


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def wrapped(kind: str, model: Any) -> Any:
    if kind == "ddp":
        return DistributedDataParallel(model)
    is_hsdp = kind == "hsdp"
    mesh = init_device_mesh("cpu", (2, 1) if is_hsdp else (2,), mesh_dim_names=("copies", "parts") if is_hsdp else None)
    fully_shard(model[1] if kind == "part" else model, mesh=mesh)
    return model


def norm_of(model: Any) -> Any:
    return getattr(model, "module", model)[1]


def save_and_restore(rank: int, place: Path, kind: str) -> None:
    model = wrapped(kind, net())
    model(torch.full((4, 2), float(rank + 1)) + torch.arange(8.0).reshape(4, 2)).sum().backward()
    means = norm_of(model).running_mean.clone()
    others = [torch.zeros_like(means), torch.zeros_like(means)]
    torch.distributed.all_gather(others, means)
    assert not torch.equal(*others)
    manager = CheckpointManager(place / kind)
    manager.save(1, TrainingState(model=model, normaliser=Keeps(torch.tensor([rank + 5]))))

    fresh, normaliser = wrapped(kind, net()), Keeps(torch.tensor([0]))
    manager.restore(TrainingState(model=fresh, normaliser=normaliser), 1)

    assert torch.equal(norm_of(fresh).running_mean, means)
    assert int(norm_of(fresh).num_batches_tracked) == 1
    assert int(normaliser.tensor) == rank + 5
    norm_of(model).running_mean.fill_(3.0)
    norm_of(model).running_var.fill_(2.0)
    manager.save(2, TrainingState(model=model, normaliser=Keeps(torch.tensor([9]))))
    manager.restore(TrainingState(model=fresh, normaliser=normaliser), 2)
    assert norm_of(fresh).running_mean.tolist() == [3.0] * 4
    assert int(normaliser.tensor) == 9
    manager.close()


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp", "part"])
def test_buffers_and_objects_that_differ_come_back_on_each_rank(tmp_path: Path, kind: str) -> None:
    check_ranks(tmp_path / "ranks", 2, save_and_restore, tmp_path, kind)
    names = {path.name for path in (tmp_path / kind / "checkpoint-00000002").iterdir()}
    assert "model.safetensors" in names


def refuse(rank: int, place: Path) -> None:
    manager = CheckpointManager(place / "run")
    different = net()
    with torch.no_grad():
        different[0].weight[1, 1] += rank
    mesh = init_device_mesh("cpu", (2,))
    replicated: Any = nn.Module()
    replicated.norm = nn.Parameter(DTensor.from_local(torch.tensor([1.0, float(rank)]), mesh, [Replicate()]))
    sharded: Any = nn.Module()
    sharded.norm = nn.Parameter(distribute_tensor(torch.arange(4.0), mesh))
    sharded.plain = nn.Parameter(torch.tensor([float(rank)]))
    stage: Any = nn.Module()
    own_mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stages", "parts"))["parts"]
    stage.local = nn.Parameter(DTensor.from_local(torch.tensor([float(rank)]), own_mesh, [Shard(0)]))
    for model, name in ((different, "0.weight"), (replicated, "norm"), (sharded, "plain"), (stage, "local")):
        with pytest.raises(HfshardError, match=rf"'model/{name}' \('model/{name}' on ranks 0 and 1\).*Seed all ranks"):
            manager.save(1, TrainingState(model=model))
    assert not (place / "run").exists()
    allowing = CheckpointManager(place / "run", allow_different_replicas=True)
    allowing.save(1, TrainingState(model=different))
    restored = net()
    allowing.restore(TrainingState(model=restored), 1)
    assert torch.equal(restored[0].weight, net()[0].weight)
    allowing.close()


def test_copies_of_a_parameter_that_differ_are_refused_by_name(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, refuse, tmp_path)


class Seen:
    """Objects of a user that differ in one place of many."""

    def __init__(self, rank: int) -> None:
        self.mask = torch.zeros(4096, dtype=torch.bool)
        self.mask[5 + 8 * rank] = True
        self.counts = torch.zeros(10_000, dtype=torch.int64)
        self.counts[[1, 6] if rank else [3, 4]] = 1
        self.turned = torch.tensor([1 + 2j]).conj()

    def state_dict(self) -> dict[str, Any]:
        return {"mask": self.mask, "counts": self.counts, "turned": self.turned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def save_sparse(rank: int, place: Path) -> None:
    model, seen = net(), Seen(rank)
    model.register_buffer("visits", seen.counts.clone())
    model.register_buffer("odd", torch.full((3,), 7, dtype=torch.uint8))
    manager = CheckpointManager(place / "run")
    manager.save(1, TrainingState(model=model, seen=seen))

    fresh, again = net(), Seen(1 - rank)
    fresh.register_buffer("visits", torch.zeros(10_000, dtype=torch.int64))
    fresh.register_buffer("odd", torch.zeros(3, dtype=torch.uint8))
    manager.restore(TrainingState(model=fresh, seen=again), 1)
    assert torch.equal(fresh.visits, seen.counts)
    assert torch.equal(again.mask, seen.mask)
    assert torch.equal(again.counts, seen.counts)
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    with pytest.raises(UnstorableTensorError, match="Cannot store 'model/sparse'"):
        manager.save(2, TrainingState(model=model))
    manager.close()


def test_what_differs_in_one_place_of_many_is_each_ranks_own(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, save_sparse, tmp_path)


NUMBERS = TensorDataset(torch.arange(8))


def save_loader(rank: int, place: Path) -> None:
    loader = ResumableDataLoader(NUMBERS, 2)
    CheckpointManager(place / "run").save(1, TrainingState(model=net(), loader=loader))


def test_a_loader_that_is_left_out_is_no_buffer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_ranks(tmp_path / "ranks", 2, save_loader, tmp_path)
    state = TrainingState(model=net(), loader=ResumableDataLoader(NUMBERS, 2))

    CheckpointManager(tmp_path / "run").restore(state, 1, without=["loader"])
    assert "buffers and objects" not in caplog.text


def save_on_two(rank: int, place: Path) -> None:
    model = DistributedDataParallel(net())
    norm_of(model).running_mean.fill_(float(rank))
    CheckpointManager(place / "run").save(1, TrainingState(model=model, normaliser=Keeps(torch.tensor([rank + 5]))))


def test_one_process_gets_what_the_first_rank_had(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_ranks(tmp_path / "ranks", 2, save_on_two, tmp_path)
    model, normaliser = net(), Keeps(torch.tensor([0]))
    model[1].running_mean.fill_(7.0)

    CheckpointManager(tmp_path / "run").restore(TrainingState(model=model, normaliser=normaliser), 1)

    assert model[1].running_mean.tolist() == [0.0] * 4
    assert int(normaliser.tensor) == 5
    assert "has separate buffers and objects for 2 ranks, but there are 1 here" in caplog.text


class Shares(torch.optim.Optimizer):
    """Steps on each rank every second parameter, whose new values the others get: as a distributed Muon does."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            if number % 2 == torch.distributed.get_rank():
                state = self.state[parameter]
                state["momentum"] = 0.9 * state["momentum"] + parameter.grad if state else parameter.grad.clone()
                parameter.sub_(state["momentum"], alpha=0.1)
            torch.distributed.broadcast(parameter, number % 2)


class Locals(torch.optim.Optimizer):
    """Steps this rank's part of each DTensor, with a plain tensor as its state."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            gradient = parameter.grad.to_local()
            state["momentum"] = 0.9 * state["momentum"] + gradient if state else gradient.clone()
            parameter.to_local().sub_(state["momentum"], alpha=0.1)


def shared_work(is_spread: bool) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 5, bias=False))
    if is_spread:
        fully_shard(model)
    return model, Locals(model.parameters()) if is_spread else Shares(model.parameters())


def step_shares(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[list[float]]:
    for step in steps:
        optimizer.zero_grad()
        model(torch.arange(6.0).reshape(2, 3) / (step + 9)).square().sum().backward()
        optimizer.step()
    own = [one.to_local() if isinstance(one, DTensor) else one for one in model.parameters()]
    return [one.flatten().tolist() for one in own]


def resume_shares(rank: int, place: Path, is_spread: bool) -> None:
    straight = step_shares(*shared_work(is_spread), range(6))
    model, optimizer = shared_work(is_spread)
    step_shares(model, optimizer, range(3))
    manager = CheckpointManager(place)
    manager.save(3, TrainingState(model=model, optimizer=optimizer), blocking=not is_spread)

    model, optimizer = shared_work(is_spread)
    manager.restore(TrainingState(model=model, optimizer=optimizer), 3)

    assert len(optimizer.state) == (2 if is_spread else 1)
    assert step_shares(model, optimizer, range(3, 6)) == straight
    manager.save(6, TrainingState(model=model, optimizer=optimizer))
    manager.close()


@pytest.mark.parametrize("is_spread", [False, True])
def test_optimizers_that_differ_come_back_on_each_rank_and_nowhere_else(tmp_path: Path, is_spread: bool) -> None:
    check_ranks(tmp_path / "ranks", 2, resume_shares, tmp_path / "run", is_spread)

    model: Any = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 5, bias=False))
    state = TrainingState(model=model, optimizer=Shares(model.parameters()))
    manager = CheckpointManager(tmp_path / "run")
    with pytest.raises(StateDictMismatchError, match=r"Each rank saved its own 'optimizer' .* more or fewer ranks now"):
        manager.restore(state, 6)
    assert manager.restore(state, 6, strict=False) == 6
    assert not state.components["optimizer"].state


def save_momentum(rank: int, place: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    model.weight.grad = torch.full((2, 2), rank + 1.0)
    optimizer.step()
    state = TrainingState(model=model, optimizer=optimizer)
    manager = CheckpointManager(place / "run")
    manager.save(1, state)
    optimizer.state[model.weight]["momentum_buffer"].zero_()

    manager.restore(state, 1)

    assert optimizer.state[model.weight]["momentum_buffer"].tolist() == [[rank + 1.0] * 2] * 2
    manager.close()


def test_momentum_of_the_same_parameters_comes_back_on_each_rank_as_it_was(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, save_momentum, tmp_path)
