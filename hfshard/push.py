"""Push a saved checkpoint to a hub as one commit, or copy it to a store."""

from __future__ import annotations

import os

from hfshard._util.arguments import wraps_os_errors
from hfshard.checkpoint.locate import locate_checkpoint
from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError
from hfshard.format.file_names import WeightNames
from hfshard.hub.push_files import (
    PushOptions,
    PushRequest,
    collect_push_contents,
    detect_variants,
    push_files,
)
from hfshard.hub.repo import PushResult
from hfshard.places.place import Place, SavePlace, place_to_push, place_to_save
from hfshard.places.source import CheckpointSource
from hfshard.saving.copy_checkpoint import copy_all, without_marks
from hfshard.saving.hub_transaction import push_parts
from hfshard.saving.resharding import reshard_source
from hfshard.saving.save_request import SaveOptions


@wraps_os_errors("directory")
def push_checkpoint(
    directory: str | os.PathLike[str],
    repo_id: str | os.PathLike[str],
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    path_in_repo: str = "",
    allow_patterns: list[str] | str | None = None,
    ignore_patterns: list[str] | str | None = None,
    follow_links: bool = False,
    card_picture: bool = False,
    progress: bool | None = None,
) -> PushResult:
    """Push a saved checkpoint: to a hub as one commit, or to a store.

    The directory is pushed as it is: checkpoint, config, tokenizer, README and everything else except `.git`, `.cache`
    and `__pycache__`. Files that the hub already has are not sent. Shards, indexes and pickles that earlier pushes of
    the same variants left in the repo are deleted in the same commit; all other files stay. With more than 256 files,
    shards with new names are committed first: a push that fails in between leaves some that no index names.

    A checkpoint in a store is pushed in the same way: its bytes go through memory, compared with their checksums, and
    shards get the names that they have in a directory.

    A directory with the weights in parts, as DeepSpeed and torch.distributed.checkpoint save them, is pushed as the
    safetensors files that `hfshard convert` writes, with config and tokenizer, and without a copy on disk.

    To a store address, every checkpoint of the directory is copied as `reshard_checkpoint` would write it there, but in
    the same files, bit for bit, with one save for each variant. Other files of at most 256 MiB are copied too, and
    replace those of the same names. Files that the store already has are not sent. A store has no commits or branches,
    so arguments for them are rejected.

    Args:
        directory: A directory with at least one checkpoint, written by hfshard or any other tool; or an address, such
            as "s3://bucket/prefix".
        repo_id: "org/name", created if it is missing; or a path or `file://` URL of a directory that serves as a hub;
            or the address of a store.
        commit_message: Title of the commit. None: "Upload checkpoint".
        commit_description: Further text of the commit.
        private: Whether a newly created repo is private. None: the organization's default.
        token: A token, as in huggingface_hub. None: the saved one.
        revision: A branch, created if it is missing, or "refs/pr/N". None: main.
        create_pr: Open a pull request on main instead of pushing; not together with another revision.
        path_in_repo: Folder in the repo, or below the address.
        allow_patterns, ignore_patterns: Globs of paths in the directory, as in huggingface_hub's `upload_folder`.
        follow_links: Also push the targets of symbolic links to outside of the directory; without it they are rejected.
        card_picture: Show the checkpoint in the repo's README.md, in the same commit: a picture of its modules, which
            an installed Chromium draws, and a table of parameters, dtype, files, sha256 of the index and signature.
            They are between two markers; the rest of the README.md is left as it is, and without one it is created.
            A signed checkpoint is refused: `sign_checkpoint` puts the card in.
        progress: Whether to show a bar on stderr. None: on a terminal.

    Returns:
        The commit. If the hub already has everything, none is created, and `is_new` is false. For a store, `commit` is
        "", and `url` is the address.

    Raises:
        CheckpointNotFoundError, DamagedCheckpointError: The directory has no checkpoint, or one that cannot be loaded.
        InvalidArgumentError: An argument is not supported, such as create_pr together with another branch; or a link
            leaves the directory.
        HubAccessError, HubNotFoundError, HubConnectionError: The repo cannot be pushed to; nothing was committed.
        RemoteChangedError: Another push wrote other weights at the same time; nothing was committed.
        IntegrityError: A file differs from its checksum; nothing was committed.
        BrowserError: With card_picture: there is no Chromium, or it failed; nothing was sent.
        StoreError: A store refused or failed.

    Example:
        >>> hfshard.save_state_dict(model.state_dict(), "out")
        >>> result = hfshard.push_checkpoint("out", "org/name", commit_message="First weights")
        >>> result.url
        'https://huggingface.co/org/name/commit/3f1c...'
    """
    options = PushOptions(
        commit_message=commit_message,
        commit_description=commit_description,
        private=private,
        token=token,
        revision=revision,
        create_pr=create_pr,
        path_in_repo=path_in_repo,
        follow_links=follow_links,
        card_picture=card_picture,
        progress=progress,
    )
    return push_to_place(directory, repo_id, options, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)


def push_to_place(
    directory: str | os.PathLike[str],
    repo_id: str | os.PathLike[str],
    options: PushOptions,
    *,
    allow_patterns: list[str] | str | None = None,
    ignore_patterns: list[str] | str | None = None,
) -> PushResult:
    """Do what `push_checkpoint` does, with its options as one object."""
    source = place_to_save(directory, "directory")
    target = place_to_push(repo_id)
    below = None if target.has_revisions else _place_below(target, options)
    patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
    if _is_in_parts(source):
        parts = CheckpointSource(source.address)
        if below is None:
            return push_parts(parts, target.address, options, **patterns)
        return _copy_parts(parts, below, options)
    files = source.files(follow_links=options.follow_links)
    if below is not None:
        return copy_all(files, below, options.progress, **patterns)
    found = without_marks(collect_push_contents(files, **patterns))
    request = PushRequest(contents=found.contents, variants=frozenset(found.indexes), options=options)
    return push_files(request, target.address)


def _is_in_parts(source: SavePlace) -> bool:
    """Return whether a directory has no weights but those that another framework saved in parts."""
    folder = source.folder()
    if not source.is_read_from_disk or detect_variants(folder.names()):
        return False
    try:
        return locate_checkpoint(folder, WeightNames(), opens_foreign=True).kind == "foreign"
    except CheckpointNotFoundError:
        return False


def _copy_parts(parts: CheckpointSource, target: SavePlace, options: PushOptions) -> PushResult:
    """Copy what another framework saved in parts as the safetensors files of `hfshard convert`."""
    count_sent = target.count_sent({""})
    reshard_source(parts, target, SaveOptions(progress=options.progress), follow_links=options.follow_links)
    sent = count_sent()
    return PushResult("", target.address, is_new=sent is not None, sent_bytes=sent or 0)


def _place_below(target: Place, options: PushOptions) -> SavePlace:
    """Return the folder in a place without commits, and reject options that only a hub has."""
    given = {
        "revision": options.revision,
        "create_pr": options.create_pr,
        "commit_message": options.commit_message,
        "commit_description": options.commit_description,
        "private": options.private,
        "token": options.token,
        "card_picture": options.card_picture,
    }
    for name, value in given.items():
        if value not in (None, False, ""):
            raise InvalidArgumentError(
                f"{name} is for a hub: '{target.address}' is in a store, which has no commits, and is accessed with "
                "its service's own settings. Leave it out.",
                path=target.address,
            )
    return place_to_save(f"{target.address}/{options.folder}".rstrip("/"), "repo_id")
