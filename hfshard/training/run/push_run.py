"""Checkpoints of a run pushed to hubs, as one commit each, in the background or not."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Final, Literal, TypedDict

from hfshard._util.progress import byte_progress
from hfshard._util.threads import cancellable, run_in_threads
from hfshard.checkpoint.check_files import check_files
from hfshard.checkpoint.folder import Folder
from hfshard.constants import FILES_AT_ONCE, MAX_INDEX_BYTES, README, SAFETENSORS_SUFFIX
from hfshard.disk.byte_source import ByteSource, BytesSource
from hfshard.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    HubError,
    InvalidArgumentError,
    UnsafePathError,
)
from hfshard.format.file_names import MODEL_BASE, WeightNames
from hfshard.format.index import FileDigest, sha256_of
from hfshard.hub.directory.directory_hub import split_address
from hfshard.hub.push_files import PushOptions, PushRequest, open_hub, push_files
from hfshard.places.place import place_to_push
from hfshard.training.run.background import Background, ForkSafe
from hfshard.training.run.find_checkpoint import checkpoint_of_step
from hfshard.training.run.manifest import MANIFEST, CheckpointManifest, RunCheckpoint, checked_step
from hfshard.training.run.run_storage import RunStorage
from hfshard.training.state.collect_state import PARTS

if TYPE_CHECKING:
    from hfshard.hub.repo import PushResult, RemoteFile


Hashes = dict[FileDigest, str]
"""A file's digest in the manifest -> its sha256 from an earlier push: frozen weights are not hashed again."""


@dataclass(frozen=True, slots=True)
class VerifiedContents:
    """A checkpoint to push."""

    folder: Folder
    manifest: CheckpointManifest
    raw: bytes
    """The bytes of the manifest."""
    contents: dict[str, ByteSource] = field(default_factory=dict)
    """File name -> contents."""


def read_manifest_of(found: RunCheckpoint) -> VerifiedContents:
    """Read the manifest of a checkpoint, without the contents yet.

    Raises:
        DamagedCheckpointError: Its manifest cannot be read.
    """
    found.require_manifest()
    folder = found.folder()
    raw = folder.read_small(MANIFEST, MAX_INDEX_BYTES)
    manifest = CheckpointManifest.from_json(raw, os.path.join(found.path, MANIFEST))
    return VerifiedContents(folder, manifest, raw)


def read_contents(one: VerifiedContents, progress: bool | None, hashes: Hashes) -> VerifiedContents:
    """Add the contents, which are compared and hashed in one pass.

    Args:
        one: The checkpoint.
        progress: Whether to show a bar on stderr. None: on a terminal.
        hashes: The hashes of earlier pushes, which this push's hashes replace.

    Raises:
        DamagedCheckpointError, UnsafePathError: A file differs from the saved one.
    """
    recorded = one.manifest.files
    check_files(one.folder, recorded, "structure")
    with byte_progress(
        "Verifying", sum(record.size or 0 for record in recorded.values()), progress
    ) as progress_callback:
        work = partial(_content, one.folder, hashes=dict(hashes), progress_callback=progress_callback)
        made = dict(zip(recorded, run_in_threads(work, recorded.items(), FILES_AT_ONCE), strict=True))
    hashes.clear()
    hashes.update({recorded[name]: content.sha256 for name, content in made.items() if content.sha256 is not None})
    return replace(one, contents={MANIFEST: BytesSource(one.raw), **made})


def _content(
    folder: Folder,
    item: tuple[str, FileDigest],
    cancelled: Event,
    *,
    hashes: Hashes,
    progress_callback: Callable[[int], object],
) -> ByteSource:
    name, record = item
    sha256 = _checked_sha256(folder, name, record, hashes) if name.endswith(SAFETENSORS_SUFFIX) else record.sha256
    cancellable(progress_callback, cancelled)(record.size or 0)
    return folder.source(name, sha256)


def _checked_sha256(folder: Folder, name: str, record: FileDigest, hashes: Hashes) -> str:
    shard = folder.open_shard(name)
    try:
        # A file that contains its own checksum was hashed with zeros in its place.
        known = hashes.get(record) or (None if shard.written_by_hfshard else record.sha256)
        if known is None:
            return shard.checked_sha256(record)
        shard.check_contents(record)
        return known
    finally:
        shard.close()


# Pushes: a checkpoint becomes one commit.


logger = logging.getLogger(__name__)

_KEPT: Final = frozenset({README, ".gitattributes", ".gitignore"})
"""Files that stay on a hub even if the previously pushed checkpoint had them: people edit them there."""


class PushArguments(TypedDict, total=False):
    """Keyword arguments of `CheckpointManager.push`."""

    revision: str | None
    private: bool | None
    token: str | bool | None
    commit_message: str | None
    create_pr: bool
    progress: bool | None


def found_to_push(
    storage: RunStorage, step: int | Literal["best", "all"] | None, best_step: Callable[[], int | None]
) -> list[RunCheckpoint]:
    """Find the checkpoint of a run to push, or all of them, as `CheckpointManager.push` describes.

    Raises:
        InvalidArgumentError: `step` is not valid.
        CheckpointNotFoundError: There is no such checkpoint.
    """
    if isinstance(step, str) and step not in ("best", "all"):
        raise InvalidArgumentError(f"step must be a number, 'best', 'all' or None, got {step!r}.")
    found = storage.checkpoints()
    if not found:
        raise CheckpointNotFoundError(f"There is no checkpoint in '{storage.root}'. Check the path.", path=storage.root)
    if step == "all":
        return found
    if step is None:
        return found[:1]  # even if it is damaged: an older one is never pushed silently
    number = best_step() if step == "best" else checked_step(step)
    if number is None:
        raise CheckpointNotFoundError(
            f"No checkpoint in '{storage.root}' has the metric that selects the best one. Pass it when you save: "
            "manager.save(step, state, metric=...).",
            path=storage.root,
        )
    return [checkpoint_of_step(storage, number)]


def push_found(
    found: RunCheckpoint, repo_id: str | os.PathLike[str], options: PushOptions, hashes: Hashes | None = None
) -> PushResult:
    """Push one checkpoint as one commit, its files at the top of the repo; those of the previous one are deleted.

    Raises:
        DamagedCheckpointError: A file differs from the saved one; nothing was sent.
        HubError: The push failed, as in `push_checkpoint`.
    """
    contents = read_contents(read_manifest_of(found), options.progress, {} if hashes is None else hashes)
    return _push(contents, repo_id, options)


def push_all(found: Sequence[RunCheckpoint], repo_id: str | os.PathLike[str], options: PushOptions) -> list[PushResult]:
    """Push checkpoints in the order in which they were saved, a commit each, except those that were pushed before.

    The checkpoint on the branch decides: if it is one of these, it and those before it are skipped; otherwise those
    are skipped that are neither of a later save nor of a higher step.

    Args:
        found: The checkpoints, in any order.
        repo_id, options: As in `push_found`.

    Returns:
        One result for each checkpoint that was pushed.

    Raises:
        InvalidArgumentError: A pull request was requested, which is for one checkpoint.
        HubError: The branch is at another checkpoint that is newer than all of these.
        Everything that `push_found` raises; all are compared with their manifests before the first is pushed.
    """
    if options.create_pr:
        raise InvalidArgumentError("A pull request is for one checkpoint. Pass its step, or push all to a branch.")
    in_order = sorted(map(read_manifest_of, found), key=lambda one: one.manifest.save_number)
    hashes: Hashes = {}
    newer = _newer_than_remote(in_order, repo_id, options)
    return [_push(one, repo_id, options) for one in [read_contents(one, options.progress, hashes) for one in newer]]


def _newer_than_remote(
    in_order: list[VerifiedContents], repo_id: str | os.PathLike[str], options: PushOptions
) -> list[VerifiedContents]:
    hub = open_hub(repo_id, token=options.token, private=options.private)
    remote = hub.tree(options.revision) or hub.tree(None)  # a new branch begins at main
    if remote is None or MANIFEST not in remote.files:
        return in_order
    raw = hub.read(MANIFEST, remote.commit)
    raws = [one.raw for one in in_order]
    if raw in raws:
        return in_order[raws.index(raw) + 1 :]
    try:
        newest = CheckpointManifest.from_json(raw, MANIFEST)
    except (DamagedCheckpointError, UnsafePathError) as error:
        logger.warning("Cannot read '%s' on '%s', so all checkpoints are pushed: %s", MANIFEST, repo_id, error)
        return in_order
    newer = [
        one for one in in_order if one.manifest.save_number > newest.save_number or one.manifest.step > newest.step
    ]
    if not newer:
        raise HubError(
            f"'{os.fspath(repo_id)}' is at the checkpoint of step {newest.step}, which is newer than all of these and "
            "not one of them. Push to another revision; or, to replace it with one of these, pass its step.",
            path=os.fspath(repo_id),
            actual=newest.step,
        )
    return newer


def _push(pushed: VerifiedContents, repo_id: str | os.PathLike[str], options: PushOptions) -> PushResult:
    has_model = any(_is_of(MODEL_BASE, name) for name in pushed.contents)
    request = PushRequest(
        contents=pushed.contents,
        variants=frozenset({None}) if has_model else frozenset(),
        options=options,
        default_message=f"Checkpoint at step {pushed.manifest.step}",
        find_stale=partial(_stale, pushed),
    )
    return push_files(request, repo_id)


def _stale(pushed: VerifiedContents, there: Mapping[str, RemoteFile], read: Callable[[str], bytes]) -> set[str]:
    """Find what the previously pushed checkpoint left: weights, by their names, and the files in its manifest.

    A file in its manifest stays if it was changed since.
    """
    parts = [base for base in PARTS if any(_is_of(base, name) for name in pushed.contents)]
    stale = {name for name in there if name not in pushed.contents and any(_is_of(base, name) for base in parts)}
    left = there.keys() - stale - pushed.contents.keys() - _KEPT
    if MANIFEST not in there or not left:
        return stale
    try:
        before = CheckpointManifest.from_json(read(MANIFEST), MANIFEST)
    except (DamagedCheckpointError, UnsafePathError) as error:
        logger.warning("Cannot read '%s' on the hub, so any files that it names are left alone: %s", MANIFEST, error)
        return stale
    return stale | {
        name for name in left & before.files.keys() if _is_as_recorded(there[name], before.files[name], name, read)
    }


def _is_of(base: str, name: str) -> bool:
    names = WeightNames(base=base)
    return name in (names.single, names.index) or names.is_shard(name)


def _is_as_recorded(file: RemoteFile, digest: FileDigest, name: str, read: Callable[[str], bytes]) -> bool:
    if file.size != digest.size:
        return False
    if name.endswith(SAFETENSORS_SUFFIX):
        return True  # the sizes are equal, and its checksum is of another kind
    return (file.sha256 or sha256_of(read(name))) == digest.sha256


# Background pushes: one at a time to one repo, and always the newest checkpoint.


class BackgroundPusher(ForkSafe):
    """Pushes checkpoints; a failure is a warning, because the checkpoint is on disk, and `wait` raises the last one."""

    def __init__(self, address: str | os.PathLike[str], progress: bool | None) -> None:
        """Check the address; no request is sent yet.

        Args:
            address: "org/name", or a path or `file://` URL of a directory hub; with "@branch" unless it is main.
            progress: Whether to show a bar during a push that blocks.

        Raises:
            InvalidArgumentError, HubNotFoundError: The address is not a valid one.
        """
        self._repo_id, revision = split_address(address)
        if not place_to_push(self._repo_id).is_for_hfshard_only:
            from hfshard.hub.download import check_repo_id  # huggingface_hub takes time to import

            check_repo_id(self._repo_id)
        self._options = PushOptions(revision=revision, progress=progress)
        self._hashes: Hashes = {}
        self._thread = Background()
        super().__init__()

    def forget(self) -> None:
        """Forget the pushes."""
        self._lock = threading.RLock()  # a signal handler may save while it is held
        self._pushing: RunCheckpoint | None = None
        self._waiting: RunCheckpoint | None = None
        self._error: Exception | None = None
        """The last push's error."""

    @property
    def steps_in_use(self) -> set[int]:
        """Steps whose checkpoints must stay where they are."""
        with self._lock:
            return {one.step for one in (self._pushing, self._waiting) if one is not None}

    def push(self, found: RunCheckpoint, *, blocking: bool) -> None:
        """Push a checkpoint now; or in the background, after the push that is running.

        A checkpoint that is still waiting is no longer pushed, because this one is newer.
        """
        if blocking:
            self.join()
            self._push(found, self._options)
            return
        with self._lock:
            if self._pushing is not None:
                self._waiting = found
                return
            self._pushing = found
        self._thread.wait()
        self._thread.start(self._work, f"Pushing to '{self._repo_id}'")

    def join(self) -> None:
        """Wait for the running push."""
        self._thread.wait()

    def wait(self) -> None:
        """Wait for the running push, and raise the last push's error, once."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        found = self._pushing
        while found is not None:
            self._push(found, replace(self._options, progress=False))
            with self._lock:
                found = self._pushing = self._waiting
                self._waiting = None

    def _push(self, found: RunCheckpoint, options: PushOptions) -> None:
        try:
            push_found(found, self._repo_id, options, self._hashes)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            logger.warning(
                "The checkpoint of step %d was saved, but not pushed to '%s': %s", found.step, self._repo_id, error
            )
            self._error = error
        else:
            self._error = None
