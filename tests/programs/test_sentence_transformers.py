"""sentence-transformers: a SentenceTransformer around a model of ours, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertModel

import hfshard
from hfshard.training import CheckpointCallback, CheckpointManager
from tests.programs.models import SETTINGS, Bert, assert_ours, assert_same, bert, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

sentence_transformers: Any = pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")

SENTENCES = ["a cat sat", "there"]


def embedder(directory: Path, model: Any = None, **options: Any) -> Any:
    """Around the model in a directory; with a model, that is saved there first."""
    from sentence_transformers.sentence_transformer import modules as models

    if model is not None:
        model.save_pretrained(directory, **options)
        tokenizer().save_pretrained(directory)
    module = models.Transformer(str(directory))
    return sentence_transformers.SentenceTransformer(modules=[module, models.Pooling(8)], device="cpu")


def loaded(directory: Path) -> Any:
    return sentence_transformers.SentenceTransformer(str(directory), device="cpu")


def embeddings(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.encode(SENTENCES, convert_to_tensor=True, show_progress_bar=False)
    return found


def test_a_model_of_ours_is_saved_by_it_and_loaded_by_all(tmp_path: Path) -> None:
    model = bert()
    made = embedder(tmp_path / "bert", model, max_shard_size="6KB")
    assert type(made[0].model) is BertModel
    assert_same(made[0].model, model)
    before = embeddings(made)

    made[0].model = Bert.from_pretrained(tmp_path / "bert", verify="full")
    made.save(str(tmp_path / "out"))

    assert_ours(tmp_path / "out")
    assert torch.equal(embeddings(loaded(tmp_path / "out")), before)
    assert_same(BertModel.from_pretrained(tmp_path / "out"), model)


def trainer(model: Any, directory: Path) -> Any:
    from datasets import Dataset
    from sentence_transformers.losses import CosineSimilarityLoss

    rows = [{"first": f"a cat {word}", "second": "sat there", "score": 0.5} for word in ("sat", "there", "a", "cat")]
    settings = sentence_transformers.SentenceTransformerTrainingArguments(
        str(directory), max_steps=3, logging_strategy="no", **SETTINGS
    )
    data, loss = Dataset.from_list(rows), CosineSimilarityLoss(model)
    return sentence_transformers.SentenceTransformerTrainer(model=model, args=settings, train_dataset=data, loss=loss)


def test_its_trainer_resumes_exactly_through_the_callback(tmp_path: Path) -> None:
    models = []
    for seed, place in ((0, None), (1, str(tmp_path / "run" / "checkpoint-00000002"))):
        trained = trainer(embedder(tmp_path / "bert", bert(seed=seed)), tmp_path / "run")
        CheckpointCallback().attach(trained)
        trained.train(resume_from_checkpoint=place)
        models.append(trained.model)

    straight, resumed = models
    assert_same(resumed, straight)
    assert CheckpointManager(tmp_path / "run").verify() == {2: [], 3: []}


def test_under_install_it_saves_and_loads_through_hfshard(tmp_path: Path) -> None:
    embedder(tmp_path / "bert", bert(BertModel))
    with hfshard.install():
        made = embedder(tmp_path / "bert")
        made.save_pretrained(str(tmp_path / "out"))
        again = embeddings(loaded(tmp_path / "out"))

    assert_ours(tmp_path / "out")
    assert torch.equal(again, embeddings(made))
    assert torch.equal(embeddings(loaded(tmp_path / "out")), embeddings(made))
