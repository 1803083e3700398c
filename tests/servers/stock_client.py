"""Scripts with stock huggingface_hub, and what they leave on the Hub server of the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers import processes
from tests.servers.hub.hub_server import HubServer, Request

WEIGHTS = bytes(range(256)) * 1000  # 256,000 bytes, no two neighbours alike
SERVER: dict[str, Any] = {"multipart_bytes": 100_000, "page_size": 3}  # options of the Hub server

BEFORE = """
import json, os, sys
from pathlib import Path
from huggingface_hub import (
    CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi, get_hf_file_metadata, hf_hub_download,
    hf_hub_url, snapshot_download,
)
home = Path(sys.argv[1])
"""
AFTER = "\nprint(json.dumps(result))"


def run(hub: HubServer, home: Path, script: str, token: str | None = "hf_write", has_xet: bool = False) -> Any:
    """Run a script with stock huggingface_hub in a child; gives what it assigned to `result`."""
    environment = {**hub.environment(token, home=home), "HF_HUB_DISABLE_XET": "0" if has_xet else "1"}
    done = processes.run(["-c", BEFORE + script + AFTER, home], env=environment, timeout=110)
    assert done.returncode == 0, done.stderr + "\n".join(map(str, hub.log))
    return json.loads(done.stdout.splitlines()[-1])


def kinds(requests: list[Request]) -> list[str]:
    return [request.kind for request in requests]


def files_of(hub: HubServer, revision: str = "main") -> dict[str, bytes]:
    view = hub.repo("org/model")
    return {path: view.read(path, revision) for path in view.files(revision) if path != ".gitattributes"}
