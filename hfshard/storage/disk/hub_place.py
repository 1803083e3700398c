"""Where a directory serves as a hub: nothing but a push writes there."""

from __future__ import annotations

import os

from hfshard._util.addresses import is_address
from hfshard.constants import HUB_MARKER
from hfshard.errors import SaveDirectoryError


def has_hub_marker(root: str) -> bool:
    """Whether a directory is a hub."""
    return os.path.isfile(os.path.join(root, HUB_MARKER))


def enclosing_hub(directory: str) -> str | None:
    """Find the directory hub that a path is, or lies in; links are followed, and the path need not exist."""
    at = os.path.realpath(directory)
    while not has_hub_marker(at):
        above = os.path.dirname(at)
        if above == at:
            return None
        at = above
    return at


def refuse_hub(directory: str) -> None:
    """Refuse to save where only pushes write: nobody would load it, or it would change a commit.

    Raises:
        SaveDirectoryError: The directory is a directory hub, or lies in one. A store is none.
    """
    if is_address(directory):
        return
    hub = enclosing_hub(directory)
    if hub is not None:
        where = "is" if hub == os.path.realpath(directory) else "lies in"
        raise SaveDirectoryError(
            f"'{directory}' {where} the directory hub '{hub}', which holds commits: what is saved there is not part of "
            f"any, or would damage one. Nothing was written. Save into a directory outside of it and run: hfshard push "
            f"DIR {hub}; or call model.push_to_hub('{hub}').",
            path=directory,
        )
