"""What stock's save_pretrained and push_to_hub take, an installed hfshard takes, and it writes the same."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertModel, PreTrainedModel

import hfshard
from hfshard.errors import InvalidSizeError, SaveDirectoryError
from tests.helpers.tiny_bert import bert
from tests.zoo.compare import differences, facts_of_model, raw_tensors, small_files
from tests.zoo.models import scramble

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("uninstalled")]


def plain() -> Any:
    """A model whose tensors all differ."""
    model = bert(0, cls=BertModel)
    scramble(model)
    return model


def with_views() -> Any:
    """One with tensors that lie in one storage, or are not contiguous."""
    model = plain()
    storage = torch.arange(128.0).view(16, 8)
    model.pooler.dense.weight = torch.nn.Parameter(storage[:8])
    model.encoder.layer[0].attention.output.dense.weight = torch.nn.Parameter(storage[8:])
    model.embeddings.word_embeddings.weight = torch.nn.Parameter(torch.arange(80.0).view(8, 10).t())
    return model


def with_buffers() -> Any:
    """One with tensors of other dtypes, and empty and scalar ones."""
    model = plain()
    for dtype in (torch.bool, torch.uint16, torch.complex64, torch.float8_e4m3fn):
        model.register_buffer(str(dtype).partition(".")[2], torch.ones(3).to(dtype))
    model.register_buffer("empty", torch.zeros(0, 3))
    model.register_buffer("scalar", torch.tensor(3.0))
    model.pooler.half()
    return model


def weight_normed() -> Any:
    """One whose weight is computed of two others."""
    model = plain()
    torch.nn.utils.parametrizations.weight_norm(model.pooler.dense)
    return model


CASES: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (plain, (), {}),
    (plain, (), {"nonsense": 1, "safe_serialization": True, "save_function": torch.save, "repo_id": "a/b"}),
    (plain, (), {"safe_serialization": False}),
    (plain, (False,), {}),
    (plain, (True, None, False, "2KB", "fp16", None, True, True, False), {}),
    (plain, (), {"state_dict": {"pooler.dense.bias": torch.ones(8)}}),
    (plain, (), {"state_dict": {"module.pooler.dense.bias": torch.ones(8), "x": torch.ones(1)}}),
    (plain, (), {"max_shard_size": 2000}),
    (plain, (), {"max_shard_size": 1500.5}),
    (plain, (), {"max_shard_size": "2kB"}),
    (plain, (), {"max_shard_size": "1.5KB"}),
    (plain, (), {"max_shard_size": 0}),
    (plain, (), {"max_shard_size": -1}),
    (plain, (), {"max_shard_size": "1TB", "token": "x", "save_peft_format": False, "save_original_format": False}),
    (with_views, (), {}),
    (with_buffers, (), {}),
    (weight_normed, (), {}),
    (lambda: torch.compile(plain(), backend="eager"), (), {}),
    (lambda: torch.nn.DataParallel(plain()).module, (), {}),
]


@pytest.mark.parametrize(("make", "arguments", "options"), CASES, ids=range(len(CASES)))
def test_a_save_writes_what_stock_writes(
    make: Any, arguments: tuple[Any, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    def save(directory: Path) -> Any:
        model = make()
        given = {**options, "state_dict": dict(options["state_dict"])} if "state_dict" in options else options
        assert model.save_pretrained(directory, *arguments, **given) is None
        return model

    theirs = save(tmp_path / "theirs")
    with hfshard.install(quiet=True):
        ours = save(tmp_path / "ours")

    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "theirs"))
    assert small_files(tmp_path / "ours") == small_files(tmp_path / "theirs")
    if arguments != (False,):
        variant = "fp16" if arguments else None
        found = [{"file": raw_tensors(tmp_path / name, variant)} for name in ("ours", "theirs")]
        assert differences(*found) == []
        found = [facts_of_model(getattr(model, "_orig_mod", model)) for model in (ours, theirs)]
        assert differences(*found) == []


def test_no_place_is_named_where_nothing_stays(
    tmp_path: Path, installed: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level("INFO", "transformers"):
        plain().save_pretrained(tmp_path)
        plain().config.save_pretrained(tmp_path / "config")

    assert {record.getMessage() for record in caplog.records if "saved in" in record.getMessage()} == {
        f"Configuration saved in {tmp_path / 'config' / 'config.json'}"
    }


def test_an_object_that_is_no_model_is_stocks(tmp_path: Path, installed: None) -> None:
    class NoModel:
        pass

    with pytest.raises(AttributeError, match="'NoModel' object has no attribute"):
        PreTrainedModel.save_pretrained(NoModel(), tmp_path)  # type: ignore[arg-type]


def test_a_file_in_the_way_is_an_error_and_no_save_that_did_nothing(tmp_path: Path, installed: None) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SaveDirectoryError):
        plain().save_pretrained(tmp_path / "file")
    with pytest.raises(InvalidSizeError):
        plain().save_pretrained(tmp_path / "out", max_shard_size="five")
    assert not (tmp_path / "out").exists()
