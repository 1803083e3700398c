"""Spread models in the memory of a device: over NCCL on GPUs, and by the same lines over gloo on the CPU.

On a machine with GPUs: python -m pytest tests/training/test_spread_save_devices_on_ranks.py
"""

from __future__ import annotations

import os
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hfshard
from hfshard.training import CheckpointManager, TrainingState
from hfshard.training.run.find_checkpoint import open_run
from hfshard.training.run.run_writer import RunWriter
from hfshard.training.spread_save import SpreadSaveArguments, save_spread
from tests.helpers import processes
from tests.training.models import Net
from tests.training.test_spread_save_runs_on_ranks import assert_same

COMMAND = "python -m pytest tests/training/test_spread_save_devices_on_ranks.py"


def gpus(count: int) -> list[pytest.MarkDecorator]:
    words = f"NOT RUN: this machine has fewer than {count} CUDA devices. Where there are some: {COMMAND}"
    return [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < count, reason=words)]


CASES = [
    pytest.param("cpu", "gloo", 1, id="cpu"),
    pytest.param("cpu", "gloo", 2, id="cpu-2"),
    pytest.param("cuda", "nccl", 1, id="nccl", marks=gpus(1)),
    pytest.param("cuda", "cpu:gloo,cuda:nccl", 1, id="gloo-and-nccl", marks=gpus(1)),
    pytest.param("cuda", "nccl", 2, id="nccl-2", marks=gpus(2)),
]
LAYOUTS = {1: ("fsdp", "hsdp"), 2: ("fsdp",)}


def spread(layout: str, device: str, *, is_meta: bool = False) -> Net:
    """A model with the same first values on all ranks; or one without values."""
    torch.manual_seed(3)
    shape = (1, 1) if layout == "hsdp" else (dist.get_world_size(),)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("a", "b")[: len(shape)])
    net = Net().to("meta" if is_meta else device)
    for block in net.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


class DeviceRun:
    """A model in the memory of a device, and what trains it."""

    def __init__(self, layout: str, device: str) -> None:
        self.net, self.device = spread(layout, device), device
        self.optimizer = torch.optim.AdamW([one for one in self.net.parameters() if one.requires_grad], fused=True)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.state = TrainingState(model=self.net, optimizer=self.optimizer, scheduler=self.scheduler)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.net(torch.randn(4, 6).to(self.device)).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def local(self) -> dict[str, torch.Tensor]:
        """What this rank has of all tensors."""
        found = dict(self.net.state_dict())
        for number, slots in enumerate(self.optimizer.state.values()):
            found |= {f"{number}/{slot}": value for slot, value in slots.items()}
        return {name: getattr(tensor, "_local_tensor", tensor).clone() for name, tensor in found.items()}


def at(tensors: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    """On the CPU, to be compared; all of them must be on a device, but for counts of steps."""
    assert {one.device.type for name, one in tensors.items() if not name.endswith("/step")} == {device}
    return {name: one.cpu() for name, one in tensors.items()}


def load_what_was_saved(run: DeviceRun, layout: str, device: str, place: Path) -> None:
    hfshard.save_model(run.net, place / "model", max_shard_size="300B")
    saved = {name: one for name, one in at(run.local(), device).items() if "/" not in name}
    for is_meta in (False, True):
        net = spread(layout, device, is_meta=is_meta)
        hfshard.load_model(net, place / "model", verify="full")
        found = {name: getattr(one, "_local_tensor", one).detach() for name, one in net.state_dict().items()}
        assert_same(at(found, device), saved)
    state_dict = run.net.state_dict()
    like = hfshard.load_state_dict(place / "model", like=state_dict)
    assert all(like[name].device.type == device and torch.equal(like[name], one) for name, one in state_dict.items())


def resume_what_was_saved(run: DeviceRun, layout: str, device: str, place: Path) -> None:
    with CheckpointManager(place / "run") as manager:
        before = at(run.local(), device)
        manager.save(2, run.state, blocking=False)
        run.train(2)  # beside the save
        manager.save(4, run.state)
        after = at(run.local(), device)
        again = DeviceRun(layout, device)
        again.train(1)
        assert manager.restore(again.state, 2) == 2
        assert_same(at(again.local(), device), before)
        again.train(2)
        assert_same(at(again.local(), device), after)
        assert manager.restore_latest(again.state) == 4
        assert manager.verify() == {2: [], 4: []}


def save_as_many_ranks_do(run: DeviceRun, layout: str, device: str, place: Path) -> None:
    """Even where there is one rank only: parts are copied in host memory, and exchanged over a gloo group."""
    writer = RunWriter(open_run(str(place / "by-parts")), None, None, None)
    for step, blocking in ((1, True), (2, False)):
        order = SpreadSaveArguments(
            state=run.state, step=step, extra=None, metrics_of=lambda _: {}, files={}, max_shard_size="300B",
            checksum="xxh3", progress=None, blocking=blocking,
        )  # fmt: skip
        save_spread(order, writer, lambda *_: pytest.fail("taken for a model that each rank has"))
    writer.close()
    again = DeviceRun(layout, device)
    assert CheckpointManager(place / "by-parts").restore_latest(again.state) == 2
    assert_same(at(again.local(), device), at(run.local(), device))


def use_device(rank: int, world_size: int, device: str, backend: str, place: Path) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(place / "store"), world_size)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=processes.PATIENCE_SECONDS)
    )
    for layout in LAYOUTS[world_size]:
        run = DeviceRun(layout, device)
        torch.manual_seed(100 * rank)
        run.train(2)
        for work in (load_what_was_saved, resume_what_was_saved, save_as_many_ranks_do):
            work(run, layout, device, place / layout)


def use_device_and_exit(*args: Any) -> None:
    try:
        use_device(*args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # without waiting for the other ranks
    dist.barrier()
    os._exit(0)


@pytest.mark.parametrize(("device", "backend", "world_size"), CASES)
def test_a_device_has_what_was_saved_and_loaded(device: str, backend: str, world_size: int, tmp_path: Path) -> None:
    def run(rank: int) -> processes.End:
        return processes.end_of(
            tmp_path / f"{rank}.txt", use_device_and_exit, rank, world_size, device, backend, tmp_path
        )

    with ThreadPoolExecutor(world_size) as pool:
        ends = list(pool.map(run, range(world_size)))
    assert [end.status for end in ends] == [0] * world_size, "\n".join(end.words for end in ends)
