"""Repos of the Hub: what is said when there is nothing to be had."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hfshard
from hfshard.errors import CheckpointNotFoundError


def test_repo_that_is_not_cached_is_an_error_with_a_command_that_exists(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"run: hf models ls no-such-model$") as raised:
        hfshard.load_state_dict("no-such-model", cache_dir=tmp_path)
    command = re.split("run: hf |no-such-model$", str(raised.value))[1].split()
    hub = [sys.executable, "-c", "from huggingface_hub.cli.hf import main; main()", *command, "--help"]
    run = subprocess.run(hub, env=child_environment, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "REPO_ID" in run.stdout
