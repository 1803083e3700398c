"""What a repo_id names: a repo of the Hub or a directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from traceback import format_exception
from typing import Any

import pytest

import hfshard
from hfshard.errors import HfshardError, InvalidArgumentError
from hfshard.hub.directory.directory_hub import DirectoryHub, hub_directory, split_address
from tests.helpers.tiny_bert import Bert, bert, value_of

pytestmark = pytest.mark.compat


def test_one_place_has_one_meaning_for_push_pull_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bert(5).push_to_hub("./hub")
    places: list[Any] = ["hub", "./hub", Path("hub"), tmp_path / "hub", (tmp_path / "hub").as_uri()]
    for place in places:
        assert value_of(Bert.from_pretrained(place)) == 5
        assert os.path.samefile(hfshard.pull_checkpoint(place), DirectoryHub.open(tmp_path / "hub").snapshot())
        bert(5).push_to_hub(place)
    assert len([item for item in DirectoryHub.open("hub").revisions() if item.kind == "commit"]) == 1


@pytest.mark.parametrize("url", ["file:///x/hub#y", "file:///x/hub?y", "file://other/x", "https://x/y", "file://"])
def test_url_that_would_be_cut_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError):
        hub_directory(url)


def test_a_store_is_no_repo(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"'s3://bucket/p' is a store address, not a repo\. Stores hold checkpoints"
    ):
        bert(1).push_to_hub("s3://bucket//p/")


def test_directory_names_are_decoded(tmp_path: Path) -> None:
    assert hub_directory("file:///a%20b/c%23d%3Fe") == "/a b/c#d?e"
    assert hub_directory("org/name") is None
    assert hub_directory(tmp_path) == str(tmp_path)


@pytest.mark.parametrize(
    ("address", "place", "revision"),
    [
        ("org/name", "org/name", None),
        ("org/name@v1.0", "org/name", "v1.0"),
        ("org/name@refs/pr/3", "org/name", "refs/pr/3"),
        ("{here}/me@home/hub", "{here}/me@home/hub", None),
        ("{here}/me@home/hub@a/b@c", "{here}/me@home/hub", "a/b@c"),
        ("./me@home/hub@main", "{here}/me@home/hub", "main"),
        ("file://{here}/me%40home/hub@main", "{here}/me@home/hub", "main"),
        ("plain@main", "plain", "main"),
        ("plain", "{here}/plain", None),
        ("hub@v1", "hub@v1", None),
        (Path("plain"), "{here}/plain", None),
        ("/new/me@home/hub", "/new/me@home/hub", None),
    ],
)
def test_address_is_a_place_and_a_revision(
    address: str | Path, place: str, revision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    DirectoryHub.create(tmp_path / "me@home" / "hub")
    DirectoryHub.create("plain")
    (tmp_path / "hub@v1").mkdir()
    given = address.format(here=tmp_path) if isinstance(address, str) else address

    assert split_address(given) == (place.format(here=tmp_path), revision)


@pytest.mark.parametrize("place", ["user:TOKEN@host/x", "hf://user:TOKEN@org/x"])
@pytest.mark.parametrize("call", [hfshard.pull_checkpoint, hfshard.load_state_dict, Bert.from_pretrained])
def test_no_error_repeats_the_password_of_an_address(place: str, call: Callable[[str], Any]) -> None:
    with pytest.raises(HfshardError) as caught:
        call(place)
    assert "TOKEN" not in "".join(format_exception(caught.value))
    assert "TOKEN" not in str(caught.value.path)
