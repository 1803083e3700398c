"""A plain module saved with huggingface_hub's mixin and with ours: the same files, and each loads the other's."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, PyTorchModelHubMixin
from torch import nn

import hfshard
from tests.models.nets import CASES, Inner, Outer, Simple, build, ours, theirs
from tests.saving.helpers import files_in
from tests.zoo.compare import contents

pytestmark = pytest.mark.compat


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, others = one.state_dict(), other.state_dict()
    return list(mine) == list(others) and all(torch.equal(mine[name], others[name]) for name in mine)


@pytest.mark.parametrize("case", CASES)
def test_config_and_card_are_theirs_byte_for_byte_and_each_loads_the_others(case: str, tmp_path: Path) -> None:
    mine, stock = build(ours(case), case), build(theirs(case), case)
    assert mine._hub_mixin_config == stock._hub_mixin_config
    mine.save_pretrained(tmp_path / "ours")
    stock.save_pretrained(tmp_path / "theirs")

    written, expected = files_in(tmp_path / "ours"), contents(tmp_path / "theirs")
    assert written.keys() == expected.keys()
    for name in expected.keys() - {"model.safetensors"}:
        assert written[name] == expected[name]
    stock_config = theirs(case).from_pretrained(tmp_path / "theirs")._hub_mixin_config
    for place in ("ours", "theirs"):
        for model_class in (ours(case), theirs(case)):
            loaded = model_class.from_pretrained(tmp_path / place)
            assert same(loaded, mine)
            assert loaded.seen == theirs(case).from_pretrained(tmp_path / "theirs").seen
            assert loaded._hub_mixin_config == stock_config
            assert not loaded.training


def test_a_dataclass_in_a_dataclass_is_a_dict_for_both(tmp_path: Path) -> None:
    build(ours("dataclass"), "dataclass").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"inner": {"act": "relu", "heads": 3}, "width": 6}
    for model_class in (ours("dataclass"), theirs("dataclass")):
        assert model_class.from_pretrained(tmp_path).seen == Outer(6, {"act": "relu", "heads": 3})  # type: ignore[arg-type]


def test_arguments_of_from_pretrained_go_before_those_of_the_config(tmp_path: Path) -> None:
    ours("given")(width=5).save_pretrained(tmp_path)
    for model_class in (ours("given"), theirs("given")):
        loaded = model_class.from_pretrained(tmp_path, name="other")
        assert loaded.seen[:2] == (5, "other")
        assert loaded._hub_mixin_config["name"] == "other"


@pytest.mark.parametrize("config", [{"a": 1, "b": [1]}, Inner(5)])
def test_a_config_that_is_given_is_saved_in_place_of_the_noted_one(config: Any, tmp_path: Path) -> None:
    ours("defaults")().save_pretrained(tmp_path / "ours", config=config)
    theirs("defaults")().save_pretrained(tmp_path / "theirs", config=config)
    files = [(tmp_path / name / "config.json").read_bytes() for name in ("ours", "theirs")]
    assert files[0] == files[1]


def test_the_card_takes_values_and_one_that_is_there_stays(tmp_path: Path) -> None:
    class Carded(hfshard.ShardedModelMixin, nn.Module, model_card_template="---\n{{ card_data }}\n---\n{{ said }}\n"):
        pass

    Carded().save_pretrained(tmp_path, model_card_kwargs={"said": "42"})
    card = ModelCard.load(tmp_path / "README.md")
    assert card.text.strip() == "42"
    assert card.data.tags == ["model_hub_mixin", "pytorch_model_hub_mixin"]
    (tmp_path / "README.md").write_text("mine")
    Carded().save_pretrained(tmp_path, model_card_kwargs={"said": "43"})
    assert (tmp_path / "README.md").read_text() == "mine"


def test_tags_are_inherited_and_siblings_share_none() -> None:
    class Parent(hfshard.ShardedModelMixin, nn.Module, tags=["p"], library_name="lib", repo_url="https://r"):
        pass

    class One(Parent, tags=["one"]):
        pass

    class Two(Parent, tags=["two"]):
        pass

    info = One._hub_mixin_info
    assert info.model_card_data.tags == ["model_hub_mixin", "one", "p", "pytorch_model_hub_mixin"]
    assert (info.model_card_data.library_name, info.repo_url) == ("lib", "https://r")
    assert Two._hub_mixin_info.model_card_data.tags == ["model_hub_mixin", "p", "pytorch_model_hub_mixin", "two"]


def test_either_order_of_bases_and_a_class_with_their_mixin_already(tmp_path: Path) -> None:
    class Behind(Simple, hfshard.ShardedModelMixin):
        pass

    class Both(hfshard.ShardedModelMixin, theirs("defaults")):  # type: ignore[misc]
        pass

    for number, model_class in enumerate((Behind, Both)):
        made: Any = model_class
        made(width=6).save_pretrained(tmp_path / str(number), max_shard_size=300)
        assert (tmp_path / str(number) / "model.safetensors.index.json").exists()
        assert made.from_pretrained(tmp_path / str(number)).seen[0] == 6
        assert isinstance(made(), PyTorchModelHubMixin)


def test_copies_and_pickles_of_a_model_keep_its_config() -> None:
    model = ours("defaults")(width=6)
    assert copy.deepcopy(model)._hub_mixin_config["width"] == 6
    assert "post_init" not in dir(nn.Module) and not hasattr(model, "post_init")
    assert not hasattr(type(model), "is_custom_code")


class Pickled(hfshard.ShardedModelMixin, Simple):
    """In a module, for pickle."""


def test_a_pickled_model_keeps_its_config() -> None:
    model: Any = Pickled(width=6)
    again = pickle.loads(pickle.dumps(model))
    assert again._hub_mixin_config == model._hub_mixin_config
    assert same(again, model)


def test_a_pickle_beside_the_config_is_read_with_weights_only(tmp_path: Path) -> None:
    model = ours("defaults")()
    (tmp_path / "config.json").write_text(json.dumps({"width": 4}))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert same(ours("defaults").from_pretrained(tmp_path), model)
    torch.save({"layer.weight": Simple}, tmp_path / "pytorch_model.bin")
    with pytest.raises(hfshard.errors.UnsafePickleError):
        ours("defaults").from_pretrained(tmp_path)
