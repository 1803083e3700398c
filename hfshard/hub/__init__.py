"""Hubs: pushes as one commit, and pulls that are checked; the Hugging Face Hub, or a directory in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfshard._util.lazy_imports import lazy_exports

# Public name -> the module that defines it, imported when it is first used: huggingface_hub takes time to import.
_HOMES = {
    "DirectoryHub": "directory.hub",
    "PushResult": "repo_tree",
    "RemoteFile": "repo_tree",
    "RepoTree": "repo_tree",
    "Revision": "directory.revisions",
}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from hfshard.hub.directory.hub import DirectoryHub as DirectoryHub
    from hfshard.hub.directory.revisions import Revision as Revision
    from hfshard.hub.repo_tree import PushResult as PushResult
    from hfshard.hub.repo_tree import RemoteFile as RemoteFile
    from hfshard.hub.repo_tree import RepoTree as RepoTree
else:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
