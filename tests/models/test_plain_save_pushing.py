"""Plain modules pushed: one commit with config and card, to the test Hub and to a directory hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, constants, hf_hub_download

import hfshard
from hfshard.errors import InvalidArgumentError, UnknownArgumentError
from hfshard.hub.directory.directory_hub import DirectoryHub
from tests.hub.on_ranks import talking_to
from tests.hubserver.hub_server import HubServer
from tests.models.nets import Bare, Simple, build, ours, theirs

pytestmark = [
    pytest.mark.compat,
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # huggingface_hub's own, of httpx
]


class Net(hfshard.ShardedModelMixin, Simple, license="mit"):
    """Arguments with defaults."""


def net(width: int) -> Any:
    made: Any = Net(width=width)
    return made


def test_each_mixin_loads_from_the_hub_what_the_other_has_pushed(
    hub_server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with talking_to(hub_server.endpoint, tmp_path / "cache"):
        mine, stock = build(ours("given"), "given"), build(theirs("given"), "given")
        told = mine.push_to_hub("org/ours", token="hf_write", private=True)
        stock.push_to_hub("org/theirs", token="hf_write")

        api = HfApi()
        assert next(commit.title for commit in api.list_repo_commits("org/ours")) == "Push model using huggingface_hub."
        assert told.oid == api.model_info("org/ours").sha
        files = {repo: set(api.list_repo_files(repo)) for repo in ("org/ours", "org/theirs")}
        assert files["org/ours"] == files["org/theirs"]
        for name in ("config.json", "README.md"):
            paths = [hf_hub_download(repo, name) for repo in files]
            assert Path(paths[0]).read_bytes() == Path(paths[1]).read_bytes()
        for repo in files:
            for model_class in (ours("given"), theirs("given")):
                loaded = model_class.from_pretrained(repo)
                assert loaded.seen == mine.seen
                assert torch.equal(loaded.layer.weight, mine.layer.weight)


def test_one_commit_with_its_config_shards_and_no_stale_files(hub_server: HubServer, tmp_path: Path) -> None:
    with talking_to(hub_server.endpoint, tmp_path / "cache"):
        api = HfApi()
        first: Any = net(40).push_to_hub("org/net", max_shard_size="5KB")
        (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nedited\n")
        api.upload_file(path_or_fileobj=tmp_path / "README.md", path_in_repo="README.md", repo_id="org/net")
        before = len(api.list_repo_commits("org/net"))
        net(6).push_to_hub("org/net", branch="main", commit_message="Small")

        assert len(api.list_repo_commits("org/net")) == before + 1
        there = set(api.list_repo_files("org/net")) - {".gitattributes"}
        assert there == {"config.json", "model.safetensors", "README.md"}
        assert "edited" in Path(hf_hub_download("org/net", "README.md")).read_text()
        assert Net.from_pretrained("org/net").seen[0] == 6
        assert Net.from_pretrained("org/net", revision=first.oid, verify="full").seen[0] == 40
        request = net(7).push_to_hub("org/net", create_pr=True, config={"width": 7})
        assert request.pr_url
        assert Net.from_pretrained("org/net", revision="refs/pr/1").seen[0] == 7


def test_an_override_that_calls_super_gets_the_weights_of_its_configs_commit(
    hub_server: HubServer, tmp_path: Path
) -> None:
    class Asking(hfshard.ShardedModelMixin, Simple):
        @classmethod
        def _from_pretrained(cls, **kwargs: Any) -> Any:
            if kwargs["width"] == 4:
                net(6).push_to_hub("org/net")  # between config and weights
            return super()._from_pretrained(**kwargs)

    with talking_to(hub_server.endpoint, tmp_path / "cache"):
        net(4).push_to_hub("org/net")
        assert Asking.from_pretrained("org/net", strict=True).layer.weight.shape == (4, 4)
        assert Asking.from_pretrained("org/net", strict=True).layer.weight.shape == (6, 6)


def test_a_directory_hub_with_branches_and_an_override(tmp_path: Path) -> None:
    class Adding(hfshard.ShardedModelMixin, Simple):
        def _save_pretrained(self, save_directory: Path) -> None:
            super()._save_pretrained(save_directory)
            (save_directory / "below").mkdir()
            (save_directory / "below" / "more.txt").write_text("more")

    hub = tmp_path / "hub"
    net(40).push_to_hub(hub, max_shard_size="5KB", tags=["extra"])
    made: Any = Adding(width=6)
    made.push_to_hub(hub, branch="other")
    made.save_pretrained(tmp_path / "hub2", push_to_hub=True, repo_id=str(hub), revision="third")

    assert Net.from_pretrained(hub).seen[0] == 40
    assert Net.from_pretrained(str(hub), revision="other").seen[0] == 6
    assert Adding.from_pretrained(hub, revision="third").seen[0] == 6
    snapshot = Path(DirectoryHub.open(str(hub)).snapshot("other"))
    assert (snapshot / "below" / "more.txt").read_text() == "more"
    assert "extra" in (Path(DirectoryHub.open(str(hub)).snapshot(None)) / "README.md").read_text()
    assert json.loads((snapshot / "config.json").read_text())["width"] == 6


def test_a_config_goes_from_the_hub_where_the_new_model_has_none(tmp_path: Path) -> None:
    class None_(hfshard.ShardedModelMixin, Bare):
        pass

    net(4).push_to_hub(tmp_path / "hub")
    made: Any = None_()
    made.push_to_hub(tmp_path / "hub")
    tree = DirectoryHub.open(str(tmp_path / "hub")).tree()
    assert tree is not None and "config.json" not in tree.files


@pytest.mark.parametrize(
    ("argument", "kind", "words"),
    [
        ({"delete_patterns": "*"}, InvalidArgumentError, "hfshard.push_checkpoint"),
        ({"ignore_patterns": ["*.json"]}, InvalidArgumentError, "half a checkpoint"),
        ({"branch": "a", "revision": "b"}, InvalidArgumentError, "two names for one thing"),
        ({"create_pr": True, "branch": "a"}, InvalidArgumentError, "pull request on main"),
        ({"comit_message": "a"}, UnknownArgumentError, "commit_message"),
    ],
)
def test_bad_arguments_are_refused_before_the_hub_is_made(
    argument: dict[str, Any], kind: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=words):
        net(2).push_to_hub(tmp_path / "hub", **argument)
    assert not (tmp_path / "hub").exists()
