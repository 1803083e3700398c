"""Lightning with DistributedDataParallel on two ranks: one writes, and a resume is exact on both."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from hfshard.training import CheckpointManager, ResumableDataLoader, lightning_callback
from tests.distributed.gloo import check_ranks
from tests.flows.resume_trainings import as_launched
from tests.programs.models import assert_same

pytest.importorskip("lightning.pytorch", reason="pip install lightning")


def fit(seed: int, place: Path, rank: int, **arguments: Any) -> Any:
    """Train 2 epochs of 3 batches on each rank; gives the model."""
    import lightning.pytorch as lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    from tests.programs.test_lightning import Samples, module

    model = module(seed)
    torch.manual_seed(seed + rank)
    data = Samples()
    sampler: Any = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=rank, seed=5)
    with CheckpointManager(place / "run") as manager:
        callback = lightning_callback(manager, every_n_train_steps=4, **arguments)
        trainer = lightning.Trainer(
            max_epochs=2, callbacks=[callback], accelerator="cpu", devices=2, strategy="ddp", logger=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=place,
            plugins=[TorchElasticEnvironment()], use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(model, ResumableDataLoader(data, batch_size=2, sampler=sampler, drop_last=True, seed=rank))
    return model


def train_and_resume(rank: int, place: Path) -> None:
    warnings.simplefilter("ignore")  # Lightning's own
    with as_launched(rank, 2):
        straight = fit(0, place, rank)
        resumed = fit(1, place, rank, resume=4)
    assert resumed.losses == straight.losses[4:]
    assert_same(resumed, straight)


def test_ddp_is_resumed_exactly_on_both_ranks(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, train_and_resume, tmp_path)
    assert CheckpointManager(tmp_path / "run").verify() == {4: []}
