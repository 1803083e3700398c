"""Where the browser is that draws a page as a picture."""

from __future__ import annotations

import os
import shutil
from typing import Final

CHROMIUM: Final = "HFSHARD_CHROMIUM"
"""The environment variable that names the browser: a path, or a command on PATH."""

_COMMANDS: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_chromium() -> str | None:
    """Find a Chromium or Chrome: the one that `HFSHARD_CHROMIUM` names, or the first on PATH.

    Returns:
        Its path, or None where there is none.
    """
    named = os.environ.get(CHROMIUM)
    commands = (named,) if named else _COMMANDS
    return next(filter(None, map(shutil.which, commands)), None)
