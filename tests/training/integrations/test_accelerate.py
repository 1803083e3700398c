"""Accelerate's prepared objects: what ends an accumulation, and what is refused; tests/flows/ resumes trainings."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import DataLoader

from hfshard.errors import InvalidArgumentError
from hfshard.training import CheckpointManager, ResumableDataLoader, prepare_loader, prepared_state

pytestmark = pytest.mark.compat


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True, gradient_accumulation_steps=2)


def test_an_epochs_end_ends_an_accumulation(accelerator: Accelerator) -> None:
    loader = prepare_loader(accelerator, ResumableDataLoader(torch.arange(3.0), batch_size=1))  # type: ignore[arg-type]
    model = accelerator.prepare(nn.Linear(1, 1))
    synced = []
    for _ in range(2):
        for _ in loader:
            with accelerator.accumulate(model):
                synced.append(accelerator.sync_gradients)
    assert synced == [False, True, True, False, True, True]
    assert (len(loader), loader.epoch, loader.batch) == (3, 2, 0)


def test_a_save_amid_an_accumulation_is_refused(accelerator: Accelerator, tmp_path: Path) -> None:
    model = accelerator.prepare(nn.Linear(1, 1))
    state = prepared_state(accelerator, model=model)
    with accelerator.accumulate(model):
        pass
    with pytest.raises(InvalidArgumentError, match=r"gradients=Gradients\(model\)"):
        CheckpointManager(tmp_path).save(1, state)
    assert os.listdir(tmp_path) == []
    with accelerator.accumulate(model):
        pass
    CheckpointManager(tmp_path).save(2, state)


def test_a_loader_without_a_position_is_refused(accelerator: Accelerator) -> None:
    loader: DataLoader[Any] = DataLoader(torch.arange(3.0))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="Do not prepare it: loader = prepare_loader"):
        prepared_state(accelerator, loader=accelerator.prepare(loader))
    with pytest.raises(InvalidArgumentError, match="was not prepared, got a DataLoader"):
        prepare_loader(accelerator, loader)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP"])
def test_parts_without_names_are_refused(kind: str) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType(kind)
    accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=1)
    try:
        with pytest.raises(InvalidArgumentError, match=f"This Accelerator uses {kind}"):
            prepared_state(accelerator)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
