"""Comparison of files with a verified signature: in a directory or a store, and exactly the ones that are open."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from hfshard._util.progress import ProgressCallback, byte_progress
from hfshard._util.text import shorten_list
from hfshard._util.threads import cancellable, run_in_threads
from hfshard.checkpoint.folder import LocalFolder
from hfshard.checkpoint.load_options import FilesBeside
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.checkpoint.ranged_folder import RangedFolder
from hfshard.checkpoint.reports import Problem, VerifyReport
from hfshard.constants import (
    CONFIG_NAME,
    FILES_AT_ONCE,
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    SIGNATURE_NAME,
    WEIGHTS_SUFFIXES,
)
from hfshard.disk.safe_open import is_users_link, open_regular, read_small
from hfshard.errors import CheckpointChangedError, HfshardError, InvalidArgumentError, SignatureError
from hfshard.format.file_names import INDEX_FILE
from hfshard.format.index import CheckpointIndex, FileDigest, sha256_of
from hfshard.pickles.pickle_file import PickleFile
from hfshard.shards.shard import SafetensorsShard
from hfshard.shards.shard_file import SafetensorsFile
from hfshard.signing.model_signing import SignedManifest, digests_by_library, signed_manifest
from hfshard.signing.signed_files import (
    SMALL_SIGNATURE_BYTES,
    FileIdentity,
    OpenWeights,
    file_identity,
    hash_files,
    is_needed,
    is_optional,
    is_signable,
    list_files,
    max_signature_bytes,
    may_be_read,
    remote_code_references,
)
from hfshard.signing.signer import SignedBy

_SHOWN: Final = 5
"""Maximum number of names in a message."""


@dataclass
class SignedFolder:
    """A directory, and the manifest of a verified signature over it."""

    root: str
    manifest: SignedManifest
    below: str = ""
    """The folder in it that is loaded, with a trailing slash; "": all of it."""
    has_code: bool = False
    """True if code of the checkpoint may be run."""
    seen: dict[str, FileIdentity] = field(default_factory=dict)
    """The files that were compared by name, and their state then."""
    open_weights: OpenWeights = field(default_factory=OpenWeights)
    """The files that were compared while open."""
    objects: Mapping[str, str] = field(default_factory=dict)
    """For a store: file -> name of its object, if different."""

    def check_beside(self) -> None:
        """Compare every file that a load reads along with the weights.

        Raises:
            SignatureError: One differs, is missing, or was added.
        """
        there, signed = self._names_read(), self.manifest.digests.keys()
        self._refuse(missing_files=filter(self._is_needed, signed - there), added_files=there - signed)
        self.check(sorted(there))
        if self.has_code:
            self._reject_other_code()

    def compare_names(self, there: Set[str]) -> tuple[set[str], list[SignatureError]]:
        """Return the existing files that are signed, and an error for each missing or added file."""
        signed = self.manifest.digests.keys()
        added, missing = sorted(self._added(there)), sorted(signed - there)
        return {*there} & signed, [*map(self.not_signed, added), *map(self.missing, missing)]

    def left_out(self, there: Set[str]) -> list[str]:
        """List the existing files that the signer left out on purpose, because no load uses them."""
        unsigned = there - self.manifest.digests.keys()
        return sorted(unsigned - self._added(unsigned))

    def check_all(self, progress: bool | None = None) -> None:
        """Compare every existing file, including those of other weights.

        Raises:
            SignatureError: A file differs or was added, or a file that a load needs is missing.
        """
        names, signed = self.names_there(), self.manifest.digests.keys()
        self._refuse(missing_files=filter(self._is_needed, signed - names), added_files=self._added(names))
        names &= signed
        total = sum(os.path.getsize(os.path.join(self.root, name)) for name in names)
        with byte_progress("Verifying", total, progress) as progress_callback:
            self.check(sorted(names), progress_callback)

    def check(self, names: Collection[str], progress_callback: ProgressCallback | None = None) -> None:
        """Hash files, and compare them with the signed digests.

        Raises:
            SignatureError: One differs.
        """
        for name, (found, seen) in self.hashed(names, progress_callback).items():
            if found != self.manifest.digests.get(name):
                raise self.differs(name)
            self.seen[name] = seen

    def hashed(
        self, names: Collection[str], progress_callback: ProgressCallback | None = None
    ) -> dict[str, tuple[dict[str, str], FileIdentity]]:
        """Hash files as the signature does: path -> digests, and the file's identity."""
        if self.manifest.is_plain:
            plain = hash_files(self.root, names, progress_callback)
            return {name: ({name: digest}, seen) for name, (digest, seen) in plain.items()}
        result: dict[str, tuple[dict[str, str], FileIdentity]] = {}
        for name in names:
            path = os.path.join(self.root, name)
            os.close(open_regular(path, self.root))
            before = file_identity(path)
            digests = digests_by_library(self.root, [name], self.manifest.serialization)
            if before is None or before != file_identity(path):
                raise self.differs(name)
            result[name] = digests, before
        return result

    def check_opened(self, checkpoint: OpenCheckpoint, progress: bool | None = None) -> None:
        """Compare the open files of weights, even if their names now have other files, and the other files once more.

        Raises:
            SignatureError: One differs, or is not signed.
            CheckpointChangedError: The checkpoint was replaced or changed meanwhile.
        """
        files: dict[str, SafetensorsShard | PickleFile] = {**checkpoint.shards, **checkpoint.pickles}
        below = os.path.relpath(checkpoint.directory, self.root)
        names = {name: os.path.normpath(os.path.join(below, name)) for name in files}
        entry = os.path.normpath(os.path.join(below, checkpoint.weights.name))
        self._refuse(missing_files=(), added_files={entry, *names.values()} - self.manifest.digests.keys())
        total = sum(file.size for file in files.values())
        with byte_progress("Verifying", total, progress) as progress_callback:
            run_in_threads(
                lambda name, cancelled: self._check_open_file(
                    names[name], files[name], checkpoint, name, cancellable(progress_callback, cancelled)
                ),
                sorted(files, key=lambda name: -files[name].size),
                FILES_AT_ONCE,
            )
        raw = checkpoint.raw_index
        if raw is not None and self._digests_of(entry, raw) != self.manifest.digests[entry]:
            raise self.differs(entry)
        # The config that was read is the current one, if nothing changed since it was compared.
        self.confirm()
        if not checkpoint.is_unchanged():
            raise CheckpointChangedError(
                f"The checkpoint in '{checkpoint.directory}' was replaced while its signature was being checked. "
                "Retry when no save is running.",
                path=checkpoint.directory,
            )

    def confirm(self) -> None:
        """Check at the end of a load that no file was touched since it was compared, and none was added.

        Raises:
            SignatureError: A file was changed meanwhile, or was added and is not as it was signed.
            CheckpointChangedError: A file is as it was signed, but may have been different when it was read.
        """
        self.open_weights.confirm()
        changed = [name for name, seen in self.seen.items() if file_identity(os.path.join(self.root, name)) != seen]
        there = [name for name in changed if os.path.lexists(os.path.join(self.root, name))]
        come = self._names_read() - self.seen.keys()
        self._refuse(missing_files=set(changed) - set(there), added_files=come - self.manifest.digests.keys())
        self.check(sorted({*there, *come}))
        if changed:
            path = os.path.join(self.root, changed[0])
            raise CheckpointChangedError(
                f"'{path}' was replaced while the checkpoint was loaded. Retry when nothing changes it.",
                path=path,
            )

    def differs(self, name: str, damaged: Collection[str] = ()) -> SignatureError:
        """Return the error for a file that differs from the signed one, or that was not signed."""
        if name not in self.manifest.digests:
            return self.not_signed(name)
        path = self._path(name)
        which = f" (tensor {shorten_list(sorted(damaged), _SHOWN, quote=True)})" if damaged else ""
        return SignatureError(
            f"'{path}' is not the file that was signed{which}: it was changed, or the signature belongs to another "
            "checkpoint. Download it again, or ask the signer; to list all differences, run: hfshard verify "
            f"{self.root} --public-key KEY",
            path=path,
        )

    def not_signed(self, name: str) -> SignatureError:
        """Return the error for a file that was added."""
        path = self._path(name)
        if self._is_ignored(name):
            return SignatureError(
                f"'{path}' is not covered by the signature: the signer left it out on purpose, but a load reads it. "
                "Remove it, or ask for a signature of all files.",
                path=path,
            )
        return SignatureError(
            f"'{path}' is not covered by the signature: it was added after the checkpoint was signed, or belongs to "
            "another one. Remove it, or ask the signer.",
            path=path,
        )

    def missing(self, name: str) -> SignatureError:
        """Return the error for a missing file."""
        path = self._path(name)
        return SignatureError(f"'{path}' was signed, but is missing. Download the checkpoint again.", path=path)

    def became_link(self, name: str) -> SignatureError | None:
        """Return the error for a signed file, or the signature, that became a link; None if the Hub's cache made it."""
        path = self._path(name)
        if self.manifest.allows_links or not is_users_link(path, self.root):
            return None
        return SignatureError(
            f"'{path}' was written as a file, but is now a link, which the signature does not allow. Replace it with "
            "the file, or download the checkpoint again.",
            path=path,
        )

    def names_there(self, *, takes_debris: bool = False) -> set[str]:
        """List the existing files: those that hfshard would sign, and those that were signed."""
        names = set(list_files(self.root, takes_debris=takes_debris).names)
        others = self.manifest.digests.keys() - names
        return names | {name for name in others if os.path.lexists(os.path.join(self.root, name))}

    def _names_read(self) -> set[str]:
        """List the existing files that a load may read along with the weights."""
        there = {name for name in self.names_there() if may_be_read(name, has_code=self.has_code)}
        return there & self.manifest.digests.keys() | self._added(there)

    def _added(self, names: Collection[str]) -> set[str]:
        """Select the files that are not signed, and were not left out on purpose as far as a signer may do that."""
        unsigned = set(names) - self.manifest.digests.keys()
        return {name for name in unsigned if not (self._is_ignored(name) and is_optional(name))}

    def _is_needed(self, name: str) -> bool:
        return name.startswith(self.below) and is_needed(name)

    def _path(self, name: str) -> str:
        return os.path.join(self.root, self.objects.get(name, name))

    def _digests_of(self, name: str, raw: bytes) -> dict[str, str]:
        """Hash the contents of a file as the signature does."""
        if self.manifest.is_plain:
            return {name: sha256_of(raw)}
        with tempfile.TemporaryDirectory(prefix="hfshard-") as folder:
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(raw)
            return digests_by_library(folder, [name], self.manifest.serialization)

    def _check_open_file(
        self,
        name: str,
        file: SafetensorsShard | PickleFile,
        checkpoint: OpenCheckpoint,
        own_name: str,
        progress_callback: ProgressCallback,
    ) -> None:
        if isinstance(file, SafetensorsFile) and self.manifest.is_plain:
            found = {name: self.open_weights.sha256(file, progress_callback)}
            if found != self.manifest.digests[name]:
                raise self.differs(name, file.damaged_tensors(checkpoint.index.files.get(own_name, FileDigest())))
            file.signed_sha256 = found[name]
            return
        digests, seen = self.hashed([name], progress_callback)[name]
        if digests != self.manifest.digests[name] or seen[:-1] != file.identity:
            raise self.differs(name)
        if isinstance(file, SafetensorsFile | PickleFile) and seen[-1] != file.changed_ns:
            raise CheckpointChangedError(
                f"'{file.path}' was changed after it was opened and before its signature was checked, so the open "
                "file may not be the signed one. Retry when nothing changes it.",
                path=file.path,
            )
        self.seen[name] = seen

    def _refuse(self, *, missing_files: Iterable[str], added_files: Iterable[str]) -> None:
        for name in sorted(added_files):
            raise self.not_signed(name)
        for name in sorted(missing_files):
            raise self.missing(name)

    def _is_ignored(self, name: str) -> bool:
        """Return whether the signer left a file out on purpose."""
        return any(name == path or name.startswith(f"{path}/") for path in self.manifest.ignored)

    def _reject_other_code(self) -> None:
        """Reject a config with code of another repo, which this signature does not cover."""
        for path in {os.path.join(self.root, folder, CONFIG_NAME) for folder in ("", self.below)}:
            if not os.path.lexists(path):
                continue
            raw, _ = read_small(path, self.root, MAX_CONFIG_BYTES)
            for reference in remote_code_references(raw):
                raise code_elsewhere(path, reference)


def code_elsewhere(config: str, reference: str) -> SignatureError:
    """Return the error for a config with code of another repo."""
    return SignatureError(
        f"'{config}' takes its code from another repo ({reference!r:.200}), which the signature does not cover. "
        "Load it without trust_remote_code, or without the public key.",
        path=config,
        actual=reference,
    )


# Required signatures: a load or a check is given the required signer, and finds the signature.


_BLOCK_BYTES: Final = 512
"""Unit of st_blocks."""


@dataclass(frozen=True, slots=True)
class RequiredSignature:
    """The signature that a load requires when it is given a public key."""

    by: SignedBy

    def find(self, directory: str, subfolder: str = "", *, has_code: bool = False) -> SignedFolder:
        """Find and check a checkpoint's signature, and check every file that a load reads along with the weights.

        Args:
            directory: The checkpoint's directory, including the subfolder.
            subfolder: The end of that path, if the checkpoint is below the directory or repo that was given: if it
                has no signature of its own, that of the whole directory counts.
            has_code: Whether code of the checkpoint may be run.

        Raises:
            SignatureError: There is no signature, or one by another signer; a file differs, is missing, or was added.
        """
        place = self.find_all(directory, subfolder, has_code=has_code)
        place.check_beside()
        return place

    def find_in_store(self, folder: RangedFolder, beside: FilesBeside, *, has_code: bool = False) -> SignedObjects:
        """Do what `find` does in a folder of a store, which was listed; `beside` are the small files that a load reads.

        Raises:
            SignatureError: As in `find`; or a file is not signed.
            InvalidArgumentError: Its digests are of another kind.
        """
        sizes = {name: folder.size(name) for name in folder.names()}
        manifest = stored_manifest(folder.path, sizes, lambda limit: folder.read_small(SIGNATURE_NAME, limit), self.by)
        found = SignedObjects(folder, beside, manifest, has_code, _signature=folder.version(SIGNATURE_NAME))
        found.check_beside()
        return found

    def find_all(self, directory: str, subfolder: str, *, has_code: bool = False) -> SignedFolder:
        """Find and check the signature without comparing files; raise SignatureError if it is missing or not valid."""
        root = directory.rstrip(os.sep) or os.sep
        if has_code or not os.path.lexists(os.path.join(root, SIGNATURE_NAME)):
            for _ in filter(None, subfolder.split("/")):  # code lies above too
                root = os.path.dirname(root).rstrip(os.sep)
        path = os.path.join(root, SIGNATURE_NAME)
        if not os.path.lexists(path):
            raise SignatureError(
                f"'{root}' has no signature: there is no '{SIGNATURE_NAME}'. If you trust its contents, sign it: "
                f"hfshard sign {root} --private-key KEY; or leave out the public key.",
                path=root,
            )
        raw, _ = read_small(path, root, _most_bytes(root, path))  # rejects a pipe, a link to elsewhere, or a huge file
        manifest = signed_manifest(root, path, self.by.choose, str(self.by), raw)
        below = os.path.relpath(directory, root)
        return SignedFolder(root, manifest, "" if below == os.curdir else f"{below}/", has_code=has_code)


def _most_bytes(root: str, signature: str) -> int:
    seen = file_identity(signature)
    if seen is None or seen[2] <= SMALL_SIGNATURE_BYTES:
        return SMALL_SIGNATURE_BYTES
    names = list_files(root).names
    blocks = sum(os.stat(os.path.join(root, name)).st_blocks for name in names)  # holes count for nothing
    return max_signature_bytes(len(names), blocks * _BLOCK_BYTES)


def required_signature(public_key: str | os.PathLike[str] | SignedBy) -> RequiredSignature:
    """Return the signature that a load requires when it is given this `public_key`."""
    return RequiredSignature(SignedBy.of(public_key))


# Differences from the signature, added to the report of a check.


def with_signature(
    report: VerifyReport, by: SignedBy, directory: str, subfolder: str = "", *, level: str, progress: bool | None
) -> VerifyReport:
    """Add to a report the problems of a directory's signature, and the files that differ from it.

    Shards whose recorded sha256 was compared with their bytes for the report are not read again.

    Args:
        report, by: The report of the checkpoint there, and the required signer.
        directory, subfolder: As in `RequiredSignature.find`.
        level: "full"; or "structure": weights are not read, only their records are compared.
        progress: Whether to show a bar.
    """
    try:
        place = RequiredSignature(by).find_all(directory, subfolder)
        there = place.names_there(takes_debris=True)
        names, errors = place.compare_names(there)
        errors += filter(None, map(place.became_link, [SIGNATURE_NAME, *sorted(names)]))
        folder = LocalFolder(place.root)
        read = partial(folder.read_small, limit=MAX_INDEX_BYTES)
        recorded = recorded_digests(place.manifest, names, read) if place.manifest.is_plain else {}
        damaged = {os.path.realpath(problem.file) for problem in report.problems}
        compared = {os.path.abspath(os.path.join(report.directory, name)) for name in report.files}
        known = {
            name: digest
            for name, digest in recorded.items()
            if level == "structure" or os.path.normpath(os.path.join(place.root, name)) in compared
            if os.path.realpath(os.path.join(place.root, name)) not in damaged
        }
        left = [name for name in sorted(names - known.keys()) if level == "full" or not name.endswith(WEIGHTS_SUFFIXES)]
        total = sum(os.path.getsize(os.path.join(place.root, name)) for name in left)
        with byte_progress("Verifying", total, progress) as progress_callback:
            hashed = place.hashed(left, progress_callback)
        differing = {name for name in left if hashed[name][0] != place.manifest.digests[name]}
        if level == "full" and any(os.path.normpath(os.path.join(place.root, name)) in compared for name in differing):
            # The records that the report compared shards with may be forged, such as those in a run's manifest.
            again = place.hashed(sorted(known))
            known = {name: found[name] for name, (found, _) in again.items()}
        differing |= {name for name, digest in known.items() if place.manifest.digests[name] != {name: digest}}
        errors += [place.differs(name) for name in sorted(differing)]
    except HfshardError as error:
        if isinstance(error, InvalidArgumentError):
            raise
        return with_problems(report, [error])
    unread = 0 if level == "full" else len(names) - len(left)
    left_out = place.left_out({name for name in there if is_signable(name)})
    return with_compared(report, by, names, errors, left_out, unread=unread, read_bytes=total)


def with_compared(
    report: VerifyReport,
    by: SignedBy,
    names: Collection[str],
    errors: Collection[HfshardError],
    left_out: Sequence[str],
    *,
    unread: int,
    read_bytes: int,
) -> VerifyReport:
    """Add to a report what the comparison with a signature found.

    Args:
        report, by: The report without the signature, and the required signer.
        names: The signed files that exist.
        errors: The files that differ, are missing, or were added.
        left_out: The files that were left out of the signature on purpose.
        unread: The number of signed files whose bytes were not compared.
        read_bytes: Bytes that were read for the comparison.
    """
    warnings = [f"{unread} signed files of weights were not compared: level='full' compares them."] if unread else []
    if left_out:
        warnings.append(
            f"{shorten_list(left_out, _SHOWN, quote=True)}: left out of the signature on purpose by the signer; no "
            "load accepts such files."
        )
    files = tuple(dict.fromkeys((*report.files, *sorted(names))))
    report = replace(report, files=files, warnings=(*report.warnings, *warnings))
    report = replace(with_problems(report, errors), checked_bytes=report.checked_bytes + read_bytes)
    return replace(report, signed_by=str(by)) if report.ok and not unread else report


def with_problems(report: VerifyReport, errors: Collection[HfshardError]) -> VerifyReport:
    """Add errors to the problems of a report."""
    found = [Problem(error.path or report.directory, None, error.message) for error in errors]
    return replace(report, problems=(*report.problems, *found))


def recorded_digests(manifest: SignedManifest, names: Collection[str], read: Callable[[str], bytes]) -> dict[str, str]:
    """Collect the sha256 of shards from the indexes, among existing signed files, that are as they were signed."""
    found: dict[str, str] = {}
    for name in filter(INDEX_FILE.fullmatch, names):
        raw = read(name)
        if manifest.digests[name] != {name: sha256_of(raw)}:
            continue
        folder = os.path.dirname(name)
        for shard, digest in CheckpointIndex.from_json(raw, name).files.items():
            path = os.path.join(folder, shard)
            if digest.sha256 is not None and path in names and not path.endswith(".json"):
                found[path] = digest.sha256
    return found


# Comparison of a store's files with a signature: exactly the bytes that a load reads, and the open shards.


@dataclass
class SignedObjects:
    """A checkpoint in a store, and the manifest of a verified signature over it.

    Every read returns the bytes of the listed object, or raises, so that the compared bytes are the loaded ones.
    """

    folder: RangedFolder
    beside: FilesBeside
    manifest: SignedManifest
    has_code: bool
    """True if code of the checkpoint may be run."""
    _compared: Mapping[str, bytes] = field(default_factory=dict)
    """The small files, as they were compared."""
    _signature: Hashable = None
    """Identity of the verified signature's object."""

    def check_beside(self) -> None:
        """Compare every file that a load reads along with the weights.

        Raises:
            SignatureError: One differs, is not signed, or is missing.
        """
        self._compared = self.beside.read_all()
        for name, raw in sorted(self._compared.items()):
            self._compare(name, sha256_of(raw))
        for name in sorted(filter(is_needed, self.manifest.digests)):
            if self.folder.was_listed(name.rpartition("/")[0]) and not self.folder.has(name):
                raise self._place.missing(name)
        for reference in remote_code_references(self._compared.get(CONFIG_NAME, b"")) if self.has_code else ():
            raise code_elsewhere(self.folder.path_of(CONFIG_NAME), reference)

    def check_all(self, progress: bool | None = None) -> None:
        """Raise InvalidArgumentError: files that transformers itself reads by name can be checked only on disk."""
        raise needs_disk(self.folder.path, "is read by transformers itself")

    def check_opened(self, checkpoint: OpenCheckpoint, progress: bool | None = None) -> None:
        """Compare the open shards, each streamed once, and the small files once more.

        Raises:
            SignatureError: One differs, or is not signed.
            CheckpointChangedError: Another save replaced it meanwhile.
            InvalidArgumentError: It can be compared only on disk.
        """
        entry = checkpoint.weights.name
        if checkpoint.pickles:
            raise needs_disk(self.folder.path, "has files of torch.save")
        signed = self.manifest.digests.keys()
        if self.folder.version(SIGNATURE_NAME) != self._signature:
            raise self._changed()
        single = checkpoint.names.single
        if single in signed and not self.folder.has(single) and entry not in signed:
            why = f"was signed as one file, '{single}', which has another header in a store"
            raise needs_disk(self.folder.path, why)
        for name in (entry, *checkpoint.shards):
            if name not in signed:
                raise self._place.not_signed(name)
        raw = checkpoint.raw_index
        if raw is not None:
            self._compare(entry, sha256_of(raw))
        shards = checkpoint.shards
        with byte_progress("Verifying", sum(one.size for one in shards.values()), progress) as progress_callback:
            run_in_threads(
                lambda name, cancelled: self._compare(
                    name, shards[name].checked_sha256(FileDigest(), cancellable(progress_callback, cancelled))
                ),
                sorted(shards, key=lambda name: -shards[name].size),
                FILES_AT_ONCE,
            )
        self.confirm()

    def confirm(self) -> None:
        """Raise CheckpointChangedError unless the small files are still those that were compared."""
        if self.beside.read_all() != self._compared:
            raise self._changed()

    def _changed(self) -> CheckpointChangedError:
        path = self.folder.path
        return CheckpointChangedError(
            f"The checkpoint in '{path}' was replaced while it was loaded. Retry when no save is running.",
            path=path,
        )

    @property
    def _place(self) -> SignedFolder:
        objects = {
            name: self.folder.path_of(name).removeprefix(f"{self.folder.path}/") for name in self.manifest.digests
        }
        return SignedFolder(self.folder.path, self.manifest, objects=objects)

    def _compare(self, name: str, sha256: str) -> None:
        if self.manifest.digests.get(name) != {name: sha256}:
            raise self._place.differs(name)


def stored_manifest(place: str, sizes: Mapping[str, int], read: Callable[[int], bytes], by: SignedBy) -> SignedManifest:
    """Check the signature of a place in a store with these files (name -> bytes); `read` gets the limit in bytes.

    Raises:
        SignatureError: There is no signature, or one by another signer.
        InvalidArgumentError: Its digests are of another kind.
    """
    path = f"{place}/{SIGNATURE_NAME}"
    if SIGNATURE_NAME not in sizes:
        raise SignatureError(
            f"'{place}' has no signature: there is no '{SIGNATURE_NAME}'. Sign the directory that is pushed there "
            "(hfshard sign DIR --private-key KEY), and push it again; or leave out the public key.",
            path=place,
        )
    limit = max_signature_bytes(len(sizes), sum(sizes.values()) - sizes[SIGNATURE_NAME])
    if sizes[SIGNATURE_NAME] > limit:
        raise SignatureError(
            f"'{path}' has {sizes[SIGNATURE_NAME]} bytes, but a signature of such files has at most {limit}. Ask the "
            "checkpoint's publisher for the right file.",
            path=path,
        )
    manifest = signed_manifest(place, path, by.choose, str(by), read(limit))
    if not manifest.is_plain:
        raise needs_disk(place, "was signed with digests other than the sha256 of complete files")
    return manifest


def needs_disk(place: str, why: str) -> InvalidArgumentError:
    """Return the error for a checkpoint that can't be compared in a store."""
    return InvalidArgumentError(
        f"'{place}' {why}, so its signature must be checked on disk. Run: hfshard pull {place} DIR && hfshard verify "
        "DIR --public-key KEY",
        path=place,
    )
