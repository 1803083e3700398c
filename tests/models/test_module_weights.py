"""A module that transformers does not know: which process saves it, which tensors, and what beside them."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hfshard
from hfshard.errors import InvalidArgumentError, SaveDirectoryError, UnknownArgumentError, UnstorableTensorError
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.models.module_weights import save_module, take_repo_id, without_defaults
from hfshard.places.place import place_to_save
from hfshard.saving.save_request import SaveOptions
from tests.helpers.tiny_bert import bert
from tests.models.nets import ours


@pytest.fixture
def model() -> nn.Linear:
    """A weight of four ones, and a bias of two."""
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


def test_a_module_is_saved_under_the_names_that_it_has_without_wrappers(model: nn.Linear, tmp_path: Path) -> None:
    index = save_module(nn.DataParallel(model), place_to_save(tmp_path), None, SaveOptions())

    assert index is not None and (index.total_size, index.total_parameters) == (24, 6)
    assert index.weight_map == {"weight": "model.safetensors", "bias": "model.safetensors"}
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found["weight"], torch.ones(2, 2)) and torch.equal(found["bias"], torch.ones(2))


def test_tensors_that_are_given_are_saved_in_place_of_the_modules_own(model: nn.Linear, tmp_path: Path) -> None:
    given = {"bias": torch.full((2,), 7.0)}

    save_module(model, place_to_save(tmp_path), given, SaveOptions())

    saved = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in saved.items()} == {"bias": [7.0, 7.0]}
    assert list(given) == ["bias"] and model.bias.tolist() == [1.0, 1.0]


def test_a_process_that_is_not_the_main_one_saves_nothing(model: nn.Linear, tmp_path: Path) -> None:
    target = tmp_path / "new"

    assert save_module(model, place_to_save(target), None, SaveOptions(), is_main_process=False) is None
    assert not target.exists()


def test_in_a_collective_save_each_process_saves_though_not_the_main_one(model: nn.Linear, tmp_path: Path) -> None:
    index = save_module(model, place_to_save(tmp_path), None, SaveOptions(is_collective=True), is_main_process=False)

    assert index is not None
    assert os.path.isfile(tmp_path / "model.safetensors")


def test_files_beside_the_weights_are_part_of_the_save(model: nn.Linear, tmp_path: Path) -> None:
    files = {"config": b'{"width": 2}', "model_files": {"net.py": b"width = 2"}}

    save_module(model, place_to_save(tmp_path), None, SaveOptions(max_shard_size=1), files=files)

    assert (tmp_path / "config.json").read_bytes() == b'{"width": 2}'
    assert (tmp_path / "net.py").read_bytes() == b"width = 2"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["hfshard"]["files"]["config.json"]["size"] == 12


def test_names_that_share_a_tensor_are_stored_once_and_loaded_twice(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    index = save_module(nn.ModuleDict({"a": layer, "b": layer}), place_to_save(tmp_path), None, SaveOptions())

    assert index is not None and index.tied_names == {"b.bias": "a.bias", "b.weight": "a.weight"}
    assert set(load_file(tmp_path / "model.safetensors")) == {"a.bias", "a.weight"}
    assert torch.equal(hfshard.load_state_dict(tmp_path)["b.weight"], layer.weight)


def test_a_module_that_cannot_be_stored_leaves_no_directory_and_files_stay(model: nn.Linear, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")

    with pytest.raises(UnstorableTensorError, match="weight"):
        save_module(nn.LazyLinear(2), place_to_save(tmp_path / "new"), None, SaveOptions())
    with pytest.raises(SaveDirectoryError, match=r"/file'"):
        save_module(model, place_to_save(tmp_path / "file"), None, SaveOptions())

    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "mine"


def _entered(call: Callable[[], object]) -> set[str]:
    """The files of the package that have code which a call runs, in any thread."""
    package = os.path.dirname(hfshard.__file__)
    found = set()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            found.add(os.path.relpath(frame.f_code.co_filename, package))

    before, before_in_threads = sys.getprofile(), threading.getprofile()
    sys.setprofile(note)
    threading.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        threading.setprofile(before_in_threads)
    return found


def test_a_process_alone_enters_no_file_for_several_ranks(model: nn.Linear, tmp_path: Path) -> None:
    tensors = dict(model.state_dict())
    hfshard.save_state_dict(tensors, tmp_path / "out")
    state = hfshard.training.TrainingState(model=model)
    transformers_model = bert(1.0)
    with hfshard.CheckpointManager(tmp_path / "run", progress=False) as manager:
        calls: dict[str, Callable[[], object]] = {
            "save_state_dict": lambda: hfshard.save_state_dict(tensors, tmp_path / "out"),
            "save_model": lambda: hfshard.save_model(model, tmp_path / "model"),
            "save_pretrained": lambda: transformers_model.save_pretrained(tmp_path / "bert"),
            "load_state_dict": lambda: hfshard.load_state_dict(tmp_path / "out"),
            "CheckpointManager.save": lambda: manager.save(1, state),
        }
        for call in calls.values():  # imports run code of every file
            call()
        entered = {name: _entered(call) for name, call in calls.items()}

    assert all(entered.values())
    found = {name: [file for file in files if file.startswith("distributed")] for name, files in entered.items()}
    assert found == {name: [] for name in calls}


# Arguments that the saves and pushes of both kinds of models share, checked the same for each.


def plain(value: float) -> Any:
    """A module of random weights, whatever the value."""
    return ours("defaults")()


both = pytest.mark.parametrize("build", [bert, plain], ids=["transformers", "plain"])


@both
def test_arguments_of_older_code_are_accepted_and_pickles_are_not(build: Any, tmp_path: Path) -> None:
    build(1).save_pretrained(tmp_path / "out", safe_serialization=True, save_function=print)
    build(1).push_to_hub(str(tmp_path / "hub"), safe_serialization=True)

    for call in (build(1).save_pretrained, build(1).push_to_hub):
        with pytest.raises(InvalidArgumentError, match="does not write pickles"):
            call(str(tmp_path / "none"), safe_serialization=False)
    assert not (tmp_path / "none").exists()


@both
def test_the_nearest_argument_is_suggested(build: Any, tmp_path: Path) -> None:
    for call in (build(1).save_pretrained, build(1).push_to_hub):
        with pytest.raises(UnknownArgumentError, match=r"'comit_message'\. Did you mean 'commit_message'\?"):
            call(str(tmp_path / "none"), comit_message="x")


@both
def test_a_revision_without_a_push_is_not_for_a_store(build: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="revision='v1' is for a hub"):
        build(1).save_pretrained("s3://bucket/prefix", revision="v1")


@both
def test_the_default_repo_has_the_name_of_the_directory_that_dots_lead_to(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "saved/below").mkdir(parents=True)
    hub = tmp_path / "hub/saved"
    hub.mkdir(parents=True)
    build(1).push_to_hub(str(hub))
    monkeypatch.chdir(tmp_path / "hub")

    build(2).save_pretrained(tmp_path / "saved/below/..", push_to_hub=True, repo_id=None, commit_message="again")

    assert (tmp_path / "saved/config.json").exists()
    assert [one.message for one in DirectoryHub.open(hub).revisions() if one.name == "main"] == ["again"]


def test_a_given_repo_is_taken_from_the_arguments() -> None:
    kwargs = {"repo_id": "org/name", "revision": "v1"}

    assert take_repo_id(kwargs, "/there/out") == "org/name"
    assert kwargs == {"revision": "v1"}
    assert take_repo_id(kwargs, "s3://bucket/runs/out") == "out"


def test_arguments_with_their_defaults_are_dropped() -> None:
    given = {"variant": None, "packing": "balanced", "max_shard_size": "5GB", "progress": None, "checksum": "xxh3"}

    assert without_defaults(given) == {"packing": "balanced", "checksum": "xxh3"}
