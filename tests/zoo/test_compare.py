"""The comparison itself: stock transformers is equal to itself, and each kind of difference is seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2LMHeadModel

from tests.models.conftest import SHARDS, WHOLE, Saves
from tests.zoo.compare import Loaded, bits, bits_of, differences, facts_of_load, load, raw_tensors
from tests.zoo.models import ZOO
from tests.zoo.parameters import every_model_by_representatives


@every_model_by_representatives  # marks some compat
def test_stock_is_equal_to_itself_loaded_whole_or_in_shards(name: str, saves: Saves) -> None:
    directory = saves.stock(name, SHARDS)

    assert saves.differences(ZOO[name].stock_class, directory, name, WHOLE) == []
    assert raw_tensors(directory) == raw_tensors(saves.stock(name, WHOLE))


@pytest.mark.parametrize("name", ZOO)
def test_a_specimen_is_the_same_each_time_it_is_built(name: str, saves: Saves) -> None:
    first, second = saves.model_in(saves.stock(name, SHARDS)).state_dict(), ZOO[name].build().state_dict()

    assert bits_of(first) == bits_of(second)


@pytest.mark.parametrize("name", ZOO)
def test_no_two_stored_tensors_of_a_specimen_are_alike(name: str, saves: Saves) -> None:
    floating = [value for value in raw_tensors(saves.stock(name, SHARDS)).values() if "float" in value[0]]

    assert len(set(floating)) == len(floating)


def _change_a_bit(model: Any) -> None:
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight.view(torch.int32)[0, 0] ^= 1


def _untie(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())


CHANGES: dict[str, Callable[[Any], object]] = {
    "state dict transformer.h.0.attn.c_attn.weight": _change_a_bit,
    "ties": _untie,
    "parameters transformer.ln_f.weight": lambda model: model.transformer.ln_f.to(torch.float64),
    "parameters transformer.ln_f.bias": lambda model: model.transformer.ln_f.bias.requires_grad_(False),
    "training transformer.h.1.mlp.dropout": lambda model: model.transformer.h[1].mlp.dropout.train(),
    "config attn_pdrop": lambda model: model.config.update({"attn_pdrop": 0.9}),
    "generation config top_k": lambda model: model.generation_config.update(top_k=3),
    "model name_or_path": lambda model: setattr(model, "name_or_path", "elsewhere"),
    "config internals _commit_hash": lambda model: setattr(model.config, "_commit_hash", "0" * 40),
}
"""What is seen -> what is done to a loaded model."""


@pytest.mark.parametrize("seen", CHANGES)
def test_a_difference_is_seen(seen: str, saves: Saves) -> None:
    directory = saves.stock("gpt2")
    loaded = load(GPT2LMHeadModel, directory)

    CHANGES[seen](loaded.model)

    found = differences(facts_of_load(loaded, directory), saves.stock_facts("gpt2"))
    assert any(line.startswith(seen) for line in found), found


def test_zero_and_minus_zero_differ_and_nan_equals_itself() -> None:
    assert bits(torch.tensor([0.0])) != bits(torch.tensor([-0.0]))
    assert bits(torch.tensor(float("nan"))) == bits(torch.tensor(float("nan")))


def test_what_the_loading_report_says_is_compared(saves: Saves) -> None:
    directory = saves.stock("gpt2")
    loaded = load(GPT2LMHeadModel, directory)
    quiet = Loaded(loaded.model, loaded.info, [])
    loud = Loaded(loaded.model, {**loaded.info, "missing_keys": {"lm_head.weight"}}, ["CLASS LOAD REPORT"])

    found = differences(facts_of_load(loud, directory), facts_of_load(quiet, directory))

    assert [line.split(":")[0] for line in found] == ["loading info missing_keys", "log"]


def test_a_key_in_two_files_is_no_checkpoint(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file({"a": torch.zeros(1)}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)

    with pytest.raises(AssertionError, match="a lies in two files"):
        raw_tensors(tmp_path)
