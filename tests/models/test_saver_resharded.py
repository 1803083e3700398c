"""Checkpoints of the zoo that were re-sharded or converted: stock transformers and hfshard load them as before."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from tests.models.conftest import SHARDS, WHOLE, Saves
from tests.models.test_model_builder_directories import write_pickle
from tests.saving.helpers import files_in
from tests.zoo.compare import Facts, differences, facts_of_load, load
from tests.zoo.mixin_classes import with_mixin
from tests.zoo.models import ZOO
from tests.zoo.parameters import REPRESENTATIVES, parameters

NAMES = (
    "bert_pretraining", "gpt2", "llama_tied", "llama_mixed_dtypes", "llama_generation", "mixtral", "ernie_bf16", "t5",
    "whisper", "levit",
)  # fmt: skip
"""Tied, untied, mixed dtypes, experts that are converted, encoder-decoders, int buffers."""
every_name = pytest.mark.parametrize("name", parameters(NAMES, REPRESENTATIVES))
FEW = {"gpt2", "llama_tied", "llama_mixed_dtypes", "mixtral", "levit"}
_OTHERS = [name for name in NAMES if name not in FEW]
few_names = pytest.mark.parametrize("name", parameters(NAMES, REPRESENTATIVES & FEW, _OTHERS))
"""For files that are changed in place, where what is in them matters less: the others run with --slow."""


TIED = ("bert_pretraining", "llama_tied", "t5")


def unlike(name: str, one: Path, want: Facts) -> list[str]:
    """How what stock transformers and hfshard load differs from what is wanted."""
    stock_class = ZOO[name].stock_class
    found = differences(facts_of_load(load(stock_class, one), one), want)
    return found + differences(facts_of_load(load(with_mixin(stock_class), one), one), want)


@pytest.mark.parametrize(("old", "new"), [(SHARDS, WHOLE), (WHOLE, SHARDS)], ids=["merged", "split"])
@every_name
def test_a_resharded_model_is_the_saved_one(name: str, old: str, new: str, saves: Saves, tmp_path: Path) -> None:
    hfshard.reshard_checkpoint(saves.ours(name, old), tmp_path / "new", new)
    assert unlike(name, tmp_path / "new", saves.stock_facts(name)) == []
    assert hfshard.verify_checkpoint(tmp_path / "new").ok
    # Of one dtype, nothing but parameters, and no tensor in the middle that is too large for the small files.
    if name in ("llama_tied", "llama_generation") or (name in ("gpt2", "t5") and new == SHARDS):
        assert files_in(tmp_path / "new") == files_in(saves.ours(name, new))


@few_names
def test_a_stock_checkpoint_is_resharded_in_place(name: str, saves: Saves, tmp_path: Path) -> None:
    for number, size in enumerate((WHOLE, SHARDS)):
        place = tmp_path / str(number)
        shutil.copytree(saves.stock(name, size), place)
        hfshard.reshard_checkpoint(place, place, "50KB", low_disk=size == SHARDS)
        assert unlike(name, place, saves.stock_facts(name)) == []
        assert hfshard.verify_checkpoint(place).ok


@pytest.mark.parametrize("name", parameters((*TIED, "gpt2", "whisper"), TIED, ("gpt2", "whisper")))
def test_pickles_of_a_tied_model_are_converted_in_place(name: str, tmp_path: Path) -> None:
    for shards in (1, 3):
        place = tmp_path / str(shards)
        write_pickle(place, name, shards=shards)
        want = facts_of_load(load(ZOO[name].stock_class, place), place)
        hfshard.reshard_checkpoint(place, place, "50KB")
        assert not list(place.glob("*.bin*"))
        assert unlike(name, place, want) == []


@pytest.mark.compat
@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral"])
def test_a_cast_model_is_the_saved_cast_one(name: str, saves: Saves, tmp_path: Path) -> None:
    hfshard.reshard_checkpoint(saves.ours(name, SHARDS), tmp_path / "new", WHOLE, dtype="bfloat16")
    model = load(ZOO[name].stock_class, tmp_path / "new").model
    stored: Any = load(ZOO[name].stock_class, saves.ours(name)).model
    want = stored.to(torch.bfloat16)
    assert model.dtype == model.config.dtype == torch.bfloat16
    assert all(torch.equal(model.state_dict()[key], value) for key, value in want.state_dict().items())
