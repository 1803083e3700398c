"""Wav2Vec2's adapters of languages lie beside the model, and are loaded while it is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

import hfshard

pytestmark = pytest.mark.compat


class SpeechModel(hfshard.ShardedModelMixin, Wav2Vec2ForCTC):
    """As a user writes it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose adapter is full of zeros, and beside it that of English, full of ones."""
    folder = tmp_path_factory.mktemp("speech")
    config = Wav2Vec2Config(
        vocab_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, conv_dim=(8,),
        conv_stride=(5,), conv_kernel=(10,), num_conv_pos_embeddings=2,
        num_conv_pos_embedding_groups=1, adapter_attn_dim=2, do_stable_layer_norm=True,
    )  # fmt: skip
    model: Any = Wav2Vec2ForCTC(config)
    english = {key: torch.ones_like(value) for key, value in model._get_adapters().items()}
    save_file(english, folder / "adapter.eng.safetensors")
    hfshard.save_model(model, folder)
    return folder


def test_the_adapter_is_looked_for_beside_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    stock = Wav2Vec2ForCTC.from_pretrained(folder, target_lang="eng")
    for load in (SpeechModel.from_pretrained, lambda *args, **more: hfshard.load_model(Wav2Vec2ForCTC, *args, **more)):
        model = load(folder.name, target_lang="eng")

        assert all(torch.equal(value, stock.state_dict()[name]) for name, value in model.state_dict().items())
        assert (model.lm_head.weight == 1).all()
        assert model.config.name_or_path == model.name_or_path == folder.name


def test_a_model_in_a_directory_hub_finds_its_adapter_there(folder: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    hfshard.push_checkpoint(folder, hub)
    model = SpeechModel.from_pretrained(hub, target_lang="eng")
    assert (model.lm_head.weight == 1).all()
    assert model.name_or_path == str(hub)
