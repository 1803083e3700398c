"""Runs in a store: saved, found, resumed on an empty machine, and no different when they are brought to a disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hfshard
from hfshard.commit import store_plan
from hfshard.errors import SaveDirectoryError, StoreAccessError
from hfshard.stores.open_store import open_store
from hfshard.training import CheckpointManager, TrainingState
from tests.servers.stores.fault_proxy import FaultProxy
from tests.stores.runs.bucket_run import BucketRun, Net, save_steps
from tests.training.fingerprint import flatten

S3 = pytest.mark.parametrize("scheme", ["s3"])
S3_AND_HUB = pytest.mark.parametrize(
    "scheme", ["s3", "hf", *(pytest.param(scheme, marks=pytest.mark.slow) for scheme in ("gs", "az"))]
)
"""What the services do differently is held by `tests/stores/test_store_contract.py`."""


def trained(seed: int) -> tuple[TrainingState, nn.Module]:
    """A model, its optimizer and scheduler after two steps."""
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        net.head(net.body(torch.randn(3, 16))).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return TrainingState(model=net, optimizer=optimizer, scheduler=scheduler), net


def bits(state: TrainingState) -> list[tuple[str, str]]:
    """All that the parts of a state hold."""
    return [line for name, part in state.components.items() for line in flatten(part.state_dict(), name)]


def test_a_run_is_resumed_on_an_empty_machine(run: BucketRun) -> None:
    state, _ = trained(0)
    with CheckpointManager(run.root, max_shard_size="1KB") as manager:
        saved = manager.save(2, state, metric={"loss": 0.5}, extra={"epoch": 1})
    drawn = torch.rand(3)

    other, _ = trained(1)
    manager = CheckpointManager(run.root)
    restored = manager.restore_latest(other)

    assert restored == 2 and restored.path == saved == f"{run.root}/checkpoint-00000002"
    assert (restored.extra, restored.metrics) == ({"epoch": 1}, {"loss": 0.5})
    assert bits(other) == bits(state)
    assert torch.equal(torch.rand(3), drawn)
    assert (manager.latest_step(), manager.all_steps()) == (2, [2])


@S3_AND_HUB
def test_a_synced_copy_of_a_run_is_one_on_the_disk(run: BucketRun, tmp_path: Path) -> None:
    state, _ = trained(0)
    with CheckpointManager(run.root, max_shard_size="1KB") as manager:
        manager.save(1, state)
        manager.save(2, state)

    local = CheckpointManager(run.synced(tmp_path))

    assert local.verify() == {1: [], 2: []}
    other, _ = trained(1)
    assert local.restore_latest(other) == 2
    assert bits(other) == bits(state)


def test_a_replaced_step_keeps_its_metrics(run: BucketRun) -> None:
    state, _ = trained(1)
    with CheckpointManager(run.root, max_to_keep=1, keep_best="loss") as manager:
        manager.save(1, state, metric=1.0)
        manager.save(2, state, metric=3.0)
    with CheckpointManager(run.root, max_to_keep=1, keep_best="loss") as manager:
        manager.save(1, state)
        manager.save(3, state, metric=2.0)
        assert (manager.best_step(), manager.all_steps()) == (1, [1, 3])


@S3_AND_HUB
def test_old_checkpoints_go_and_the_best_one_stays(run: BucketRun) -> None:
    with CheckpointManager(run.root, max_to_keep=2, keep_best="loss", metric_mode="max") as manager:
        save_steps(manager, 1, 2, 3, 4)
        assert manager.all_steps() == [1, 3, 4]
        assert manager.best_step() == 1

    assert run.folders() == ["checkpoint-00000001", "checkpoint-00000003", "checkpoint-00000004"]
    assert run.litter() == []


@S3_AND_HUB
def test_a_step_is_saved_again_and_leaves_nothing_of_the_first(run: BucketRun) -> None:
    with CheckpointManager(run.root, max_shard_size="1KB") as manager:
        save_steps(manager, 1, 2, 1)
        assert manager.latest_step() == 1
        assert manager.verify() == {1: [], 2: []}

    assert run.litter() == []


@S3
def test_weights_that_did_not_change_are_copied_in_the_store(run: BucketRun) -> None:
    net = Net()
    net.body.requires_grad_(False)
    state = TrainingState(model=net)
    with CheckpointManager(run.root) as manager:
        manager.save(1, state)
        net.head.weight.data.fill_(2)
        manager.save(2, state)

    first, second = (
        {run.read(name) for name in run.names(f"checkpoint-0000000{step}/") if "/model-" in name} for step in (1, 2)
    )
    assert (len(first), len(second), len(first & second)) == (2, 2, 1)


@S3
def test_saves_beside_the_training_are_saved_as_they_were(run: BucketRun) -> None:
    net = Net(1.0)
    with CheckpointManager(run.root) as manager:
        manager.save(1, TrainingState(model=net), blocking=False)
        net.fill(2.0)
        manager.wait_until_finished()
        assert manager.restore(TrainingState(model=net), 1) == 1
    assert net.value() == 1.0


@S3
def test_a_damaged_checkpoint_is_passed_over(run: BucketRun, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(run.root) as manager:
        save_steps(manager, 1, 2)
    name = next(name for name in run.names("checkpoint-00000002/") if "/model" in name)
    raw = bytearray(run.read(name))
    raw[-1] ^= 1
    run.put(name, bytes(raw))

    net = Net()
    assert CheckpointManager(run.root).restore_latest(TrainingState(model=net)) == 1

    assert net.value() == 1.0
    assert f"Skipped the checkpoint '{run.root}/checkpoint-00000002'" in caplog.text


@S3
def test_a_store_that_refuses_a_checkpoint_does_not_pass_for_damage(run: BucketRun, proxy: FaultProxy) -> None:
    manager = CheckpointManager(run.root)
    save_steps(manager, 1, 2)
    store_plan.forget_puts()  # as in another process
    proxy.fail("status", r"GET get .*checkpoint-00000002/checkpoint-", status=403, times=100)
    with pytest.raises(StoreAccessError):
        manager.latest_step("structure")
    with pytest.raises(StoreAccessError):
        manager.restore_latest(TrainingState(model=Net()))


@S3
def test_a_folder_that_no_save_has_begun_is_left_alone(run: BucketRun) -> None:
    state, net = trained(0)
    hfshard.save_model(net, f"{run.root}/checkpoint-00000005")
    by_hand = set(open_store(run.root).list_objects(recursive=True))
    assert len(by_hand) == 3  # a shard, its index, and the plain copy of that
    with CheckpointManager(run.root) as manager:
        manager.save(1, state)
        assert manager.all_steps() == [1]

    assert by_hand <= open_store(run.root).list_objects(recursive=True).keys()
    assert hfshard.verify_checkpoint(f"{run.root}/checkpoint-00000005").ok
    with pytest.raises(SaveDirectoryError, match=f"is a folder of the training run '{run.root}'"):
        hfshard.save_model(net, f"{run.root}/checkpoint-00000005")
