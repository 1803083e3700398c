"""Open the repo that a repo_id names: on the Hugging Face Hub, or in a directory that serves as a hub."""

from __future__ import annotations

import os

from hfshard.hub.repo import Hub


def open_hub(repo_id: str | os.PathLike[str], *, token: str | bool | None = None, private: bool | None = None) -> Hub:
    """Open the repo that a repo_id names, to push to it, and create it if it is missing.

    Args:
        repo_id: "org/name", or a path or `file://` URL of a directory.
        token: A token for the Hub, as in huggingface_hub.
        private: Whether a repo that is created there is private.

    Raises:
        InvalidArgumentError: It is a URL of another kind, or the address of a store.
        HubError: The directory has something else, such as a checkpoint.
        HubAccessError, HubConnectionError: The Hub refused, or could not be reached.
    """
    from hfshard.hub.directory.directory_hub import hub_named

    hub = hub_named(repo_id, create=True)
    if hub is not None:
        return hub
    from hfshard.hub.hub_repo import HubRepo  # imports huggingface_hub, which takes time

    return HubRepo(os.fspath(repo_id), token=token, private=private)
