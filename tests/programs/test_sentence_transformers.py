"""sentence-transformers: a SentenceTransformer around a model of ours, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertModel

import hfshard
from tests.programs.models import Bert, assert_ours, assert_same, bert, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

sentence_transformers: Any = pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")

SENTENCES = ["a cat sat", "there"]


def embedder(directory: Path) -> Any:
    """Around the model in a directory."""
    from sentence_transformers.sentence_transformer import modules as models

    module = models.Transformer(str(directory))
    return sentence_transformers.SentenceTransformer(modules=[module, models.Pooling(8)], device="cpu")


def embeddings(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.encode(SENTENCES, convert_to_tensor=True, show_progress_bar=False)
    return found


def test_a_model_of_ours_is_saved_by_it_and_loaded_by_all(tmp_path: Path) -> None:
    model = bert()
    model.save_pretrained(tmp_path / "bert", max_shard_size="6KB")
    tokenizer().save_pretrained(tmp_path / "bert")
    made = embedder(tmp_path / "bert")
    assert type(made[0].model) is BertModel
    assert_same(made[0].model, model)
    before = embeddings(made)

    made[0].model = Bert.from_pretrained(tmp_path / "bert", verify="full")
    made.save(str(tmp_path / "out"))

    assert_ours(tmp_path / "out")
    loaded = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert torch.equal(embeddings(loaded), before)
    assert_same(BertModel.from_pretrained(tmp_path / "out"), model)


def test_under_install_it_saves_and_loads_through_hfshard(tmp_path: Path) -> None:
    model = bert(BertModel)
    model.save_pretrained(tmp_path / "bert")
    tokenizer().save_pretrained(tmp_path / "bert")
    with hfshard.install():
        made = embedder(tmp_path / "bert")
        made.save_pretrained(str(tmp_path / "out"))
        loaded = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), device="cpu")

    assert_ours(tmp_path / "out")
    assert torch.equal(embeddings(loaded), embeddings(made))
    stock = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert torch.equal(embeddings(stock), embeddings(made))
