"""No credentials but those that a test sets, and nothing is tried again for long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLES = ("AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR_HOST", "CLOUDSDK_", "HFSHARD_STORE_")


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user who has set nothing, in a home of his own, on a machine of no cloud; gives the home."""
    for name in os.environ:
        if name.startswith(VARIABLES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    monkeypatch.setenv("HFSHARD_STORE_RETRY_SECONDS", "0.2")
    monkeypatch.setenv("HFSHARD_STORE_TIMEOUT", "2")
    return tmp_path
