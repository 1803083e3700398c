"""For models of the zoo: where hfshard is installed, stock classes save and load what they do without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModel

import hfshard
from tests.models.conftest import SHARDS, WHOLE, Saves
from tests.zoo.compare import (
    INDEX,
    differences,
    facts_of_load,
    facts_of_model,
    load,
    raw_tensors,
    read_json,
    small_files,
)
from tests.zoo.models import ZOO

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("uninstalled")]
QUICK = ("t5", "mixtral", "llava")
"""Ties, fused experts, a composite with converted names: what each run looks at; the others by --slow."""
CUT_FROM_ONE = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3")
"""Stock puts all experts that it cuts from one tensor into one file, however large that gets: there shards differ."""
every_model = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ZOO]
)


@every_model
def test_an_installed_hfshard_does_what_stock_does(name: str, saves: Saves, tmp_path: Path) -> None:
    specimen = ZOO[name]
    stock, stock_facts = saves.stock(name, SHARDS), saves.stock_facts(name, SHARDS)
    whole = saves.stock(name, WHOLE)
    ours, theirs = specimen.build(), specimen.build()
    theirs.save_pretrained(tmp_path / "theirs")
    specimen.stock_class.from_pretrained(stock).save_pretrained(tmp_path / "theirs again")

    with hfshard.install(verify="full", quiet=True):
        ours.save_pretrained(tmp_path / "shards", max_shard_size=SHARDS)
        ours.save_pretrained(tmp_path / "ours")
        loads = [load(specimen.stock_class, tmp_path / "shards"), load(specimen.stock_class, tmp_path / "ours")]
    with hfshard.install(quiet=True):
        loads.append(load(specimen.stock_class, stock))
        loads[-1].model.save_pretrained(tmp_path / "again")

    index, stock_index = read_json(tmp_path / "shards" / INDEX), read_json(stock / INDEX)
    assert "hfshard" in index["metadata"] and "hfshard" not in stock_index["metadata"]
    assert (index["weight_map"] == stock_index["weight_map"]) == (name not in CUT_FROM_ONE)
    for mine, other in (("ours", whole), ("shards", whole), ("again", tmp_path / "theirs again")):
        assert differences({"file": raw_tensors(tmp_path / mine)}, {"file": raw_tensors(other)}) == []
        assert small_files(tmp_path / mine) == small_files(other)
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == sorted(path.name for path in whole.iterdir())
    assert differences(facts_of_model(ours), facts_of_model(theirs)) == []
    for loaded, place in zip(loads, (tmp_path / "shards", tmp_path / "ours", stock), strict=True):
        assert differences(facts_of_load(loaded, place), stock_facts) == []


@every_model
def test_auto_model_builds_the_same_base_model(name: str, saves: Saves) -> None:
    stock = saves.stock(name, SHARDS)
    try:
        theirs = facts_of_load(load(AutoModel, stock), stock)
    except ValueError:
        pytest.skip("no AutoModel knows its config")

    with hfshard.install(quiet=True):
        ours = facts_of_load(load(AutoModel, stock), stock)

    assert differences(ours, theirs) == []
