"""Tokenizers, processors and configs next to the model in a store: sent where hfshard is installed, as is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    BertConfig,
    BertModel,
    GenerationConfig,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2Processor,
)
from transformers.image_processing_base import ImageProcessingMixin

import hfshard
from hfshard.errors import InvalidPathError
from tests.helpers.tiny_bert import SHARDED, bert
from tests.programs.models import tokenizer
from tests.stores.suite.conftest import Place

pytestmark = [pytest.mark.compat, pytest.mark.parametrize("scheme", ["s3"])]


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty one, which stays empty: no folder `s3:` appears."""
    directory = tmp_path / "working"
    directory.mkdir()
    monkeypatch.chdir(directory)
    with hfshard.install(quiet=True):
        yield directory
    assert list(directory.iterdir()) == []


def saved_on_disk(directory: Path, thing: Any, **options: Any) -> dict[str, bytes]:
    """The files that a thing's own save writes into a directory."""
    thing.save_pretrained(directory, **options)
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_tokenizer_goes_next_to_the_model(store: Place, tmp_path: Path) -> None:
    model = bert(1, cls=BertModel)
    model.save_pretrained(store.path, max_shard_size=SHARDED)
    of_model = store.files()
    words = tokenizer()

    names = words.save_pretrained(store.path)

    expected = saved_on_disk(tmp_path / "words", words)
    assert {"tokenizer.json", "tokenizer_config.json"} <= expected.keys()
    assert store.files() == of_model | expected
    assert set(names) == {f"{store.path}/{name}" for name in expected}
    pulled = hfshard.pull_checkpoint(store.path, tmp_path / "pulled")
    assert AutoTokenizer.from_pretrained(pulled)("a b").input_ids == words("a b").input_ids
    assert hfshard.verify_checkpoint(store.path).ok


def test_a_chat_template_in_a_folder_and_a_keyword_argument(store: Place, tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}

    words.save_pretrained(save_directory=store.path, filename_prefix="mine")

    found = store.files()
    assert found == saved_on_disk(tmp_path / "words", words, filename_prefix="mine")
    assert any("/" in name for name in found)


@pytest.mark.parametrize("kind", ["config", "generation config", "image processor", "feature extractor", "processor"])
def test_whatever_is_no_model(store: Place, kind: str, tmp_path: Path) -> None:
    thing: Any = {
        "config": BertConfig(hidden_size=8),
        "generation config": GenerationConfig(max_new_tokens=3),
        "image processor": ImageProcessingMixin(size=8),
        "feature extractor": Wav2Vec2FeatureExtractor(),
        "processor": Wav2Vec2Processor(Wav2Vec2FeatureExtractor(), tokenizer()),
    }[kind]

    thing.save_pretrained(store.path)

    assert store.files() == saved_on_disk(tmp_path / "thing", thing)
    assert store.files()
    if kind == "processor":
        assert isinstance(AutoProcessor.from_pretrained(store.synced()), Wav2Vec2Processor)


def test_addresses_that_are_none_are_refused(store: Place) -> None:
    for place, words in (
        (Path(store.path), r"lost a slash, .*\. Pass the address as a string: 's3://"),
        ("https://example.org/model", "has an unsupported scheme"),
        ("s3://", "has no bucket name"),
    ):
        with pytest.raises(InvalidPathError, match=words):
            tokenizer().save_pretrained(place)


def test_without_hfshard_transformers_goes_its_own_way(
    store: Place, working_directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hfshard.uninstall()
    monkeypatch.chdir(tmp_path)

    tokenizer().save_pretrained(store.path)

    assert (tmp_path / "s3:").is_dir()
    assert store.files() == {}
