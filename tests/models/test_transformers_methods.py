"""The mixin in a user's hands: the order of bases, Trainer, threads, models on many ranks, arguments of older code."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import hfshard
from hfshard.errors import InvalidArgumentError, SaveDirectoryError

pytestmark = pytest.mark.compat


class Mine(hfshard.ShardedModelMixin, GPT2LMHeadModel):
    """A causal language model under a name that transformers does not know."""


def _config() -> GPT2Config:
    return GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=16)


def test_the_mixin_behind_the_model_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(InvalidArgumentError, match="must have ShardedModelMixin before"):
        type("Wrong", (GPT2LMHeadModel, hfshard.ShardedModelMixin), {})


@pytest.mark.filterwarnings("ignore")  # Trainer's own
def test_trainer_smooths_labels_as_it_does_for_the_stock_class(tmp_path: Path) -> None:
    torch.manual_seed(0)
    stock = GPT2LMHeadModel(_config())
    mine = Mine(_config())
    mine.load_state_dict(stock.state_dict())
    tokens = torch.arange(16) % 32
    data = [{"input_ids": tokens, "labels": tokens}] * 2
    options = TrainingArguments(
        output_dir=str(tmp_path), label_smoothing_factor=0.1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    losses = [Trainer(model, options, eval_dataset=data).evaluate()["eval_loss"] for model in (stock, mine)]
    assert losses[0] == losses[1]


def test_models_that_threads_load_at_once_are_whole(tmp_path: Path) -> None:
    model = Mine(_config())
    model.save_pretrained(tmp_path)

    class Fresh(hfshard.ShardedModelMixin, GPT2LMHeadModel):
        pass

    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: Fresh.from_pretrained(tmp_path), range(12)))

    assert {type(one) for one in loaded} == {Fresh}
    for one in loaded:
        assert one.lm_head.weight is one.transformer.wte.weight
        assert torch.equal(one.lm_head.weight, model.lm_head.weight)


def test_arguments_of_older_code_are_taken(tmp_path: Path) -> None:
    Mine(_config()).save_pretrained(tmp_path, safe_serialization=True, save_function=torch.save)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "generation_config.json", "model.safetensors"]
    with pytest.raises(InvalidArgumentError, match="does not write pickles: leave out safe_serialization"):
        Mine(_config()).save_pretrained(tmp_path / "new", safe_serialization=False)
    assert not (tmp_path / "new").exists()


def test_metadata_that_are_no_json_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    for bad in (float("nan"), object(), {1, 2}):
        with pytest.raises(InvalidArgumentError, match="metadata must be JSON"):
            hfshard.save_state_dict({"a": torch.zeros(1)}, tmp_path / "new", metadata={"note": bad})
    assert not (tmp_path / "new").exists()


def test_a_number_of_writers_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in ("x", "0", "-1", "1.5"):
        monkeypatch.setenv("HFSHARD_WRITERS", bad)
        with pytest.raises(InvalidArgumentError, match="HFSHARD_WRITERS"):
            hfshard.save_state_dict({"a": torch.zeros(1)}, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_link_to_nothing_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(SaveDirectoryError, match="is a broken link"):
        hfshard.save_state_dict({"a": torch.zeros(1)}, tmp_path / "link")


def test_a_changed_working_directory_leads_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    model = Mine(_config())
    kept = os.open

    def open_elsewhere(*arguments: Any, **keywords: Any) -> int:
        os.chdir(there)  # as another thread does
        return kept(*arguments, **keywords)

    monkeypatch.setattr(os, "open", open_elsewhere)
    monkeypatch.chdir(here)
    model.save_pretrained("out", max_shard_size="20KB")
    monkeypatch.chdir(here)
    model.push_to_hub("./hub")
    monkeypatch.chdir(here)
    loaded = Mine.from_pretrained("out")
    monkeypatch.setattr(os, "open", kept)

    assert not list(there.iterdir())
    assert sorted(path.name for path in here.iterdir()) == ["hub", "out"]
    assert loaded.config.name_or_path == loaded.name_or_path == "out"  # as it was given
    [snapshot] = (here / "hub" / "snapshots").iterdir()
    assert GPT2LMHeadModel.from_pretrained(snapshot)
