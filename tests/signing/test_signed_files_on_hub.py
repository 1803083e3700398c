"""Signed repos of the Hub: the signature and all files beside the weights are fetched, of one commit, and compared."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import hfshard
from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.constants import MAX_COMPANION_BYTES
from hfshard.hub.resolve import files_to_compare
from tests.helpers.tiny_bert import SHARDED, bert
from tests.hub.pull.pull_hub import PullHub
from tests.hub.server_fixture import hub_fixtures, new_repo_id
from tests.signing.conftest import Keys
from tests.signing.helpers import model_signing

pytestmark = pytest.mark.compat

hub, module_hub = hub_fixtures(PullHub)


@pytest.fixture
def repo() -> str:
    """A name for a repo of this test alone."""
    return new_repo_id()


@pytest.fixture
def signed_bert(tmp_path: Path, keys: Keys) -> Path:
    """A signed BERT in a dozen files, with a tokenizer."""
    directory = tmp_path / "bert"
    bert(3).save_pretrained(directory, max_shard_size=SHARDED)
    (directory / "tokenizer.json").write_text("{}")
    hfshard.sign_checkpoint(directory, private_key=keys.private)
    return directory


def test_a_signed_repo_loads_and_every_file_is_compared(
    hub: PullHub, repo: str, signed_bert: Path, keys: Keys, tmp_path: Path
) -> None:
    first = hub.publish(repo, signed_bert)
    cache = tmp_path / "cache"

    loaded = hub.call("load", repo, cache, public_key=keys.public)
    assert loaded == hub.call("load_auto", repo, cache, public_key=keys.public)
    assert sorted(hub.call("read", repo, cache, public_key=keys.public)) == sorted(bert(3).state_dict())
    snapshot = next((cache / f"models--{repo.replace('/', '--')}" / "snapshots").iterdir())
    assert hub.call("signature", repo) == hub.call("signature", repo, revision=first) == "model.sig"
    assert {"model.sig", "tokenizer.json"} <= {path.name for path in snapshot.iterdir()}
    wrong = hub.refused("load", repo, cache, public_key=keys.other_public)
    assert (wrong.error, "was not made by the key of" in wrong.message) == ("SignatureError", True)

    hub.view(repo).commit({"modeling_evil.py": b"raise SystemExit\n"}, "Add code")
    added = hub.refused("load_auto", repo, cache, public_key=keys.public)
    assert "modeling_evil.py' is not covered by the signature" in added.message
    hub.view(repo).commit({"modeling_evil.py": None, "tokenizer.json": b'{"evil": 1}'}, "Change the tokenizer")
    changed = hub.refused("load", repo, cache, public_key=keys.public)
    assert "tokenizer.json' is not the file that was signed" in changed.message
    assert hub.call("load", repo, cache, public_key=keys.public, revision=first) == loaded


def test_pulls_bring_the_signature(hub: PullHub, repo: str, signed_bert: Path, keys: Keys, tmp_path: Path) -> None:
    hub.publish(repo, signed_bert)

    hub.call("pull", repo, tmp_path / "pulled", cache_dir=tmp_path / "cache")

    model_signing("verify", "key", tmp_path / "pulled", "--public_key", keys.public)
    assert hfshard.verify_checkpoint(tmp_path / "pulled", public_key=keys.public).ok


def test_a_subfolder_has_the_signature_of_the_whole(
    hub: PullHub, repo: str, signed_bert: Path, keys: Keys, tmp_path: Path
) -> None:
    """What a load doesn't read need not be there: other formats, other folders, what training keeps."""
    whole = tmp_path / "whole"
    bert(2).save_pretrained(whole)
    shutil.move(signed_bert, whole / "below")
    (whole / "below" / "model.sig").unlink()
    for name in ("below/training_args.bin", "below/pytorch_model.bin.index.json", "other/scheduler.json"):
        (whole / name).parent.mkdir(exist_ok=True)
        (whole / name).write_text("{}")
    hfshard.sign_checkpoint(whole, private_key=keys.private)
    hub.publish(repo, whole)
    cache = tmp_path / "cache"

    loaded = hub.call("load", repo, cache, public_key=keys.public, subfolder="below")
    assert loaded == hub.call("load", repo, cache, public_key=keys.public, subfolder="below", local_files_only=True)
    assert loaded["digest"] != hub.call("load", repo, cache, public_key=keys.public)["digest"]
    hub.view(repo).commit({"below/tokenizer.json": b'{"evil": 1}'}, "Change the tokenizer")
    changed = hub.refused("load", repo, cache, public_key=keys.public, subfolder="below")
    assert "below/tokenizer.json' is not the file that was signed" in changed.message


def test_files_are_compared_however_large_they_are() -> None:
    """What a pull leaves out for its size, transformers would download by itself, and run."""
    large = MAX_COMPANION_BYTES + 1
    files = {"custom_generate/generate.py": large, "spk_dict.pt": large, "x.bin": 1, ".gitattributes": 1}

    found = files_to_compare(files, CheckpointQuery(needs_signature=True))

    assert found == ["custom_generate/generate.py", "spk_dict.pt"]


def test_an_unsigned_repo_is_refused(hub: PullHub, repo: str, signed_bert: Path, keys: Keys, tmp_path: Path) -> None:
    (signed_bert / "model.sig").unlink()
    hub.publish(repo, signed_bert)

    refused = hub.refused("load", repo, tmp_path / "cache", public_key=keys.public)

    assert (refused.error, "has no signature" in refused.message) == ("SignatureError", True)
