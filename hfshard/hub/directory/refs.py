"""Names of commits in a directory hub: branches, tags and pull requests, each a small file that holds an id."""

from __future__ import annotations

import os
import re
from typing import Final

from hfshard._util.text import list_some
from hfshard.disk.safe_open import read_small
from hfshard.errors import DamagedCheckpointError, HubError, HubNotFoundError, InvalidArgumentError, MissingShardError
from hfshard.hub.directory.deleted import lost_commits
from hfshard.hub.directory.manifest import commit_ids
from hfshard.hub.refs import MAIN, REF_FOLDERS, RefKind, full_name, is_commit_id, kind_of, short_name

_PREFIX: Final = re.compile(r"[0-9a-f]{7,39}")
"""The first digits of an id: at least seven, as git writes them."""
_MAX_REF_BYTES: Final = 64
"""An id and a newline are 41 bytes."""
_SHOWN_NAMES: Final = 20
"""Revisions that a message lists."""


def ref_path(root: str, ref: str) -> str:
    """The file that holds a ref's id."""
    return os.path.join(root, ref)


def read_ref(root: str, ref: str) -> str | None:
    """Read the id that a ref holds; None if there is no such ref.

    Raises:
        DamagedCheckpointError: The file does not hold an id.
    """
    path = ref_path(root, ref)
    if not os.path.isfile(path):
        return None
    try:
        raw, _ = read_small(path, root, _MAX_REF_BYTES)
    except MissingShardError:  # deleted in the meantime
        return None
    commit = raw.decode("ascii", "replace").removesuffix("\n")
    if not is_commit_id(commit):
        raise DamagedCheckpointError(
            f"'{path}' is damaged: it must hold the id of a commit. Write one of '{root}/commits' into it.", path=path
        )
    return commit


def ref_names(root: str) -> list[str]:
    """The full names of all refs: main first, then branches, tags and pull requests, each sorted."""
    found = []
    for folder in REF_FOLDERS:
        names = []
        for base, _, files in os.walk(os.path.join(root, folder)):
            below = os.path.relpath(base, root)
            names += [f"{below}/{file}" for file in files if _is_ref(f"{below}/{file}")]
        found += sorted(names, key=lambda name: (name != MAIN, len(name) if folder == "refs/pr/" else 0, name))
    return found


def _is_ref(ref: str) -> bool:
    try:
        return full_name(ref) == ref
    except InvalidArgumentError:  # a file that somebody else put there
        return False


def all_refs(root: str) -> dict[str, str]:
    """Full name -> id, in the order of `ref_names`."""
    found = {}
    for ref in ref_names(root):
        if (commit := read_ref(root, ref)) is not None:
            found[ref] = commit
    return found


def check_free(root: str, ref: str) -> None:
    """Check that the name of a new ref is not in use.

    Raises:
        InvalidArgumentError: A branch and a tag would have the same name, or one name would be a folder of another.
    """
    for other in ref_names(root):
        if other.startswith(f"{ref}/") or ref.startswith(f"{other}/"):
            raise InvalidArgumentError(
                f"'{short_name(ref)}' can't be made beside '{short_name(other)}': one would be a folder of the other. "
                "Choose another name.",
                actual=short_name(ref),
            )
        if other != ref and short_name(other) == short_name(ref):
            raise InvalidArgumentError(
                f"'{short_name(ref)}' is the name of a {kind_of(other)} already. Choose another name.",
                actual=short_name(ref),
            )


def find_ref(root: str, name: str) -> tuple[str, str] | None:
    """Find the branch, tag or pull request of a name: its full name and the id that it holds."""
    kinds: tuple[RefKind, ...] = ("branch", "tag")
    for kind in kinds:
        try:
            ref = full_name(name, kind)
        except InvalidArgumentError:
            return None
        if (commit := read_ref(root, ref)) is not None:
            return ref, commit
    return None


def find_commit(root: str, name: str) -> str | None:
    """Find a commit by its id, or by the first digits of it, even if its manifest was lost.

    Raises:
        HubError: Several ids begin with these digits.
    """
    if not is_commit_id(name) and not _PREFIX.fullmatch(name):
        return None
    found = [commit for commit in commit_ids(root) if commit.startswith(name)]
    found = found or [commit for commit in lost_commits(root) if commit.startswith(name)]
    if len(found) > 1:
        raise HubError(
            f"{len(found)} commits of '{root}' begin with {name}: {list_some(found, _SHOWN_NAMES)}. Write more of it.",
            path=root,
            actual=name,
        )
    return found[0] if found else None


def find_revision(root: str, name: str) -> str | None:
    """Find the commit that a branch, tag, pull request or id names.

    Raises:
        HubError: Several ids begin with these digits.
    """
    found = find_ref(root, name)
    return found[1] if found is not None else find_commit(root, name)


def revision_not_found(root: str, name: str) -> HubNotFoundError:
    """Make the error that lists the revisions that exist."""
    names = [short_name(ref) for ref in ref_names(root)]
    shown = list_some(names, _SHOWN_NAMES)
    count = len(commit_ids(root))
    if not names and not count:
        return HubNotFoundError(
            f"'{root}' is empty: nothing was pushed to it yet, so it has no revision '{name}'.", path=root, actual=name
        )
    return HubNotFoundError(
        f"'{root}' has no revision '{name}'. It has {shown or 'no branches and tags'}; and {count} "
        f"commit{'s' if count != 1 else ''}, listed in '{os.path.join(root, 'commits')}'.",
        path=root,
        actual=name,
    )
