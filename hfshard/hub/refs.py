"""Names of commits on a hub: what a branch, a tag or a pull request may be called, in short and in full."""

from __future__ import annotations

import re
from typing import Final, Literal

from hfshard.errors import InvalidArgumentError

RefKind = Literal["branch", "tag", "pr", "commit"]

MAIN: Final = "refs/heads/main"
REF_FOLDERS: Final[dict[str, RefKind]] = {"refs/heads/": "branch", "refs/tags/": "tag", "refs/pr/": "pr"}
_PART: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,8}")
_COMMIT_ID: Final = re.compile(r"[0-9a-f]{40}")
_MAX_NAME: Final = 200
"""Characters; together with the hub's own folders, a name of this length is still a valid path."""


def is_commit_id(name: str) -> bool:
    """Whether a name has the form of a full commit id."""
    return _COMMIT_ID.fullmatch(name) is not None


def kind_of(ref: str) -> RefKind:
    """Tell what kind of ref a full name, such as `refs/heads/main`, names."""
    return next(kind for folder, kind in REF_FOLDERS.items() if ref.startswith(folder))


def short_name(ref: str) -> str:
    """Shorten a ref to the name that users give: `main` for `refs/heads/main`; a pull request keeps its full name."""
    return ref.removeprefix("refs/heads/").removeprefix("refs/tags/")


def full_name(name: str, kind: RefKind = "branch") -> str:
    """Complete the name of a branch or tag; a full name is returned as it is.

    Raises:
        InvalidArgumentError: It can't be the name of a branch or tag (or the number of a pull request).
    """
    folders = {value: key for key, value in REF_FOLDERS.items()}
    ref = name if name.startswith("refs/") else folders[kind] + name
    folder = next((folder for folder in REF_FOLDERS if ref.startswith(folder)), None)
    if folder is not None and _is_name(ref.removeprefix(folder), is_number=REF_FOLDERS[folder] == "pr"):
        return ref
    raise InvalidArgumentError(
        f"{name[:_MAX_NAME]!r} can't be the name of a revision: use letters, digits, '.', '_', '-' and '/', without "
        "'..', a '-' or '.' at the start or '.lock' at the end, and not the form of a commit's id.",
        actual=name,
    )


def _is_name(name: str, *, is_number: bool) -> bool:
    if is_number:
        return _NUMBER.fullmatch(name) is not None
    parts = name.split("/")
    return (
        len(name) <= _MAX_NAME
        and all(_PART.fullmatch(part) and ".." not in part and not part.endswith((".lock", ".")) for part in parts)
        and parts[0] != "refs"
        and name != "HEAD"
        and not is_commit_id(name)
    )


def pr_revision(pr_url: str) -> str:
    """The revision of a pull request, such as `refs/pr/3`, from the URL of its page."""
    return f"refs/pr/{pr_url.rstrip('/').rpartition('/')[2]}"
