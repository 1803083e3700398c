"""What `save_pretrained` of a plain module writes, and overrides of its class."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hfshard
from hfshard.errors import InvalidArgumentError, SaveDirectoryError, UnknownArgumentError
from tests.models.nets import Bare, Configured, Outer, Simple, ours, theirs


class Net(hfshard.ShardedModelMixin, Simple):
    """Arguments with defaults."""


def net(width: int = 4) -> Any:
    made: Any = Net(width=width)
    return made


def listing(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".cache")


def test_shards_replace_a_single_file_and_the_config_goes_with_them(tmp_path: Path) -> None:
    net(4).save_pretrained(tmp_path)
    assert listing(tmp_path) == ["README.md", "config.json", "model.safetensors"]
    big = net(40)
    big.save_pretrained(tmp_path, max_shard_size="5KB")

    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert listing(tmp_path) == ["README.md", "config.json", *shards, "model.safetensors.index.json"]
    assert json.loads((tmp_path / "config.json").read_text())["width"] == 40
    assert hfshard.verify_checkpoint(tmp_path).ok
    assert torch.equal(Net.from_pretrained(tmp_path, verify="full").layer.weight, big.layer.weight)
    net(4).save_pretrained(tmp_path)
    assert listing(tmp_path) == ["README.md", "config.json", "model.safetensors"]
    assert theirs("defaults").from_pretrained(tmp_path).seen[0] == 4


def test_a_config_goes_where_the_new_model_has_none(tmp_path: Path) -> None:
    for size in ("5GB", 8):
        theirs("defaults")().save_pretrained(tmp_path)
        bare = ours("card")()
        bare.save_pretrained(tmp_path, max_shard_size=size)
        assert "config.json" not in listing(tmp_path)
        assert hfshard.verify_checkpoint(tmp_path).ok
        assert torch.equal(ours("card").from_pretrained(tmp_path).layer.weight, bare.layer.weight)


def test_names_of_tied_tensors_are_those_of_the_stock_mixin(tmp_path: Path) -> None:
    net().save_pretrained(tmp_path / "ours")
    theirs("defaults")().save_pretrained(tmp_path / "theirs")
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs")]
    assert sorted(files[0]) == sorted(files[1]) == ["layer.bias", "layer.weight", "turned"]


def test_wrapped_models_save_what_they_wrap(tmp_path: Path) -> None:
    model = net()
    compiled: Any = torch.compile(model, backend="eager")
    compiled.save_pretrained(tmp_path / "compiled")
    nn.DataParallel(model).module.save_pretrained(tmp_path / "parallel")

    class Wrapper(hfshard.ShardedModelMixin, nn.DataParallel):  # type: ignore[type-arg]
        pass

    wrapper: Any = Wrapper(model)
    wrapper.save_pretrained(tmp_path / "wrapper")
    for name in ("compiled", "parallel", "wrapper"):
        assert torch.equal(Net.from_pretrained(tmp_path / name, width=4).layer.weight, model.layer.weight)


def test_a_child_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    class Holder(hfshard.ShardedModelMixin, nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)
            self.other = nn.Linear(2, 2)

    holder: Any = Holder()
    holder.save_pretrained(tmp_path)
    assert torch.equal(Holder.from_pretrained(tmp_path, strict=True).other.weight, holder.other.weight)


@pytest.mark.parametrize(
    ("argument", "kind", "words"),
    [
        ({"config": "text"}, InvalidArgumentError, "must be a dict or a dataclass, got a str"),
        ({"config": {"a": object()}}, InvalidArgumentError, r"can't be written as JSON.*coders="),
        ({"save_peft_format": False}, InvalidArgumentError, "save_peft_format is for models of transformers"),
        ({"safe_serialization": False}, InvalidArgumentError, "does not write pickles"),
        ({"max_shard_sise": 1}, UnknownArgumentError, "Did you mean 'max_shard_size'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_made(
    argument: dict[str, Any], kind: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=words):
        net().save_pretrained(tmp_path / "new", **argument)
    assert not (tmp_path / "new").exists()


def test_nothing_is_saved_into_a_hub_or_by_other_processes(tmp_path: Path) -> None:
    net().push_to_hub(tmp_path / "hub")
    with pytest.raises(SaveDirectoryError, match="directory hub"):
        net().save_pretrained(tmp_path / "hub")
    net().save_pretrained(tmp_path / "rank", is_main_process=False)
    assert not (tmp_path / "rank").exists() or listing(tmp_path / "rank") == []


def test_a_state_dict_in_place_of_the_models_own(tmp_path: Path) -> None:
    net().save_pretrained(tmp_path, state_dict={"layer.weight": torch.ones(4, 4)})
    assert load_file(tmp_path / "model.safetensors").keys() == {"layer.weight"}


def test_an_override_that_calls_super_adds_its_files_and_config_and_weights_are_ours(tmp_path: Path) -> None:
    class Adding(hfshard.ShardedModelMixin, Simple):
        def _save_pretrained(self, save_directory: Path) -> None:
            super()._save_pretrained(save_directory)
            (save_directory / "more.txt").write_text("more")

    made: Any = Adding(width=40)
    made.save_pretrained(tmp_path, max_shard_size="5KB")
    assert {"more.txt", "model.safetensors.index.json", "config.json", "README.md"} <= set(listing(tmp_path))
    assert Adding.from_pretrained(tmp_path).seen[0] == 40


@pytest.mark.parametrize("calls_super", [True, False])
def test_a_config_that_an_override_writes_stays(calls_super: bool, tmp_path: Path) -> None:
    class Writing(hfshard.ShardedModelMixin, Simple):
        def _save_pretrained(self, save_directory: Path) -> None:
            (save_directory / "config.json").write_text('{"width": 9}')
            if calls_super:
                super()._save_pretrained(save_directory)

    (tmp_path / "config.json").write_text('{"old": 1}')
    made: Any = Writing(width=4)
    made.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == '{"width": 9}'


def test_an_override_that_saves_by_itself_gets_config_and_card_as_from_the_stock_mixin(tmp_path: Path) -> None:
    class Alone(hfshard.ShardedModelMixin, Simple):
        def _save_pretrained(self, save_directory: Path) -> None:
            (save_directory / "weights.txt").write_text("4")

        @classmethod
        def _from_pretrained(cls, *, model_id: str, **kwargs: Any) -> Any:
            assert os.path.isdir(model_id)
            return cls(width=kwargs["width"])

    class AloneWithoutArguments(hfshard.ShardedModelMixin, Bare):
        _save_pretrained = Alone._save_pretrained

    (tmp_path / "config.json").write_text('{"legacy": 1}')
    made: Any = Alone(width=4, limit=1.0)
    made.save_pretrained(tmp_path)
    assert listing(tmp_path) == ["README.md", "config.json", "weights.txt"]
    assert json.loads((tmp_path / "config.json").read_text()) == {"limit": 1.0, "name": "é", "width": 4}
    loaded = Alone.from_pretrained(tmp_path)
    assert loaded.seen[0] == 4
    with pytest.raises(InvalidArgumentError, match="strict and verify had no effect"):
        Alone.from_pretrained(tmp_path, verify="full")
    bare: Any = AloneWithoutArguments()
    bare.save_pretrained(tmp_path)
    assert listing(tmp_path) == ["README.md", "weights.txt"]


def test_methods_of_a_library_behind_the_mixin_are_not_passed_over(tmp_path: Path) -> None:
    class Lib(Simple):
        def _save_pretrained(self, save_directory: Path) -> None: ...

    class Wrong(hfshard.ShardedModelMixin, Lib):
        pass

    with pytest.raises(InvalidArgumentError, match=r"put ShardedModelMixin behind it.*class Wrong\(Lib, Sharded"):
        Wrong().save_pretrained(tmp_path)


def test_save_with_push_calls_push_to_hub_as_the_stock_mixin_does(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    class Pushed(hfshard.ShardedModelMixin, Configured):
        def push_to_hub(self, **kwargs: Any) -> Any:  # type: ignore[override]
            calls.append(kwargs)
            return "done"

    model: Any = Pushed(Outer(2))
    assert model.save_pretrained(tmp_path / "name") is None
    assert model.save_pretrained(tmp_path / "name", push_to_hub=True, config={"a": 1}) == "done"
    model.save_pretrained(tmp_path / "name", push_to_hub=True, repo_id="org/x", token="t", max_shard_size="1KB")
    noted = {"width": 2, "inner": {"heads": 2, "act": "relu"}}
    assert calls == [
        {"repo_id": "name", "config": {"a": 1}, "model_card_kwargs": {}},
        {"repo_id": "org/x", "config": noted, "model_card_kwargs": {}, "max_shard_size": "1KB", "token": "t"},
    ]
