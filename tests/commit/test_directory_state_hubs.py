"""Saving to where a directory hub is: refused; and looking at a hub's path, which is looking at its main."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import BertConfig

import hfshard
from hfshard.errors import CheckpointNotFoundError, SaveDirectoryError
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.training import TrainingState
from hfshard.viewing.inspection import inspect_checkpoint
from tests.hub.directory.helpers import everything, push
from tests.hub.models import Bert, make_model
from tests.signing.conftest import write_pair

pytestmark = pytest.mark.compat
OLD = {"a": torch.ones(1000), "b": torch.zeros(9)}


@pytest.fixture
def hub(tmp_path: Path) -> DirectoryHub:
    """A hub with one commit of two shards."""
    hfshard.save_state_dict(OLD, tmp_path / "old", max_shard_size=1)
    hfshard.push_checkpoint(tmp_path / "old", tmp_path / "hub")
    return DirectoryHub.open(tmp_path / "hub")


class Offloaded(Bert):
    """A model that transformers saves itself."""

    hf_device_map = {"": "cpu", "encoder": "disk"}


def save_run(place: str) -> None:
    with hfshard.CheckpointManager(place) as manager:
        manager.save(1, TrainingState(model=torch.nn.Linear(2, 2)))


SAVES: dict[str, Callable[[str], object]] = {
    "save_state_dict": lambda place: hfshard.save_state_dict({"a": torch.zeros(3)}, place),
    "save_model": lambda place: hfshard.save_model(torch.nn.Linear(2, 2), place),
    "save_pretrained": lambda place: make_model(1).save_pretrained(place),
    "by transformers": lambda place: Offloaded(BertConfig(num_hidden_layers=1, hidden_size=12)).save_pretrained(place),
    "run": save_run,
}


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("save", SAVES)
def test_nothing_is_saved_in_a_hub(save: str, hub: DirectoryHub, tmp_path: Path) -> None:
    os.symlink(hub.root, tmp_path / "link")
    snapshot = hub.snapshot()
    before = everything(hub.root), sorted(os.walk(hub.root))
    for place in (hub.root, snapshot, f"{snapshot}/a/deep/folder", f"{hub.root}/refs", str(tmp_path / "link")):
        with pytest.raises(SaveDirectoryError) as raised:
            SAVES[save](place)
        assert raised.value.message.endswith(f"push_to_hub('{hub.root}').")
        assert f"hfshard push DIR {hub.root}" in raised.value.message
    assert (everything(hub.root), sorted(os.walk(hub.root))) == before
    assert hfshard.load_state_dict(hub.root)["a"].sum() == 1000


def test_reshard_of_a_hub_in_place_is_refused(hub: DirectoryHub) -> None:
    for place, low_disk in ((hub.root, False), (hub.snapshot(), False), (hub.snapshot(), True)):
        with pytest.raises(SaveDirectoryError, match="push_to_hub"):
            hfshard.reshard_checkpoint(place, place, low_disk=low_disk)
    hub.verify()


def test_nothing_is_pulled_into_a_hub(hub: DirectoryHub) -> None:
    for place in (hub.root, hub.snapshot(), f"{hub.root}/snapshots/mine/deep"):
        with pytest.raises(SaveDirectoryError, match="push_to_hub"):
            hfshard.pull_checkpoint(hub.root, place)
    hub.verify()


def test_a_directory_beside_a_hub_is_saved_to(hub: DirectoryHub, tmp_path: Path) -> None:
    hfshard.save_state_dict(OLD, tmp_path / "hub2")
    assert hfshard.verify_checkpoint(tmp_path / "hub2").ok


def test_inspect_and_verify_of_a_hub_look_at_main(hub: DirectoryHub) -> None:
    found = inspect_checkpoint(hub.root)
    assert ([file.name for file in found.files], found.directory) == (
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        hub.snapshot(),
    )
    report = hfshard.verify_checkpoint(hub.root)
    assert (report.ok, report.directory, report.warnings) == (True, hub.snapshot(), ())
    assert report.files == (*(file.name for file in found.files), "model.safetensors.index.json")
    assert report.checked_bytes == sum(map(os.path.getsize, (Path(hub.snapshot(), name) for name in report.files)))
    assert hfshard.verify_checkpoint(f"file://{hub.root}", level="structure").checked_bytes == 0


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(raw)


def test_verify_of_a_hub_names_all_that_is_damaged(hub: DirectoryHub) -> None:
    push(hub, {"README.md": b"text"})
    folder = Path(hub.snapshot())
    flip(folder / "model-00001-of-00002.safetensors")
    flip(folder / "README.md")
    (folder / "stray.bin").write_bytes(b"")
    Path(hub.root, "commits", f"{hub.revisions()[0].parents[0]}.json").unlink()
    report = hfshard.verify_checkpoint(hub.root)
    assert [(os.path.basename(problem.file), problem.tensor) for problem in report.problems] == [
        ("model-00001-of-00002.safetensors", "a"),
        ("README.md", None),
        ("stray.bin", None),
        (f"{hub.revisions()[0].parents[0]}.json", None),
    ]


def test_verify_does_not_praise_a_file_beside_a_hubs_commits(hub: DirectoryHub) -> None:
    torch.save(OLD, Path(hub.root, "pytorch_model.bin"))
    Path(hub.root, "notes.txt").write_text("")
    report = hfshard.verify_checkpoint(hub.root)
    [problem] = report.problems
    assert problem.file == f"{hub.root}/pytorch_model.bin"
    assert "belongs to no commit" in problem.message and f"hfshard push DIR {hub.root}" in problem.message
    assert len(report.warnings) == 1 and "notes.txt" in report.warnings[0]


def test_verify_of_a_hub_whose_commit_lost_its_manifest_says_so(hub: DirectoryHub, tmp_path: Path) -> None:
    os.unlink(f"{hub.root}/commits/{hub.resolve()}.json")
    [problem] = hfshard.verify_checkpoint(hub.root).problems
    assert "has no manifest" in problem.message
    write_pair(tmp_path, "key")
    assert hfshard.verify_checkpoint(hub.root, public_key=tmp_path / "key.pub").problems == (problem,)


def test_verify_of_a_hub_without_weights_is_an_error(tmp_path: Path) -> None:
    hub = DirectoryHub.create(tmp_path / "hub")
    push(hub, {"a": b"1"})
    with pytest.raises(CheckpointNotFoundError):
        hfshard.verify_checkpoint(hub.root)


def test_verify_of_a_hub_compares_the_checksums_in_a_pickle(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    path = tmp_path / "bin" / "pytorch_model.bin"
    torch.save(OLD, path)
    raw = path.read_bytes()
    at = raw.index(OLD["a"].numpy().tobytes())
    path.write_bytes(raw[:at] + b"\x01" + raw[at + 1 :])
    hfshard.push_checkpoint(path.parent, tmp_path / "hub")
    assert [os.path.basename(one.file) for one in hfshard.verify_checkpoint(tmp_path / "hub").problems] == [path.name]
    assert hfshard.verify_checkpoint(tmp_path / "hub", level="structure").ok
