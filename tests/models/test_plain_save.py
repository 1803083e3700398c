"""What `save_pretrained` and `push_to_hub` of a plain module write, and overrides of its class."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, ModelCard, constants, hf_hub_download
from safetensors.torch import load_file
from torch import nn

import hfshard
from hfshard.errors import InvalidArgumentError, SaveDirectoryError, UnknownArgumentError
from hfshard.hub.directory.directory_hub import DirectoryHub
from tests.hub.on_ranks import talking_to
from tests.models.nets import Bare, Configured, Outer, Simple, build, ours, theirs
from tests.servers.hub.hub_server import HubServer

# huggingface_hub's own, of httpx
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


class Net(hfshard.ShardedModelMixin, Simple, license="mit"):
    """Arguments with defaults."""


def net(width: int = 4) -> Any:
    made: Any = Net(width=width)
    return made


def listing(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".cache")


def test_shards_replace_a_single_file_and_the_config_goes_with_them(tmp_path: Path) -> None:
    net(4).save_pretrained(tmp_path)
    assert listing(tmp_path) == ["README.md", "config.json", "model.safetensors"]
    big = net(40)
    big.save_pretrained(tmp_path, max_shard_size="5KB")

    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert listing(tmp_path) == ["README.md", "config.json", *shards, "model.safetensors.index.json"]
    assert json.loads((tmp_path / "config.json").read_text())["width"] == 40
    assert hfshard.verify_checkpoint(tmp_path).ok
    assert torch.equal(Net.from_pretrained(tmp_path, verify="full").layer.weight, big.layer.weight)
    net(4).save_pretrained(tmp_path)
    assert listing(tmp_path) == ["README.md", "config.json", "model.safetensors"]
    assert theirs("defaults").from_pretrained(tmp_path).seen[0] == 4


def test_a_config_goes_where_the_new_model_has_none(tmp_path: Path) -> None:
    for size in ("5GB", 8):
        theirs("defaults")().save_pretrained(tmp_path)
        bare = ours("card")()
        bare.save_pretrained(tmp_path, max_shard_size=size)
        assert "config.json" not in listing(tmp_path)
        assert hfshard.verify_checkpoint(tmp_path).ok
        assert torch.equal(ours("card").from_pretrained(tmp_path).layer.weight, bare.layer.weight)


def test_names_of_tied_tensors_are_those_of_the_stock_mixin(tmp_path: Path) -> None:
    net().save_pretrained(tmp_path / "ours")
    theirs("defaults")().save_pretrained(tmp_path / "theirs")
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs")]
    assert sorted(files[0]) == sorted(files[1]) == ["layer.bias", "layer.weight", "turned"]


def test_wrapped_models_save_what_they_wrap(tmp_path: Path) -> None:
    model = net()
    compiled: Any = torch.compile(model, backend="eager")
    compiled.save_pretrained(tmp_path / "compiled")
    nn.DataParallel(model).module.save_pretrained(tmp_path / "parallel")

    class Wrapper(hfshard.ShardedModelMixin, nn.DataParallel):  # type: ignore[type-arg]
        pass

    Wrapper(model).save_pretrained(tmp_path / "wrapper")
    for name in ("compiled", "parallel", "wrapper"):
        assert torch.equal(Net.from_pretrained(tmp_path / name, width=4).layer.weight, model.layer.weight)


def test_a_child_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    class Holder(hfshard.ShardedModelMixin, nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)
            self.other = nn.Linear(2, 2)

    holder: Any = Holder()
    holder.save_pretrained(tmp_path)
    assert torch.equal(Holder.from_pretrained(tmp_path, strict=True).other.weight, holder.other.weight)


@pytest.mark.parametrize(
    ("argument", "kind", "words"),
    [
        ({"config": "text"}, InvalidArgumentError, "must be a dict or a dataclass, got a str"),
        ({"config": {"a": object()}}, InvalidArgumentError, r"cannot be written as JSON.*coders="),
        ({"save_peft_format": False}, InvalidArgumentError, "save_peft_format is for transformers models"),
        ({"safe_serialization": False}, InvalidArgumentError, "does not write pickles"),
        ({"max_shard_sise": 1}, UnknownArgumentError, "Did you mean 'max_shard_size'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_made(
    argument: dict[str, Any], kind: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=words):
        net().save_pretrained(tmp_path / "new", **argument)
    assert not (tmp_path / "new").exists()


def test_nothing_is_saved_into_a_hub_or_by_other_processes(tmp_path: Path) -> None:
    net().push_to_hub(tmp_path / "hub")
    with pytest.raises(SaveDirectoryError, match="directory hub"):
        net().save_pretrained(tmp_path / "hub")
    net().save_pretrained(tmp_path / "rank", is_main_process=False)
    assert not (tmp_path / "rank").exists() or listing(tmp_path / "rank") == []


def test_a_state_dict_in_place_of_the_models_own(tmp_path: Path) -> None:
    net().save_pretrained(tmp_path, state_dict={"layer.weight": torch.ones(4, 4)})
    assert load_file(tmp_path / "model.safetensors").keys() == {"layer.weight"}


def test_an_override_that_calls_super_adds_its_files_and_config_and_weights_are_ours(tmp_path: Path) -> None:
    class Adding(hfshard.ShardedModelMixin, Simple):
        def _save_pretrained(self, save_directory: Path) -> None:
            super()._save_pretrained(save_directory)
            (save_directory / "more.txt").write_text("more")

    Adding(width=40).save_pretrained(tmp_path, max_shard_size="5KB")
    assert {"more.txt", "model.safetensors.index.json", "config.json", "README.md"} <= set(listing(tmp_path))
    assert Adding.from_pretrained(tmp_path).seen[0] == 40


@pytest.mark.parametrize("calls_super", [True, False])
def test_a_config_that_an_override_writes_stays(calls_super: bool, tmp_path: Path) -> None:
    class Writing(hfshard.ShardedModelMixin, Simple):
        def _save_pretrained(self, save_directory: Path) -> None:
            (save_directory / "config.json").write_text('{"width": 9}')
            if calls_super:
                super()._save_pretrained(save_directory)

    (tmp_path / "config.json").write_text('{"old": 1}')
    Writing(width=4).save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == '{"width": 9}'


def test_an_override_that_saves_by_itself_gets_config_and_card_as_from_the_stock_mixin(tmp_path: Path) -> None:
    class Alone(hfshard.ShardedModelMixin, Simple):
        def _save_pretrained(self, save_directory: Path) -> None:
            (save_directory / "weights.txt").write_text("4")

        @classmethod
        def _from_pretrained(cls, *, model_id: str, **kwargs: Any) -> Any:
            assert os.path.isdir(model_id)
            return cls(width=kwargs["width"])

    class AloneWithoutArguments(hfshard.ShardedModelMixin, Bare):
        _save_pretrained = Alone._save_pretrained

    (tmp_path / "config.json").write_text('{"legacy": 1}')
    Alone(width=4, limit=1.0).save_pretrained(tmp_path)
    assert listing(tmp_path) == ["README.md", "config.json", "weights.txt"]
    assert json.loads((tmp_path / "config.json").read_text()) == {"limit": 1.0, "name": "é", "width": 4}
    loaded = Alone.from_pretrained(tmp_path)
    assert loaded.seen[0] == 4
    with pytest.raises(InvalidArgumentError, match="strict and verify had no effect"):
        Alone.from_pretrained(tmp_path, verify="full")
    AloneWithoutArguments().save_pretrained(tmp_path)
    assert listing(tmp_path) == ["README.md", "weights.txt"]


def test_methods_of_a_library_behind_the_mixin_are_not_passed_over(tmp_path: Path) -> None:
    class Lib(Simple):
        def _save_pretrained(self, save_directory: Path) -> None: ...

    class Wrong(hfshard.ShardedModelMixin, Lib):
        pass

    with pytest.raises(InvalidArgumentError, match=r"Put ShardedModelMixin after it.*class Wrong\(Lib, Sharded"):
        Wrong().save_pretrained(tmp_path)


def test_save_with_push_calls_push_to_hub_as_the_stock_mixin_does(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    class Pushed(hfshard.ShardedModelMixin, Configured):
        def push_to_hub(self, **kwargs: Any) -> Any:  # type: ignore[override]
            calls.append(kwargs)
            return "done"

    model: Any = Pushed(Outer(2))
    assert model.save_pretrained(tmp_path / "name") is None
    assert model.save_pretrained(tmp_path / "name", push_to_hub=True, config={"a": 1}) == "done"
    model.save_pretrained(tmp_path / "name", push_to_hub=True, repo_id="org/x", token="t", max_shard_size="1KB")
    noted = {"width": 2, "inner": {"heads": 2, "act": "relu"}}
    assert calls == [
        {"repo_id": "name", "config": {"a": 1}, "model_card_kwargs": {}},
        {"repo_id": "org/x", "config": noted, "model_card_kwargs": {}, "max_shard_size": "1KB", "token": "t"},
    ]


@pytest.mark.compat
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


@pytest.mark.compat
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


@pytest.mark.compat
def test_an_override_that_calls_super_gets_weights_of_its_configs_commit(hub_server: HubServer, tmp_path: Path) -> None:
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


@pytest.mark.compat
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


@pytest.mark.compat
def test_a_config_goes_from_the_hub_where_the_new_model_has_none(tmp_path: Path) -> None:
    net(4).push_to_hub(tmp_path / "hub")
    ours("card")().push_to_hub(tmp_path / "hub")
    tree = DirectoryHub.open(str(tmp_path / "hub")).tree()
    assert tree is not None and "config.json" not in tree.files


@pytest.mark.compat
@pytest.mark.parametrize(
    ("argument", "kind", "words"),
    [
        ({"delete_patterns": "*"}, InvalidArgumentError, "hfshard.push_checkpoint"),
        ({"ignore_patterns": ["*.json"]}, InvalidArgumentError, "half a checkpoint"),
        ({"branch": "a", "revision": "b"}, InvalidArgumentError, "name the same thing"),
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


def test_a_tag_that_a_class_gives_its_card_as_text_stays_one(tmp_path: Path) -> None:
    class Tagged(hfshard.ShardedModelMixin, Simple):
        def generate_model_card(self, *args: Any, **kwargs: Any) -> Any:
            card: Any = super().generate_model_card(*args, **kwargs)
            card.data.tags = "own"
            return card

    model: Any = Tagged(width=4)
    model.push_to_hub(tmp_path / "hub", tags="extra")

    card: Any = ModelCard.load(Path(DirectoryHub.open(str(tmp_path / "hub")).snapshot(None)) / "README.md")
    assert card.data.tags == ["own", "extra"]
