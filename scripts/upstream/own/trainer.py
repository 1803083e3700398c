"""What transformers' own tests of Trainer's checkpoints check (test_trainer_checkpointing.py), written anew.

The source archive lacks that file. Trainer's own `save_model` and resume are used throughout, no callback of hfshard's.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from tests.zoo.models import TEXT, VOCABULARY

STEPS = 8


class LineConfig(PreTrainedConfig):
    model_type = "line"

    def __init__(self, slope: float = 0.0, offset: float = 0.0, **values: Any) -> None:
        super().__init__(**values)
        self.slope = slope
        self.offset = offset


class Line(PreTrainedModel):
    """y = slope * x + offset."""

    config_class = LineConfig
    base_model_prefix = "line"

    def __init__(self, config: LineConfig) -> None:
        super().__init__(config)
        self.slope = nn.Parameter(torch.tensor(config.slope).float())
        self.offset = nn.Parameter(torch.tensor(config.offset).float())
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: Any) -> None: ...

    def forward(self, input_x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        found = input_x * self.slope + self.offset
        if labels is None:
            return (found,)
        return (nn.functional.mse_loss(found, labels), found)


class PlainLine(nn.Module):
    """The same, of which transformers knows nothing."""

    forward = Line.forward

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.0))
        self.offset = nn.Parameter(torch.tensor(0.0))


def _line_data(length: int = 64) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    xs = torch.randn(length, generator=generator)
    return [{"input_x": x, "labels": 2 * x + 3 + 0.1 * torch.randn((), generator=generator)} for x in xs]


def _bert_data(length: int = 16) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(6)
    return [
        {"input_ids": torch.randint(6, VOCABULARY, (5,), generator=generator), "labels": torch.tensor(i % 2)}
        for i in range(length)
    ]


def _bert_config(**values: Any) -> Any:
    settings: dict[str, Any] = {**TEXT, "num_hidden_layers": 1, **values}
    return BertConfig(**settings)


def _bert() -> BertForSequenceClassification:
    set_seed(1)
    return BertForSequenceClassification(_bert_config())


def _trainer(directory: Path, model: Any = None, data: Any = None, callbacks: Any = None, **values: Any) -> Trainer:
    settings: dict[str, Any] = {
        "save_steps": 4,
        "max_steps": STEPS,
        "learning_rate": 0.1,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 2,
        **values,
    }
    arguments = TrainingArguments(str(directory), **settings)
    data = _line_data() if data is None else data
    model = Line(LineConfig()) if model is None else model
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks)


def _values(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _check_resume(trainer: Trainer, checkpoint: str | bool, whole: Trainer) -> None:
    """Train from a checkpoint, to the same weights as those of a run without a break."""
    trainer.train(resume_from_checkpoint=checkpoint)
    assert _equal(_values(trainer.model), _values(whole.model))


@pytest.mark.parametrize("is_pretrained", [True, False])
def test_each_checkpoint_has_its_files(tmp_path: Path, is_pretrained: bool) -> None:
    _trainer(tmp_path, Line(LineConfig()) if is_pretrained else PlainLine()).train()

    for step in (4, 8):
        found = {path.name for path in (tmp_path / f"checkpoint-{step}").iterdir() if path.is_file()}
        expected = {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
        assert expected | {"training_args.bin"} | ({"config.json"} if is_pretrained else set()) == found


@pytest.mark.parametrize("step", [4, 8])
@pytest.mark.parametrize("is_pretrained", [True, False])
def test_a_resumed_run_ends_as_the_one_without_a_break(tmp_path: Path, is_pretrained: bool, step: int) -> None:
    def model() -> Any:
        return Line(LineConfig()) if is_pretrained else PlainLine()

    whole = _trainer(tmp_path, model(), max_steps=12)
    whole.train()
    state = json.loads((tmp_path / "checkpoint-12" / "trainer_state.json").read_text())
    again = _trainer(tmp_path, model(), max_steps=12)
    _check_resume(again, str(tmp_path / f"checkpoint-{step}"), whole)

    found = json.loads((tmp_path / "checkpoint-12" / "trainer_state.json").read_text())
    assert [entry.get("loss") for entry in found["log_history"]] == [
        entry.get("loss") for entry in state["log_history"]
    ]


def test_a_transformers_model_resumes_from_the_last(tmp_path: Path) -> None:
    whole = _trainer(tmp_path, _bert(), _bert_data(), learning_rate=1e-3)
    whole.train()
    again = _trainer(tmp_path, _bert(), _bert_data(), learning_rate=1e-3)
    (tmp_path / "checkpoint-8").rename(tmp_path / "kept")
    _check_resume(again, True, whole)

    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-8")


def test_a_sharded_checkpoint_resumes(tmp_path: Path) -> None:
    whole = _trainer(tmp_path, _bert(), _bert_data(), learning_rate=1e-3)
    whole.train()
    part = tmp_path / "checkpoint-4"
    part_model = BertForSequenceClassification.from_pretrained(part)
    (part / "model.safetensors").unlink()
    part_model.save_pretrained(part, max_shard_size="10KB")
    assert (part / "model.safetensors.index.json").exists()
    again = _trainer(tmp_path, _bert(), _bert_data(), learning_rate=1e-3)
    _check_resume(again, str(part), whole)


def test_frozen_parameters_resume(tmp_path: Path) -> None:
    def model() -> BertForSequenceClassification:
        made = _bert()
        made.bert.embeddings.requires_grad_(False)
        return made

    whole = _trainer(tmp_path, model(), _bert_data(), learning_rate=1e-3)
    whole.train()
    again = _trainer(tmp_path, model(), _bert_data(), learning_rate=1e-3)
    _check_resume(again, str(tmp_path / "checkpoint-4"), whole)


def test_gradient_accumulation_resumes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "save_steps": 3, "max_steps": 7}
    whole = _trainer(tmp_path, **settings)
    whole.train()
    again = _trainer(tmp_path, **settings)
    _check_resume(again, str(tmp_path / "checkpoint-3"), whole)


def test_no_checkpoint_to_resume_from(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Can't find a valid checkpoint at"):
        _trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-99"))
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        _trainer(tmp_path).train(resume_from_checkpoint=True)


def test_old_checkpoints_go(tmp_path: Path) -> None:
    _trainer(tmp_path, save_steps=2, save_total_limit=2).train()

    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-6", "checkpoint-8"}


@pytest.mark.parametrize("is_pretrained", [True, False])
def test_the_best_model_is_loaded_at_the_end(tmp_path: Path, is_pretrained: bool) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}
    model = Line(LineConfig(slope=1.5, offset=2.5)) if is_pretrained else PlainLine()
    trainer = _trainer(tmp_path, model, learning_rate=3.0, lr_scheduler_type="constant", **settings)
    trainer.train()

    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    best = min(losses, key=lambda step: (losses[step], step))
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert math.isclose(trainer.evaluate()["eval_loss"], losses[best], rel_tol=1e-6)
    saved = load_file(tmp_path / f"checkpoint-{best}" / "model.safetensors")
    assert _equal(saved, _values(trainer.model))


def test_only_the_model_is_saved(tmp_path: Path) -> None:
    _trainer(tmp_path, save_only_model=True).train()

    found = {path.name for path in (tmp_path / "checkpoint-8").iterdir() if path.is_file()}
    assert "optimizer.pt" not in found
    assert "model.safetensors" in found


def test_save_model_writes_what_from_pretrained_reads(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path / "run", _bert(), _bert_data(), learning_rate=1e-3)
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))

    found = BertForSequenceClassification.from_pretrained(tmp_path / "out")
    assert _equal(_values(found), _values(trainer.model))
    assert (tmp_path / "out" / "training_args.bin").exists()


def test_a_callback_stops_the_run_and_it_goes_on(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 5
            control.should_save = state.global_step == 5

    whole = _trainer(tmp_path / "whole")
    whole.train()
    _trainer(tmp_path / "part", callbacks=[Stop()]).train()
    again = _trainer(tmp_path / "part")
    _check_resume(again, True, whole)


def test_a_model_made_anew_for_each_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": STEPS, "save_steps": 4, "per_device_train_batch_size": 4}
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True, **settings)
    whole = Trainer(model_init=lambda: Line(LineConfig()), args=arguments, train_dataset=_line_data())
    whole.train()
    again = Trainer(model_init=lambda: Line(LineConfig()), args=arguments, train_dataset=_line_data())
    _check_resume(again, str(tmp_path / "checkpoint-4"), whole)


def test_a_run_in_bfloat16_weights_saves_them_so(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, _bert().to(torch.bfloat16), _bert_data(), learning_rate=1e-3)  # type: ignore[arg-type]
    trainer.train()

    saved = load_file(tmp_path / "checkpoint-8" / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    _trainer(tmp_path, _bert(), _bert_data(), learning_rate=1e-3).train()
    larger = BertForSequenceClassification(_bert_config(hidden_size=64))

    with pytest.raises(RuntimeError):
        _trainer(tmp_path, larger, _bert_data()).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
