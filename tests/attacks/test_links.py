"""Directories of symbolic links are read as what they lead to; a save replaces a link, never what is behind it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.cli.main import main
from hfshard.errors import InvalidArgumentError
from hfshard.training import CheckpointManager, TrainingState
from tests.attacks.files import bases, raw
from tests.attacks.target import TinyConfig, TinyPretrained, same, truth

SMALL = 4096 + 128
"""Bytes: three shards."""


def _links(folder: Path, files: raw.Files) -> Path:
    """A directory in which every file is a link to a read-only one in `store`, beside it; gives the store."""
    store = raw.write(folder.parent / "store", files)
    folder.mkdir()
    for name in files:
        (store / name).chmod(0o444)
        (folder / name).symlink_to(store / name)
    return store


@pytest.fixture(params=[bases.ours_sharded, bases.ours_single, bases.stock_bin_sharded, raw.stock_sharded])
def linked(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint of links, of each kind."""
    _links(tmp_path / "linked", request.param())
    return tmp_path / "linked"


def _model(seed: int) -> TinyPretrained:
    model = TinyPretrained(TinyConfig())
    model.load_state_dict(truth(seed))
    return model


@pytest.mark.parametrize("size", [SMALL, "1MB"])
def test_save_replaces_the_links_and_not_what_is_behind_them(linked: Path, size: int | str) -> None:
    store = raw.files_in(linked.parent / "store")

    hfshard.save_model(_model(3), linked, max_shard_size=size)

    assert same(hfshard.load_state_dict(linked, verify="full"), truth(3))
    assert raw.files_in(linked.parent / "store") == store
    assert [path.name for path in linked.iterdir() if path.is_symlink()] in ([], ["config.json"])
    weights = [path for path in linked.iterdir() if path.suffix == ".safetensors"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in weights} == {0o666 & ~_umask()}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    ("base", "rewrite"),
    [
        (bases.ours_sharded, lambda place: hfshard.reshard_checkpoint(place, place, 2 * 4096, low_disk=False)),
        (bases.ours_sharded, lambda place: hfshard.reshard_checkpoint(place, place, 2 * 4096, low_disk=True)),
        (bases.stock_bin_sharded, lambda place: main(["convert", str(place), str(place)]) == 0),
    ],
    ids=["reshard", "reshard low_disk", "convert"],
)
def test_rewriting_in_place_leaves_what_is_behind_the_links(
    base: Callable[[], raw.Files], rewrite: Callable[[Path], object], tmp_path: Path
) -> None:
    linked = tmp_path / "linked"
    store = _links(linked, base())
    before = raw.files_in(store)

    assert rewrite(linked)

    assert same(hfshard.load_state_dict(linked, use_safetensors=True, verify="full"), truth())
    assert hfshard.verify_checkpoint(linked).ok
    assert raw.files_in(store) == before


def test_reshard_copies_what_links_beside_the_weights_lead_to_where_it_is_asked_to(tmp_path: Path) -> None:
    _links(tmp_path / "linked", bases.ours_sharded() | {"tokenizer.json": b"{}"})

    with pytest.raises(InvalidArgumentError, match=r"config.json' is a link to '.*tokenizer.json' is a link to '"):
        hfshard.reshard_checkpoint(tmp_path / "linked", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    hfshard.reshard_checkpoint(tmp_path / "linked", tmp_path / "new", follow_links=True)

    assert (tmp_path / "new/tokenizer.json").read_bytes() == b"{}"
    assert not (tmp_path / "new/tokenizer.json").is_symlink()


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
@pytest.mark.parametrize("size", [SMALL, "1MB"])
def test_save_replaces_a_link_that_leads_nowhere(tmp_path: Path, name: str, size: int | str) -> None:
    (tmp_path / name).symlink_to("gone")

    hfshard.save_model(_model(3), tmp_path, max_shard_size=size)

    assert same(hfshard.load_state_dict(tmp_path, verify="full"), truth(3))
    assert not (tmp_path / name).is_symlink()
    assert not (tmp_path / "gone").exists()


def test_failed_save_puts_the_link_back(tmp_path: Path) -> None:
    store = _links(tmp_path / "linked", bases.ours_sharded())
    before = raw.files_in(store)
    names = sorted(os.listdir(tmp_path / "linked"))
    (tmp_path / "linked/model.safetensors").mkdir()  # the rename of a single file is refused

    with pytest.raises(OSError):
        hfshard.save_model(_model(3), tmp_path / "linked", max_shard_size="1MB")

    (tmp_path / "linked/model.safetensors").rmdir()
    assert sorted(path.name for path in (tmp_path / "linked").iterdir() if path.is_symlink()) == names
    assert same(hfshard.load_state_dict(tmp_path / "linked", verify="full"), truth())
    assert raw.files_in(store) == before


def test_run_of_links_is_restored_and_saved_on(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", max_to_keep=1)
    state = TrainingState(_model(1), counter=torch.nn.Linear(1, 1))
    manager.save(1, state)
    checkpoint = tmp_path / "run/checkpoint-00000001"
    store = checkpoint.rename(tmp_path / "store")
    checkpoint.mkdir()
    for path in store.iterdir():
        (checkpoint / path.name).symlink_to(path)
    before = raw.files_in(store)

    assert manager.restore_latest(state) == 1
    assert manager.verify() == {1: []}
    manager.save(2, state)  # the same weights: unchanged files are linked from the checkpoint before

    assert raw.files_in(store) == before
    assert [path.name for path in (tmp_path / "run/checkpoint-00000002").iterdir() if path.is_symlink()] == []
    assert manager.all_steps() == [2]
    assert manager.restore_latest(state) == 2


def test_push_names_links_that_leave_the_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _links(tmp_path / "linked", bases.ours_sharded())
    hub = tmp_path / "hub"

    with pytest.raises(InvalidArgumentError, match=r"config\.json' is a link to .*/store/config\.json.*follow_links"):
        hfshard.push_checkpoint(tmp_path / "linked", hub)
    assert main(["push", str(tmp_path / "linked"), str(hub)]) == 2
    assert "--follow-links" in capsys.readouterr().err
    assert not hub.exists()

    hfshard.push_checkpoint(tmp_path / "linked", hub, follow_links=True)
    assert main(["push", "--follow-links", str(tmp_path / "linked"), str(hub)]) == 0

    assert same(hfshard.load_state_dict(hub, verify="full"), truth())
    assert [path for path in (hub / "snapshots").rglob("*") if path.is_symlink()] == []


def test_links_that_stay_inside_are_pushed_without_a_word(tmp_path: Path) -> None:
    raw.write(tmp_path / "model", bases.ours_single())
    (tmp_path / "model/NOTES").symlink_to("config.json")

    hfshard.push_checkpoint(tmp_path / "model", tmp_path / "hub")

    (notes,) = (tmp_path / "hub/snapshots").rglob("NOTES")
    assert notes.read_bytes() == bases.ours_single()["config.json"]


def test_link_to_a_folder_above_a_shard_is_refused_by_name(tmp_path: Path) -> None:
    files = raw.stock_sharded()
    names = dict.fromkeys(raw.LAYOUT[raw.SECOND], f"sub/{raw.SECOND}")
    raw.write(tmp_path / "store", {raw.SECOND: files.pop(raw.SECOND)})
    raw.write(tmp_path / "model", files | {raw.INDEX: raw.index(names=names)})
    (tmp_path / "model/sub").symlink_to(tmp_path / "store")

    with pytest.raises(hfshard.HfshardError, match=rf"sub/{raw.SECOND}' is in '.*store', outside"):
        hfshard.load_state_dict(tmp_path / "model")
