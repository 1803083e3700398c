"""What users add to from_pretrained and save_pretrained, above, beside and below the mixin, runs as in transformers."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, BertConfig, BertModel, PreTrainedModel

import hfshard
from hfshard.errors import InvalidArgumentError, StateDictMismatchError, UnknownArgumentError
from tests.zoo.compare import read_json
from tests.zoo.hub_cache import REPO, put_in_cache

pytestmark = pytest.mark.compat

HEAD = "head.pt"
COMMIT = "d" * 40
CONFIG = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 8}

calls: list[dict[str, Any]] = []
"""What the overrides were called with."""


class HeadMixin:
    """Keeps a tensor in a file of its own; what a user adds to a model's class or puts beside it."""

    head = torch.ones(2)

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, scale: int = 1, **kwargs: Any) -> Any:
        calls.append({"name": cls.__name__, "path": path, **kwargs})
        loaded = super().from_pretrained(path, *args, **kwargs)  # type: ignore[misc]
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        assert isinstance(model, cls)
        if os.path.isdir(path):
            model.head = torch.load(os.path.join(path, HEAD), weights_only=True) * scale
        return loaded

    def save_pretrained(self, save_directory: Any, *args: Any, note: str = "", **kwargs: Any) -> None:
        calls.append({"name": type(self).__name__, "path": save_directory, "note": note, **kwargs})
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        torch.save(self.head, os.path.join(save_directory, HEAD))


class Stock(HeadMixin, BertModel):  # type: ignore[misc]
    """As upstream: without hfshard's mixin."""


class Beside(hfshard.ShardedModelMixin, HeadMixin, BertModel):
    """The override stands between the mixin and the model's class."""


class Below(hfshard.ShardedModelMixin, Stock):
    """The override is the model's own."""


class Above(HeadMixin, hfshard.ShardedModelMixin, BertModel):  # type: ignore[misc]
    """The override calls the mixin."""


CLASSES = [Above, Beside, Below]
WITH_FUNCTIONS = [*CLASSES, Stock]
"""`load_model` and `save_model` take any class."""


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    make(Below).save_pretrained(directory)
    return directory


def make(model_class: Any) -> Any:
    torch.manual_seed(0)
    model = model_class(BertConfig(**CONFIG))  # type: ignore[arg-type]
    model.head = torch.tensor([2.0, 3.0])
    return model


@pytest.mark.parametrize("model_class", CLASSES)
def test_an_override_is_called_with_what_the_user_gave(model_class: Any, saved: Path) -> None:
    model = model_class.from_pretrained(saved, scale=10, dtype="float32", attn_implementation="eager")

    assert type(model) is model_class
    assert torch.equal(model.head, torch.tensor([20.0, 30.0]))
    assert calls == [{"name": model_class.__name__, "path": saved, "dtype": "float32", "attn_implementation": "eager"}]
    assert model.name_or_path == str(saved) and model.config._attn_implementation == "eager"


@pytest.mark.parametrize("model_class", WITH_FUNCTIONS)
def test_load_model_calls_the_override_and_checks_at_its_bottom(model_class: Any, saved: Path, tmp_path: Path) -> None:
    model = hfshard.load_model(model_class, saved, scale=10)

    assert type(model) is model_class
    assert torch.equal(model.head, torch.tensor([20.0, 30.0]))
    assert calls == [{"name": model_class.__name__, "path": saved}]
    hfshard.save_state_dict({**model.state_dict(), "more": torch.zeros(1)}, tmp_path)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(StateDictMismatchError, match="more"):
        hfshard.load_model(model_class, tmp_path, strict=True)


@pytest.mark.parametrize("model_class", CLASSES)
def test_an_override_returns_what_it_returned(model_class: Any, saved: Path) -> None:
    model, info = model_class.from_pretrained(saved, output_loading_info=True)

    assert type(model) is model_class and model.head[0] == 2
    assert info["missing_keys"] == set() or info["missing_keys"] == []

    class Wrapped(model_class):  # type: ignore[misc]
        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {"model": super().from_pretrained(*args, **kwargs), "note": 7}

    result: Any = Wrapped.from_pretrained(saved)
    assert type(result["model"]) is Wrapped and result["note"] == 7


@pytest.mark.parametrize("how", ["method", "function", "push"])
@pytest.mark.parametrize("model_class", WITH_FUNCTIONS)
def test_an_override_of_save_pretrained_writes_its_part(model_class: Any, how: str, tmp_path: Path) -> None:
    model = make(model_class)
    if how == "method":
        model.save_pretrained(tmp_path / "out", max_shard_size="2KB", note="mine")
    elif how == "function":
        index = hfshard.save_model(model, tmp_path / "out", max_shard_size="2KB", checksum="xxh3")
        assert index is not None
        assert all(record.xxh3 for name, record in index.files.items() if name.endswith(".safetensors"))
    elif model_class is Stock:
        pytest.skip("push_to_hub of a class without the mixin is transformers'")
    else:
        model.push_to_hub(tmp_path / "hub", max_shard_size="2KB")
        hfshard.pull_checkpoint(str(tmp_path / "hub"), tmp_path / "out", allow_patterns=HEAD)

    assert len(calls) == 1 and calls[0]["max_shard_size"] == "2KB" and calls[0]["name"] == model_class.__name__
    assert calls[0]["note"] == ("mine" if how == "method" else "")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {HEAD, "config.json", "model.safetensors.index.json"} <= names
    loaded = Stock.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.head, model.head)
    assert torch.equal(loaded.embeddings.word_embeddings.weight, model.embeddings.word_embeddings.weight)


def test_an_override_gets_the_name_of_a_repo_and_its_token(saved: Path, tmp_path: Path) -> None:
    put_in_cache(tmp_path, saved, commit=COMMIT, refs={"main": COMMIT})
    for load in (Below.from_pretrained, lambda *args, **kwargs: hfshard.load_model(Stock, *args, **kwargs)):
        model: Any = load(REPO, cache_dir=tmp_path, token="hf_mine")

        assert calls.pop() == {"name": type(model).__name__, "path": REPO, "cache_dir": tmp_path, "token": "hf_mine"}
        assert model.name_or_path == REPO


def test_an_override_may_change_the_path_and_load_other_models(saved: Path, tmp_path: Path) -> None:
    make(BertModel).save_pretrained(tmp_path)

    class Pair(BertModel):
        @classmethod
        def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            model: Any = super().from_pretrained({"mine": saved}[name], *args, **kwargs)
            model.stock = BertModel.from_pretrained(tmp_path)
            model.ours = Below.from_pretrained(saved)
            model.again = super().from_pretrained(tmp_path)
            return model

    class Mine(hfshard.ShardedModelMixin, Pair): ...

    for load in (Mine.from_pretrained, lambda name: hfshard.load_model(Pair, name)):
        model: Any = load("mine")
        assert [type(part) for part in (model.stock, model.ours, model.again)] == [BertModel, Below, type(model)]
        assert model.name_or_path == str(saved) and model.again.name_or_path == str(tmp_path)
        assert torch.equal(model.ours.head, torch.tensor([2.0, 3.0]))


def test_an_override_that_builds_by_itself_is_not_said_to_be_checked(saved: Path) -> None:
    class Making(BertModel):
        @classmethod
        def from_pretrained(cls, source: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return cls(source)

    class Mine(hfshard.ShardedModelMixin, Making): ...

    config = BertConfig(**CONFIG)  # type: ignore[arg-type]
    assert type(Mine.from_pretrained(config)) is Mine
    assert type(hfshard.load_model(Making, config)) is Making
    assert type(hfshard.load_model(Above, saved, strict=True, verify="full")) is Above
    for call in (Mine.from_pretrained, lambda *args, **kwargs: hfshard.load_model(Making, *args, **kwargs)):
        with pytest.raises(InvalidArgumentError, match="strict, verify and public_key had no effect"):
            call(config, verify="full")


def test_errors_come_through_and_leave_nothing_behind(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(hfshard.HfshardError):
        Below.from_pretrained(tmp_path)
    with pytest.raises(UnknownArgumentError, match="max_shard_size"):
        make(Below).save_pretrained(tmp_path / "out", max_shard_sizes="1GB")
    with pytest.raises(hfshard.HfshardError):
        make(Below).save_pretrained(tmp_path / "out", max_shard_size="much")

    assert not (tmp_path / "out").exists()
    assert type(Stock.from_pretrained(saved)) is Stock
    make(Stock).save_pretrained(tmp_path / "stock")
    assert "hfshard" not in (tmp_path / "stock" / "model.safetensors").read_bytes()[:2000].decode("latin-1")


def test_transformers_own_calls_in_other_threads_stay_its_own(saved: Path, tmp_path: Path) -> None:
    inside, done = threading.Event(), threading.Event()

    class Slow(BertModel):
        def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
            inside.set()
            assert done.wait(60)
            super().save_pretrained(*args, **kwargs)

    model = make(Slow)
    with ThreadPoolExecutor(1) as pool:
        ours = pool.submit(hfshard.save_model, model, tmp_path / "ours")
        assert inside.wait(60)
        BertModel.save_pretrained(model, tmp_path / "theirs")
        loaded = BertModel.from_pretrained(saved)
        done.set()
        index = ours.result(60)

    assert type(loaded) is BertModel
    assert index is not None and "hfshard" in _metadata(tmp_path / "ours")
    assert "hfshard" not in _metadata(tmp_path / "theirs")


def _metadata(directory: Path) -> str:
    return (directory / "model.safetensors").read_bytes()[:2000].decode("latin-1")


def test_models_of_overriding_classes_are_loaded_by_threads_at_once(saved: Path) -> None:
    loads: list[Callable[[], Any]] = [
        lambda: Below.from_pretrained(saved),
        lambda: hfshard.load_model(Stock, saved),
        lambda: Stock.from_pretrained(saved),
    ]
    with ThreadPoolExecutor(3) as pool:
        models = list(pool.map(lambda number: loads[number % 2](), range(6)))

    assert [type(model) for model in models] == [Below, Stock] * 3
    assert all(torch.equal(model.head, torch.tensor([2.0, 3.0])) for model in models)


def test_an_auto_class_gives_the_override_the_config_as_transformers_does(saved: Path, tmp_path: Path) -> None:
    class TinyConfig(BertConfig):
        model_type = "hfshard-tiny"

    class Tiny(BertModel):
        config_class = TinyConfig

        @classmethod
        def from_pretrained(cls, path: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            calls.append({"path": path, **kwargs})
            return super().from_pretrained(path, *args, **kwargs)

    AutoConfig.register("hfshard-tiny", TinyConfig, exist_ok=True)
    AutoModel.register(TinyConfig, Tiny, exist_ok=True)
    torch.manual_seed(0)
    Tiny(TinyConfig(**CONFIG)).save_pretrained(tmp_path)  # type: ignore[arg-type]

    theirs = AutoModel.from_pretrained(tmp_path)
    ours = hfshard.load_model(AutoModel, tmp_path)

    assert type(ours) is type(theirs) is Tiny
    assert type(calls[0]["config"]) is type(calls[1]["config"]) is TinyConfig
    assert calls[0].keys() - calls[1].keys() <= {"adapter_kwargs", "trust_remote_code", "revision"}
    assert ours.config.to_dict() == theirs.config.to_dict()


def test_the_first_call_of_a_process_and_one_after_another_library_are_hfshards(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs: dict[str, Any] = {}
    for name in ("save_pretrained", "from_pretrained"):
        current = vars(PreTrainedModel)[name]
        theirs[name] = inspect.unwrap(getattr(current, "__func__", current))
    plain: Any = type("Plain", (hfshard.ShardedModelMixin, BertModel), {})

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", theirs["save_pretrained"])
    make(plain).save_pretrained(tmp_path)
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(theirs["from_pretrained"]))
    model = plain.from_pretrained(tmp_path, verify="full")

    assert type(model) is plain and "hfshard" in _metadata(tmp_path)
    assert read_json(tmp_path / "config.json")["architectures"] == ["BertModel"]
    assert PreTrainedModel.save_pretrained.__doc__ == theirs["save_pretrained"].__doc__
