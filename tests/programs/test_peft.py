"""PEFT: an adapter beside a sharded base of ours, merged into it and saved, and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import hfshard
from tests.programs.models import Llama, assert_ours, assert_same, llama

pytestmark = [pytest.mark.compat, pytest.mark.filterwarnings("ignore")]

peft: Any = pytest.importorskip("peft", reason="pip install peft")


def adapted(base: Any) -> Any:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(base, config)


def test_an_adapter_lies_beside_a_sharded_base(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path, max_shard_size="6KB")
    model = adapted(Llama.from_pretrained(tmp_path, verify="full"))

    model.save_pretrained(tmp_path)

    names = {path.name for path in tmp_path.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "model.safetensors.index.json"} <= names
    assert hfshard.verify_checkpoint(tmp_path).ok
    [stock, ours] = [cls.from_pretrained(tmp_path) for cls in (LlamaForCausalLM, Llama)]
    name = "model.layers.0.self_attn.q_proj.lora_B.default.weight"
    assert torch.equal(stock.state_dict()[name], model.state_dict()[f"base_model.model.{name}"])
    assert_same(ours, stock)


def test_a_merged_model_is_saved_as_ours_and_loaded_by_all(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base", max_shard_size="6KB")
    model = adapted(Llama.from_pretrained(tmp_path / "base"))

    merged: Any = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged", max_shard_size="6KB")

    assert isinstance(merged, Llama)
    assert_ours(tmp_path / "merged", shards=4)
    stock: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(stock) is LlamaForCausalLM
    assert_same(stock, merged)
    assert_same(hfshard.load_model(AutoModelForCausalLM, tmp_path / "merged", strict=True), merged)


def test_under_install_peft_saves_and_loads_through_hfshard(tmp_path: Path) -> None:
    with hfshard.install():
        llama(LlamaForCausalLM).save_pretrained(tmp_path / "base", max_shard_size="2KB")
        model = adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
        model.save_pretrained(tmp_path / "adapter")
        auto = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
        merged = auto.merge_and_unload()
        merged.save_pretrained(tmp_path / "merged", max_shard_size="2KB")

    assert_ours(tmp_path / "base", shards=4)
    assert_ours(tmp_path / "merged", shards=4)
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), model.merge_and_unload())
