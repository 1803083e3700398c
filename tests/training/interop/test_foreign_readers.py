"""Directories of Accelerate's `save_state`, resumed by a CheckpointManager: as exactly as Accelerate resumes them."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader

import hfshard
from hfshard.errors import DamagedCheckpointError, StateDictMismatchError, UnsafePickleError
from hfshard.training import TrainingState, prepared_state
from tests.training.interop.accelerate_runs import (
    SAVED_AT,
    STEPS,
    Parts,
    RunsCode,
    forget_accelerate,
    save_by_accelerate,
)

pytestmark = pytest.mark.compat

LACKING = ("the number of steps (0 is taken)", "the position in the data")


@pytest.fixture(scope="module", params=["safetensors", "pickles"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state after the third step."""
    place = tmp_path_factory.mktemp("accelerate") / "checkpoint_0"
    return save_by_accelerate(place, safe_serialization=request.param == "safetensors")


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoint_0"))


def restore(state: TrainingState, checkpoint: Path, **options: Any) -> Any:
    known = {"keys": {"count": "custom_checkpoint_0"}, **options}
    return hfshard.CheckpointManager(checkpoint.parent / "ours").restore(state, checkpoint, **known)


def test_it_is_resumed_as_accelerate_resumes_it(saved: Path) -> None:
    accelerator = Accelerator(cpu=True)
    stock = Parts(accelerator)
    accelerator.load_state(str(saved))
    stock.train(SAVED_AT, STEPS)
    expected = stock.everything()

    parts = Parts()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(99)
    restored = restore(parts.state(), saved)
    parts.train(SAVED_AT, STEPS)

    assert (restored, restored.differences, restored.lacking) == (0, (), LACKING)
    assert parts.everything() == expected


def test_prepared_objects_the_scaler_and_the_count_of_batches_are_restored(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    saving = Accelerator(cpu=True, gradient_accumulation_steps=2)
    saving.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    prepared = saving.prepare(model)
    saving.scaler.scale(prepared(torch.ones(2)).sum()).backward()  # which begins the scale
    for _ in range(3):
        with saving.accumulate(prepared):
            pass
    saving.save_state(str(tmp_path / "saved"))
    forget_accelerate()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    state = prepared_state(accelerator, model=accelerator.prepare(nn.Linear(2, 2)))
    restore(state, tmp_path / "saved", keys=None)

    assert accelerator.step == 3 and accelerator.scaler.state_dict()["scale"] == 4.0
    assert torch.equal(accelerator.unwrap_model(state.components["model"]).weight, model.weight)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_the_state_of_a_stateful_loader_is_handed_over(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")

    def new_loader() -> Any:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
        data: Any = torch.arange(8.0)
        return accelerator, accelerator.prepare(DataLoader(data, batch_size=2))

    saving, batches = new_loader()
    next(iter(batches))
    saving.save_state(str(tmp_path / "saved"))
    forget_accelerate()

    _, loader = new_loader()
    restored = restore(TrainingState(), tmp_path / "saved", keys=None)
    loader.load_state_dict(restored.extra["dl_state_dict"])

    assert [batch.tolist() for batch in loader] == [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    assert restored.lacking[1].startswith("the position in the data, but for .extra['dl_state_dict']")


def test_what_is_missing_is_named(checkpoint: Path) -> None:
    (checkpoint / "optimizer_1.bin").unlink()
    (checkpoint / "random_states_0.pkl").unlink()
    (checkpoint / "sampler.bin").write_bytes(b"a pickle of Accelerate's own classes")
    parts = Parts()
    before = parts.everything()

    with pytest.raises(StateDictMismatchError, match="has no 'optimizer_1'"):
        restore(parts.state(), checkpoint)
    unchanged = parts.everything()
    restored = restore(parts.state(), checkpoint, strict=False)

    assert unchanged == before
    assert len(restored.differences) == 1 and "has no 'optimizer_1'" in restored.differences[0]
    assert restored.lacking == (
        *LACKING,
        "the order of shuffled data, as 'sampler.bin' is a pickle of Accelerate's own classes, which is not read",
        "the random number generators (dropout and shuffling go on from those of this process)",
    )
    assert parts.schedulers[1].last_epoch == 3


def test_parts_that_the_state_lacks_are_refused(saved: Path) -> None:
    parts = Parts()
    state = TrainingState(model=parts.models[0], optimizer=parts.optimizers[0], scheduler=parts.schedulers[0])

    with pytest.raises(StateDictMismatchError, match="has the state of 'custom_checkpoint_0'"):
        restore(state, saved, keys=None)
    assert len(restore(state, saved, keys=None, strict=False).differences) == 4


def test_a_name_that_is_not_there_is_refused(saved: Path) -> None:
    with pytest.raises(StateDictMismatchError, match="has no 'custom_checkpoint_7', which keys names for 'count'"):
        restore(Parts().state(), saved, keys={"count": "custom_checkpoint_7"})


@pytest.mark.parametrize("name", ["optimizer.bin", "custom_checkpoint_0.pkl", "random_states_0.pkl"])
def test_a_pickle_that_asks_for_code_is_refused_and_nothing_runs(name: str, checkpoint: Path, tmp_path: Path) -> None:
    torch.save({"state": RunsCode(tmp_path / "ran")}, checkpoint / name)
    parts = Parts()
    before = parts.everything()

    with pytest.raises(UnsafePickleError, match=name):
        restore(parts.state(), checkpoint)

    assert not (tmp_path / "ran").exists()
    assert parts.everything() == before


def test_a_generator_that_would_read_beyond_its_buffer_is_refused(checkpoint: Path) -> None:
    states = torch.load(checkpoint / "random_states_0.pkl", weights_only=False)
    kind, key, _, *rest = states["numpy_random_seed"]
    torch.save({**states, "numpy_random_seed": (kind, key, 10**9, *rest)}, checkpoint / "random_states_0.pkl")

    with pytest.raises(DamagedCheckpointError, match=r"random_states_0\.pkl.*at 1000000000"):
        restore(Parts().state(), checkpoint)


def test_the_generators_of_other_processes_are_lacking(checkpoint: Path) -> None:
    shutil.copy(checkpoint / "random_states_0.pkl", checkpoint / "random_states_1.pkl")

    restored = restore(Parts().state(), checkpoint)

    assert restored.lacking[-1].endswith("(it has those of 2 processes, and here is 1)")
