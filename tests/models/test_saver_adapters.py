"""hfshard.save_model of a model with an adapter saves what its save_pretrained does: the adapter's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hfshard
from hfshard.errors import InvalidArgumentError
from tests.helpers.peft_versions import peft_of_transformers

pytestmark = pytest.mark.compat

peft = peft_of_transformers()


class Llama(hfshard.ShardedModelMixin, LlamaForCausalLM):
    """As a user writes it."""


def _with_adapter(model_class: type[LlamaForCausalLM], base: Path) -> Any:
    config = LlamaConfig(vocab_size=6, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    hfshard.save_model(LlamaForCausalLM(config), base)
    model: Any = model_class.from_pretrained(base)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    return model


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("model_class", [LlamaForCausalLM, Llama])
def test_the_adapter_is_saved_as_by_transformers(tmp_path: Path, model_class: type[LlamaForCausalLM]) -> None:
    model = _with_adapter(model_class, tmp_path / "base")
    assert hfshard.save_model(torch.nn.DataParallel(model), tmp_path / "ours") is None
    model.save_pretrained(tmp_path / "theirs")

    ours, theirs = (_contents(tmp_path / name) for name in ("ours", "theirs"))
    assert set(ours) == {"adapter_config.json", "adapter_model.safetensors", "generation_config.json"}
    assert ours == theirs

    loaded = hfshard.load_model(model_class, tmp_path / "ours")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_metadata_for_an_adapter_is_refused(tmp_path: Path) -> None:
    model = _with_adapter(LlamaForCausalLM, tmp_path / "base")
    with pytest.raises(InvalidArgumentError, match="leave out metadata="):
        hfshard.save_model(model, tmp_path / "ours", metadata={"step": 1})
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("model_class", [LlamaForCausalLM, Llama])
def test_an_adapter_goes_into_no_store(
    tmp_path: Path, model_class: type[LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _with_adapter(model_class, tmp_path / "base")
    monkeypatch.chdir(tmp_path)

    with pytest.raises(InvalidArgumentError, match="goes into directories only, not to 's3://bucket/adapter'"):
        hfshard.save_model(model, "s3://bucket/adapter")

    assert [path.name for path in tmp_path.iterdir()] == ["base"]
