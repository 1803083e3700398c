"""Accelerate: load_checkpoint_and_dispatch of what we wrote, in memory and with parts on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, init_empty_weights, load_checkpoint_and_dispatch
from transformers import LlamaForCausalLM

import hfshard
from tests.programs.models import Llama, assert_ours, assert_same, llama

pytestmark = [pytest.mark.compat, pytest.mark.filterwarnings("ignore")]

TOKENS = torch.tensor([[1, 4, 5, 2]])


def dispatched(directory: Path, **arguments: Any) -> Any:
    with init_empty_weights(include_buffers=False):
        model = llama(LlamaForCausalLM)
    return load_checkpoint_and_dispatch(model, str(directory), **arguments).eval()


@pytest.mark.parametrize("size", ["6KB", "1MB"])
def test_what_we_wrote_is_dispatched(size: str, tmp_path: Path) -> None:
    model = llama().eval()
    model.save_pretrained(tmp_path / "out", max_shard_size=size)
    expected = model(TOKENS).logits

    whole = dispatched(tmp_path / "out", device_map={"": "cpu"})
    assert_same(whole, model)
    parts = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "lm_head": "disk",
             "model.rotary_emb": "cpu"}  # fmt: skip
    on_disk = dispatched(tmp_path / "out", device_map=parts, offload_folder=str(tmp_path / "offloaded"))
    assert on_disk.lm_head.weight.device.type == "meta"
    assert torch.equal(on_disk(TOKENS).logits, expected)


def test_what_its_accelerator_saves_is_loaded_and_the_other_way_round(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = llama(LlamaForCausalLM)
    accelerator.save_model(accelerator.prepare(model), str(tmp_path / "theirs"), max_shard_size="6KB")
    assert_same(hfshard.load_model(llama(LlamaForCausalLM, seed=1), tmp_path / "theirs", strict=True), model)

    ours = accelerator.unwrap_model(accelerator.prepare(llama(Llama)))
    ours.save_pretrained(tmp_path / "ours", max_shard_size="6KB", save_function=accelerator.save)
    assert_ours(tmp_path / "ours", shards=4)


def test_under_install_what_scripts_write_is_ours(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    with hfshard.install():
        model = accelerator.unwrap_model(accelerator.prepare(llama(LlamaForCausalLM)))
        model.save_pretrained(
            tmp_path, is_main_process=accelerator.is_main_process, save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(model), max_shard_size="2KB",
        )  # fmt: skip
        loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert_ours(tmp_path, shards=4)
    assert_same(loaded, model)
    assert_same(dispatched(tmp_path, device_map={"": "cpu"}), model)
