"""The test Hub for processes that have imported huggingface_hub already, such as the ranks of a group."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.servers.hub.routes.api import NO_HARNESSES


@contextmanager
def talking_to(endpoint: str, home: Path, token: str = "hf_write") -> Iterator[None]:
    """Let this process talk to a Hub while the block runs.

    Args:
        endpoint: The server's.
        home: For the cache; no other process's.
        token: Of who asks.
    """
    home.mkdir(parents=True, exist_ok=True)
    harnesses = home / "harnesses.json"
    harnesses.write_text(json.dumps(NO_HARNESSES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_CACHE", str(home))
        patch.setattr(constants, "AGENT_HARNESSES_PATH", str(harnesses), raising=False)
        patch.setitem(os.environ, "HF_TOKEN", token)
        yield
