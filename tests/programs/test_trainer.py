"""transformers' Trainer: its own checkpoints and models are ours, with the mixin and under install."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

import hfshard
from tests.helpers import processes
from tests.programs.models import SETTINGS, Llama, assert_ours, assert_same, llama

pytestmark = [pytest.mark.compat, pytest.mark.filterwarnings("ignore")]


def trainer(model: Any, directory: Path) -> Trainer:
    rows: Any = [{"input_ids": [1, 4 + number % 4, 2], "labels": [1, 4, 2]} for number in range(8)]
    arguments = TrainingArguments(str(directory), max_steps=3, logging_strategy="no", **SETTINGS)
    made = Trainer(model, arguments, train_dataset=rows)
    made.remove_callback(PrinterCallback)
    return made


@pytest.mark.parametrize("way", ["mixin", "install"])
def test_its_own_checkpoints_and_models_are_ours(way: str, tmp_path: Path) -> None:
    cls = Llama if way == "mixin" else LlamaForCausalLM
    with hfshard.install() if way == "install" else nullcontext():
        straight = trainer(llama(cls), tmp_path / "run")
        straight.train()
        straight.save_model(str(tmp_path / "out"))
        resumed = trainer(llama(cls, seed=1), tmp_path / "run")
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))

    assert_same(resumed.model, straight.model)
    for directory in ("run/checkpoint-2", "run/checkpoint-3", "out"):
        assert_ours(tmp_path / directory)
    assert_same(LlamaForCausalLM.from_pretrained(tmp_path / "out"), straight.model)


def save_twice_and_die(directory: Path, call: str) -> None:
    """Be killed amid the second save of other weights, at the first call of a function of the system."""
    with hfshard.install(quiet=True):
        trainer(llama(LlamaForCausalLM, seed=0), directory / "run").save_model(str(directory / "out"))
        second = trainer(llama(LlamaForCausalLM, seed=1), directory / "run")
        setattr(os, call, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
        second.save_model(str(directory / "out"))


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_kill_amid_a_save_leaves_the_old_model(call: str, tmp_path: Path) -> None:
    end = processes.end_of(tmp_path / "said.txt", save_twice_and_die, tmp_path, call)
    assert end.status == -signal.SIGKILL, end.words
    assert_same(LlamaForCausalLM.from_pretrained(tmp_path / "out"), llama(LlamaForCausalLM, seed=0))
    assert hfshard.verify_checkpoint(tmp_path / "out").ok
