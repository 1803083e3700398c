"""`checkpoint-9/` of transformers' Trainer, resumed by a CheckpointManager: as exactly as Trainer itself resumes it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
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
from tests.attacks.files import raw
from tests.training.interop.accelerate_runs import RunsCode
from tests.training.interop.trainer_runs import (
    SAVED_AT,
    everything,
    everything_of,
    new_trainer,
    parts_of,
    restore,
    train,
)

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
    assert everything_of(state) == expected


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

    assert everything_of(state) == everything(stock.model, stock.optimizer, stock.lr_scheduler)


def llama_trainer(place: Path, make: Callable[[LlamaForCausalLM], Any] = lambda model: model, **more: Any) -> Trainer:
    """A Trainer that saves after its one step."""
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, **more
    )
    data: Any = [{"input_ids": [1, 2], "labels": [1, 2]}]
    arguments = TrainingArguments(
        str(place / "run"), save_steps=1, max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
    )
    return Trainer(make(LlamaForCausalLM(config)), arguments, train_dataset=data)


def state_of(trainer: Trainer) -> TrainingState:
    trainer.create_optimizer_and_scheduler(1)
    return TrainingState(model=trainer.model, optimizer=trainer.optimizer, scheduler=trainer.lr_scheduler)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    saved, fresh = (llama_trainer(tmp_path, tie_word_embeddings=True) for _ in range(2))
    saved.train()

    state = state_of(fresh)
    restore(state, tmp_path / "run" / "checkpoint-1")

    model = state.components["model"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert everything_of(state) == everything(saved.model, saved.optimizer, saved.lr_scheduler)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_is_loaded_by_peft_and_the_rest_is_restored(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    lora = peft.LoraConfig(target_modules=["q_proj"])
    torch.manual_seed(1)
    saved = llama_trainer(tmp_path, lambda model: peft.get_peft_model(model, lora))
    saved.train()
    place = tmp_path / "run" / "checkpoint-1"
    torch.manual_seed(1)  # the same base
    state = state_of(
        llama_trainer(tmp_path, lambda model: peft.PeftModel.from_pretrained(model, place, is_trainable=True))
    )

    with pytest.raises(StateDictMismatchError, match="has no 'model'"):
        restore(state, place)
    assert len(restore(state, place, strict=False).differences) == 1
    assert everything_of(state) == everything(saved.model, saved.optimizer, saved.lr_scheduler)


def test_half_a_directory_is_refused_and_its_rest_is_restored_if_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "optimizer.pt").unlink()
    (checkpoint / "rng_state.pth").unlink()
    state = parts_of(tmp_path)
    before = everything_of(state)

    with pytest.raises(StateDictMismatchError, match=r"checkpoint-9' has no 'optimizer'"):
        restore(state, checkpoint)
    unchanged = everything_of(state)
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
    before = everything_of(state)

    with pytest.raises(UnsafePickleError, match=name):
        restore(state, checkpoint)

    assert not (tmp_path / "ran").exists()
    assert everything_of(state) == before


def test_weights_that_hfshard_has_saved_are_compared_with_their_checksums(checkpoint: Path, tmp_path: Path) -> None:
    weights = {name: tensor.clone() for name, tensor in hfshard.load_state_dict(checkpoint).items()}
    hfshard.save_state_dict(weights, checkpoint, max_shard_size="8KB")
    shard = sorted(checkpoint.glob("model-*.safetensors"))[0]
    shard.write_bytes(raw.flip(shard.read_bytes(), -1))

    with pytest.raises(IntegrityError, match=shard.name):
        restore(parts_of(tmp_path), checkpoint)


def test_the_arguments_are_not_read(checkpoint: Path, tmp_path: Path) -> None:
    torch.save(RunsCode(tmp_path / "ran"), checkpoint / "training_args.bin")

    assert restore(parts_of(tmp_path), checkpoint) == 9
    assert not (tmp_path / "ran").exists()


def test_a_loss_that_is_not_a_number_is_no_damage(checkpoint: Path, tmp_path: Path) -> None:
    progress = json.loads((checkpoint / "trainer_state.json").read_text())
    progress["log_history"][0]["loss"] = float("nan")
    (checkpoint / "trainer_state.json").write_text(json.dumps(progress))

    restored = restore(parts_of(tmp_path), checkpoint)

    assert restored.extra["log_history"][0]["loss"] != restored.extra["log_history"][0]["loss"]


def test_a_run_of_trainers_is_refused_with_the_name_of_its_last_checkpoint(saved: Path, tmp_path: Path) -> None:
    state = parts_of(tmp_path)

    with pytest.raises(CheckpointNotFoundError, match=r"Pass one of them, such as '.*run/checkpoint-12'"):
        hfshard.CheckpointManager(tmp_path / "ours").restore(state, saved.parent)


HOSTILE_PROGRESS = {
    "[" * 100_000: "nested deeper",
    '{"global_step": -1}': "global_step must be a number of at least 0, got -1",
    '{"global_step": "9"}': "global_step must be a number of at least 0, got '9'",
    '{"global_step": 9, "epoch": NaN}': "epoch must be a number of at least 0, got nan",
    '{"global_step": ' + "9" * 5000 + "}": "trainer_state.json",
}


def a_pipe(checkpoint: Path) -> None:
    (checkpoint / "scheduler.pt").unlink()
    os.mkfifo(checkpoint / "scheduler.pt")


def a_file(name: str, text: str) -> Callable[[Path], object]:
    return lambda checkpoint: (checkpoint / name).write_text(text)


@pytest.mark.parametrize(
    ("spoil", "error", "match"),
    [
        pytest.param(a_pipe, DamagedCheckpointError, r"scheduler\.pt' is not a regular file", id="a pipe"),
        *(
            pytest.param(a_file("trainer_state.json", text), DamagedCheckpointError, match, id=f"progress {text:.40}")
            for text, match in HOSTILE_PROGRESS.items()
        ),
        pytest.param(
            a_file("training_state.json", "{}"), CheckpointNotFoundError, r"no checkpoint\.json", id="ours, damaged"
        ),
        *(
            pytest.param(lambda place, name=name: (place / name).mkdir(), StateDictMismatchError, name, id=name)
            for name in ("global_step9", "pytorch_model_fsdp_0")  # parts for the ranks of DeepSpeed and of FSDP
        ),
    ],
)
def test_a_spoilt_directory_is_refused_and_not_waited_for(
    spoil: Callable[[Path], object], error: type[Exception], match: str, checkpoint: Path, tmp_path: Path
) -> None:
    spoil(checkpoint)

    with pytest.raises(error, match=match):
        restore(parts_of(tmp_path), checkpoint)


def test_parameters_in_other_groups_are_refused(saved: Path, tmp_path: Path) -> None:
    state = parts_of(tmp_path)
    model = state.components["model"]
    state.components["optimizer"] = torch.optim.AdamW(model.parameters(), lr=0.01)

    with pytest.raises(StateDictMismatchError, match="groups of 'optimizer'"):
        restore(state, saved)
