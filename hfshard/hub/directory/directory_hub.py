"""A directory that serves as a hub: commits next to each other, each a complete snapshot that stock readers load.

    <root>/hfshard-hub.json        {"format": 1}: marks a directory hub
    <root>/commits/<id>.json       the commit: files with size and sha256, parents, message, description
    <root>/snapshots/<id>/...      its files, read-only, a plain directory; unchanged ones are hard links
    <root>/refs/heads/<branch>     an id; likewise refs/tags/<tag> and refs/pr/<number>
    <root>/deleted/                records of deleted names and commits, until `prune`; see `commit_graph.py`
    <root>/.staging/               unfinished changes; absent at rest

An id is the first 40 hex digits of the sha256 of the manifest, which has no time and no host in it: the same files on
the same parent with the same message are the same commit. The displayed date is the manifest's modification time.
`hub_writer.py` describes how a change is made crash-safe.

Readers take no lock: a snapshot never changes, and a ref is replaced by a rename. A reader that opens a commit while
`prune` removes it finds all of it or gets an error, never silently a part of it.

Linux refuses hard links to another user's read-only files (fs.protected_hardlinks): if several users push into one hub,
unchanged files share their blocks if the file system can (btrfs, XFS), and are copied if not.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Final
from urllib.parse import unquote, urlsplit

from hfshard._util.address_hints import suggest_address
from hfshard._util.arguments import (
    FILE_SCHEME,
    absolute_path,
    check_slashes,
    checked_path_text,
    has_hub_marker,
    is_store_url,
    parse_address,
    wraps_os_errors,
)
from hfshard._util.text import without_url_secrets
from hfshard.constants import FORMAT_VERSION, HUB_MARKER, MAX_CONFIG_BYTES, MAX_INDEX_BYTES
from hfshard.disk.byte_source import ByteSource
from hfshard.disk.fsops import (
    locked_directory,
    make_directories,
    rename,
    sync_directory,
    write_file,
)
from hfshard.disk.safe_open import read_small
from hfshard.errors import HubError, HubNotFoundError, InvalidArgumentError
from hfshard.format.strict_json import dump_json, parse_json_object
from hfshard.hub.directory import commit_graph
from hfshard.hub.directory.hub_writer import HubWriter, lock_hub
from hfshard.hub.directory.snapshot import (
    StagedSnapshot,
    check_hashes,
    check_snapshot,
    reject_unexpected_files,
)
from hfshard.hub.repo import (
    MAIN,
    CommitRequest,
    PushResult,
    RepoTree,
    StaleParentError,
    full_name,
    is_commit_id,
    ref_kind,
    short_name,
)

LOCK_WAIT_SECONDS: Final = 600.0
"""How long a push waits for another one into the same hub: as long as a push of 1 TB to a slow disk takes."""


class DirectoryHub:
    """A hub in a directory; get one by `open` or `create`."""

    def __init__(self, root: str, *, wait_seconds: float = LOCK_WAIT_SECONDS) -> None:
        self.root = absolute_path(root)
        self.wait_seconds = wait_seconds

    @staticmethod
    def is_hub(path: str | os.PathLike[str]) -> bool:
        """Return whether a directory is marked as a hub."""
        return has_hub_marker(_local(path))

    @classmethod
    @wraps_os_errors("path")
    def open(cls, path: str | os.PathLike[str]) -> DirectoryHub:
        """Open an existing hub.

        Args:
            path: The directory, as a path or a `file://` URL.

        Raises:
            HubNotFoundError: The directory is not a hub.
            HubError: It was made by a newer version of hfshard.

        Example:
            >>> hub = DirectoryHub.open("/srv/models/org/name")
            >>> hub.snapshot("v1")
            '/srv/models/org/name/snapshots/3f1c...'
        """
        root = _local(path)
        check_hub_marker(root)
        return cls(root)

    @classmethod
    @wraps_os_errors("path")
    def create(cls, path: str | os.PathLike[str], *, exist_ok: bool = True) -> DirectoryHub:
        """Turn a new or empty directory into a hub, or open an existing hub.

        Raises:
            HubError: The directory has something else, such as a checkpoint; or it is a hub and `exist_ok` is false.
        """
        root = _local(path)
        is_new = not has_hub_marker(root) and _write_hub_marker(root)
        if not is_new and not exist_ok:
            raise HubError(f"'{root}' is already a directory hub. Leave out exist_ok=False to use it.", path=root)
        return cls.open(root)

    def tree(self, revision: str | None = None) -> RepoTree | None:
        """Return the files at a revision (None: main); None if there is no such revision.

        While there is no `main` either, a missing branch is empty: its commit is "".

        Raises:
            DamagedCheckpointError: The commit's manifest is missing or was changed; or the names of commits were lost.
        """
        name = revision or "main"
        commit = commit_graph.find_revision(self.root, name)
        if commit is not None:
            return RepoTree(commit, commit_graph.read_commit_manifest(self.root, commit).files)
        is_branch = not name.startswith(("refs/pr/", "refs/tags/")) and not is_commit_id(name)
        if not is_branch or commit_graph.read_ref(self.root, MAIN) is not None:
            return None
        commit_graph.reject_lost_history(self.root)
        return RepoTree("")

    def make_branch(self, branch: str) -> None:
        """Create a branch where `main` is, unless it exists already or nothing was pushed yet.

        Raises:
            HubNotFoundError: It is the name of a pull request; those are opened by create_pr=True.
        """
        if branch.startswith("refs/pr/"):
            raise HubNotFoundError(
                f"'{self.root}' has no '{branch}'. To open a pull request, push with create_pr=True.", path=self.root
            )
        if commit_graph.find_ref(self.root, branch) is None and commit_graph.read_ref(self.root, MAIN) is not None:
            self.branch(branch)

    def read(self, path: str, commit: str) -> bytes:
        """Read a small file.

        Raises:
            HubNotFoundError: The commit has no such file.
            IntegrityError: Its bytes are not those that were pushed.
        """
        commit = self.resolve(commit)
        file = commit_graph.read_commit_manifest(self.root, commit).files.get(path)
        if file is None:
            raise HubNotFoundError(f"Commit {commit} of '{self.root}' has no file '{path}'.", path=path)
        folder = commit_graph.snapshot_path(self.root, commit)
        check_snapshot(folder, {path: file})
        check_hashes(folder, {path: file}, progress=False)
        return read_small(os.path.join(folder, path), folder, MAX_INDEX_BYTES)[0]

    def url_of(self, commit: str) -> str:
        """Return the directory of a commit's files."""
        return commit_graph.snapshot_path(self.root, commit)

    def commit(
        self,
        changes: Mapping[str, ByteSource | None],
        *,
        parent: str | None,
        revision: str | None = None,
        message: str,
        description: str | None = None,
        create_pr: bool = False,
        progress_callback: Callable[[int], object] | None = None,
    ) -> PushResult:
        """Make one commit on top of `parent`, and move the branch to it.

        Args:
            changes: Path -> new contents, or None for a file to delete.
            parent: The commit that the branch is at; None: it has none yet.
            revision: A branch, created if it is missing, or "refs/pr/N". None: main.
            message: The title of the commit.
            description: More about it.
            create_pr: Leave the branch where it is, and give the commit a new "refs/pr/N".
            progress_callback: Called with the size of every block of new contents.

        Returns:
            The commit; it is `parent` if the files are the same, unless `create_pr` is true.

        Raises:
            StaleParentError: The branch is no longer at `parent`; nothing was changed.
            NotEnoughSpaceError: Nothing was changed.
            IntegrityError: Contents are not what their sha256 says, or a kept file is damaged; nothing was changed.
            HubError: The revision is a tag or a commit.
            InvalidArgumentError: A path, a message or the name of a branch can't be stored.
            CommitUnfinishedError: It was committed, but could not be flushed to disk.
        """
        request = CommitRequest(
            changes=changes,
            parent=parent,
            revision=revision,
            message=message,
            description=description,
            create_pr=create_pr,
        )
        base = branch_for(self.root, request)
        check_request(request)
        with lock_hub(self.root, wait_seconds=self.wait_seconds) as locked:
            return commit_changes(locked, request, base, progress_callback)

    def resolve(self, revision: str | None = None) -> str:
        """Find the commit that a branch, tag, "refs/...", an id or its first 7 or more digits name.

        Returns:
            The commit's id.

        Raises:
            HubNotFoundError: There is no such revision; the message lists those that exist.
            HubError: Several commits begin with these digits.
        """
        name = revision or "main"
        commit = commit_graph.find_revision(self.root, name)
        if commit is None:
            raise commit_graph.revision_not_found(self.root, name)
        return commit

    def snapshot(self, revision: str | None = None) -> str:
        """Return the directory of a revision's files; never write into it.

        Raises:
            HubNotFoundError: There is no such revision.
            DamagedCheckpointError: A file is missing or has another size; `verify` compares the bytes.
        """
        commit = self.resolve(revision)
        folder = commit_graph.snapshot_path(self.root, commit)
        check_snapshot(folder, commit_graph.read_commit_manifest(self.root, commit).files)
        return folder

    def verify(
        self, revision: str | None = None, *, paths: Collection[str] | None = None, progress: bool | None = False
    ) -> None:
        """Read files of a revision, and compare their sha256 with the pushed ones.

        Args:
            revision: A branch, tag, "refs/...", an id or its first 7 or more digits. None: main.
            paths: The files to read. None: all.
            progress: Whether to show a bar on stderr. None: on a terminal.

        Raises:
            IntegrityError: A file differs, or was not pushed.
            MissingShardError: A file is missing.
        """
        commit = self.resolve(revision)
        folder = commit_graph.snapshot_path(self.root, commit)
        files = commit_graph.read_commit_manifest(self.root, commit).files
        found = check_snapshot(folder, files)
        reject_unexpected_files(folder, files, found)
        check_hashes(folder, files if paths is None else {path: files[path] for path in paths}, progress)

    def revisions(self) -> list[commit_graph.Revision]:
        """List all branches (main first), tags and pull requests, then all commits, the newest first."""
        return commit_graph.revisions_of(self.root)

    def tag(self, name: str, revision: str | None = None) -> str:
        """Give a revision a permanent name.

        Returns:
            The commit's id.

        Raises:
            HubError: The tag is at another commit.
            DamagedCheckpointError: The commit's manifest is missing, or can't be read.
            InvalidArgumentError: The name is not a valid one, or is that of a branch.
        """
        return self._name(full_name(name, "tag"), revision)

    def branch(self, name: str, revision: str | None = None) -> str:
        """Create a branch at a revision, with the result and the errors of `tag`."""
        return self._name(full_name(name, "branch"), revision)

    def delete(self, revision: str, *, force: bool = False) -> int:
        """Delete a branch, tag or pull request; or, by its id, a commit that none of them points to.

        Args:
            revision: The name, or a commit's id.
            force: Delete `main` too.

        Returns:
            Bytes that were freed on disk: 0 for a name, as its commits stay until `prune`.

        Raises:
            HubNotFoundError: There is no such revision.
            HubError: It is `main`, or a commit that a name points to.
            CommitUnfinishedError: A name was deleted, but this could not be flushed to disk.
        """
        with lock_hub(self.root, wait_seconds=self.wait_seconds) as locked:
            if (found := commit_graph.find_ref(self.root, revision)) is not None:
                if found[0] == MAIN and not force:
                    raise HubError(
                        f"Cannot delete 'main': '{self.root}' loads it by default. To delete it, pass force=True "
                        "(hfshard revisions --force)."
                    )
                locked.remove_ref(found[0])
                return 0
            commit = self.resolve(revision)
            if names := [
                short_name(ref) for ref, target in commit_graph.all_refs(self.root).items() if target == commit
            ]:
                raise HubError(
                    f"Cannot delete commit {commit}: names point to it ({', '.join(names)}). Delete them first.",
                    path=self.root,
                )
            return locked.remove_commits([commit])

    def prune(self) -> int:
        """Remove the commits that no branch, tag or pull request leads to, directly or through parents.

        Returns:
            Bytes that were freed on disk.

        Raises:
            DamagedCheckpointError: A manifest in a history is missing or can't be read, or names were lost; nothing is
                removed.
        """
        with lock_hub(self.root, wait_seconds=self.wait_seconds) as locked:
            free_bytes = locked.remove_commits(commit_graph.unreachable(self.root))
            locked.drop_tombstones(commit_graph.reachable(self.root, commit_graph.all_refs(self.root)))
            return free_bytes

    def _name(self, ref: str, revision: str | None) -> str:
        with lock_hub(self.root, wait_seconds=self.wait_seconds) as locked:
            commit = self.resolve(revision)
            commit_graph.read_commit_manifest(self.root, commit)
            current = commit_graph.read_ref(self.root, ref)
            if current is None:
                commit_graph.check_free(self.root, ref)
                locked.set_ref(ref, commit)
            elif current != commit:
                raise HubError(
                    f"The {ref_kind(ref)} '{short_name(ref)}' is already at {current}, not at {commit}. Delete it "
                    "first, or choose another name.",
                    path=self.root,
                    expected=commit,
                    actual=current,
                )
        return commit


def hub_named(repo_id: str | os.PathLike[str], *, create: bool = False) -> DirectoryHub | None:
    """Open the directory hub that a repo_id names, or create it; None for a repo of the Hugging Face Hub."""
    directory = hub_directory(repo_id)
    if directory is None:
        return None
    return DirectoryHub.create(directory) if create else DirectoryHub.open(directory)


def _local(path: str | os.PathLike[str]) -> str:
    name = checked_path_text(path)
    return absolute_path(hub_directory(name) or name)


# One commit of a directory hub: check the request, stage the snapshot, and move the branch.


def branch_for(root: str, request: CommitRequest) -> str:
    """Return the full name of the branch or pull request that a commit goes to, or that a new pull request is for.

    Raises:
        HubError: The revision is a tag or a commit.
        HubNotFoundError: It is a pull request, and does not exist or is to get a pull request of its own.
        InvalidArgumentError: It can't be the name of a branch.
    """
    name = request.revision or "main"
    found = commit_graph.find_ref(root, name)
    if found is None and commit_graph.find_commit(root, name) is not None:
        raise HubError(f"Cannot push to '{name}': it is a commit. Pass a branch.", path=root, actual=name)
    ref = found[0] if found is not None else full_name(name)
    if ref_kind(ref) == "tag":
        raise HubError(f"Cannot push to '{name}': it is a tag. Pass a branch.", path=root, actual=name)
    if ref_kind(ref) == "pr" and (request.create_pr or found is None):
        raise HubNotFoundError(
            f"'{root}' has no pull request '{name}' to push to. Open one with create_pr=True on a branch.",
            path=root,
            actual=name,
        )
    return ref


def check_request(request: CommitRequest) -> None:
    """Check the paths and texts of a commit.

    Raises:
        InvalidArgumentError: One can't be stored.
    """
    for path in request.changes:
        commit_graph.check_paths([path])
    for text in (request.message, request.description or ""):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(
                f"{text!r} is not a valid message: it cannot be encoded as UTF-8. Remove lone surrogates."
            ) from error


def commit_changes(
    locked: HubWriter, request: CommitRequest, base: str, progress_callback: Callable[[int], object] | None
) -> PushResult:
    """Make the commit on top of `base`, the full name of the branch or pull request; see `DirectoryHub.commit`."""
    root = locked.root
    parent = request.parent
    is_new_branch = _check_parent(root, base, parent)
    commit_graph.check_free(root, base)
    ref = _new_pr(root) if request.create_pr else base
    old = commit_graph.read_commit_manifest(root, parent) if parent is not None else commit_graph.CommitManifest()
    kept = {path: file for path, file in old.files.items() if path not in request.changes}
    adds = {path: content for path, content in request.changes.items() if content is not None}
    commit_graph.check_paths([*kept, *adds])
    locked.make_staging()
    os.mkdir(locked.staged_files)
    stage = StagedSnapshot(root, locked.staged_files, progress_callback)
    files = stage.put(kept, parent, adds)
    if parent is not None and files == old.files and not request.create_pr:
        if is_new_branch:
            locked.set_ref(ref, parent)
        return PushResult(parent, commit_graph.snapshot_path(root, parent), is_new=False)
    parents = (parent,) if parent is not None else ()
    commit = locked.commit_staged(
        commit_graph.CommitManifest(files, parents, request.message, request.description), ref
    )
    pr_url = ref if request.create_pr else None
    return PushResult(commit, commit_graph.snapshot_path(root, commit), pr_url, sent_bytes=stage.copied_bytes)


def _check_parent(root: str, base: str, parent: str | None) -> bool:
    """Check that the branch is at the parent, or can be created there.

    Returns:
        Whether the branch is missing.

    Raises:
        StaleParentError: The branch is at another commit, or the parent is gone.
    """
    current = commit_graph.read_ref(root, base)
    if current != parent and (current is not None or commit_graph.find_revision(root, str(parent)) != parent):
        raise StaleParentError(f"'{short_name(base)}' of '{root}' is at {current}, not at {parent}.")
    return current is None


def _new_pr(root: str) -> str:
    numbers = [int(ref.rpartition("/")[2]) for ref in commit_graph.ref_names(root) if ref_kind(ref) == "pr"]
    return f"refs/pr/{max(numbers, default=0) + 1}"


# The file that marks a directory as a hub.


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


def _write_hub_marker(root: str) -> bool:
    """Turn a new or empty directory into a hub.

    Returns:
        False if another process made it a hub first.

    Raises:
        HubError: It contains something else, or it is a file.
        DirectoryLockedError: Another process did not release the directory's lock.
    """
    with locked_directory(root, wait_seconds=LOCK_WAIT_SECONDS, make=partial(_make_root, root)):
        if has_hub_marker(root):
            return False
        _check_empty(root)
        _write_marker_file(root)
        return True


def _make_root(root: str) -> list[str]:
    try:
        return make_directories(root)
    except (NotADirectoryError, FileExistsError) as error:
        raise HubError(f"Cannot create a hub in '{root}': it, or a path above it, is a file.", path=root) from error


def _check_empty(root: str) -> None:
    left = set(os.listdir(root))
    staging = os.path.join(root, commit_graph.STAGING)
    if left == {commit_graph.STAGING} and os.path.isdir(staging) and set(os.listdir(staging)) <= {HUB_MARKER}:
        return  # left by a process that was killed
    if left:
        raise HubError(
            f"'{root}' is neither empty nor a directory hub: it contains '{min(left)}'. A hub needs its own directory: "
            "pass a new or empty one.",
            path=root,
        )


def _write_marker_file(root: str) -> None:
    staging = os.path.join(root, commit_graph.STAGING)
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


_PATH_STARTS: Final = ("/", "./", "../", "~")


def hub_directory(repo_id: str | os.PathLike[str]) -> str | None:
    """Find the directory that a repo_id names; None if it is "org/name" on the Hugging Face Hub.

    A directory is named by a path object, a `file://` URL, text that looks like a path (it begins with `/`, `./`, `../`
    or `~`, or is `.` or `..`), and the name of a directory hub, so that what is loaded from there is pushed there.

    Raises:
        InvalidArgumentError: It is a URL of another machine or of another kind, or a store address, valid or not.
    """
    if not isinstance(repo_id, str):
        return checked_path_text(repo_id, "repo_id")
    check_slashes(repo_id, "repo_id")
    if repo_id.startswith(FILE_SCHEME):
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
        return repo_id
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
