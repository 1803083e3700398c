"""What a repo_id names: a repo of the Hub or a directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import hfshard
from hfshard.errors import InvalidArgumentError
from hfshard.hub.address import directory_of
from hfshard.hub.directory.hub import DirectoryHub
from tests.helpers.tiny_bert import Bert, bert, value_of

pytestmark = pytest.mark.compat


def test_one_place_has_one_meaning_for_push_pull_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    bert(5).push_to_hub("~/hub")
    places: list[Any] = ["~/hub", "hub", "./hub", Path("hub"), tmp_path / "hub", (tmp_path / "hub").as_uri()]
    for place in places:
        assert value_of(Bert.from_pretrained(place)) == 5
        assert os.path.samefile(hfshard.pull_checkpoint(place), DirectoryHub.open(tmp_path / "hub").snapshot())
        bert(5).push_to_hub(place)
    assert len([item for item in DirectoryHub.open("hub").revisions() if item.kind == "commit"]) == 1


@pytest.mark.parametrize("url", ["file:///x/hub#y", "file:///x/hub?y", "file://other/x", "https://x/y", "file://"])
def test_url_that_would_be_cut_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError):
        directory_of(url)


def test_directory_names_are_decoded(tmp_path: Path) -> None:
    assert directory_of("file:///a%20b/c%23d%3Fe") == "/a b/c#d?e"
    assert directory_of("org/name") is None
    assert directory_of(tmp_path) == str(tmp_path)
