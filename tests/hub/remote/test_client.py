"""What errors say of the Hub and of tokens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hfshard
from hfshard.errors import CheckpointNotFoundError, HubAccessError
from hfshard.hub.remote.client import translate_hub_errors
from hfshard.stores.buckets.hub_calls import describe_token, without_token

REFUSAL = r"run: hf models ls no-such-model \(There is no file or directory 'no-such-model' either\.\)$"


def test_repo_that_is_not_cached_is_an_error_with_a_command_that_exists(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    with pytest.raises(CheckpointNotFoundError, match=REFUSAL) as raised:
        hfshard.load_state_dict("no-such-model", cache_dir=tmp_path)
    command = re.split("run: hf |no-such-model \\(", str(raised.value))[1].split()
    hub = [sys.executable, "-c", "from huggingface_hub.cli.hf import main; main()", *command, "--help"]
    run = subprocess.run(hub, env=child_environment, capture_output=True, text=True, check=False, timeout=110)
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
    assert without_token("Token abcd is wrong; abcde is not.", "abcd") == "Token … is wrong; abcde is not."
    monkeypatch.setenv("HF_TOKEN", "hf_saved")
    assert without_token("'hf_saved' has expired", None) == "'…' has expired"
    assert without_token("hf_saved", False) == "hf_saved"
