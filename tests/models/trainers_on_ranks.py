"""Trainer and Accelerate under DeepSpeed ZeRO-3, on the ranks of a gloo group."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from transformers import LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

import hfshard
from hfshard.errors import RankFailedError
from tests.distributed.gloo import waiting
from tests.flows.resume_trainings import as_launched
from tests.foreign.producers.truth import write_truth
from tests.models.zero3_engines import counted_gathers, gathered
from tests.programs.models import SETTINGS, llama

_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 12,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


def save_all(rank: int, place: Path) -> None:
    """Save by both, with hfshard and without."""
    warnings.simplefilter("ignore")
    for save, way in ((save_by_trainer, "trainer"), (save_by_accelerate, "accelerate")):
        with as_launched(rank, dist.get_world_size()):
            save(rank, place / way)


def save_by_trainer(rank: int, place: Path) -> None:
    """Train a step, which saves a checkpoint, and save the model."""
    rows: Any = [{"input_ids": [1, 4 + number % 4, 2], "labels": [1, 4, 2]} for number in range(8)]
    settings = {**SETTINGS, "per_device_train_batch_size": 2, "save_steps": 1}
    arguments = TrainingArguments(str(place / "run"), max_steps=1, deepspeed=_CONFIG, bf16=True, **settings)
    trainer = Trainer(llama(LlamaForCausalLM), arguments, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    with hfshard.install(quiet=True):
        trainer.train()
        with counted_gathers() as found:
            trainer.save_model(str(place / "out"))
        assert not found
        check_gathered(trainer, place)
        check_refused(rank, trainer, place)
    truth = gathered(trainer.model_wrapped)
    if rank == 0:
        write_truth(place, truth)


class OwnSave(Trainer):
    """Saves something else, on the ranks that Trainer lets save."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self.args.should_save:
            torch.save(sorted(state_dict), f"{output_dir}-names.pt")


def check_gathered(trainer: Any, place: Path) -> None:
    """Let Trainer gather: for each node, for parts that cannot be told, and for a class with a `_save` of its own."""
    weight = trainer.model.lm_head.weight
    for way in ("node", "untold", "own"):
        with counted_gathers() as found, waiting(0.1), ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            if way == "node":
                patch.setattr(trainer.args, "save_on_each_node", True)
            elif way == "untold":
                patch.setattr(weight, "comm", None, raising=False)
            else:
                patch.setattr(trainer, "__class__", OwnSave)
            trainer.save_model(str(place / way))
        assert found
        dist.barrier()
    assert (place / "own-names.pt").is_file()


def check_refused(rank: int, trainer: Any, place: Path) -> None:
    """End on all ranks, soon, where the first one cannot create the directory."""
    (place / "file").touch()
    with pytest.raises(FileExistsError if rank == 0 else RankFailedError):
        trainer.save_model(str(place / "file"))


def save_by_accelerate(rank: int, place: Path) -> None:
    """Save the weights of a prepared model."""
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=_CONFIG))
    model = llama(LlamaForCausalLM)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    engine, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    truth = gathered(engine)
    with hfshard.install(quiet=True), counted_gathers() as found:
        accelerator.save_model(engine, place / "out", max_shard_size="2KB")
    assert not found
    accelerator.save_model(engine, str(place / "stock"), max_shard_size="2KB")
    if rank == 0:
        write_truth(place, truth)
