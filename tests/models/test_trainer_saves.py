"""`save_model` of Trainer and of Accelerate on several ranks, with install(): of replicas, and of each rank's part."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from accelerate import Accelerator
from huggingface_hub.errors import OfflineModeIsEnabled
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import hfshard
from tests.distributed.gloo import check_ranks, waiting
from tests.flows.resume_trainings import as_launched
from tests.foreign.producers.truth import read_truth
from tests.helpers.tensor_bytes import assert_same
from tests.programs.models import SETTINGS, assert_ours, llama

_NEVER_SECONDS = 1000.0
_WARM_UP = "tests.foreign.producers.deepspeed_on_cpu:warm_up"


@pytest.mark.compat
def test_trainer_and_accelerate_have_what_is_called() -> None:
    assert [*inspect.signature(Trainer.save_model).parameters] == ["self", "output_dir", "_internal_call"]
    assert [*inspect.signature(Trainer._save).parameters] == ["self", "output_dir", "state_dict"]
    assert {"revision", "commit_message"} <= inspect.signature(Trainer.push_to_hub).parameters.keys()
    assert {"should_save", "save_on_each_node", "push_to_hub", "hub_revision"} <= {*dir(TrainingArguments)}
    expected = ["self", "model", "save_directory", "max_shard_size", "safe_serialization"]
    assert [*inspect.signature(Accelerator.save_model).parameters] == expected


@pytest.mark.compat
def test_other_saves_of_accelerate_are_its_own(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    layer = accelerator.prepare(nn.Linear(2, 2))

    with hfshard.install(quiet=True):
        accelerator.save_model(layer, tmp_path / "safe")
        accelerator.save_model(layer, tmp_path / "pickle", safe_serialization=False)

    assert [path.name for path in (tmp_path / "safe").iterdir()] == ["model.safetensors"]
    assert [path.name for path in (tmp_path / "pickle").iterdir()] == ["pytorch_model.bin"]


@pytest.mark.compat
def test_other_methods_of_trainer_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], save_on_each_node=True)
    trainer = Trainer(nn.Linear(2, 2), arguments)
    for name in ("init_hf_repo", "create_model_card"):
        monkeypatch.setattr(Trainer, name, lambda *_args, **_options: None)

    with hfshard.install(quiet=True), pytest.raises(OfflineModeIsEnabled):  # it got as far as that
        trainer.push_to_hub()


def _save_replicas(rank: int, place: Path) -> None:
    rows: Any = [{"input_ids": [1, 4 + number % 4, 2], "labels": [1, 4, 2]} for number in range(8)]
    arguments = {**SETTINGS, "max_steps": 1, "save_steps": 1}
    with as_launched(rank, dist.get_world_size()), hfshard.install(quiet=True), waiting(_NEVER_SECONDS):
        trainer = Trainer(
            llama(LlamaForCausalLM), TrainingArguments(str(place / "run"), **arguments), train_dataset=rows
        )
        assert trainer.args.should_save == (rank == 0)
        trainer.train()
        trainer.save_model(str(place / "out"))
        dist.barrier()


def test_the_first_rank_saves_replicas_without_waiting_for_others(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, _save_replicas, tmp_path)

    for way in ("run/checkpoint-1", "out"):
        assert_ours(tmp_path / way)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="pip install '.[test,frameworks]'")
def test_nothing_is_gathered_on_a_rank(tmp_path: Path) -> None:
    from tests.models import trainers_on_ranks

    check_ranks(tmp_path / "ranks", 2, trainers_on_ranks.save_all, tmp_path, modules=[_WARM_UP])

    truth = read_truth(tmp_path / "trainer")
    for way in ("run/checkpoint-1", "out", "node", "untold"):
        assert_ours(tmp_path / "trainer" / way)
        stock = LlamaForCausalLM.from_pretrained(tmp_path / "trainer" / way, dtype="auto")
        assert_same(stock.state_dict(), truth)
    assert (tmp_path / "trainer" / "out" / "training_args.bin").is_file()
    truth = read_truth(tmp_path / "accelerate")
    assert truth.pop("lm_head.weight").equal(truth["model.embed_tokens.weight"])
    for way in ("out", "stock"):
        assert_same(hfshard.load_state_dict(tmp_path / "accelerate" / way), truth)
    files = {way: {path.name for path in (tmp_path / "accelerate" / way).iterdir()} for way in ("out", "stock")}
    assert files["out"] == files["stock"]
