"""Pull a checkpoint from a hub or a store: complete, of one save, and checked."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hfshard._util.arguments import wraps_os_errors
from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.errors import InvalidArgumentError
from hfshard.format.index import Verify
from hfshard.places.fetch import fetch_or_export
from hfshard.places.place import DirectoryPlace, place_to_push, place_to_save
from hfshard.saving.copy_checkpoint import copy_checkpoint, listed


@wraps_os_errors("repo_id")
def pull_checkpoint(
    repo_id: str | os.PathLike[str],
    local_dir: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    variant: str | None = None,
    subfolder: str = "",
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    allow_patterns: Sequence[str] | str | None = None,
    ignore_patterns: Sequence[str] | str | None = None,
    overwrite: bool = False,
    verify: Verify = "structure",
    progress: bool | None = None,
) -> str:
    """Pull a checkpoint from a hub or a store, and check that it is complete.

    The other files of its folder are pulled too: config, tokenizer, code, README, and the weights in subfolders; but
    not the weights of other variants and formats, except those that a transformers class reads along with its own
    (`spk_dict.pt` of Qwen2.5-Omni), and nothing in `.git`, `.cache` and `__pycache__`. All files are from one commit.
    An interrupted pull continues where it stopped.

    From a store, tensors are read by ranges, straight into the files of the directory or of another store, and compared
    with their checksums in transit; the tensors of each file stay together. So are those that are pulled from a hub
    into a store, through the cache.

    An existing checkpoint in `local_dir` (of the same variant) is replaced as by a save, with everything that belongs
    to it: its weights and indexes, config.json, generation_config.json, model.sig, and tokenizer and processor files
    with the names that transformers gives them. Every other file is yours, even if an earlier pull wrote it: if the
    pull would replace it by other contents, it raises, names all such files, and changes nothing. This includes code
    and other files that changed on the hub since the last pull. A README.md causes no error: it stays as it is, with a
    warning. `overwrite` replaces all of these.

    Args:
        repo_id: "org/name" on the Hugging Face Hub; or a directory hub, as a path or a `file://` URL; or the address of
            a store, such as "s3://bucket/prefix".
        local_dir: Plain directory for the files, or the address of a store; its previous contents can be loaded until
            the pull is complete. None: the files stay in huggingface_hub's cache, where other tools find them.
        revision: A branch, tag, commit, or "refs/pr/1". None: main.
        variant, subfolder: The checkpoint to pull, as in transformers' `from_pretrained`.
        token: A token, as in huggingface_hub. None: the saved one.
        cache_dir: Directory of the cache. None: that of HF_HUB_CACHE.
        local_files_only: Send no request; use the files in the cache.
        force_download: Download files even if the cache has them.
        allow_patterns, ignore_patterns: Globs of paths that select the other files to pull; the checkpoint is always
            pulled. `allow_patterns` may name any file, except other weights of the same checkpoint.
        overwrite: Replace files in `local_dir` that do not belong to a checkpoint there but differ from the pulled
            ones, including README.md; and remove shards there that no index names.
        verify: How to check the files afterwards: "none", "structure", or "full" for every byte. From a directory hub,
            every file is always compared with its sha256 before it is copied.
        progress: Whether to show a bar on stderr. None: on a terminal.

    Returns:
        The absolute path, or the address, of the checkpoint: `local_dir`, or the snapshot in the cache (with the
        subfolder).

    Raises:
        HubNotFoundError, HubAccessError, HubConnectionError, HubError: The hub cannot be reached, or refused.
        CheckpointNotFoundError: There are no weights; or, with local_files_only, the cache does not have all files.
        IntegrityError: A file was damaged in transit, or in the directory hub; nothing of it was kept.
        NotEnoughSpaceError: The disk is too full. Files that arrived before are kept in the cache, and the next pull
            continues there.
        SaveDirectoryError: `local_dir` has files of yours that would be replaced; or it is a file, a directory hub or
            inside one, or has a link in place of a folder; or, for a pull from a hub, its checkpoint cannot stay
            loadable until the pull is complete: pickles, or shards of the same names on a file system without links.
        InvalidArgumentError: For a store, an argument that only a hub has (a revision, a cache), or no `local_dir`.
        UnsafePathError: A store has an object whose name leads out of the directory, or cannot be a file's name.
        StoreError: A store refused or failed.

    Example:
        >>> directory = hfshard.pull_checkpoint("org/name", revision="v1", verify="full")
        >>> state_dict = hfshard.load_state_dict(directory)
    """
    query = CheckpointQuery(
        variant=variant,
        subfolder=subfolder,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        force_download=force_download,
        needs_companions=True,
        allow_patterns=listed(allow_patterns),
        ignore_patterns=listed(ignore_patterns),
    )
    target = None if local_dir is None else place_to_save(local_dir, "local_dir")
    source = place_to_push(repo_id)
    if not source.has_revisions:
        _reject_hub_options(query, source.address)
        if target is None:
            raise InvalidArgumentError(
                f"'{source.address}' is in a store, which has no cache. Pass local_dir, a directory or another address "
                "(hfshard pull ADDRESS DIR).",
                path=source.address,
            )
        files = place_to_save(source.address, "repo_id").files(query.subfolder, follow_links=True)
        return copy_checkpoint(files, target, query, verify=verify, progress=progress, overwrite=overwrite)
    if target is None or target.is_read_from_disk:
        to = None if target is None else target.address
        return fetch_or_export(repo_id, to, query, verify=verify, progress=progress, overwrite=overwrite)
    directory = fetch_or_export(repo_id, None, query, verify=verify, progress=progress)
    files = DirectoryPlace(directory).files(follow_links=True)
    return copy_checkpoint(files, target, query, progress=progress, overwrite=overwrite)


def _reject_hub_options(query: CheckpointQuery, address: str) -> None:
    """Reject options that only a hub has."""
    given = {
        "revision": query.revision,
        "token": query.token,
        "cache_dir": query.cache_dir,
        "local_files_only": query.local_files_only,
        "force_download": query.force_download,
    }
    for name, value in given.items():
        if value not in (None, False):
            raise InvalidArgumentError(
                f"{name} is for a hub: '{address}' is in a store, which has no revisions and no cache. Leave it out.",
                path=address,
            )
