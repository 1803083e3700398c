"""What a repo_id names: a repo of the Hugging Face Hub, or a directory that serves as a hub."""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import unquote, urlsplit

from hfshard.errors import InvalidArgumentError

_FILE_SCHEME: Final = "file://"
_PATH_STARTS: Final = ("/", "./", "../", "~")


def directory_of(repo_id: str) -> str | None:
    """The directory that a repo_id names, or None where it is "org/name" on the Hugging Face Hub.

    A `file://` URL and whatever looks like a path (it begins with `/`, `./`, `../` or `~`, or is `.` or `..`).

    Raises:
        InvalidArgumentError: A URL of another machine, or of another kind.
    """
    if repo_id.startswith(_FILE_SCHEME):
        parts = urlsplit(repo_id)
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise InvalidArgumentError(
                f"'{repo_id}' is no file URL of this machine: write file:///path/to/hub, with three slashes.",
                path=repo_id,
            )
        return unquote(parts.path)
    if "://" in repo_id:
        raise InvalidArgumentError(
            f"'{repo_id}' is no repo_id: write org/name (for another server, set HF_ENDPOINT), "
            "or a path or file:// URL of a directory.",
            path=repo_id,
        )
    if repo_id.startswith(_PATH_STARTS) or repo_id in (".", ".."):
        return os.path.expanduser(repo_id)
    return None
