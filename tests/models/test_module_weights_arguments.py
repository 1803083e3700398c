"""Arguments that the saves and pushes of both kinds of models share, checked the same for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hfshard.errors import InvalidArgumentError, UnknownArgumentError
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.models.module_weights import take_repo_id, without_defaults
from tests.helpers.tiny_bert import bert
from tests.models.nets import ours


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
