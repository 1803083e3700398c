"""What a CheckpointCallback writes, keeps, passes over and refuses, within one process."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertForSequenceClassification,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainerState,
)

from hfshard.errors import DamagedCheckpointError, HfshardError, InvalidArgumentError, StateDictMismatchError
from hfshard.training import CheckpointCallback, CheckpointManager
from tests.flows.resume_trainings import STEPS, Case, everything, trainer

CASE = Case(0, ())
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "greater_is_better": False}


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def attached(directory: Path, callback: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """A Trainer, and the callback that it has."""
    trained = trainer(CASE, directory, **arguments)
    return trained, CheckpointCallback(**callback or {}).attach(trained)


def saved(directory: Path, **arguments: Any) -> Any:
    """A short training with a checkpoint after each step."""
    trained, checkpoints = attached(directory, **{"max_steps": 3, "save_steps": 1, **arguments})
    trained.train()
    return trained, checkpoints


def resumed(directory: Path, place: Any, callback: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """A training that saves nothing, and went on from a place."""
    trained, _ = attached(directory, callback, **{"save_strategy": "no", **arguments})
    trained.train(resume_from_checkpoint=place)
    return trained


@contextmanager
def flipped(path: Path) -> Iterator[None]:
    """A file with a bit that is another one."""
    raw = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(raw[:-2] + bytes([raw[-2] ^ 4]) + raw[-1:])
    try:
        yield
    finally:
        path.write_bytes(raw)


@pytest.mark.compat
def test_a_checkpoint_loads_in_stock_transformers_and_holds_no_pickle(tmp_path: Path) -> None:
    trained, checkpoints = saved(tmp_path)
    run = tmp_path / "run"
    assert sorted(os.listdir(run)) == ["checkpoint-00000001", "checkpoint-00000002", "checkpoint-00000003"]
    newest = run / "checkpoint-00000003"
    assert sorted(os.listdir(newest)) == [
        "checkpoint.json", "config.json", "model.safetensors", "optimizer.safetensors", "state.safetensors",
        "trainer_state.json", "training_state.json",
    ]  # fmt: skip
    assert checkpoints.latest() == str(newest)
    loaded = BertForSequenceClassification.from_pretrained(newest)
    assert same(weights(loaded), weights(trained.model))
    state = TrainerState.load_from_json(str(newest / "trainer_state.json"))
    assert (state.global_step, len(state.log_history)) == (3, 3)


def test_the_tokenizer_is_in_the_checkpoint(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))
    trained = trainer(CASE, tmp_path, max_steps=1, save_steps=1)
    trained.processing_class = tokenizer
    checkpoints = CheckpointCallback().attach(trained)
    trained.train()
    loaded = PreTrainedTokenizerFast.from_pretrained(str(checkpoints.latest()))
    assert loaded.get_vocab() == {"a": 0, "b": 1}
    assert checkpoints.manager is not None and checkpoints.manager.verify() == {1: []}


@pytest.mark.compat
def test_a_damaged_newest_checkpoint_is_passed_over_and_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path)
    newest = tmp_path / "run" / "checkpoint-00000003"
    trained, checkpoints = attached(tmp_path, max_steps=4, save_strategy="no")
    with flipped(newest / "optimizer.safetensors"):
        with caplog.at_level(logging.WARNING):
            found = checkpoints.latest()
        assert found == str(tmp_path / "run" / "checkpoint-00000002")
        assert f"Skipped the checkpoint '{newest}'" in caplog.text
        with pytest.raises(DamagedCheckpointError, match=r"optimizer\.safetensors"):
            trained.train(resume_from_checkpoint=True)
        trained.train(resume_from_checkpoint=found)
    assert trained.state.global_step == 4


@pytest.mark.compat
def test_a_checkpoint_that_trainer_alone_has_saved_is_resumed_as_ever(tmp_path: Path) -> None:
    alone = trainer(CASE, tmp_path, max_steps=4, save_steps=2)
    alone.train()
    again = resumed(tmp_path, str(tmp_path / "run" / "checkpoint-2"), max_steps=4)
    assert everything(again) == everything(alone)


@pytest.mark.compat
def test_a_run_that_was_moved_is_resumed_from_there(tmp_path: Path) -> None:
    straight, _ = saved(tmp_path)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    again = resumed(tmp_path, str(tmp_path / "moved" / "checkpoint-00000001"), max_steps=3)
    assert everything(again) == everything(straight)


@pytest.mark.compat
def test_skipped_data_are_resumed_as_trainer_does_it(tmp_path: Path) -> None:
    arguments = {"max_steps": 6, "save_steps": 4, "ignore_data_skip": True}
    ends = []
    for name, is_ours in (("ours", True), ("upstream", False)):
        for resume in (False, True):
            trained = trainer(CASE, tmp_path / name, **arguments)
            if is_ours:
                CheckpointCallback().attach(trained)
            checkpoint = tmp_path / name / "run" / ("checkpoint-00000004" if is_ours else "checkpoint-4")
            trained.train(resume_from_checkpoint=str(checkpoint) if resume else None)
        ends.append(everything(trained))
    assert ends[0] == ends[1]


@pytest.mark.compat
def test_the_best_model_is_kept_and_loaded_at_the_end(tmp_path: Path) -> None:
    kept: dict[int, dict[str, torch.Tensor]] = {}

    class Keeping(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kept[state.global_step] = weights(kwargs["model"])

    arguments = {"max_steps": 6, "save_steps": 1, "learning_rate": 0.3, "load_best_model_at_end": True, **EVALUATED}
    trained, checkpoints = attached(tmp_path, {"max_to_keep": 1}, **arguments)
    trained.add_callback(Keeping())
    trained.train()
    best = trained.state.best_global_step
    assert best is not None and best < 6
    assert (checkpoints.manager.all_steps(), checkpoints.manager.best_step()) == ([best, 6], best)
    assert trained.state.best_model_checkpoint == str(tmp_path / "run" / f"checkpoint-{best:08d}")
    assert same(weights(trained.model), kept[best])
    losses = [entry["eval_loss"] for entry in trained.state.log_history if "eval_loss" in entry]
    assert losses.index(min(losses)) == best - 1


def test_the_best_model_is_loaded_in_a_class_that_loads_weights_itself(tmp_path: Path) -> None:
    arguments = {"max_steps": 6, "save_steps": 1, "learning_rate": 0.3, "load_best_model_at_end": True, **EVALUATED}
    trained = trainer(CASE, tmp_path, **arguments)
    methods = {"_load_best_model": lambda self: self._load_from_checkpoint(self.state.best_model_checkpoint)}
    trained.__class__ = type("Own", (type(trained),), methods)  # as sentence-transformers' Trainer
    CheckpointCallback().attach(trained)

    trained.train()

    assert trained.state.best_global_step in range(1, 6)
    best = BertForSequenceClassification.from_pretrained(trained.state.best_model_checkpoint)
    assert same(weights(trained.model), weights(best))


def test_save_strategy_best_saves_what_is_better(tmp_path: Path) -> None:
    trained, checkpoints = saved(tmp_path, max_steps=6, save_strategy="best", learning_rate=0.3, **EVALUATED)
    losses = [entry["eval_loss"] for entry in trained.state.log_history if "eval_loss" in entry]
    better = [step for step, loss in enumerate(losses, 1) if loss < min([*losses[: step - 1], float("inf")])]
    assert checkpoints.manager.all_steps() == better


@pytest.mark.compat
def test_callbacks_with_a_state_are_saved_as_trainer_saves_them(tmp_path: Path) -> None:
    states = []
    for name, is_ours in (("ours", True), ("upstream", False)):
        arguments = {"max_steps": 3, "save_steps": 3, "load_best_model_at_end": True, **EVALUATED, "eval_steps": 3}
        trained = trainer(CASE, tmp_path / name, **arguments)
        trained.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
        if is_ours:
            CheckpointCallback().attach(trained)
        trained.train()
        [path] = (tmp_path / name / "run").glob("checkpoint-*/trainer_state.json")
        states.append(json.loads(path.read_text()))
    ours, upstream = states
    assert ours["stateful_callbacks"] == upstream["stateful_callbacks"]
    assert "EarlyStoppingCallback" in ours["stateful_callbacks"]
    assert (ours.pop("best_model_checkpoint"), upstream.pop("best_model_checkpoint")) == (
        str(tmp_path / "ours" / "run" / "checkpoint-00000003"),
        str(tmp_path / "upstream" / "run" / "checkpoint-3"),
    )
    for state in states:
        for entry in state["log_history"]:
            for key in [key for key in entry if key.endswith(("runtime", "per_second"))]:
                del entry[key]
    assert ours == upstream


@pytest.mark.compat
def test_early_stopping_continues_to_count_after_a_resume(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {**EVALUATED, "save_steps": 1, "load_best_model_at_end": True, "learning_rate": 0.0}
    stops = []
    for place in (None, str(tmp_path / "run" / "checkpoint-00000003")):
        trained, _ = attached(tmp_path, **arguments)
        trained.add_callback(EarlyStoppingCallback(early_stopping_patience=3))
        trained.train(resume_from_checkpoint=place)
        stops.append(trained.state.global_step)

    assert stops == [4, 4]


@pytest.mark.parametrize(
    ("arguments", "manager", "message"),
    [
        ({"save_only_model": True}, None, "leaves nothing to resume from"),
        ({"push_to_hub": True, "hub_model_id": "org/name"}, None, "hub_strategy='every_save' would push"),
        ({"save_total_limit": 2}, {"max_to_keep": 3}, "the CheckpointManager's max_to_keep=3"),
        ({"save_total_limit": 1, "load_best_model_at_end": True}, None, "Trainer itself removes the last"),
        ({"load_best_model_at_end": True}, {"max_to_keep": 3}, "keep_best='eval_loss', metric_mode='min'"),
    ],
)
def test_what_would_be_done_by_half_is_refused(
    arguments: dict[str, Any], manager: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    if "push_to_hub" in arguments:
        trained = trainer(CASE, tmp_path)
        trained.args.push_to_hub = True  # its own way would ask the Hub for the repo
    else:
        extra = {**EVALUATED, "save_steps": 1} if "load_best_model_at_end" in arguments else {}
        trained = trainer(CASE, tmp_path, **extra, **arguments)
    with pytest.raises(InvalidArgumentError, match=message):
        CheckpointCallback(None if manager is None else CheckpointManager(tmp_path, **manager)).attach(trained)
    assert "_save_checkpoint" not in vars(trained), "it still saves as ever"


@pytest.mark.parametrize(("name", "words"), [("is_deepspeed_enabled", "DeepSpeed"), ("is_fsdp_enabled", "FSDP1")])
def test_parts_without_names_are_refused(name: str, words: str, tmp_path: Path) -> None:
    trained = trainer(CASE, tmp_path)
    setattr(trained, name, True)

    with pytest.raises(InvalidArgumentError, match=f"This Trainer uses {words}"):
        CheckpointCallback().attach(trained)


@pytest.mark.parametrize(
    "names", [["_load_optimizer_and_scheduler"], ["_load_rng_state"], ["_save_checkpoint", "_load_from_checkpoint"]]
)
def test_a_class_with_a_state_of_its_own_is_refused_by_name(names: list[str], tmp_path: Path) -> None:
    trained = trainer(CASE, tmp_path)
    trained.__class__ = type("Own", (type(trained),), dict.fromkeys(names, print))

    with pytest.raises(InvalidArgumentError, match=f"Own overrides {', '.join(names)}, which"):
        CheckpointCallback().attach(trained)
    assert "_save_checkpoint" not in vars(trained), "it still saves as ever"


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["_save_checkpoint"], id="TRL's model card"),
        pytest.param(["_load_from_checkpoint", "_load_best_model"], id="sentence-transformers' weights"),
    ],
)
def test_a_class_without_a_state_of_its_own_is_supported(names: list[str], tmp_path: Path) -> None:
    trained = trainer(CASE, tmp_path)
    trained.__class__ = type("Own", (type(trained),), dict.fromkeys(names, print))

    CheckpointCallback().attach(trained)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks for names that transformers deprecates
def test_a_peft_model_is_refused_by_name(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    trained = trainer(CASE, tmp_path)
    trained.model = peft.get_peft_model(trained.model, peft.LoraConfig(target_modules=["query"], r=2))

    with pytest.raises(InvalidArgumentError, match="this one is a PeftModel"):
        CheckpointCallback().attach(trained)


def test_a_hyperparameter_search_is_refused_by_name(tmp_path: Path) -> None:
    trained, _ = attached(tmp_path)
    trained.state.is_hyper_param_search = True

    with pytest.raises(InvalidArgumentError, match="A hyperparameter search"):
        trained.callback_handler.on_train_begin(trained.args, trained.state, trained.control)


def test_a_manager_and_arguments_for_another_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="combine a manager with max_to_keep, which would create another"):
        CheckpointCallback(CheckpointManager(tmp_path), max_to_keep=2)


def test_a_callback_that_was_not_attached_says_so(tmp_path: Path) -> None:
    trained = trainer(CASE, tmp_path)
    checkpoints = CheckpointCallback()
    trained.add_callback(checkpoints)
    with pytest.raises(InvalidArgumentError, match=r"checkpoints\.attach\(trainer\) before trainer\.train\(\)"):
        trained.train()
    checkpoints.attach(trained)
    assert trained.callback_handler.callbacks.count(checkpoints) == 1
    with pytest.raises(InvalidArgumentError, match="belongs to another Trainer"):
        checkpoints.attach(trainer(CASE, tmp_path))


def test_a_trainer_that_never_restores_the_rng_is_stopped(tmp_path: Path) -> None:
    saved(tmp_path)
    trained, _ = attached(tmp_path, max_steps=4)
    vars(trained)["_load_rng_state"] = lambda checkpoint: None  # as where a version of transformers calls it otherwise
    with pytest.raises(HfshardError, match="did not restore the random state"):
        trained.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": 12}, r"seed \(or data_seed\) was 11, and is 12"),
        ({"per_device_train_batch_size": 2}, "number of batches in an epoch was 7, and is 13"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps was 1, and is 2"),
    ],
)
def test_a_resume_to_other_batches_is_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    saved(tmp_path)
    trained, _ = attached(tmp_path, max_steps=4, save_strategy="no", **arguments)
    with pytest.raises(StateDictMismatchError, match=message):
        trained.train(resume_from_checkpoint=True)
    trained.args.ignore_data_skip = True
    trained.train(resume_from_checkpoint=True)


def test_a_second_training_of_the_same_trainer_goes_on(tmp_path: Path) -> None:
    trained, checkpoints = saved(tmp_path, max_steps=2)
    trained.args.max_steps = STEPS // 4
    trained.train(resume_from_checkpoint=checkpoints.latest())
    assert checkpoints.manager.all_steps() == [1, 2, 3, 4, 5]
