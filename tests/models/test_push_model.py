"""Models that are pushed from memory, or by way of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate import cpu_offload

from hfshard.errors import UnknownArgumentError
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.models.push_model import merge_tags
from tests.helpers.tiny_bert import Bert, bert, value_of

pytestmark = pytest.mark.compat


@pytest.mark.parametrize(
    "argument", [{"state_dict": {}}, {"is_main_process": False}, {"checksum": None}, {"save_directory": "x"}]
)
def test_push_of_a_model_refuses_what_it_does_not_take(argument: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(UnknownArgumentError):
        bert(1).push_to_hub(str(tmp_path / "hub"), **argument)
    assert not (tmp_path / "hub").exists()


def test_tags_are_merged_in_their_order() -> None:
    assert merge_tags(None, []) == []
    assert merge_tags("one", ["two", "one"], ("three",)) == ["one", "two", "three"]
    assert merge_tags([{"base": "bert"}, "x", {"base": "bert"}], "y") == [{"base": "bert"}, "x", "y"]


def offloaded(value: float) -> Any:
    """A model that only transformers can collect: accelerate keeps one of its parts on the CPU, away from the rest."""
    model: Any = bert(value)
    cpu_offload(model.pooler)
    model.hf_device_map = {"embeddings": 0, "encoder": 0, "pooler": "cpu"}
    return model


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_model_that_transformers_collects_is_one_commit_with_deletes_and_variant(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    bert(1).push_to_hub(str(hub))
    first = DirectoryHub.open(hub).resolve()
    offloaded(2).push_to_hub(str(hub), variant="fp16", max_shard_size=10**9)
    offloaded(3).push_to_hub(str(hub), max_shard_size=1000)
    tree = DirectoryHub.open(hub).tree()
    assert tree is not None
    assert "model.safetensors" not in tree.files
    assert {"model.fp16.safetensors", "model.safetensors.index.json", "README.md"} <= tree.files.keys()
    assert value_of(Bert.from_pretrained(str(hub))) == 3
    assert value_of(Bert.from_pretrained(str(hub), variant="fp16")) == 2
    assert value_of(Bert.from_pretrained(str(hub), revision=first)) == 1
