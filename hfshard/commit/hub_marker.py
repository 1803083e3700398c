"""The file that marks a directory as a hub, and the parsing of a repo_id: a repo of the Hub, or such a directory."""

from __future__ import annotations

import os
import shutil
from typing import Final
from urllib.parse import unquote, urlsplit

from hfshard._util.address_hints import suggest_address
from hfshard._util.arguments import (
    absolute_path,
    check_slashes,
    checked_path_text,
    is_store_url,
    parse_address,
)
from hfshard._util.text import without_url_secrets
from hfshard.commit.directory_state import has_hub_marker
from hfshard.constants import FORMAT_VERSION, HUB_MARKER, MAX_CONFIG_BYTES
from hfshard.disk.fsops import (
    locked_directory,
    make_directories,
    remove_empty_directories,
    rename,
    sync_directory,
    write_file,
)
from hfshard.disk.safe_open import read_small
from hfshard.errors import HubError, HubNotFoundError, InvalidArgumentError
from hfshard.format.strict_json import dump_json, parse_json_object

STAGING: Final = ".staging"
"""Folder of a hub for files that are not complete yet."""


def check_hub_marker(root: str) -> None:
    """Check that a directory is a hub that this version of hfshard can read.

    Raises:
        HubNotFoundError: The directory is not a hub, or does not exist.
        HubError: It has another format, because a newer hfshard wrote it.
    """
    if not has_hub_marker(root):
        what = "is not a directory hub" if os.path.isdir(root) else "does not exist"
        raise HubNotFoundError(
            f"'{root}' {what}. The first push to a hub creates it: hfshard push CHECKPOINT {root}. To load a "
            "plain checkpoint, pass its directory without a revision.",
            path=root,
        )
    marker = os.path.join(root, HUB_MARKER)
    raw, _ = read_small(marker, root, MAX_CONFIG_BYTES)
    value = parse_json_object(raw, path=marker, what="File", remedy='Write {"format": 1} into it.')
    if value.get("format") != FORMAT_VERSION:
        raise HubError(
            f"'{root}' is a directory hub of format {value.get('format')!r}, but this version of hfshard reads format "
            f"{FORMAT_VERSION}. Install a newer hfshard.",
            path=marker,
            expected=FORMAT_VERSION,
            actual=value.get("format"),
        )


def write_hub_marker(root: str, *, wait_seconds: float) -> bool:
    """Turn a new or empty directory into a hub.

    Returns:
        False if another process made it a hub first.

    Raises:
        HubError: It contains something else, or it is a file.
        DirectoryLockedError: Another process held the directory's lock for all of `wait_seconds`.
    """
    try:
        made = make_directories(root)
    except (NotADirectoryError, FileExistsError) as error:
        raise HubError(f"Cannot create a hub in '{root}': it, or a path above it, is a file.", path=root) from error
    try:
        with locked_directory(root, wait_seconds=wait_seconds):
            if has_hub_marker(root):
                return False
            _check_empty(root)
            _write_marker_file(root)
            return True
    except BaseException:
        remove_empty_directories(made)
        raise


def ensure_hub_marker(root: str, *, wait_seconds: float) -> bool:
    """Do what `write_hub_marker` does, but lock nothing if the directory is a hub already."""
    return not has_hub_marker(root) and write_hub_marker(root, wait_seconds=wait_seconds)


def _check_empty(root: str) -> None:
    left = set(os.listdir(root))
    staging = os.path.join(root, STAGING)
    if left == {STAGING} and os.path.isdir(staging) and set(os.listdir(staging)) <= {HUB_MARKER}:
        return  # left by a process that was killed
    if left:
        raise HubError(
            f"'{root}' is neither empty nor a directory hub: it contains '{min(left)}'. A hub needs its own directory: "
            "pass a new or empty one.",
            path=root,
        )


def _write_marker_file(root: str) -> None:
    staging = os.path.join(root, STAGING)
    try:
        os.makedirs(staging, exist_ok=True)
        staged = os.path.join(staging, HUB_MARKER)
        if os.path.lexists(staged):
            os.unlink(staged)
        write_file(staged, dump_json({"format": FORMAT_VERSION}))
        rename(staged, os.path.join(root, HUB_MARKER))
        sync_directory(root)
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # if this fails, the first push does it


# Parsing of a repo_id: a repo of the Hugging Face Hub, or a directory.


_FILE_SCHEME: Final = "file://"
_PATH_STARTS: Final = ("/", "./", "../", "~")


def hub_directory(repo_id: str | os.PathLike[str]) -> str | None:
    """Find the directory that a repo_id names; None if it is "org/name" on the Hugging Face Hub.

    A directory is named by a path object, a `file://` URL, text that looks like a path (it begins with `/`, `./`, `../`
    or `~`, or is `.` or `..`), and the name of a directory hub, so that what is loaded from there is pushed there.

    Raises:
        InvalidArgumentError: It is a URL of another machine or of another kind, or a store address, valid or not.
    """
    if not isinstance(repo_id, str):
        return os.path.expanduser(checked_path_text(repo_id, "repo_id"))
    check_slashes(repo_id, "repo_id")
    if repo_id.startswith(_FILE_SCHEME):
        parts = urlsplit(repo_id)
        if parts.netloc not in ("", "localhost") or not parts.path or parts.query or parts.fragment:
            shown = without_url_secrets(repo_id)
            raise InvalidArgumentError(
                f"'{shown}' is not a file URL of a directory on this machine. Write file:///path/to/hub, with three "
                "slashes, and %3F and %23 for ? and #.",
                path=shown,
            )
        return unquote(parts.path)
    if is_store_url(repo_id):
        raise InvalidArgumentError(
            f"'{parse_address(repo_id, 'repo_id')}' is a store address, not a repo. Stores hold checkpoints, not "
            "commits. Save to it with save_pretrained, or copy to it with "
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


def absolute_repo_id(repo_id: str | os.PathLike[str]) -> str:
    """Return what a repo_id names, independent of the working directory: a directory's absolute path, or "org/name".

    Raises:
        InvalidArgumentError: It is neither a path nor a name, or a URL or address that `hub_directory` rejects.
    """
    text = checked_path_text(repo_id, "repo_id")
    directory = hub_directory(repo_id)
    return text if directory is None else absolute_path(directory, "repo_id")


def split_address(place: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Split an address into a path or repo_id, and the revision after the "@".

    A path may contain an "@" itself: the text after it is a revision only if the part before it is a directory hub.

    Raises:
        InvalidArgumentError: The part before or after the "@" is empty, or it is a URL of another kind.
    """
    text = checked_path_text(place, "repo_id")
    directory = hub_directory(place)
    if directory is None:
        at = -1 if os.path.isdir(text) else text.find("@")
        is_password = ":" in text[: max(at, 0)]  # of user:password@host, which is not a repo_id
        return (text, None) if at < 0 or is_password else _split_at(text, at)
    directory = absolute_path(directory, "repo_id")
    ends = [at for at, character in enumerate(directory) if character == "@"]
    hubs = [at for at in ends if has_hub_marker(directory[:at])]
    return (directory, None) if not hubs or os.path.isdir(directory) else _split_at(directory, hubs[0])


def _split_at(text: str, at: int) -> tuple[str, str]:
    if not text[:at] or not text[at + 1 :]:
        raise InvalidArgumentError(f"'{text}' must be a path or repo_id with a revision, such as org/name@main.")
    return text[:at], text[at + 1 :]
