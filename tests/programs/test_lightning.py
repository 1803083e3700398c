"""Lightning: a training through `lightning_callback`, killed in the middle and resumed exactly; stock readers."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfshard
from hfshard.errors import DamagedCheckpointError, InvalidArgumentError
from hfshard.training import CheckpointManager, ResumableDataLoader, lightning_callback
from tests.programs.models import assert_ours, assert_same, flipped

pytestmark = pytest.mark.filterwarnings("ignore")

lightning: Any = pytest.importorskip("lightning.pytorch", reason="pip install lightning")


class Stopped(Exception):
    """In the place of a crash."""


class Samples(torch.utils.data.Dataset[Any]):
    """Numbers, with noise of two RNGs."""

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index)) / 14 + torch.rand(4) + random.random()


def module(seed: int, stop_at: int = -1) -> Any:
    class Model(lightning.LightningModule):  # type: ignore[misc]  # Lightning is not checked
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
            self.losses: list[float] = []

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            if self.trainer.global_step == stop_at:
                raise Stopped
            loss = (self.layers(batch) - batch.mean(1, keepdim=True)).square().mean()
            self.losses.append(loss.item())
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            steps = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": steps, "interval": "step"}}

    torch.manual_seed(seed)
    return Model()


def fit(model: Any, directory: Path, *callbacks: Any, strategy: Any = "auto", **arguments: Any) -> Any:
    """Train 3 epochs of 4 batches, with callbacks besides hfshard's; gives that."""
    with CheckpointManager(directory / "run", keep_best="loss") as manager:
        checkpoints = lightning_callback(manager, **arguments)
        trainer = lightning.Trainer(
            max_epochs=3, callbacks=[checkpoints, *callbacks], accelerator="cpu", logger=False, strategy=strategy,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=directory,
        )  # fmt: skip
        trainer.fit(model, ResumableDataLoader(Samples(), batch_size=4, shuffle=True, seed=5))
    return checkpoints


@pytest.mark.parametrize("every", [None, 3, 4])
def test_a_training_that_stopped_is_resumed_exactly(every: int | None, tmp_path: Path) -> None:
    straight = module(0)
    fit(straight, tmp_path / "straight", every_n_train_steps=every)
    with pytest.raises(Stopped):
        fit(module(0, stop_at=7), tmp_path, every_n_train_steps=every)

    resumed = module(1)
    torch.manual_seed(9)
    checkpoints = fit(resumed, tmp_path, every_n_train_steps=every, resume=True)

    saved = 6 if every == 3 else 4
    assert checkpoints.restored == saved
    assert resumed.losses == straight.losses[saved:]
    assert_same(resumed, straight)
    steps = [4, 8, 12] if every != 3 else [3, 6, 9, 12]
    assert checkpoints.manager.all_steps() == steps
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [f"checkpoint-{step:08d}" for step in steps]


def test_its_checkpoints_are_ours_and_load_anywhere(tmp_path: Path) -> None:
    trained = module(0)
    checkpoints = fit(trained, tmp_path, every_n_train_steps=6)
    newest = Path(checkpoints.manager.path_of(12))
    assert_same(hfshard.load_model(module(1), newest, verify="full"), trained)
    assert not list((tmp_path / "run").rglob("*.ckpt"))
    assert set(checkpoints.manager.verify()) == {6, 12}
    assert checkpoints.manager.best_step() in (6, 12)

    checkpoints.manager.push(tmp_path / "hub", 6)
    elsewhere = module(1)
    assert fit(elsewhere, tmp_path / "elsewhere", resume=f"{tmp_path}/hub").restored == 6
    assert_same(elsewhere, trained)

    with flipped(newest / "optimizer.safetensors"):
        with pytest.raises(DamagedCheckpointError, match=r"optimizer\.safetensors"):
            fit(module(1), tmp_path, every_n_train_steps=6, resume=12)
        assert fit(module(1), tmp_path, every_n_train_steps=6, resume=True).restored == 6

    hfshard.save_model(trained, tmp_path / "out", max_shard_size="200B")
    assert_ours(tmp_path / "out", shards=None)


def test_a_save_due_at_an_epochs_last_batch_resumes_at_the_next_epoch(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    epochs = lightning.callbacks.LambdaCallback(
        on_train_epoch_start=lambda trainer, _: seen.append(("start", trainer.current_epoch)),
        on_train_epoch_end=lambda trainer, _: seen.append(("end", trainer.current_epoch)),
    )
    fit(module(0), tmp_path, epochs, every_n_train_steps=8)
    seen.clear()

    fit(module(1), tmp_path, epochs, every_n_train_steps=8, resume=8)

    assert seen == [("start", 2), ("end", 2)]


def test_lightnings_callbacks_with_a_state_are_resumed_within_an_epoch(tmp_path: Path) -> None:
    models = []
    for seed, resume in ((0, False), (1, 5)):
        models.append(module(seed))
        callbacks = (
            lightning.callbacks.GradientAccumulationScheduler({1: 2}),
            lightning.callbacks.EarlyStopping("loss", patience=9),
            lightning.callbacks.ModelCheckpoint(tmp_path / "stock"),
        )
        fit(models[-1], tmp_path, *callbacks, every_n_train_steps=5, resume=resume)

    straight, resumed = models
    assert_same(resumed, straight)
    assert resumed.losses == straight.losses[6:]


class Hooked:
    """A module's hook."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (("LambdaCallback", {"on_save_checkpoint": print}), "LambdaCallback has on_save_checkpoint, which"),
        (("EMAWeightAveraging", {}), "EMAWeightAveraging has on_save_checkpoint and on_load_checkpoint, which"),
        (("StochasticWeightAveraging", {"swa_lrs": 0.1}), "StochasticWeightAveraging replaces the scheduler"),
        (None, "Own has on_load_checkpoint, which"),
    ],
)
def test_a_state_that_would_be_lost_is_refused_by_name(callback: Any, message: str, tmp_path: Path) -> None:
    model = module(0)
    callbacks = []
    if callback is None:
        model.__class__ = type("Own", (Hooked, type(model)), {})
    else:
        name, arguments = callback
        callbacks.append(getattr(lightning.callbacks, name)(**arguments))

    with pytest.raises(InvalidArgumentError, match=message):
        fit(model, tmp_path, *callbacks)
    assert not (tmp_path / "run").exists()


def test_a_scheduler_that_lightning_steps_after_the_save_is_refused_by_name(tmp_path: Path) -> None:
    model = module(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    model.configure_optimizers = lambda: {
        "optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}
    }  # fmt: skip

    with pytest.raises(InvalidArgumentError, match="Lightning steps ReduceLROnPlateau after"):
        fit(model, tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_strategy_that_keeps_parts_elsewhere_is_refused_by_name(tmp_path: Path) -> None:
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class ShardedStrategy(SingleDeviceStrategy):  # type: ignore[misc]  # Lightning is not checked
        """As DeepSpeed's and FSDP's are other ones."""

    with pytest.raises(InvalidArgumentError, match="This Trainer uses ShardedStrategy"):
        fit(module(0), tmp_path, strategy=ShardedStrategy("cpu"))
    assert not (tmp_path / "run").exists()


def test_the_lightning_that_is_imported_is_the_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other: Any = pytest.importorskip("pytorch_lightning", reason="pip install pytorch-lightning")
    manager = CheckpointManager(tmp_path / "run")
    assert isinstance(lightning_callback(manager), lightning.callbacks.Checkpoint)
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    callback = lightning_callback(manager)
    assert isinstance(callback, other.callbacks.Checkpoint)
    assert not isinstance(callback, lightning.callbacks.Checkpoint)


def test_a_fresh_run_is_no_error_and_a_wrong_number_is(tmp_path: Path) -> None:
    assert fit(module(0), tmp_path, resume=True).restored is None
    with pytest.raises(InvalidArgumentError, match="at least 1, got 0"):
        lightning_callback(CheckpointManager(tmp_path / "run"), every_n_train_steps=0)
