"""What errors say of the Hub and of tokens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from huggingface_hub import constants

import hfshard
from hfshard.errors import CheckpointNotFoundError, HubAccessError
from hfshard.hub.http import translate_hub_errors
from hfshard.stores.hub_calls import describe_token, shown_endpoint, without_secrets
from tests.helpers import processes
from tests.servers.hub.hub_server import HubServer

REFUSAL = r"run: hf models ls no-such-model \(There is no file or directory 'no-such-model' either\.\)$"


def test_repo_that_is_not_cached_is_an_error_with_a_command_that_exists(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    with pytest.raises(CheckpointNotFoundError, match=REFUSAL) as raised:
        hfshard.load_state_dict("no-such-model", cache_dir=tmp_path)
    command = re.split("run: hf |no-such-model \\(", str(raised.value))[1].split()
    hub = ["-c", "from huggingface_hub.cli.hf import main; main()", *command, "--help"]
    run = processes.run_fresh(hub, env=child_environment)
    assert run.returncode == 0, run.stderr
    assert "REPO_ID" in run.stdout


@pytest.mark.compat
@pytest.mark.parametrize("token", ["hf_SECRETSECRET\n", " hf_SECRETSECRET", "", "hf_SECRETSECRÉT"])
def test_token_that_can_not_be_one_is_refused_and_not_quoted(token: str) -> None:
    with (
        pytest.raises(HubAccessError, match="The token that was passed is empty, or has") as raised,
        translate_hub_errors("o/n", token),
    ):
        pass
    assert "SECRET" not in str(raised.value)


@pytest.mark.parametrize("token", ["x", "abcd", "hf_short", "hf_fifteen_long"])
def test_short_token_is_not_shown_at_all(token: str) -> None:
    assert describe_token(token) == "the token '…' that was passed"


def test_token_that_a_server_quotes_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert without_secrets("Token abcd is wrong; abcde is not.", "abcd") == "Token … is wrong; abcde is not."
    monkeypatch.setenv("HF_TOKEN", "hf_saved")
    assert without_secrets("'hf_saved' has expired", None) == "'…' has expired"
    assert without_secrets("hf_saved", False) == "hf_saved"


@pytest.mark.parametrize("endpoint", ["https://someone:hunter2@hub", "https://hunter2@hub", "https://a:hun/ter2@hub"])
def test_an_endpoint_is_shown_without_its_user(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    assert shown_endpoint() == "https://hub"


MIRROR = """
import sys, time, traceback
import torch, hfshard
from hfshard.stores.open_store import open_store

time.sleep = lambda seconds: None


def fail(act, *args, **options):
    try:
        act(*args, **options)
    except hfshard.errors.HfshardError:
        traceback.print_exc()
        print("failed")
    else:
        raise AssertionError(args)


if sys.argv[1] == "there":
    hfshard.save_state_dict({"a": torch.ones(2)}, "out")
    pushed = hfshard.push_checkpoint("out", "org/mirrored")
    print(pushed.url, hfshard.push_checkpoint("out", "org/mirrored").url)
    print(hfshard.push_checkpoint("out", "org/mirrored", create_pr=True, commit_message="x").url)
    fail(hfshard.load_state_dict, "org/mirrored", revision="nothing")
    fail(hfshard.pull_checkpoint, "org/mirrored", subfolder="nothing")
fail(hfshard.load_state_dict, "org/nothing")
fail(hfshard.push_checkpoint, "out", "nobody/else")
fail(open_store("hf://buckets/org/nothing").list_objects)
fail(open_store("hf://buckets/org/nothing").put, "a", b"1")
"""


@pytest.mark.parametrize(("what", "offline", "errors"), [("there", "0", 6), ("gone", "0", 4), ("offline", "1", 4)])
def test_the_password_of_a_mirror_is_never_shown(
    tmp_path: Path, child_environment: dict[str, str], what: str, offline: str, errors: int
) -> None:
    with HubServer(tmp_path / "hub", has_xet=True) as server:
        host = server.endpoint.removeprefix("http://") if what == "there" else "127.0.0.1:1"
        mirror = {
            "HF_ENDPOINT": f"http://someone:hf_write@{host}",
            "HF_HUB_VERBOSITY": "error",  # its own log of retries names URLs as they are
            "HF_HUB_OFFLINE": offline,
            "HFSHARD_XET": "1",
        }
        environment = {**child_environment, **server.environment(home=tmp_path / "home"), **mirror}
        del environment["HF_TOKEN"]
        (tmp_path / "out").mkdir()
        done = processes.run(["-c", MIRROR, what], env=environment, cwd=tmp_path, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "hf_write" not in done.stdout + done.stderr
    assert done.stdout.count("failed") == errors, done.stderr
    assert f"http://{host}" in done.stderr
    assert done.stdout.count(f"http://{host}/org/mirrored/commit/") == (3 if what == "there" else 0)
