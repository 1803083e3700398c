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
from hfshard.errors import SaveDirectoryError, UnstorableTensorError
from hfshard.models.module_weights import save_module
from hfshard.places.place import place_to_save
from hfshard.saving.save_request import SaveOptions
from tests.helpers.tiny_bert import bert


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
