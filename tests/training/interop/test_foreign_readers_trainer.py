"""`checkpoint-9/` of transformers' Trainer, resumed by a CheckpointManager: as exactly as Trainer itself resumes it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hfshard
from hfshard.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    IntegrityError,
    StateDictMismatchError,
    UnsafePickleError,
)
from hfshard.training import TrainingState
from hfshard.training.interop.foreign_checkpoint import LACKS_RNG
from tests.training.interop.accelerate_runs import RunsCode
from tests.training.interop.trainer_runs import SAVED_AT, everything, new_trainer, parts_of, restore, train

pytestmark = pytest.mark.compat


def test_it_is_resumed_as_trainer_resumes_it(saved: Path, tmp_path: Path) -> None:
    stock = new_trainer(tmp_path)
    stock.train(resume_from_checkpoint=str(saved))
    expected = everything(stock.model, stock.optimizer, stock.lr_scheduler)

    state = parts_of(tmp_path / "ours")
    torch.manual_seed(99)
    restored = restore(state, saved)
    loader = state.components["loader"]
    position = loader.epoch, loader.batch
    train(state, restored)

    assert (restored, restored.differences, restored.lacking) == (9, (), ())
    assert restored.extra["max_steps"] == 12 and restored.path == str(saved)
    assert position == (1, 2)
    parts = (state.components[name] for name in ("model", "optimizer", "scheduler"))
    assert everything(*parts) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        {"optim": "adafactor"},
        {"optim": "adamw_torch", "lr_scheduler_type": "polynomial"},
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 3}},
    ],
    ids=str,
)
def test_other_optimizers_and_schedulers_are_resumed_as_trainer_resumes_them(
    arguments: dict[str, Any], tmp_path: Path
) -> None:
    new_trainer(tmp_path, max_steps=10, **arguments).train()
    checkpoint = tmp_path / "run" / f"checkpoint-{SAVED_AT}"
    stock = new_trainer(tmp_path / "stock", save_strategy="no", **arguments)
    stock.train(resume_from_checkpoint=str(checkpoint))

    state = parts_of(tmp_path / "ours", arguments)
    train(state, restore(state, checkpoint))

    parts = (state.components[name] for name in ("model", "optimizer", "scheduler"))
    assert everything(*parts) == everything(stock.model, stock.optimizer, stock.lr_scheduler)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    saved, model = LlamaForCausalLM(config), LlamaForCausalLM(config)
    data: Any = [{"input_ids": [1, 2], "labels": [1, 2]}]
    arguments: dict[str, Any] = {
        "save_steps": 1,
        "max_steps": 1,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    made = Trainer(saved, TrainingArguments(str(tmp_path / "run"), **arguments), train_dataset=data)
    made.train()

    fresh = Trainer(model, TrainingArguments(str(tmp_path / "run"), **arguments))
    fresh.create_optimizer_and_scheduler(1)
    state = TrainingState(model=model, optimizer=fresh.optimizer, scheduler=fresh.lr_scheduler)
    restore(state, tmp_path / "run" / "checkpoint-1")

    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert everything(model, fresh.optimizer, fresh.lr_scheduler) == everything(
        saved, made.optimizer, made.lr_scheduler
    )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_is_loaded_by_peft_and_the_rest_is_restored(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    base = LlamaForCausalLM(config).state_dict()

    def trainer_of(make: Any) -> Trainer:
        model = LlamaForCausalLM(config)
        model.load_state_dict(base)
        data: Any = [{"input_ids": [1, 2], "labels": [1, 2]}]
        arguments: dict[str, Any] = {"save_steps": 1, "max_steps": 1, "use_cpu": True, "report_to": []}
        return Trainer(make(model), TrainingArguments(str(tmp_path / "run"), **arguments), train_dataset=data)

    saved = trainer_of(lambda model: peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])))
    saved.train()
    place = tmp_path / "run" / "checkpoint-1"
    fresh = trainer_of(lambda model: peft.PeftModel.from_pretrained(model, place, is_trainable=True))
    fresh.create_optimizer_and_scheduler(1)
    state = TrainingState(model=fresh.model, optimizer=fresh.optimizer, scheduler=fresh.lr_scheduler)

    with pytest.raises(StateDictMismatchError, match="has no 'model'"):
        restore(state, place)
    assert len(restore(state, place, strict=False).differences) == 1
    assert everything(fresh.model, fresh.optimizer, fresh.lr_scheduler) == everything(
        saved.model, saved.optimizer, saved.lr_scheduler
    )


def test_half_a_directory_is_refused_and_its_rest_is_restored_if_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "optimizer.pt").unlink()
    (checkpoint / "rng_state.pth").unlink()
    state = parts_of(tmp_path)
    before = everything(*(state.components[name] for name in ("model", "optimizer", "scheduler")))

    with pytest.raises(StateDictMismatchError, match=r"checkpoint-9' has no 'optimizer'"):
        restore(state, checkpoint)
    unchanged = everything(*(state.components[name] for name in ("model", "optimizer", "scheduler")))
    restored = restore(state, checkpoint, strict=False)

    assert unchanged == before
    assert len(restored.differences) == 1 and "has no 'optimizer'" in restored.differences[0]
    assert restored.lacking == (LACKS_RNG,)
    assert state.components["scheduler"].last_epoch == 9
    assert torch.equal(
        state.components["model"].state_dict()["classifier.weight"],
        hfshard.load_state_dict(checkpoint)["classifier.weight"],
    )


def test_without_its_progress_the_step_and_the_position_are_lacking(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "trainer_state.json").unlink()
    state = parts_of(tmp_path)

    restored = restore(state, checkpoint)

    assert restored == 0
    assert restored.lacking == ("the number of steps (0 is taken)", "the state of 'loader'")


def test_a_loader_with_an_order_of_its_own_is_told(saved: Path, tmp_path: Path) -> None:
    state = parts_of(tmp_path, shuffle=True)

    restored = restore(state, saved)

    assert restored.lacking == ("the order of shuffled data, which is this loader's own",)
    assert state.components["loader"].batch == 2


def test_a_loader_of_other_batches_begins_its_epoch(saved: Path, tmp_path: Path) -> None:
    state = parts_of(tmp_path, batch_size=5)

    restored = restore(state, saved)

    assert restored.lacking == (
        "batches like this loader's, of which 1.28571 epochs are no whole number",
        "the state of 'loader'",
    )


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "pytorch_model.bin"])
def test_a_pickle_that_asks_for_code_is_refused_and_nothing_runs(name: str, checkpoint: Path, tmp_path: Path) -> None:
    if name == "pytorch_model.bin":
        (checkpoint / "model.safetensors").unlink()
    torch.save({"state": RunsCode(tmp_path / "ran")}, checkpoint / name)
    state = parts_of(tmp_path)
    before = everything(*(state.components[name] for name in ("model", "optimizer", "scheduler")))

    with pytest.raises(UnsafePickleError, match=name):
        restore(state, checkpoint)

    assert not (tmp_path / "ran").exists()
    assert everything(*(state.components[name] for name in ("model", "optimizer", "scheduler"))) == before


def test_what_is_no_regular_file_is_refused_and_not_waited_for(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "scheduler.pt").unlink()
    os.mkfifo(checkpoint / "scheduler.pt")

    with pytest.raises(DamagedCheckpointError, match=r"scheduler\.pt' is not a regular file"):
        restore(parts_of(tmp_path), checkpoint)


def test_weights_that_hfshard_has_saved_are_compared_with_their_checksums(checkpoint: Path, tmp_path: Path) -> None:
    state = parts_of(tmp_path)
    weights = hfshard.load_state_dict(checkpoint)
    hfshard.save_state_dict(
        {name: tensor.clone() for name, tensor in weights.items()}, checkpoint, max_shard_size="8KB"
    )
    shard = sorted(checkpoint.glob("model-*.safetensors"))[0]
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)

    with pytest.raises(IntegrityError, match=shard.name):
        restore(state, checkpoint)


def test_the_arguments_are_not_read(checkpoint: Path, tmp_path: Path) -> None:
    torch.save(RunsCode(tmp_path / "ran"), checkpoint / "training_args.bin")

    assert restore(parts_of(tmp_path), checkpoint) == 9
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("progress", "message"),
    [
        ("[" * 100_000, "nested deeper"),
        ('{"global_step": -1}', "global_step is -1"),
        ('{"global_step": "9"}', "global_step is '9'"),
        ('{"global_step": 9, "epoch": NaN}', "epoch is nan"),
        ('{"global_step": ' + "9" * 5000 + "}", "trainer_state.json"),
    ],
)
def test_a_hostile_progress_is_refused(progress: str, message: str, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "trainer_state.json").write_text(progress)

    with pytest.raises(DamagedCheckpointError, match=message):
        restore(parts_of(tmp_path), checkpoint)


def test_a_loss_that_is_not_a_number_is_no_damage(checkpoint: Path, tmp_path: Path) -> None:
    progress = json.loads((checkpoint / "trainer_state.json").read_text())
    progress["log_history"][0]["loss"] = float("nan")
    (checkpoint / "trainer_state.json").write_text(json.dumps(progress))

    restored = restore(parts_of(tmp_path), checkpoint)

    assert restored.extra["log_history"][0]["loss"] != restored.extra["log_history"][0]["loss"]


def test_a_damaged_checkpoint_of_ours_is_not_taken_for_trainers(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "training_state.json").write_text("{}")

    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint\.json"):
        restore(parts_of(tmp_path), checkpoint)


def test_a_run_of_trainers_is_refused_with_the_name_of_its_last_checkpoint(saved: Path, tmp_path: Path) -> None:
    state = parts_of(tmp_path)

    with pytest.raises(CheckpointNotFoundError, match=r"give one of them, such as '.*run/checkpoint-12'"):
        hfshard.CheckpointManager(tmp_path / "ours").restore(state, saved.parent)


@pytest.mark.parametrize("name", ["global_step9", "pytorch_model_fsdp_0"])
def test_parts_for_the_ranks_of_fsdp_and_deepspeed_are_refused(name: str, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / name).mkdir()

    with pytest.raises(StateDictMismatchError, match=name):
        restore(parts_of(tmp_path), checkpoint)


def test_parameters_in_other_groups_are_refused(saved: Path, tmp_path: Path) -> None:
    state = parts_of(tmp_path)
    model = state.components["model"]
    state.components["optimizer"] = torch.optim.AdamW(model.parameters(), lr=0.01)

    with pytest.raises(StateDictMismatchError, match="groups of 'optimizer'"):
        restore(state, saved)
