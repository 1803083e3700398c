"""transformers models that DeepSpeed ZeRO-3 has partitioned are refused; what Trainer has gathered is saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertModel, LlamaConfig, LlamaForCausalLM

import hfshard
from hfshard.errors import InvalidArgumentError, UnstorableTensorError
from hfshard.training import CheckpointManager, TrainingState
from tests.helpers.peft_versions import peft_of_transformers
from tests.helpers.tiny_bert import Bert, bert
from tests.tensors.zero3 import gathered, partition


class OwnSave(Bert):
    """A class with a `save_pretrained` of its own."""

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        super().save_pretrained(*args, **kwargs)


@pytest.fixture(params=[Bert, OwnSave, BertModel], ids=["mixin", "own save_pretrained", "install"])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A partitioned model, of a class with the mixin, or of transformers' own while hfshard is installed."""
    built = bert(3, cls=request.param)
    partition(built)
    with hfshard.install(quiet=True) if request.param is BertModel else nullcontext():
        yield built


def with_adapter() -> Any:
    config = LlamaConfig(vocab_size=6, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    built: Any = LlamaForCausalLM(config)
    built.add_adapter(peft_of_transformers().LoraConfig(r=2, target_modules=["q_proj"]))
    partition(built)
    return built


def gathered_weights(model: Any) -> dict[str, torch.Tensor]:
    with gathered(model):
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def files_in(place: Path) -> list[str]:
    return sorted(path.name for path in place.rglob("*") if path.is_file())


CALLS: dict[str, Callable[[Any, Path], object]] = {
    "save_model": lambda model, out: hfshard.save_model(model, out),
    "save_pretrained": lambda model, out: model.save_pretrained(out),
    "and push": lambda model, out: model.save_pretrained(out, push_to_hub=True, repo_id=str(out / "hub")),
    "push_to_hub": lambda model, out: model.push_to_hub(str(out / "hub")),
    "distributed_checkpoint": lambda model, out: model.save_pretrained(out, distributed_checkpoint=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_model_is_not_saved(model: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(UnstorableTensorError, match=r"Cannot save 'embeddings\.word_embeddings\.weight' and 22 more"):
        CALLS[name](model, tmp_path)

    assert files_in(tmp_path) == []


@pytest.mark.compat
@pytest.mark.parametrize("name", ["save_model", "save_pretrained", "push_to_hub"])
def test_an_adapter_which_transformers_saves_is_refused(name: str, tmp_path: Path) -> None:
    model = with_adapter()

    with hfshard.install(quiet=True), pytest.raises(UnstorableTensorError, match="DeepSpeed ZeRO-3 has partitioned"):
        CALLS[name](model, tmp_path)

    assert files_in(tmp_path) == []


def test_a_run_is_neither_saved_nor_restored(model: Any, tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)

    for call in (manager.save, lambda _, state: manager.restore_latest(state)):
        with pytest.raises(InvalidArgumentError, match="Cannot save or restore a run with"):
            call(1, TrainingState(model=model))

    assert files_in(tmp_path) == []


def test_nothing_is_loaded_into_a_model(model: Any, tmp_path: Path) -> None:
    hfshard.save_model(bert(5), tmp_path)

    with pytest.raises(InvalidArgumentError, match=r"Cannot load into 'embeddings\.word_embeddings\.weight' and 22 "):
        hfshard.load_model(model, tmp_path)


def test_a_model_that_is_born_partitioned_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a block of `deepspeed.zero.Init()`, which wraps constructors."""
    hfshard.save_model(bert(5), tmp_path)
    construct = BertModel.__init__

    def construct_partitioned(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        partition(self)

    monkeypatch.setattr(BertModel, "__init__", construct_partitioned)

    with pytest.raises(InvalidArgumentError, match=r"outside of deepspeed\.zero\.Init\(\)"):
        hfshard.load_model(BertModel, tmp_path)


def test_what_was_gathered_is_saved_for_a_partitioned_model(model: Any, tmp_path: Path) -> None:
    """Trainer and Accelerate gather on the first rank, and pass the weights."""
    weights = gathered_weights(model)

    hfshard.save_model(model, tmp_path / "function", state_dict=weights, max_shard_size=2000)
    model.save_pretrained(tmp_path / "method", state_dict=weights, max_shard_size=2000)

    for place in (tmp_path / "function", tmp_path / "method"):
        loaded = hfshard.load_state_dict(place)
        assert len(loaded) == 23
        assert {float(value) for tensor in loaded.values() for value in tensor.unique()} == {3}
        index = json.loads((place / "model.safetensors.index.json").read_bytes())
        assert index["metadata"]["total_parameters"] == 848  # each of the tiny BERT counted once


def test_a_gathered_model_is_saved(model: Any, tmp_path: Path) -> None:
    with gathered(model):
        model.save_pretrained(tmp_path)

    assert hfshard.load_state_dict(tmp_path)["embeddings.word_embeddings.weight"].shape == (10, 8)


@pytest.mark.compat
def test_an_adapter_that_was_gathered_is_saved(tmp_path: Path) -> None:
    model = with_adapter()

    with hfshard.install(quiet=True):
        model.save_pretrained(tmp_path, state_dict=gathered_weights(model))

    (_, lora) = sorted(hfshard.load_state_dict(tmp_path / "adapter_model.safetensors").items())
    assert lora[1].shape == (4, 2)


@pytest.mark.parametrize("state_dict", [None, {}])
def test_ranks_and_trainers_that_save_no_weights_are_not_refused(model: Any, state_dict: Any, tmp_path: Path) -> None:
    """Other ranks than the first pass None; Trainer that is not to gather passes an empty state dict."""
    model.save_pretrained(tmp_path, state_dict=state_dict, is_main_process=state_dict is not None)

    assert files_in(tmp_path) == (["config.json"] if state_dict is not None else [])


@pytest.mark.compat
def test_a_rank_that_saves_no_adapter_is_not_refused(tmp_path: Path) -> None:
    model = with_adapter()

    with hfshard.install(quiet=True):
        model.save_pretrained(tmp_path, is_main_process=False)

    assert "adapter_model.safetensors" not in files_in(tmp_path)
