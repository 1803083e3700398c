"""One file in the place of a directory: it is loaded and verified whatever else lies beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import hfshard
from hfshard.errors import CheckpointNotFoundError, HubError, InvalidArgumentError
from tests.saving.helpers import flip

SHARDED = {"a": torch.ones(3), "b": torch.zeros(2000)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Beside a sharded checkpoint, other files of weights."""
    hfshard.save_state_dict(SHARDED, tmp_path, max_shard_size=5000)
    save_file({"c": torch.ones(1)}, tmp_path / "other.safetensors")
    torch.save({"d": torch.ones(2)}, tmp_path / "last.pt")
    torch.save({"weight": torch.ones(1, 1), "bias": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    return tmp_path


@pytest.mark.parametrize(
    "name, names",
    [
        ("model-00001-of-00002.safetensors", ["b"]),
        ("model.safetensors.index.json", ["b", "a"]),
        ("other.safetensors", ["c"]),
        ("last.pt", ["d"]),
        ("pytorch_model.bin", ["weight", "bias"]),
    ],
)
def test_a_file_is_loaded_and_verified(folder: Path, name: str, names: list[str]) -> None:
    assert list(hfshard.load_state_dict(folder / name, verify="structure")) == names

    report = hfshard.verify_checkpoint(folder / name)
    assert report.ok
    assert name in report.files


def test_a_file_is_named_by_a_relative_path_and_loaded_in_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    path = f"{folder.name}/model.safetensors.index.json"
    assert list(hfshard.load_state_dict(path, keys="a", verify="full")) == ["a"]


def test_a_file_is_loaded_into_a_module(folder: Path) -> None:
    assert hfshard.load_model(nn.Linear(1, 1), folder / "pytorch_model.bin").weight.item() == 1


def test_damage_of_a_file_is_found(folder: Path) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    flip(path, -1)
    assert not hfshard.verify_checkpoint(folder / "model.safetensors.index.json").ok
    assert hfshard.verify_checkpoint(path).warnings, "the checksums of a shard are in the index"


@pytest.mark.parametrize("call", [hfshard.load_state_dict, hfshard.verify_checkpoint])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, call: Callable[[Path], object]) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidArgumentError, match=r"config\.json' is a file whose name is not a checkpoint's"):
        call(tmp_path / "config.json")


def test_a_file_has_no_subfolder(folder: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="is a file: leave out subfolder and variant"):
        hfshard.load_state_dict(folder / "other.safetensors", subfolder="x")


def test_a_name_that_leads_nowhere_says_that_there_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(CheckpointNotFoundError, match=r"There is no file 'model\.safetensors'"):
        hfshard.load_state_dict("model.safetensors")
    for name in ("missing", "missing/bert"):
        with pytest.raises((HubError, CheckpointNotFoundError), match=f"no file or directory '{name}' either"):
            hfshard.load_state_dict(name, local_files_only=True)


def test_a_file_that_is_a_link_is_followed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    link = tmp_path_factory.mktemp("links") / "best.pth.tar"
    link.symlink_to(folder / "last.pt")
    assert list(hfshard.load_state_dict(link)) == ["d"]


def test_a_file_becomes_a_directory_of_its_weights_alone(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    torch.save({"model": {"a": torch.ones(3)}, "ema": {"a": torch.zeros(3)}}, folder / "run.pth.tar")

    for name, key, names in (("run.pth.tar", "ema", ["a"]), ("other.safetensors", None, ["c"]), ("last.pt", None, "d")):
        out = folder / f"out-{name}"
        index = hfshard.reshard_checkpoint(folder / name, out, key=key)
        assert list(index.weight_map) == list(names)
        assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert hfshard.load_state_dict(folder / "out-run.pth.tar", verify="full")["a"].tolist() == [0, 0, 0]
    with pytest.raises(InvalidArgumentError, match=r"is the directory of 'last\.pt' itself. Pass another one"):
        hfshard.reshard_checkpoint(folder / "last.pt", folder)
    assert list(hfshard.load_state_dict(folder)) == ["b", "a"]
