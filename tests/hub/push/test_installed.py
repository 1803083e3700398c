"""What a stock model pushes where hfshard is installed is what it pushes without, and transformers loads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.utils import hub as transformers_hub

from tests.hub.models import digest_of, make_model
from tests.hub.push.push_hub import PushHub

pytestmark = pytest.mark.compat


def test_a_push_makes_stocks_commit(hub: PushHub, repo: str) -> None:
    other = f"{repo}-stock"
    options = {"max_shard_size": "9KB", "tags": ["one"], "private": True}
    hub.call("push_stock", 1, other, **options)
    hub.call("push_installed", 1, repo, **options)

    assert hub.files(repo) == hub.files(other)
    weights = {name for name in hub.files(repo) if name.startswith("model")}
    assert len(weights) > 5
    for name in hub.files(repo) - weights:
        assert hub.view(repo).read(name) == hub.view(other).read(name)
    assert [one.title for one in hub.view(repo).commits()] == [one.title for one in hub.view(other).commits()]
    assert hub.view(repo).private
    expected = digest_of(make_model(1, stock=True).state_dict())
    assert hub.loads(repo) == expected
    assert hub.call("load_installed", other, hub.root / f"{other}-cache").result == expected

    hub.call("push_installed", 2, repo)
    assert hub.files(repo) == {"README.md", "config.json", "model.safetensors"}


@pytest.mark.skipif(not hasattr(transformers_hub, "resolve_revision"), reason="this transformers resolves no revision")
def test_a_revision_that_was_resolved_stays_what_it_was(hub: PushHub, repo: str) -> None:
    hub.call("push_installed", 1, repo)

    loaded = hub.call("load_after_push", 2, repo, hub.root / f"{repo}-cache").result

    assert loaded == digest_of(make_model(1, stock=True).state_dict()) != hub.loads(repo)


def test_a_save_that_pushes_makes_stocks_commit(hub: PushHub, repo: str, tmp_path: Path) -> None:
    hub.call("push_installed", 1, repo, tmp_path / "out", commit_message="mine", create_pr=False)
    hub.call("push_installed", 1, f"{repo}-of-arguments", tmp_path / "out", private=True, space_sdk=None)

    for one in (repo, f"{repo}-of-arguments"):
        assert hub.files(one) == {"README.md", "config.json", "model.safetensors"}
        assert hub.loads(one) == digest_of(make_model(1, stock=True).state_dict())
    assert hub.view(repo).commits()[0].title == "mine"
    assert hub.view(f"{repo}-of-arguments").private
