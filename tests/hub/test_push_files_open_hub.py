"""A repo_id is opened as what it names, and a directory becomes a hub; `tests/hub/push` opens repos of the Hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfshard.errors import HubError, InvalidArgumentError
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.hub.push_files import open_hub


def test_a_directory_that_is_missing_becomes_a_hub_and_is_opened_again(tmp_path: Path) -> None:
    for repo_id in (tmp_path / "hub", str(tmp_path / "hub"), f"file://{tmp_path}/hub"):
        hub = open_hub(repo_id)

        assert isinstance(hub, DirectoryHub)
        assert hub.root == str(tmp_path / "hub")

    assert DirectoryHub.is_hub(tmp_path / "hub")


def test_a_directory_with_other_files_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(HubError):
        open_hub(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("repo_id", ["s3://models/bert", "https://huggingface.co/org/name"])
def test_other_addresses_are_refused(repo_id: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"is a store address|is not a repo_id"):
        open_hub(repo_id)
