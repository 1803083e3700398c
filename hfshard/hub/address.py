"""What a repo_id names: a repo of the Hugging Face Hub, or a directory that serves as a hub."""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import unquote, urlsplit

from hfshard._util.addresses import check_slashes, names_store, parse_address, suggest_address
from hfshard._util.arguments import absolute_path, path_text
from hfshard._util.text import without_url_secrets
from hfshard.errors import InvalidArgumentError
from hfshard.storage.disk.hub_place import has_hub_marker

_FILE_SCHEME: Final = "file://"
_PATH_STARTS: Final = ("/", "./", "../", "~")


def directory_of(repo_id: str | os.PathLike[str]) -> str | None:
    """Find the directory that a repo_id names; None where it is "org/name" on the Hugging Face Hub.

    A directory is named by a path object, a `file://` URL, whatever looks like a path (it begins with `/`, `./`, `../`
    or `~`, or is `.` or `..`), and the name of a directory hub, so that what is loaded from there is pushed there.

    Raises:
        InvalidArgumentError: A URL of another machine, or of another kind; or the address of a store, or what was one.
    """
    if not isinstance(repo_id, str):
        return os.path.expanduser(path_text(repo_id, "repo_id"))
    check_slashes(repo_id, "repo_id")
    if repo_id.startswith(_FILE_SCHEME):
        parts = urlsplit(repo_id)
        if parts.netloc not in ("", "localhost") or not parts.path or parts.query or parts.fragment:
            shown = without_url_secrets(repo_id)
            raise InvalidArgumentError(
                f"'{shown}' is not a file URL of a directory on this machine: write file:///path/to/hub, with three "
                "slashes, and %3F and %23 for ? and #.",
                path=shown,
            )
        return unquote(parts.path)
    if names_store(repo_id):
        raise InvalidArgumentError(
            f"'{parse_address(repo_id, 'repo_id')}' is the address of a store, which holds checkpoints and no commits, "
            "so that no repo can be there: save to it (save_pretrained), or copy a checkpoint to it: "
            "hfshard.push_checkpoint(directory, address).",
            path=repo_id,
        )
    if "://" in repo_id:
        advice = suggest_address(repo_id) or (
            "Write org/name (for another server, set HF_ENDPOINT), or a path or file:// URL of a directory."
        )
        shown = without_url_secrets(repo_id)
        raise InvalidArgumentError(f"'{shown}' is not a repo_id. {advice}", path=shown)
    if repo_id.startswith(_PATH_STARTS) or repo_id in (".", "..") or has_hub_marker(repo_id):
        return os.path.expanduser(repo_id)
    return None


def absolute_address(repo_id: str | os.PathLike[str]) -> str:
    """Return what a repo_id names whatever the working directory becomes: a directory's absolute path, or "org/name".

    Raises:
        InvalidArgumentError: It is no path and no name; or as `directory_of`.
    """
    text = path_text(repo_id, "repo_id")
    directory = directory_of(repo_id)
    return text if directory is None else absolute_path(directory, "repo_id")


def split_address(place: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Split an address into a path or repo_id, and the revision after the "@".

    A path may contain an "@" itself: what follows it is a revision only where the part before it is a directory hub.

    Raises:
        InvalidArgumentError: There is nothing before or after the "@", or it is a URL of another kind.
    """
    text = path_text(place, "repo_id")
    directory = directory_of(place)
    if directory is None:
        at = -1 if os.path.isdir(text) else text.find("@")
        is_password = ":" in text[: max(at, 0)]  # of user:password@host, which is no repo_id
        return (text, None) if at < 0 or is_password else _split_at(text, at)
    directory = absolute_path(directory, "repo_id")
    ends = [at for at, character in enumerate(directory) if character == "@"]
    hubs = [at for at in ends if has_hub_marker(directory[:at])]
    return (directory, None) if not hubs or os.path.isdir(directory) else _split_at(directory, hubs[0])


def _split_at(text: str, at: int) -> tuple[str, str]:
    if not text[:at] or not text[at + 1 :]:
        raise InvalidArgumentError(f"'{text}' must be a path or repo_id with a revision, such as org/name@main.")
    return text[:at], text[at + 1 :]
