"""Accelerate loads what `save_pretrained` writes: whole, sharded, dispatched, from a folder of offloaded weights.

Stock, transformers writes the files; under hfshard.install(), hfshard does.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import (
    Accelerator,
    cpu_offload,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accelerate.utils import load_checkpoint_in_model, load_state_dict
from torch import nn
from transformers import AutoModelForCausalLM

from tests.zoo.models import ZOO
from upstream.own.tiny_bert import same

NAMES = ("gpt2", "llama_untied", "llama_tied", "llama_bf16", "mamba", "bart", "whisper")
SIZES = ("10MB", "20KB")


def _empty(name: str, model: Any) -> Any:
    with init_empty_weights():
        empty = type(model)(ZOO[name].make_config())
    empty.tie_weights()
    return empty


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_load_checkpoint_and_dispatch(tmp_path: Path, name: str, size: str) -> None:
    model = ZOO[name].build()
    model.save_pretrained(tmp_path, max_shard_size=size)

    found = load_checkpoint_and_dispatch(_empty(name, model), str(tmp_path), device_map={"": "cpu"})
    assert same(found, model)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_load_checkpoint_in_a_model_that_has_weights(tmp_path: Path, name: str, size: str) -> None:
    model = ZOO[name].build()
    model.save_pretrained(tmp_path, max_shard_size=size)
    found = type(model)(ZOO[name].make_config()).to(model.dtype)

    load_checkpoint_in_model(found, str(tmp_path))
    assert same(found, model)


@pytest.mark.parametrize("size", SIZES)
def test_dispatched_to_the_disk_and_run(tmp_path: Path, size: str) -> None:
    model = ZOO["llama_untied"].build()
    model.save_pretrained(tmp_path / "out", max_shard_size=size)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    places |= {"lm_head": "disk", "model.rotary_emb": "cpu"}
    ids = torch.arange(6, 14)[None]

    found = load_checkpoint_and_dispatch(
        _empty("llama_untied", model), str(tmp_path / "out"), device_map=places, offload_folder=str(tmp_path / "off")
    )
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)


def test_one_file_as_accelerate_reads_it(tmp_path: Path) -> None:
    model = ZOO["gpt2"].build()
    model.save_pretrained(tmp_path)

    found = load_state_dict(str(tmp_path / "model.safetensors"), device_map={"": "cpu"})
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in found.items())


@pytest.mark.parametrize("size", SIZES)
def test_what_the_accelerator_saves_loads_in_transformers(tmp_path: Path, size: str) -> None:
    model = ZOO["llama_untied"].build()
    model.config.save_pretrained(tmp_path)
    Accelerator(cpu=True).save_model(model, str(tmp_path), max_shard_size=size)

    assert same(AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto"), model)


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_an_offloaded_model_is_saved_whole(tmp_path: Path, offload: str) -> None:
    model = ZOO["llama_untied"].build()
    expected = copy.deepcopy(model)
    if offload == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, str(tmp_path / "off"), execution_device=torch.device("cpu"))
    model.save_pretrained(tmp_path / "out", max_shard_size="20KB")

    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), expected)


def test_a_dispatched_model_is_saved_whole(tmp_path: Path) -> None:
    model = ZOO["llama_untied"].build()
    expected = copy.deepcopy(model)
    places = infer_auto_device_map(model, max_memory={"cpu": "40KB", "disk": "10MB"})
    dispatched = dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path / "off"))
    dispatched.save_pretrained(tmp_path / "out")

    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), expected)


def test_a_prepared_model_is_unwrapped_and_saved(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = ZOO["gpt2"].build()
    prepared = accelerator.prepare(model)
    accelerator.unwrap_model(prepared).save_pretrained(
        tmp_path,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(prepared),
    )

    assert same(AutoModelForCausalLM.from_pretrained(tmp_path), model)


def test_states_of_a_run_with_a_transformers_model(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(ZOO["gpt2"].build(), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
    before = copy.deepcopy(model)
    accelerator.save_state(str(tmp_path / "state"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path / "state"))

    assert optimizer is not None
    assert same(model, before)
