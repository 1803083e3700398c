"""A source is a directory or a repo, and a query that checks itself and keeps its token to itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.checkpoint.folder import LocalFolder
from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.checkpoint.ranged_folder import StoreFolder
from hfshard.errors import InvalidArgumentError
from hfshard.places.place import ResolvedSource
from hfshard.places.source import CheckpointSource
from tests.stores.saving.memory_store import MemoryStore


def test_a_directory_is_found_with_its_subfolder(tmp_path: Path) -> None:
    local = CheckpointSource(str(tmp_path), CheckpointQuery(subfolder="unet")).find_local()

    assert local is not None
    assert local.directory == str(tmp_path / "unet")
    assert local.path == str(tmp_path)


def test_a_repo_is_not_on_this_machine() -> None:
    assert CheckpointSource("org/name").find_local() is None


def test_a_variant_that_is_no_part_of_a_name_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be part of a file name"):
        CheckpointQuery(variant="../x")


def test_a_token_is_not_shown() -> None:
    assert "hf_secret" not in repr(CheckpointQuery(token="hf_secret"))


def test_stores_and_directory_hubs_are_read_by_hfshard_alone(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    hfshard.save_state_dict({"w": torch.ones(2)}, tmp_path / "saved")
    hfshard.push_checkpoint(tmp_path / "saved", tmp_path / "hub")

    for path in ("s3://models/bert", str(tmp_path / "hub")):
        assert CheckpointSource(path).is_for_hfshard_only
    for path in ("org/name", str(tmp_path / "plain")):
        assert not CheckpointSource(path).is_for_hfshard_only


def test_each_try_costs_requests_in_a_store_so_that_there_are_fewer() -> None:
    folder = StoreFolder(MemoryStore(), "s3://models/bert")

    assert ResolvedSource("/there", "/there", LocalFolder("/there")).traits.retries == 400
    assert ResolvedSource("/there", "/there", folder).traits.retries == 20


@pytest.mark.parametrize(
    "call",
    [
        lambda path: hfshard.reshard_checkpoint(path, f"{path}-new", revision="v1"),
        lambda path: hfshard.show_checkpoint(path, f"{path}.html", revision="v1"),
    ],
    ids=["reshard", "show"],
)
def test_a_revision_of_a_plain_directory_is_refused_and_nothing_is_written(
    call: Callable[[str], object], tmp_path: Path
) -> None:
    hfshard.save_state_dict({"a": torch.ones(2)}, tmp_path / "out")

    with pytest.raises(InvalidArgumentError) as caught:
        call(str(tmp_path / "out"))

    directory = tmp_path / "out"
    assert str(caught.value) == (
        f"revision='v1' is for a hub: '{directory}' is a plain directory, which has no revisions. Leave it out."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_main_is_no_revision_of_a_directory_and_a_load_ignores_all_as_transformers_does(tmp_path: Path) -> None:
    hfshard.save_state_dict({"a": torch.ones(2)}, tmp_path)

    assert hfshard.reshard_checkpoint(tmp_path, tmp_path, revision="main").weight_map == {"a": "model.safetensors"}
    assert list(hfshard.load_state_dict(tmp_path, revision="v1")) == ["a"]
