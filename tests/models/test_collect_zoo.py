"""For every model of the zoo: hfshard saves and stock loads, stock saves and hfshard loads, and the files are alike."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from tests.models.conftest import SHARDS, WHOLE, Saves
from tests.zoo.compare import (
    INDEX,
    SINGLE_FILE,
    contents,
    differences,
    facts_of_model,
    file_differences,
    raw_tensors,
    read_json,
    small_files,
)
from tests.zoo.mixin_classes import with_mixin
from tests.zoo.models import ZOO
from tests.zoo.parameters import (
    every_layout,
    every_layout_by_representatives,
    every_layout_compat,
    every_model,
    representatives,
)

SHARD_BYTES = 20_000


@every_layout
def test_stock_loads_what_hfshard_saves_as_what_stock_saves(name: str, size: str, saves: Saves) -> None:
    assert saves.differences(ZOO[name].stock_class, saves.ours(name, size), name, size) == []


@every_layout_compat
def test_hfshard_loads_what_stock_saves_as_stock_does(name: str, size: str, saves: Saves) -> None:
    _, facts = saves.load_of_stock("ours", name, size)

    assert differences(facts, saves.stock_facts(name, size)) == []


@every_layout_by_representatives
def test_hfshard_loads_what_hfshard_saves_as_stock_does_what_stock_saves(name: str, size: str, saves: Saves) -> None:
    assert saves.differences(with_mixin(ZOO[name].stock_class), saves.ours(name, size), name, size) == []


@every_layout
def test_both_saves_hold_the_same_tensors_with_the_same_bytes(name: str, size: str, saves: Saves) -> None:
    ours, theirs = raw_tensors(saves.ours(name, size)), raw_tensors(saves.stock(name, size))

    assert differences({"file": ours}, {"file": theirs}) == []


@every_layout
def test_config_and_generation_config_are_transformers_byte_for_byte(name: str, size: str, saves: Saves) -> None:
    ours = saves.ours(name, size)

    assert small_files(ours) == small_files(saves.stock(name, size))
    assert read_json(ours / "config.json")["architectures"] == [ZOO[name].class_name]


@every_model
def test_the_index_counts_what_transformers_counts(name: str, saves: Saves) -> None:
    ours, theirs = (read_json(directory / INDEX) for directory in (saves.ours(name, SHARDS), saves.stock(name, SHARDS)))

    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert {key: ours["metadata"][key] for key in theirs["metadata"]} == theirs["metadata"]


@every_layout
def test_a_save_leaves_the_weights_and_the_small_files_and_nothing_else(name: str, size: str, saves: Saves) -> None:
    directory = saves.ours(name, size)
    weights = {SINGLE_FILE} if size == WHOLE else {INDEX, *read_json(directory / INDEX)["weight_map"].values()}

    assert {path.name for path in directory.iterdir()} == weights | set(small_files(directory))


@every_model
def test_no_shard_is_over_the_limit_unless_it_holds_one_tensor(name: str, saves: Saves) -> None:
    for path in saves.ours(name, SHARDS).glob("*.safetensors"):
        assert path.stat().st_size <= SHARD_BYTES or len(load_file(path)) == 1


@every_model
def test_a_save_leaves_the_model_as_transformers_save_does(name: str, saves: Saves) -> None:
    ours, theirs = (saves.model_in(directory) for directory in (saves.ours(name, SHARDS), saves.stock(name, SHARDS)))

    assert type(ours) is with_mixin(ZOO[name].stock_class) and type(theirs) is ZOO[name].stock_class
    assert differences(facts_of_model(ours), facts_of_model(theirs)) == []


@every_model
def test_a_model_that_hfshard_loaded_is_saved_again_byte_for_byte(name: str, saves: Saves, tmp_path: Path) -> None:
    for who in ("ours", "stock"):
        loaded, _ = saves.load_of_stock(who, name, SHARDS)
        loaded.model.save_pretrained(tmp_path / who, max_shard_size=SHARDS)

    assert file_differences(tmp_path / "ours", tmp_path / "stock") == []


@representatives
def test_a_loaded_model_can_be_trained_without_changing_its_files(name: str, saves: Saves) -> None:
    directory = saves.ours(name, SHARDS)
    before = contents(directory)
    model = with_mixin(ZOO[name].stock_class).from_pretrained(directory)

    for parameter in model.parameters():
        parameter.data.add_(1)

    assert contents(directory) == before
