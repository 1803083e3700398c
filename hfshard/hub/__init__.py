"""Hubs, the Hugging Face Hub or a directory in its place: pushes as one commit, and checked pulls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfshard._util.lazy_imports import lazy_exports

# Public name -> the module that defines it, imported on first use: huggingface_hub takes time to import.
_HOMES = {
    "DirectoryHub": "directory.directory_hub",
    "PushResult": "repo",
    "RemoteFile": "repo",
    "RepoTree": "repo",
    "Revision": "directory.commit_graph",
}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from hfshard.hub.directory.commit_graph import Revision as Revision
    from hfshard.hub.directory.directory_hub import DirectoryHub as DirectoryHub
    from hfshard.hub.repo import PushResult as PushResult
    from hfshard.hub.repo import RemoteFile as RemoteFile
    from hfshard.hub.repo import RepoTree as RepoTree
else:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
