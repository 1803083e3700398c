"""What `from_pretrained` of a plain module reads: the config and the weights of one save."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import hfshard
from hfshard.checkpoint.folder import LocalFolder
from hfshard.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    IntegrityError,
    InvalidArgumentError,
    StateDictMismatchError,
)
from tests.models.nets import Bare, Optionally, Simple
from tests.saving.helpers import flip


class Net(hfshard.ShardedModelMixin, Simple):
    """Arguments with defaults."""


class Any_(hfshard.ShardedModelMixin, Optionally):
    """Any arguments."""


def saved(directory: Path, width: int = 4, **kwargs: Any) -> Any:
    model: Any = Net(width=width)
    model.save_pretrained(directory, **kwargs)
    return model


def test_a_flipped_byte_is_an_error_before_the_model_is_given_out(tmp_path: Path) -> None:
    saved(tmp_path)
    flip(tmp_path / "model.safetensors", -1)
    with pytest.raises(IntegrityError):
        Net.from_pretrained(tmp_path, verify="full")


def test_strict_refuses_and_without_it_a_warning_names_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({"layer.weight": tensors["layer.weight"], "odd": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(StateDictMismatchError, match=r"layer\.bias"):
        Net.from_pretrained(tmp_path, strict=True, verify="none")
    with caplog.at_level(logging.WARNING):
        Net.from_pretrained(tmp_path, verify="none")
    assert "lacks" in caplog.text and "layer.bias" in caplog.text and "no place for odd" in caplog.text
    with pytest.raises(StateDictMismatchError, match="shape"):
        Net.from_pretrained(tmp_path, width=5)


@pytest.mark.parametrize("is_overridden", [False, True])
def test_config_and_weights_are_of_one_save_though_another_comes_between(is_overridden: bool, tmp_path: Path) -> None:
    saved(tmp_path, 4)
    seen: list[Any] = []

    class Asking(hfshard.ShardedModelMixin, Simple):
        @classmethod
        def _from_pretrained(cls, **kwargs: Any) -> Any:
            return super()._from_pretrained(**kwargs)

    class Slow(Asking if is_overridden else Net):  # type: ignore[misc]
        @classmethod
        def _decode_arg(cls, expected_type: Any, value: Any) -> Any:
            if not seen:
                seen.append(saved(tmp_path, 6))  # while the first one's config is being read
            return super()._decode_arg(expected_type, value)

    loaded = Slow.from_pretrained(tmp_path)
    assert loaded.seen[0] == 6
    assert torch.equal(loaded.layer.weight, seen[0].layer.weight)


def test_a_checkpoint_that_keeps_changing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalFolder, "traits", replace(LocalFolder.traits, retries=2))
    saved(tmp_path)

    class Restless(hfshard.ShardedModelMixin, Simple):
        @classmethod
        def _decode_arg(cls, expected_type: Any, value: Any) -> Any:
            saved(tmp_path)
            return super()._decode_arg(expected_type, value)

    with pytest.raises(CheckpointChangedError, match="was replaced on every attempt"):
        Restless.from_pretrained(tmp_path)


class AskingAny(Any_):
    """With an override."""

    @classmethod
    def _from_pretrained(cls, **kwargs: Any) -> Any:
        return super()._from_pretrained(**kwargs)


@pytest.mark.parametrize("model_class", [Any_, AskingAny])
def test_the_key_of_a_commit_under_way_reaches_no_constructor(model_class: Any, tmp_path: Path) -> None:
    model: Any = Any_(3, config={"a": 1}, b=2)
    model.save_pretrained(tmp_path)
    weights = "model-hfshard-0123456789abcdef.safetensors"
    (tmp_path / "model.safetensors").rename(tmp_path / weights)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("{\n", f'{{\n  "transformers_weights": "{weights}",\n', 1))
    loaded = model_class.from_pretrained(tmp_path)
    assert loaded.seen == (3, [("a", 1), ("b", 2), ("width", 3)], [("a", 1), ("b", 2)])
    assert torch.equal(loaded.layer.weight, model.layer.weight)


def test_names_that_the_constructor_has_too_are_the_constructors(tmp_path: Path) -> None:
    class Read(hfshard.ShardedModelMixin, Bare):
        def __init__(self, read: int = 1, variant: str = "a") -> None:
            super().__init__()
            self.seen = (read, variant)  # type: ignore[assignment]

    Read(read=2).save_pretrained(tmp_path)
    assert Read.from_pretrained(tmp_path).seen == (2, "a")
    assert Read.from_pretrained(tmp_path, read=3, variant="b").seen == (3, "b")


def test_variant_and_subfolder_choose_the_checkpoint(tmp_path: Path) -> None:
    model = saved(tmp_path / "below", variant="fp16")
    loaded = Net.from_pretrained(tmp_path, subfolder="below", variant="fp16")
    assert torch.equal(loaded.layer.weight, model.layer.weight)


def test_a_constructor_may_load_others_of_its_class(tmp_path: Path) -> None:
    inner = saved(tmp_path / "inner", 5)

    class Outer(hfshard.ShardedModelMixin, nn.Module):
        def __init__(self, path: str, depth: int = 0) -> None:
            super().__init__()
            self.net = Net.from_pretrained(path)
            self.below = Outer(path, depth - 1) if depth else None

    outer: Any = Outer(str(tmp_path / "inner"), 1)
    with torch.no_grad():
        outer.net.layer.weight.zero_()
    outer.save_pretrained(tmp_path / "outer")
    loaded = Outer.from_pretrained(tmp_path / "outer")
    assert not loaded.net.layer.weight.any()
    assert torch.equal(loaded.below.net.layer.weight, inner.layer.weight)


def test_an_override_that_calls_super_gets_the_checked_weights(tmp_path: Path) -> None:
    model = saved(tmp_path / "out", max_shard_size=300)
    calls = []

    class Asking(hfshard.ShardedModelMixin, Simple):
        @classmethod
        def _from_pretrained(cls, *, model_id: str, revision: str | None, **kwargs: Any) -> Any:
            calls.append((model_id, revision))
            return super()._from_pretrained(model_id=model_id, revision=revision, **kwargs)

    loaded = Asking.from_pretrained(tmp_path / "out", verify="full", strict=True)
    assert calls == [(str(tmp_path / "out"), None)]
    assert torch.equal(loaded.layer.weight, model.layer.weight)
    hub = tmp_path / "hub"
    model.push_to_hub(hub)
    assert torch.equal(Asking.from_pretrained(hub).layer.weight, model.layer.weight)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda path: Net.from_pretrained(None), "takes a path or a repo_id"),
        (lambda path: Net.from_pretrained(path, 4), "takes a path or a repo_id"),
        (lambda path: Net.from_pretrained(path, parallelize=print), "hfshard.load_model"),
        (lambda path: Net.from_pretrained(path, map_location="nowhere"), "device must be available to torch"),
        (lambda path: Net.from_pretrained(path, map_location="meta"), "a device with data, got 'meta'"),
        (lambda path: Net.from_pretrained(path, map_location=torch.device("meta")), "Net without data, call it within"),
        (lambda path: Net.from_pretrained(path, verify="ful"), "verify must be"),
    ],
)
def test_bad_arguments_are_refused(call: Any, words: str, tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(InvalidArgumentError, match=words):
        call(tmp_path)


def test_what_is_not_there_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"width": 3}))
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint"):
        Net.from_pretrained(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="There is no directory"):
        Net.from_pretrained(tmp_path / "nowhere")


def test_errors_of_an_override_and_of_a_constructor_come_through_as_they_are(tmp_path: Path) -> None:
    saved(tmp_path)

    class Failing(hfshard.ShardedModelMixin, nn.Module):
        def __init__(self, width: int = 1) -> None:
            raise FileNotFoundError("mine")

    class Overriding(hfshard.ShardedModelMixin, Simple):
        @classmethod
        def _from_pretrained(cls, **kwargs: Any) -> Any:
            raise FileNotFoundError("mine")

    for model_class in (Failing, Overriding):
        with pytest.raises(FileNotFoundError, match="mine") as caught:
            model_class.from_pretrained(tmp_path)
        assert caught.type is FileNotFoundError


def test_load_model_builds_the_class_as_from_pretrained_does(tmp_path: Path) -> None:
    model = saved(tmp_path, 5)
    assert torch.equal(hfshard.load_model(Net, tmp_path, verify="full").layer.weight, model.layer.weight)
    assert torch.equal(Net.from_pretrained(tmp_path / "model.safetensors").layer.weight, model.layer.weight)
    with pytest.raises(InvalidArgumentError, match=r"a plain module\. Build it"):
        hfshard.load_model(Net, tmp_path, output_loading_info=True)
