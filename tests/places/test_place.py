"""A text becomes a place once, and the same text means another one to each verb."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.checkpoint.folder import LocalFolder
from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.checkpoint.ranged_folder import StoreFolder
from hfshard.errors import CheckpointNotFoundError, HubNotFoundError, InvalidArgumentError, InvalidPathError
from hfshard.places.place import (
    DirectoryHubPlace,
    DirectoryPlace,
    HubPlace,
    Place,
    ResolvedSource,
    StorePlace,
    explain_missing_directory,
    place_to_check,
    place_to_load,
    place_to_push,
    place_to_save,
)
from tests.stores.saving.memory_store import MemoryStore

ADDRESS = "s3://models/bert"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    hfshard.save_state_dict({"w": torch.ones(2)}, tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def hub(saved: Path, tmp_path: Path) -> Path:
    hfshard.push_checkpoint(saved, tmp_path / "hub")
    return tmp_path / "hub"


def test_a_name_of_two_parts_is_a_directory_a_repo_or_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert [type(place("org/name")) for place in (place_to_save, place_to_load, place_to_check, place_to_push)] == [
        DirectoryPlace,
        HubPlace,
        DirectoryPlace,
        HubPlace,
    ]

    (tmp_path / "org" / "name").mkdir(parents=True)

    assert isinstance(place_to_load("org/name"), DirectoryPlace)
    assert place_to_load("org/name").address == str(tmp_path / "org" / "name")
    assert isinstance(place_to_push("org/name"), HubPlace)
    assert place_to_push("org/name").address == "org/name"


def test_an_address_is_a_store_to_all() -> None:
    for resolve in (place_to_save, place_to_load, place_to_check, place_to_push):
        place = resolve("s3://models//bert/")

        assert isinstance(place, StorePlace)
        assert place.address == place.key == ADDRESS
        assert place.is_for_hfshard_only
        assert not place.has_revisions
        assert not place.is_read_from_disk


def test_a_directory_hub_is_one_to_loads_checks_and_pushes_but_a_directory_to_a_save(hub: Path) -> None:
    for resolve in (place_to_load, place_to_check, place_to_push):
        assert isinstance(resolve(str(hub)), DirectoryHubPlace)

    assert not isinstance(place_to_save(hub), HubPlace)
    assert place_to_push(hub).address == place_to_push(f"file://{hub}").address == str(hub)
    assert place_to_push(hub).has_revisions


def test_a_push_may_create_the_directory_of_its_hub(tmp_path: Path) -> None:
    assert isinstance(place_to_push(tmp_path / "new"), DirectoryHubPlace)


@pytest.mark.parametrize("resolve", [place_to_save, place_to_load, place_to_check])
def test_an_address_of_no_service_is_refused(resolve: Callable[[str], Place]) -> None:
    with pytest.raises(InvalidPathError, match="unsupported scheme"):
        resolve("ftp://models/bert")
    with pytest.raises(InvalidArgumentError, match="is not a repo_id"):
        place_to_push("https://example.org/models")


def test_the_argument_is_named() -> None:
    with pytest.raises(InvalidPathError, match=r"^local_dir"):
        place_to_save("", "local_dir")


def test_a_checkpoint_is_found_with_its_folder(saved: Path, hub: Path) -> None:
    found = place_to_load(str(saved.parent)).find(CheckpointQuery(subfolder="saved"))

    assert found is not None
    assert (found.directory, found.path) == (str(saved), str(saved.parent))
    assert isinstance(found.folder, LocalFolder)
    assert found.folder.path == str(saved)
    assert found.mirror is None

    of_hub = place_to_load(str(hub)).find(CheckpointQuery(revision="main"))

    assert of_hub is not None
    assert Path(of_hub.directory).parent == hub / "snapshots"
    assert place_to_load("org/name").find(CheckpointQuery()) is None


def test_a_file_is_a_checkpoint_where_it_is_accepted(saved: Path) -> None:
    place = place_to_load(str(saved / "model.safetensors"))
    found = place.find(CheckpointQuery(), takes_files=True)

    assert found is not None
    assert (found.directory, found.weights_name) == (str(saved), "model.safetensors")
    with pytest.raises(InvalidArgumentError, match=r"is a file\. Pass the directory"):
        place.find(CheckpointQuery())
    with pytest.raises(InvalidArgumentError, match="leave out subfolder and variant"):
        place.find(CheckpointQuery(variant="fp16"), takes_files=True)
    with pytest.raises(CheckpointNotFoundError, match="There is no file"):
        place_to_load(str(saved / "model-2.safetensors")).find(CheckpointQuery())


@pytest.mark.parametrize("path", ["/no/such/directory", "./missing", "a/b/c", "~/none"])
def test_a_path_that_leads_nowhere_is_not_taken_for_a_repo(path: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match="There is no directory"):
        place_to_load(path).find(CheckpointQuery())


def test_a_directory_is_the_same_by_another_name_and_a_store_by_its_address(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(saved)
    link = place_to_save(tmp_path / "link")
    in_store = StoreFolder(MemoryStore(), ADDRESS)

    assert link.is_same(LocalFolder(str(saved)))
    assert link.key == place_to_save(saved).key
    assert not link.is_same(LocalFolder(str(tmp_path)))
    assert not link.is_same(in_store)
    assert place_to_save(ADDRESS).is_same(in_store)
    assert not place_to_save("s3://models/gpt").is_same(in_store)


def test_only_a_store_has_no_use_for_a_revision(saved: Path, hub: Path) -> None:
    for text in (str(saved), str(hub), "org/name"):
        place_to_load(text).reject_hub_arguments(revision="v1", token="secret")

    with pytest.raises(InvalidArgumentError, match="revision='v1' is for a hub"):
        place_to_load(ADDRESS).reject_hub_arguments(revision="v1")


def test_each_place_checks_what_is_there(saved: Path, hub: Path) -> None:
    assert place_to_check(saved).verify(CheckpointQuery(), "full", False).ok
    report = place_to_check(hub).verify(CheckpointQuery(), "full", False)

    assert report.ok
    assert report.directory.startswith(str(hub / "snapshots"))
    with pytest.raises(CheckpointNotFoundError, match="There is no directory"):
        place_to_check(saved / "none").verify(CheckpointQuery(), "full", False)


def test_the_files_to_push_are_those_of_the_place(saved: Path) -> None:
    assert list(place_to_save(saved).files().contents()) == ["model.safetensors"]
    assert list(place_to_save(saved.parent).files("saved").contents()) == ["model.safetensors"]


def test_a_copy_counts_the_files_that_have_changed(saved: Path) -> None:
    count = place_to_save(saved.parent).count_sent({"saved"})

    assert count() is None

    (saved / "notes.txt").write_text("twelve bytes")

    assert count() == 12


def test_traits_are_those_of_the_folder() -> None:
    assert ResolvedSource("/there", "/there", LocalFolder("/there")).traits is LocalFolder.traits


def test_what_is_read_from_disk(saved: Path, hub: Path) -> None:
    for text in (str(saved), str(hub), str(saved / "model.safetensors"), "org/name", "/nowhere"):
        assert place_to_load(text).is_read_from_disk  # a repo is downloaded to the cache

    assert not place_to_load(ADDRESS).is_read_from_disk


def test_a_hub_is_not_blamed_alone_for_a_name_that_is_nowhere() -> None:
    with (
        pytest.raises(HubNotFoundError, match=r"No repo\. \(There is no file or directory 'org/name' either\.\)"),
        explain_missing_directory("org/name"),
    ):
        raise HubNotFoundError("No repo.", path="org/name")
