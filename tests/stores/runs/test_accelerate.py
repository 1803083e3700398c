"""What Accelerate has prepared is saved into a run in a store, beside the training, while children are forked."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import hfshard
from hfshard.errors import StoreError
from hfshard.training import CheckpointManager, prepared_state
from tests.stores.runs.bucket_run import BucketRun

pytestmark = pytest.mark.parametrize("scheme", ["s3"])

AS_FORKED = 7


def _try_in_child(root: str) -> int:
    """The exit status of a forked child that asks the store for something."""
    child = os.fork()
    if child == 0:
        try:
            hfshard.load_state_dict(root)
        except StoreError as error:
            os._exit(AS_FORKED if "forked from one that had used a store" in str(error) else 1)
        os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_saves_beside_the_training_while_children_are_forked(run: BucketRun) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    state = prepared_state(accelerator, model=model, optimizer=optimizer)

    def train() -> Any:
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
        return model.weight.detach().clone()

    with CheckpointManager(run.root, max_to_keep=2) as manager:
        assert manager.all_steps() == []  # from now on, this process has used the store
        for step in (1, 2, 3):
            weight = train()
            manager.save(step, state, blocking=False)
            assert _try_in_child(run.root) == AS_FORKED
        manager.wait_until_finished()
        train()
        assert manager.restore_latest(state) == 3

    assert run.folders() == ["checkpoint-00000002", "checkpoint-00000003"]
    assert torch.equal(model.weight, weight)
    hfshard.save_model(accelerator.unwrap_model(model), f"{run.root}/plain")
    assert torch.equal(hfshard.load_state_dict(f"{run.root}/plain")["weight"], weight)
