"""Push files as one commit: list the hub's files, compare, upload what is missing, commit on top of that state."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol

from hfshard._util.arguments import check_text_arguments
from hfshard._util.progress import byte_progress
from hfshard.checkpoint.folder import LocalFolder
from hfshard.checkpoint.locate import directory_not_found
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint, WhenOpen, open_checkpoint, warn_of_others_files
from hfshard.constants import (
    BIN_SUFFIX,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    README,
    SAFETENSORS_SUFFIX,
    SIGNATURE_NAME,
)
from hfshard.disk.byte_source import ByteSource, BytesSource, FileSource, file_source, read_all, sha256_of_source
from hfshard.disk.safe_open import reject_links_to_outside
from hfshard.errors import HfshardError, HubError, InvalidArgumentError, RemoteChangedError
from hfshard.format.file_names import INDEX_FILE, MODEL_BASE, WeightNames, names_of_entry, replaced_weights
from hfshard.format.index import CheckpointIndex, FileDigest
from hfshard.hub.model_card import CARD_PICTURE, draw_card, merge_card
from hfshard.hub.repo import Hub, PushResult, RemoteFile, RepoTree, StaleParentError, is_left_out, is_plain_path
from hfshard.stores.store import StoredSource

logger = logging.getLogger(__name__)

_ATTEMPTS: Final = 5
"""Attempts at a push, each on top of what others have pushed during the one before."""


def open_hub(repo_id: str | os.PathLike[str], *, token: str | bool | None = None, private: bool | None = None) -> Hub:
    """Open the repo to push to, "org/name", or a path or `file://` URL of a directory; create it if it is missing.

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


def push_files(request: PushRequest, repo_id: str | os.PathLike[str]) -> PushResult:
    """Push files as one commit.

    Raises:
        RemoteChangedError: Another push changed the same files, or others kept pushing; nothing was committed.
        Every other error that `push_checkpoint` raises for a hub.
    """
    repo_id = os.fspath(repo_id)
    if request.options.card_picture:
        request = _with_card(request, repo_id)
    hub = open_hub(repo_id, token=request.options.token, private=request.options.private)
    before: RepoTree | None = None
    for _ in range(_ATTEMPTS):
        now = _tree_of_branch(hub, request.options.revision, repo_id)
        plan = plan_against(hub, request, now)
        if plan.is_empty:
            logger.info("'%s' already has all files: no commit was created.", repo_id)
            return PushResult(now.commit, hub.url_of(now.commit), is_new=False)
        if before is not None:
            reject_conflicting_push(before, now, plan, request, repo_id)
        try:
            result = _commit(hub, request, plan, parent=now.commit or None)
        except StaleParentError:
            before = now
            continue
        _note_signature(request, plan, now, repo_id)
        logger.info("Pushed %d files (%d deleted) to '%s'.", len(plan.adds), len(plan.deletes), repo_id)
        return result
    raise RemoteChangedError(
        f"Other pushes to '{repo_id}' came first {_ATTEMPTS} times during this push. Nothing was committed. Try again.",
        path=repo_id,
    )


def _with_card(request: PushRequest, repo_id: str) -> PushRequest:
    """Add the picture of the checkpoint, and its part of the README.md that is pushed or already there.

    Raises:
        InvalidArgumentError: The checkpoint is signed.
        Everything that `draw_card` and `merge_card` raise.
    """
    if SIGNATURE_NAME in request.contents:
        raise InvalidArgumentError(
            f"'{SIGNATURE_NAME}' signs '{README}', which the card would change, so that verification would fail. "
            "Nothing was pushed. Push without card_picture; to have a card, put it in when signing: sign_checkpoint("
            "..., card_picture=True) or hfshard sign --card-picture."
        )
    is_path = os.path.isabs(repo_id) or "://" in repo_id
    name = os.path.basename(repo_id.rstrip("/")) if is_path else repo_id
    card = draw_card(request.contents, name)
    contents = {**request.contents, CARD_PICTURE: BytesSource(card.picture)}
    if README in contents:
        contents[README] = BytesSource(merge_card(read_all(contents[README]), card.text, name))

    def make_card(read_old: Callable[[], bytes] | None) -> bytes | None:
        made = None if request.make_card is None else request.make_card(read_old)
        if made is None and read_old is not None:
            made = read_old()
        return merge_card(made, card.text, name)

    return replace(request, contents=contents, make_card=make_card)


def _note_signature(request: PushRequest, plan: PushPlan, before: RepoTree, repo_id: str) -> None:
    """Warn if the hub's signature is stale, because this push changed files that it covers."""
    path = request.options.folder + SIGNATURE_NAME
    documents = (".md", ".gitattributes")
    changed = [name for name in (*plan.adds, *plan.deletes) if not name.endswith(documents)]
    if (
        path in before.files
        and path not in plan.changes
        and any(name.startswith(request.options.folder) for name in changed)
    ):
        logger.warning(
            "The signature '%s' in '%s' is stale: this push changed the files it covers, so verification will fail. "
            "Sign a directory (hfshard sign DIR --private-key KEY) and push it, or delete the file.",
            path,
            repo_id,
        )


def _tree_of_branch(hub: Hub, revision: str | None, repo_id: str) -> RepoTree:
    """Return the files at the branch, and create the branch if it is missing."""
    found = hub.tree(revision)
    if found is None and revision is not None:
        hub.make_branch(revision)
        found = hub.tree(revision)
    if found is None:
        raise HubError(f"'{repo_id}' has no branch '{revision or 'main'}', and it could not be created.", path=repo_id)
    return found


def _commit(hub: Hub, request: PushRequest, plan: PushPlan, *, parent: str | None) -> PushResult:
    total = sum(content.size for content in plan.adds.values())
    with byte_progress("Pushing", total, request.options.progress) as show:

        def note(count: int) -> None:
            request.check()
            show(count)

        request.check()
        return hub.commit(
            plan.changes,
            parent=parent,
            revision=request.options.revision,
            message=request.message,
            description=request.options.commit_description,
            create_pr=request.options.create_pr,
            progress_callback=note,
        )


# Push requests: the user's options, and the files to push.


CardBuilder = Callable[[Callable[[], bytes] | None], bytes | None]
"""Builds a README.md. Its argument reads the existing one, if there is one; returning None leaves that as it is."""

StaleFinder = Callable[[Mapping[str, RemoteFile], Callable[[str], bytes]], Collection[str]]
"""Selects files to delete. Its arguments are the files of the folder by name, and a reader of small ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """Options of a push; the fields are the arguments of `push_checkpoint`.

    Raises:
        InvalidArgumentError: A pull request on another branch than main, or a folder outside the repo.
    """

    commit_message: str | None = None
    """None: the default message of the request."""
    commit_description: str | None = None
    private: bool | None = None
    """Whether a repo that is created is private."""
    token: str | bool | None = field(default=None, repr=False)
    revision: str | None = None
    """A branch, or "refs/pr/N". None: main."""
    create_pr: bool = False
    path_in_repo: str = ""
    follow_links: bool = False
    """Whether to push the targets of links that lead out of the directory."""
    card_picture: bool = False
    """Whether to draw the checkpoint, and to show it in the repo's README.md."""
    progress: bool | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without a request to a hub."""
        check_text_arguments(
            revision=self.revision or None,
            path_in_repo=self.path_in_repo or None,
            commit_message=self.commit_message or None,
            commit_description=self.commit_description or None,
        )
        if self.create_pr and self.revision not in (None, "main"):
            raise InvalidArgumentError(
                "create_pr opens a pull request on main. Pass only one of create_pr and revision."
            )
        parts = self.path_in_repo.split("/")
        if ".." in parts or "\\" in self.path_in_repo:
            raise InvalidArgumentError(f"path_in_repo must stay in the repo, got {self.path_in_repo!r}.")
        if any(part.lower() == ".git" for part in parts):
            raise InvalidArgumentError(f"path_in_repo must not be in git's own folder, got {self.path_in_repo!r}.")
        if self.card_picture and self.folder:
            raise InvalidArgumentError(
                "card_picture shows the checkpoint at the top of a repo. Pass only one of it and path_in_repo."
            )

    @property
    def folder(self) -> str:
        """The folder of the repo as a prefix of paths: "" or "name/"."""
        parts = [part for part in self.path_in_repo.split("/") if part not in ("", ".")]
        return "".join(f"{part}/" for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushRequest:
    """Files to push, and how to push them."""

    contents: Mapping[str, ByteSource]
    """Path in the folder -> contents."""
    variants: frozenset[str | None]
    """Variants of the checkpoints among them; all their other weights and indexes on the hub are deleted."""
    options: PushOptions = field(default_factory=PushOptions)
    default_message: str = "Upload checkpoint"
    """The commit's message where the options have none."""
    make_card: CardBuilder | None = None
    find_stale: StaleFinder | None = None
    """Selects other files to delete."""
    check: Callable[[], None] = lambda: None
    """Called before the commit begins, and from any thread while new contents are read; raises to cancel."""

    @property
    def message(self) -> str:
        """The commit's message."""
        return self.options.commit_message or self.default_message


# Push plans: files to send and to delete, so that a hub has what the last save wrote, and the user's own files.


SHARD: Final = re.compile(r"-\d{5,}-of-\d{5,}(?:-\d{8,15}-[0-9a-f]{16})?\.(?:safetensors|bin)$")
"""End of a shard's name in any checkpoint, including one that was synced from a store."""


@dataclass(frozen=True, slots=True)
class PushPlan:
    """Changes that one push makes."""

    adds: dict[str, ByteSource]
    """Path in the repo -> new contents."""
    deletes: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """True if the hub has all files already, and nothing else of this checkpoint."""
        return not self.adds and not self.deletes

    @property
    def changes(self) -> dict[str, ByteSource | None]:
        """Path -> new contents, or None for a file to delete."""
        return {**self.adds, **dict.fromkeys(self.deletes)}


def plan_push(contents: Mapping[str, ByteSource], remote: RepoTree, stale: Collection[str]) -> PushPlan:
    """Compare the files to push with those on the hub; read files of unknown hash if the sizes are equal."""
    adds: dict[str, ByteSource] = {}
    for path, content in contents.items():
        file = remote.files.get(path)
        known = _hashed_if_needed(content, file)
        if file is None or not file.has_contents(known):
            adds[path] = known
    return PushPlan(adds, tuple(sorted(stale)))


def _hashed_if_needed(content: ByteSource, file: RemoteFile | None) -> ByteSource:
    """Add the sha256 if it will be compared, so that no file is read twice for it."""
    is_comparable = file is not None and file.sha256 is not None and file.size == content.size
    if is_comparable and isinstance(content, FileSource) and content.sha256 is None:
        return replace(content, sha256=sha256_of_source(content))
    return content


def detect_variants(names: Iterable[str]) -> set[str | None]:
    """Find the variants of a checkpoint that file names belong to; None is the one without a variant."""
    checkpoints = filter(None, map(names_of_entry, names))
    return {one.variant for one in checkpoints if one.base == MODEL_BASE}


def _weights_among(files: Iterable[str], variants: Iterable[str | None]) -> set[str]:
    """Select the names that are, by convention, those of these variants' weights in either format."""
    families = [WeightNames(variant) for variant in variants]
    return {name for name in files if any(names.owns(name) for names in families)}


def stale_names(
    remote: Iterable[str], local: Collection[str], variants: Iterable[str | None], owned: Collection[str]
) -> set[str]:
    """Find files in a folder of the hub that belonged to the checkpoints to push, and no longer do.

    Args:
        remote, local, variants: Names in the folder, names to push, and the variants of the checkpoints to push.
        owned: Files that the hub's indexes of these variants name, by any name.
    """
    names = set(remote)
    return (_weights_among(names, variants) | names.intersection(owned)).difference(local)


def foreign_indexes(remote: Iterable[str], local: Collection[str], variants: Iterable[str | None]) -> list[str]:
    """Find the hub's indexes of checkpoints that are not pushed: the files that they name must stay."""
    indexes = set(filter(INDEX_FILE.fullmatch, remote)).difference(local)
    return sorted(indexes - _weights_among(indexes, variants))


def unindexed_weights(remote: Iterable[str], local: Collection[str], variants: Iterable[str | None]) -> set[str]:
    """Find weights on the hub without a conventional name: only an index shows which checkpoint they belong to."""
    weights = {name for name in remote if name.endswith((SAFETENSORS_SUFFIX, BIN_SUFFIX))}.difference(local)
    return weights - _weights_among(weights, variants)


# Comparison of a push with a hub: files to send, files to delete, and pushes that would mix.


def plan_against(hub: Hub, request: PushRequest, remote: RepoTree) -> PushPlan:
    """Plan the changes of a push to a hub that has `remote` at the branch."""
    folder, local = request.options.folder, set(request.contents)
    below = {path.removeprefix(folder): path for path in remote.files if path.startswith(folder)}
    there = {name: path for name, path in below.items() if "/" not in name}
    owned, kept = _indexed(hub, request, remote, there)
    stale = stale_names(there, local, request.variants, owned - kept) - kept
    if request.find_stale is not None:
        files = {name: remote.files[path] for name, path in there.items()}
        more = request.find_stale(files, lambda name: hub.read(there[name], remote.commit))
        stale |= (there.keys() & more) - local
    contents = {folder + name: content for name, content in request.contents.items()}
    contents |= _card(hub, request, remote)
    return plan_push(contents, remote, [below[name] for name in stale | replaced_weights(below, local)])


def _indexed(hub: Hub, request: PushRequest, remote: RepoTree, there: Mapping[str, str]) -> tuple[set[str], set[str]]:
    """Read the file names in the hub's indexes: of the checkpoints to push, and of others.

    An index is fetched only if it could make a difference.
    """
    local = set(request.contents)
    owned, kept = set(), set()
    if unindexed_weights(there, local, request.variants):
        for variant in request.variants:
            names = WeightNames(variant)
            for index in {names.index, names.hub_index, names.bin_index}:
                if index in there:
                    owned |= _named_by(hub, there[index], remote.commit)
    if stale_names(there, local, request.variants, ()) or owned:
        for index in foreign_indexes(there, local, request.variants):
            shards = {name for name in there if SHARD.search(name)}  # of any checkpoint, which it could name
            kept |= _named_by(hub, there[index], remote.commit, else_all=shards)
    return owned, kept


def _named_by(hub: Hub, path: str, commit: str, *, else_all: Collection[str] = ()) -> set[str]:
    """Return the files that an index names; `else_all` for an index that can't be read."""
    raw = hub.read(path, commit)
    try:
        return set(CheckpointIndex.from_json(raw, path).weight_map.values())
    except HfshardError as error:
        logger.warning("'%s' on the hub cannot be read, so the files that it may name are kept: %s", path, error)
        return set(else_all)


def _card(hub: Hub, request: PushRequest, remote: RepoTree) -> dict[str, ByteSource]:
    if request.make_card is None or README in request.contents:
        return {}
    new = request.make_card(partial(hub.read, README, remote.commit) if README in remote.files else None)
    return {} if new is None else {README: BytesSource(new)}


def reject_conflicting_push(
    before: RepoTree, now: RepoTree, plan: PushPlan, request: PushRequest, repo_id: str
) -> None:
    """Reject a commit on top of another push of the same files or weights, because the two would mix.

    Files that are now as this push would leave them are not a conflict: they come from an equal push, or from an
    earlier commit of this one.

    Raises:
        RemoteChangedError: The other push changed a file that this one writes too.
    """
    changed = {path for path in plan.changes if before.files.get(path) != now.files.get(path)}
    names = {path.removeprefix(request.options.folder) for path in changed if path.startswith(request.options.folder)}
    mine = sorted(names & request.contents.keys() | _weights_among(names, request.variants))
    if mine:
        raise RemoteChangedError(
            f"Another push to '{repo_id}' changed '{mine[0]}' (commit {now.commit[:8]}), which this push also "
            "writes. Nothing was committed. Review that commit; push again to overwrite it.",
            path=repo_id,
            actual=now.commit,
        )


# Files to push from one place: checked, with the hashes of the save, and without leftovers.


_LINKS: Final = (
    "the directory that is pushed. Pass follow_links=True (hfshard push --follow-links) to push what they link to, "
    "or exclude them with ignore_patterns."
)
"""End of the message about links that leave the directory."""

_JUNK: Final = ".DS_Store"
"""A file that is never pushed: a view of the folder in macOS."""


def collect_directory(
    directory: str, *, names: Collection[str] | None = None, follow_links: bool = False
) -> tuple[dict[str, ByteSource], dict[str | None, CheckpointIndex]]:
    """Collect the files to push from a directory, and its indexes by variant; see `DirectoryFiles` for the arguments.

    Raises:
        Everything that `collect_push_contents` raises.
    """
    found = collect_push_contents(DirectoryFiles(directory, names, follow_links=follow_links))
    return found.contents, found.indexes


class FilesOfPlace(Protocol):
    """The files below one place, as candidates for a push."""

    @property
    def place(self) -> str:
        """The place, for messages."""

    def contents(self) -> dict[str, ByteSource]:
        """List the files: path below the place -> contents; files have no hash yet."""

    def open_variant(
        self, variant: str | None, when_open: WhenOpen | None = None
    ) -> AbstractContextManager[OpenCheckpoint]:
        """Open the checkpoint of a variant, and check its structure; `when_open` is that of `open_checkpoint`."""

    def check(self, paths: Collection[str]) -> None:
        """Raise if one of these files may not be pushed."""


@dataclass(frozen=True, slots=True)
class PushContents:
    """Files to push from a place, and the checkpoints that they form."""

    contents: dict[str, ByteSource]
    """Path below the place -> contents, with the sha256 if the save recorded it."""
    indexes: dict[str | None, CheckpointIndex]
    """Variant -> index."""
    entries: dict[str | None, str]
    """Variant -> name of its entry."""


def collect_push_contents(
    files: FilesOfPlace,
    *,
    allow_patterns: list[str] | str | None = None,
    ignore_patterns: list[str] | str | None = None,
) -> PushContents:
    """Collect the files to push from any place, and check the structure of every checkpoint in it.

    All files of a checkpoint are of one save, even if others are made meanwhile: its weights are those of the recorded
    hashes, and the small files are read now.

    Args:
        files: Saved checkpoints, and the user's files next to them.
        allow_patterns, ignore_patterns: Globs of paths, as in huggingface_hub's `upload_folder`.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        InvalidArgumentError: The patterns leave out all weights, or a part of a checkpoint; or a link leaves the
            directory, or a name has a backslash or an unprintable character.
        DamagedCheckpointError, UnsafePathError, UnsafePickleError: A checkpoint can't be loaded.
    """
    place = files.place
    contents = files.contents()
    variants = detect_variants(name for name in contents if "/" not in name)
    if not variants:
        with files.open_variant(None):  # for its error, or weights that config.json names
            variants = {None}
    indexes: dict[str | None, CheckpointIndex] = {}
    entries: dict[str | None, str] = {}
    known: dict[str, str | None] = {}
    files_of: dict[str | None, set[str]] = {}
    small: dict[str, ByteSource] = {}

    def read_small_files(checkpoint: OpenCheckpoint) -> None:
        nonlocal contents
        own = {CONFIG_NAME, GENERATION_CONFIG_NAME, *_files_of(checkpoint)}
        if any((name in contents) != checkpoint.folder.has(name) for name in own):
            contents = files.contents()  # a save came after the listing
        for name in (name for name in own if name.endswith(".json")):
            small.pop(name, None)
            if isinstance(contents.get(name), FileSource):
                small[name] = BytesSource(read_all(contents[name]))

    for variant in sorted(variants, key=lambda name: name or ""):
        with files.open_variant(variant, read_small_files) as checkpoint:
            indexes[variant] = checkpoint.index
            entries[variant] = checkpoint.weights.name
            files_of[variant] = _files_of(checkpoint)
            known |= _known_hashes(checkpoint)
    selected = select_names(contents, allow_patterns, ignore_patterns)
    for variant in [variant for variant, held in files_of.items() if not _is_selected(held, selected, place)]:
        del indexes[variant], entries[variant]  # the hub keeps what it has of this one
    used = {name for held in files_of.values() for name in held}
    # Named like weights, but no checkpoint uses them: left by a killed save, or outranked by another file.
    leftovers = _weights_among(selected, variants).difference(used)
    for name in sorted(leftovers):
        logger.warning("'%s' in '%s' belongs to no checkpoint: it is not pushed.", name, place)
    if not any(path.endswith((SAFETENSORS_SUFFIX, BIN_SUFFIX)) for path in selected - leftovers):
        raise InvalidArgumentError(
            f"The patterns exclude all weights of '{place}'. Check allow_patterns and ignore_patterns.",
            path=place,
        )
    files.check(selected - leftovers)
    contents |= small
    pushed = {name: _with_sha256(contents[name], known.get(name)) for name in selected - leftovers}
    return PushContents(pushed, indexes, entries)


def select_names(
    names: Iterable[str], allow_patterns: list[str] | str | None, ignore_patterns: list[str] | str | None
) -> set[str]:
    """Return the names that match `allow_patterns`, if given, and don't match `ignore_patterns`."""
    from huggingface_hub.utils import filter_repo_objects  # imports huggingface_hub, which takes time

    return set(filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))


def _with_sha256(content: ByteSource, sha256: str | None) -> ByteSource:
    """Return contents with their hash, if it is known; bytes in memory know their own.

    A file on disk gets the size that it has now, as a save may have replaced it between the listing and the opening.
    """
    if isinstance(content, FileSource):
        return file_source(content.path, sha256)
    return replace(content, sha256=sha256) if isinstance(content, StoredSource) else content


class DirectoryFiles:
    """The files of a directory.

    Args:
        place: The directory.
        names: The only files to consider. None: all files.
        follow_links: Whether links may lead out of the directory. Those of a snapshot in the Hub's cache always may.
    """

    def __init__(self, place: str, names: Collection[str] | None = None, *, follow_links: bool = False) -> None:
        self.place = place
        self._names = names
        self._follow_links = follow_links

    def contents(self) -> dict[str, ByteSource]:
        """List all files, except pipes, broken links, links to folders, and what is never pushed.

        Raises:
            CheckpointNotFoundError: There is no such directory.
        """
        folder = LocalFolder(self.place)
        if not folder.exists():
            raise directory_not_found(self.place)
        found: dict[str, ByteSource] = {}
        for path in _paths(self.place):
            if self._names is None or path in self._names:
                with suppress(FileNotFoundError):  # another program's temporary file, which is gone
                    found[path] = folder.source(path)
        return found

    @contextmanager
    def open_variant(self, variant: str | None, when_open: WhenOpen | None = None) -> Iterator[OpenCheckpoint]:
        """Open the checkpoint of a variant, and warn of small files that were edited or removed since its save."""
        with open_checkpoint(self.place, variant=variant, when_open=when_open) as checkpoint:
            warn_of_others_files(checkpoint, "structure")
            yield checkpoint

    def check(self, paths: Collection[str]) -> None:
        """Reject names that no pull accepts, and links that leave the directory, unless they are to be followed."""
        _reject_names(self.place, paths)
        if not self._follow_links:
            reject_links_to_outside(self.place, paths, _LINKS)


def _reject_names(directory: str, names: Collection[str]) -> None:
    """Reject names that some system would read as other paths, or that are not printable."""
    name = next((name for name in sorted(names) if not is_plain_path(name)), None)
    if name is not None:
        raise InvalidArgumentError(
            f"The name {name!r} in '{directory}' has a backslash or an unprintable character, so no pull would "
            "accept it. Rename it, or exclude it with ignore_patterns (hfshard push --exclude).",
            path=directory,
        )


def _is_selected(files: Collection[str], selected: Collection[str], directory: str) -> bool:
    """Return whether a checkpoint's files are all selected; False if none is.

    Raises:
        InvalidArgumentError: Only some of them are.
    """
    left_out = sorted(set(files) - set(selected))
    if len(left_out) == len(set(files)):
        return False
    if left_out:
        raise InvalidArgumentError(
            f"The patterns exclude '{left_out[0]}', without which the checkpoint in '{directory}' cannot be loaded. "
            "Check allow_patterns and ignore_patterns.",
            path=directory,
        )
    return True


def _known_hashes(checkpoint: OpenCheckpoint) -> dict[str, str | None]:
    """Return file -> recorded sha256. A single file, or one with another checksum, is read, compared and hashed."""
    hashes: dict[str, str | None] = {}
    for name, shard in checkpoint.shards.items():
        record = checkpoint.index.files.get(name, FileDigest())
        hashes[name] = record.sha256
        if record.is_verifiable and (checkpoint.weights.kind == "single" or record.sha256 is None):
            hashes[name] = shard.checked_sha256(record)
    return hashes


def _paths(directory: str) -> Iterator[str]:
    for above, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if not is_left_out(name))
        for name in [*(one for one in folders if os.path.islink(os.path.join(above, one))), *sorted(files)]:
            path = os.path.join(above, name)
            if name == _JUNK or is_left_out(name):
                continue
            if os.path.isfile(path):
                yield _checked_name(os.path.relpath(path, directory), directory)
            else:
                logger.warning("'%s' is a pipe, a broken link or a link to a folder: it is not pushed.", path)


def _checked_name(path: str, directory: str) -> str:
    try:
        path.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"The name {path!r} in '{directory}' is not valid UTF-8, which hubs require. Rename it.",
            path=directory,
        ) from error
    return path


def _files_of(checkpoint: OpenCheckpoint) -> set[str]:
    return {checkpoint.weights.name, *checkpoint.shards, *checkpoint.pickles}
