"""TRL: SFTTrainer trains a model of ours, saves it, and resumes through `CheckpointCallback`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import hfshard
from hfshard.training import CheckpointCallback
from tests.programs.models import SETTINGS, Llama, assert_ours, assert_same, llama, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

trl: Any = pytest.importorskip("trl", reason="pip install trl")
datasets: Any = pytest.importorskip("datasets", reason="pip install datasets")


def trainer(model: Any, directory: Path, peft_config: Any = None, **arguments: Any) -> Any:
    settings = {**SETTINGS, "max_steps": 4, "bf16": False, "logging_steps": 1, "max_length": 8, **arguments}
    rows = [{"input_ids": [1, 4 + number % 4, 5, 4, 2]} for number in range(6)]
    return trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(output_dir=str(directory), gradient_checkpointing=False, **settings),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def test_sft_trains_saves_and_resumes_exactly(tmp_path: Path) -> None:
    straight = trainer(llama(), tmp_path / "run")
    checkpoints = CheckpointCallback(max_shard_size="6KB").attach(straight)
    straight.train()
    assert checkpoints.manager is not None and checkpoints.manager.verify() == {2: [], 4: []}
    straight.save_model(str(tmp_path / "out"))

    assert_ours(tmp_path / "out")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), straight.model)
    assert_same(Llama.from_pretrained(tmp_path / "out", verify="full"), straight.model)

    resumed = trainer(llama(seed=1), tmp_path / "run", save_strategy="no")
    CheckpointCallback().attach(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-00000002"))
    assert_same(resumed.model, straight.model)
    losses = [[entry["loss"] for entry in one.state.log_history if "loss" in entry] for one in (resumed, straight)]
    assert losses[0] == losses[1]


def test_under_install_its_checkpoints_and_models_are_ours(tmp_path: Path) -> None:
    with hfshard.install():
        trained = trainer(llama(LlamaForCausalLM), tmp_path / "run")
        trained.train()
        trained.save_model(str(tmp_path / "out"))
        again = trainer(llama(LlamaForCausalLM, seed=1), tmp_path / "run", max_steps=5)
        again.train(resume_from_checkpoint=True)

    assert again.state.global_step == 5
    for name in ("checkpoint-2", "checkpoint-4", "checkpoint-5"):
        assert_ours(tmp_path / "run" / name)
    assert_ours(tmp_path / "out")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), trained.model)


def test_under_install_adapters_are_trained_over_a_base_of_ours(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft", reason="pip install peft")
    llama(Llama).save_pretrained(tmp_path / "base", max_shard_size="6KB")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with hfshard.install():
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        trained = trainer(base, tmp_path / "run", config)
        trained.train()
        trained.save_model(str(tmp_path / "adapter"))
        loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
        again = trainer(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "run", config, max_steps=5)
        again.train(resume_from_checkpoint=True)

    assert not list((tmp_path / "run" / "checkpoint-4").glob("model*")), "only the adapter is saved"
    assert_same(peft.get_peft_model_state_dict(loaded), peft.get_peft_model_state_dict(trained.model))
    assert again.state.global_step == 5
    assert_ours(tmp_path / "base", shards=4)
