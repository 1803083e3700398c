"""Adapters of PEFT, where it is installed: they are transformers' to save and to load, and hfshard hands them over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfshard
from tests.helpers.peft_versions import peft_of_transformers
from tests.models.conftest import Saves
from tests.zoo.compare import differences, facts_of_load, load
from tests.zoo.hub_cache import REPO, put_in_cache
from tests.zoo.mixin_classes import with_mixin
from tests.zoo.models import ZOO

pytestmark = pytest.mark.compat

peft = peft_of_transformers()

TARGETS = {"llama_untied": "q_proj", "mixtral": "v_proj", "bert": "query"}
COMMIT = "e" * 40


def save_adapter(name: str, model_class: Any, base: Path, directory: Path) -> None:
    """Put an adapter on a model, and save it."""
    model = model_class.from_pretrained(base)
    torch.manual_seed(3)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=[TARGETS[name]], init_lora_weights=False))
    model.save_pretrained(directory)


@pytest.fixture(params=TARGETS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def adapter(name: str, saves: Saves, tmp_path: Path) -> Path:
    save_adapter(name, ZOO[name].stock_class, saves.stock(name), tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_is_saved_as_transformers_saves_it(name: str, adapter: Path, saves: Saves, tmp_path: Path) -> None:
    save_adapter(name, with_mixin(ZOO[name].stock_class), saves.stock(name), tmp_path / "ours")

    ours, theirs = ({path.name: path.read_bytes() for path in at.iterdir()} for at in (tmp_path / "ours", adapter))
    assert differences(ours, theirs) == []


def test_an_adapter_is_loaded_with_its_base_model_as_transformers_loads_it(name: str, adapter: Path) -> None:
    stock_class = ZOO[name].stock_class
    theirs = facts_of_load(load(stock_class, adapter), adapter)

    ours = facts_of_load(load(with_mixin(stock_class), adapter), adapter)

    assert differences(ours, theirs) == []
    assert any("lora_A" in key for key in ours["state dict"])


def test_an_adapter_in_the_hubs_cache_is_loaded_as_by_transformers(name: str, adapter: Path, tmp_path: Path) -> None:
    put_in_cache(tmp_path / "cache", adapter, commit=COMMIT, refs={"main": COMMIT})
    stock_class, cache = ZOO[name].stock_class, tmp_path / "cache"
    theirs = facts_of_load(load(stock_class, REPO, cache_dir=cache))

    ours = facts_of_load(load(with_mixin(stock_class), REPO, cache_dir=cache))

    assert differences(ours, theirs) == []


@pytest.mark.parametrize("name", ["llama_untied"])
def test_an_adapter_is_loaded_through_an_auto_class_as_transformers_loads_it(name: str, adapter: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(adapter)

    ours = hfshard.load_model(AutoModelForCausalLM, adapter)

    assert type(ours) is type(theirs)
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value)
