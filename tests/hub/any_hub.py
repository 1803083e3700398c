"""What lets a process import huggingface_hub before it knows which Hub of the tests it will talk to.

huggingface_hub reads the address of the Hub and the home directory when it is imported, and others make their own of
them. A server of forks imports all that with marks in their place, and each of its forks puts its own there.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SETTINGS = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Seconds. By default these are 10: a client that asks again because a busy machine has paused somebody for so long
    # makes requests that no test expects.
    "HF_HUB_DOWNLOAD_TIMEOUT": "100",
    "HF_HUB_ETAG_TIMEOUT": "100",
}
"""What all clients of these Hubs are told."""
MARKS = {"HF_ENDPOINT": "http://any-hub.invalid", "HF_HOME": "/dev/null/any-home"}
"""Nobody answers at the one, and nothing can be made in the other: what keeps a mark fails."""
_READ_LATE = {"HF_TOKEN", "HF_XET_CLIENT_RETRY_BASE_DELAY", "HF_XET_XORB_COMPRESSION_POLICY"}
"""What is read when it is needed."""
_SWITCHES = {"HF_HUB_DISABLE_XET": ("0", "1"), "HF_HUB_OFFLINE": ("0",)}
"""What a client may be told, too; "0" is as if it were not."""

_made: list[tuple[dict[str, Any], str, str | Path]] = []
"""Names of modules, and of objects in them, whose values have marks in them."""
_DEEPEST = 2
"""Objects in modules are looked into, and those in these."""


def is_client(settings: Mapping[str, str]) -> bool:
    """Whether these settings are those of a client of such a Hub, which can be put in place of the marks."""
    own = {name: value for name, value in settings.items() if name not in MARKS and name not in _READ_LATE}
    switched = {name: own.pop(name) for name in _SWITCHES if name in own}
    return (
        settings.keys() >= MARKS.keys()
        and own == SETTINGS
        and all(value in _SWITCHES[name] for name, value in switched.items())
    )


def find_marks() -> None:
    """Note what the modules that are imported have made of the marks; without the marks, nothing."""
    _made.clear()
    if os.environ.get("HF_ENDPOINT") == MARKS["HF_ENDPOINT"]:
        for module in list(sys.modules.values()):
            if module.__name__ != __name__:
                _note(vars(module), 0)


def _note(names: dict[str, Any], depth: int) -> None:
    for name, value in list(names.items()):
        if isinstance(value, (str, Path)):
            if any(mark in str(value) for mark in MARKS.values()):
                _made.append((names, name, value))
        elif (
            depth < _DEEPEST
            and str(type(value).__module__).startswith("huggingface_hub.")
            and hasattr(value, "__dict__")
        ):
            _note(vars(value), depth + 1)


def replace_marks() -> None:
    """Put what the environment says in place of the marks."""
    if not _made:
        return
    for names, name, value in _made:
        text = str(value)
        for variable, mark in MARKS.items():
            text = text.replace(mark, os.environ[variable].rstrip("/"))
        names[name] = type(value)(text)
    importlib.reload(sys.modules["huggingface_hub.constants"])
