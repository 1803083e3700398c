"""The comparison itself: stock transformers is equal to itself, and each kind of difference is seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel, PreTrainedModel

from tests.models.conftest import SHARDS, WHOLE, Saves
from tests.zoo.compare import Loaded, bits, differences, facts_of_load, load, raw_tensors
from tests.zoo.models import ZOO
from tests.zoo.parameters import every_model_by_representatives


@every_model_by_representatives  # marks some compat
def test_stock_is_equal_to_itself_loaded_whole_or_in_shards(name: str, saves: Saves) -> None:
    directory = saves.stock(name, SHARDS)

    again = facts_of_load(load(ZOO[name].stock_class, directory), directory)

    assert differences(again, saves.stock_facts(name, WHOLE)) == []
    assert raw_tensors(directory) == raw_tensors(saves.stock(name, WHOLE))


@pytest.mark.parametrize("name", ZOO)
def test_a_specimen_is_the_same_each_time_it_is_built(name: str, saves: Saves) -> None:
    first, second = saves.model_in(saves.stock(name, SHARDS)).state_dict(), ZOO[name].build().state_dict()

    assert {key: bits(value) for key, value in first.items()} == {key: bits(value) for key, value in second.items()}


@pytest.mark.parametrize("name", ZOO)
def test_no_two_stored_tensors_of_a_specimen_are_alike(name: str, saves: Saves) -> None:
    floating = [value for value in raw_tensors(saves.stock(name, SHARDS)).values() if "float" in value[0]]

    assert len(set(floating)) == len(floating)


def _change_a_bit(model: Any) -> None:
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight.view(torch.int32)[0, 0] ^= 1


def _untie(model: PreTrainedModel) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())


def _cast(model: Any) -> None:
    model.transformer.ln_f.to(torch.float64)


def _freeze(model: Any) -> None:
    model.transformer.ln_f.bias.requires_grad_(False)


def _train_one(model: Any) -> None:
    model.transformer.h[1].mlp.dropout.train()


def _change_config(model: PreTrainedModel) -> None:
    model.config.attn_pdrop = 0.9


def _change_generation(model: PreTrainedModel) -> None:
    model.generation_config.top_k = 3


def _rename(model: PreTrainedModel) -> None:
    model.name_or_path = "elsewhere"


def _set_commit(model: PreTrainedModel) -> None:
    model.config._commit_hash = "0" * 40


CHANGES: list[tuple[Callable[[PreTrainedModel], None], str]] = [
    (_change_a_bit, "state dict transformer.h.0.attn.c_attn.weight"),
    (_untie, "ties"),
    (_cast, "parameters transformer.ln_f.weight"),
    (_freeze, "parameters transformer.ln_f.bias"),
    (_train_one, "training transformer.h.1.mlp.dropout"),
    (_change_config, "config attn_pdrop"),
    (_change_generation, "generation config top_k"),
    (_rename, "model name_or_path"),
    (_set_commit, "config internals _commit_hash"),
]


@pytest.mark.parametrize(("change", "seen"), CHANGES, ids=lambda value: getattr(value, "__name__", None))
def test_a_difference_is_seen(change: Callable[[PreTrainedModel], None], seen: str, saves: Saves) -> None:
    directory = saves.stock("gpt2")
    loaded = load(GPT2LMHeadModel, directory)

    change(loaded.model)

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
    from safetensors.torch import save_file

    for number in (1, 2):
        save_file({"a": torch.zeros(1)}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)

    with pytest.raises(AssertionError, match="a lies in two files"):
        raw_tensors(tmp_path)
