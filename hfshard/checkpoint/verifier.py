"""Full check of a checkpoint: report everything that is wrong with it, not only the first problem."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from hfshard._util.progress import ProgressCallback, byte_progress
from hfshard._util.threads import cancellable, run_in_threads
from hfshard.checkpoint.check_files import (
    ReplacedMeanwhile,
    check_small_file,
    check_total,
    compare_shard,
    retry_if_replaced,
)
from hfshard.checkpoint.folder import Folder, as_folder
from hfshard.checkpoint.locate import entry_of, locate_checkpoint, versions_or_error, weights_bytes
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint, open_checkpoint
from hfshard.checkpoint.reports import Problem, VerifyReport
from hfshard.constants import FILES_AT_ONCE, MAX_INDEX_BYTES, SAFETENSORS_SUFFIX
from hfshard.errors import (
    AmbiguousWeightsError,
    CheckpointChangedError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    HfshardError,
    IntegrityError,
    InvalidArgumentError,
    StoreError,
    UnsafePathError,
    printable_message,
    repair_hint,
)
from hfshard.format.file_names import WeightNames
from hfshard.format.index import CheckpointIndex, FileDigest, check_tied_names
from hfshard.pickles.pickle_file import PickleFile
from hfshard.shards.shard import SafetensorsShard


@dataclass
class _Findings:
    """The problems and warnings of one file, or of all files."""

    directory: str
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    checked_bytes: int = 0
    data_bytes: int = 0
    """Bytes of tensor data, checked or not."""

    def add_tensor(self, shard: SafetensorsShard, tensor: str, what: str) -> None:
        message = printable_message(f"Tensor '{tensor}' {what}. Download or save it again.")
        self.problems.append(Problem(shard.path, tensor, message))

    def add_error(self, error: HfshardError) -> None:
        """Add a failed check's error; raise a StoreError, which says nothing about the checkpoint."""
        if isinstance(error, StoreError):
            raise error
        path = error.path if error.path is not None else self.directory
        # The message may end with the advice to run this very check.
        message = error.message.replace(f", or run 'hfshard verify {self.directory}'", "")
        self.problems.append(Problem(path, error.fqn, message))

    @contextmanager
    def collected(self) -> Iterator[None]:
        """End the block at the first check that fails, and add its error; see `add_error`."""
        try:
            yield
        except HfshardError as error:
            self.add_error(error)

    def add_all(self, other: _Findings) -> None:
        self.problems += other.problems
        self.warnings += other.warnings
        self.checked_bytes += other.checked_bytes
        self.data_bytes += other.data_bytes


def verify_directory(
    directory: str | Folder,
    names: WeightNames,
    level: str,
    progress: bool | None,
    weights_name: str | None = None,
) -> VerifyReport:
    """Check the checkpoint in a directory, with a progress bar; see `hfshard.verify_checkpoint`.

    Args:
        directory: The path of a directory, or a folder.
        names: The checkpoint's file names.
        level: "structure" or "full".
        progress: A bar on stderr; None: on a terminal.
        weights_name: The index or single file to check, regardless of other files. None: the one transformers finds.

    Raises:
        CheckpointNotFoundError: There is no such directory, or it has no weights.
        CheckpointChangedError: It kept being replaced in a store.
        InvalidArgumentError: `level` is neither "structure" nor "full".
    """
    if level not in ("structure", "full"):
        raise InvalidArgumentError(f"level must be 'structure' or 'full', got {level!r}.")
    folder = as_folder(directory)

    def check() -> VerifyReport:
        folder.refresh(names if weights_name is None else None)
        before = versions_or_error(folder, names, weights_name)

        def is_replaced() -> bool:
            return not folder.is_current() or before != versions_or_error(folder, names, weights_name)

        verifier = Verifier(folder, names, level, weights_name)
        total = 0
        try:
            if level == "full":
                # The verifier reports these.
                with suppress(DamagedCheckpointError, UnsafePathError, CheckpointChangedError):
                    total = weights_bytes(folder, (SAFETENSORS_SUFFIX,))
            with byte_progress("Verifying", total, progress if total else False) as progress_callback:
                verifier.run(progress_callback)
            report = verifier.report()
        except CheckpointNotFoundError as error:
            if is_replaced():
                raise ReplacedMeanwhile from error
            raise
        if report.problems and is_replaced():
            raise ReplacedMeanwhile
        return report

    return retry_if_replaced(check, folder.traits, folder.path)


class Verifier:
    """Checker that collects problems file by file, several at once, then those that only all files together show."""

    def __init__(self, folder: Folder, names: WeightNames, level: str, weights_name: str | None = None) -> None:
        self.folder = folder
        self.directory = folder.path
        self.weights_name = weights_name
        self.names = names
        self.level = level
        self.files: list[str] = []
        self.findings = _Findings(self.directory)
        self.names_in: dict[str, list[str]] = defaultdict(list)
        """File -> the tensors that the index names for it."""

    def report(self) -> VerifyReport:
        """Return the report of all findings."""
        return VerifyReport(
            directory=self.directory,
            files=tuple(self.files),
            problems=tuple(dict.fromkeys(self.findings.problems)),
            warnings=tuple(self.findings.warnings),
            checked_bytes=self.findings.checked_bytes,
        )

    def run(self, progress_callback: ProgressCallback) -> None:
        """Check everything."""
        try:
            if self.weights_name is not None:
                weights = entry_of(self.weights_name)
            else:
                weights = locate_checkpoint(self.folder, self.names, opens_foreign=True)
        except CheckpointNotFoundError:
            raise
        except HfshardError as error:
            self.findings.add_error(error)
            return
        index = self._read_index(weights.name) if weights.kind == "index" else None
        if weights.kind == "single":
            self._check_files(None, [weights.name], progress_callback)
        elif index is not None:
            # A file without tensors, such as that of an empty state dict, has a digest too.
            listed = {name for name in index.files if name.endswith(SAFETENSORS_SUFFIX)}
            self._check_files(index, sorted(listed | set(index.weight_map.values())), progress_callback)
            if not self.findings.problems:
                with self.findings.collected():
                    check_total(os.path.join(self.directory, weights.name), index, self.findings.data_bytes)
        elif weights.kind == "foreign":
            self._check_foreign(progress_callback)
        elif weights.kind != "index":
            self._check_pickles(progress_callback)
        if self.weights_name is None and (index is not None or weights.kind != "index"):
            self._warn_of_strays(index)  # shards of an index that cannot be read are not strays
        self._warn_of_other_tools_files()

    def _read_index(self, name: str) -> CheckpointIndex | None:
        self.files.append(name)
        index = None
        with self.findings.collected():
            raw = self.folder.read_small(name, MAX_INDEX_BYTES)
            index = CheckpointIndex.from_json(raw, os.path.join(self.directory, name))
        return index

    def _check_files(
        self, index: CheckpointIndex | None, names: list[str], progress_callback: ProgressCallback
    ) -> None:
        digests = dict(index.files) if index is not None else {}
        for tensor, file in index.weight_map.items() if index is not None else ():
            self.names_in[file].append(tensor)
        self.files += names
        largest_first = sorted(names, key=lambda name: -self.folder.size(name))
        checked = run_in_threads(
            lambda name, cancelled: self._check_file(name, index, digests, cancellable(progress_callback, cancelled)),
            largest_first,
            FILES_AT_ONCE,
        )
        for findings, _ in sorted(zip(checked, largest_first, strict=True), key=lambda pair: pair[1]):
            self.findings.add_all(findings)
        for name in sorted(digests):
            if name.endswith(".json"):
                self._check_small_file(name, digests[name])

    def _check_small_file(self, name: str, digest: FileDigest) -> None:
        self.files.append(name)
        try:
            check_small_file(self.folder, name, digest)
        except HfshardError as error:
            if isinstance(error, IntegrityError) and self.level != "full":
                self.findings.warnings.append(error.message)  # people edit configs by hand
            else:
                self.findings.add_error(error)

    def _check_file(
        self,
        name: str,
        index: CheckpointIndex | None,
        digests: dict[str, FileDigest],
        progress_callback: ProgressCallback,
    ) -> _Findings:
        findings = _Findings(self.directory)
        try:
            shard = self.folder.open_shard(name)
        except HfshardError as error:
            findings.add_error(error)
            return findings
        try:
            findings.data_bytes = shard.data_bytes
            if index is None:
                digests |= {**shard.hfshard_metadata.files, name: shard.hfshard_metadata.digests}  # it is the only one
                with findings.collected():
                    check_tied_names(shard.hfshard_metadata.tied_names, shard.header.tensors, shard.path)
            else:
                self._check_names(name, shard, index, findings)
            self._check_bytes(shard, digests.get(name, FileDigest()), findings, progress_callback)
            if self.level == "full" and not digests.get(name, FileDigest()).is_verifiable:
                self._note_no_checksum(name, shard, index, findings)
        finally:
            shard.close()
        return findings

    def _check_bytes(
        self,
        shard: SafetensorsShard,
        digest: FileDigest,
        findings: _Findings,
        progress_callback: ProgressCallback,
    ) -> None:
        try:
            # The damaged tensors are found below.
            compare_shard(shard, replace(digest, tensor_digests=None), self.level, progress_callback)
            if self.level == "full" and digest.is_verifiable:
                findings.checked_bytes += shard.size
        except HfshardError as error:
            damaged = shard.damaged_tensors(digest)
            for tensor in damaged:
                findings.add_tensor(
                    shard, tensor, f"of '{shard.path}' is damaged: its bytes are not those that were saved"
                )
            if not damaged:
                findings.add_error(error)
        except InterruptedError:  # Ctrl-C, or another file failed
            raise
        except OSError as error:  # a bad sector
            message = printable_message(f"'{shard.path}' cannot be read: {error.strerror}. Download or save it again.")
            findings.problems.append(Problem(shard.path, None, message))

    def _check_names(self, name: str, shard: SafetensorsShard, index: CheckpointIndex, findings: _Findings) -> None:
        for tensor in shard.header.tensors:
            if (where := index.weight_map.get(tensor, "no file")) != name:
                findings.add_tensor(shard, tensor, f"is in '{shard.path}', but the index says that it is in {where}")
        for tensor in self.names_in[name]:
            if tensor not in shard.header.tensors:
                findings.add_tensor(shard, tensor, f"is not in '{shard.path}', where the index says that it is")

    def _note_no_checksum(
        self, name: str, shard: SafetensorsShard, index: CheckpointIndex | None, findings: _Findings
    ) -> None:
        # Checksums are written for all files or for none, and a shard says by itself that hfshard wrote it.
        digests = index.files if index is not None else {}
        has_others = any(digest.is_verifiable for file, digest in digests.items() if file.endswith(SAFETENSORS_SUFFIX))
        if index is not None and (has_others or (shard.written_by_hfshard and name not in digests)):
            message = f"'{shard.path}' was saved with a checksum, but the index has none. {repair_hint(shard.path)}"
            findings.problems.append(Problem(shard.path, None, message))
        else:
            findings.warnings.append(f"'{name}' has no checksum (hfshard writes them): only its structure was checked.")

    def _check_pickles(self, progress_callback: ProgressCallback) -> None:
        with self.findings.collected(), self._opened_with_key() as checkpoint:
            self.files.extend(checkpoint.pickles)
            checked = run_in_threads(
                lambda item, cancelled: self._check_pickle(*item, cancellable(progress_callback, cancelled)),
                checkpoint.pickles.items(),
                FILES_AT_ONCE,
            )
            for findings in checked:
                self.findings.add_all(findings)

    def _check_foreign(self, progress_callback: ProgressCallback) -> None:
        with self.findings.collected(), self._opened_with_key() as checkpoint:
            foreign = checkpoint.foreign
            assert foreign is not None
            self.files.extend(foreign.table.sizes)
            if self.level == "full":
                self.findings.checked_bytes = foreign.check_values(progress_callback)
            if self.level != "full" or not foreign.table.is_verifiable:
                self.findings.warnings.append(
                    f"{foreign.table.framework}: the bytes of all tensors are there, but they were not verified."
                )

    @contextmanager
    def _opened_with_key(self) -> Iterator[OpenCheckpoint]:
        """Open what has keys. If there are several sets of weights, each is checked, and the last stays open."""
        opened = partial(open_checkpoint, self.folder, variant=self.names.variant, weights_name=self.weights_name)
        key = None
        try:
            with opened() as checkpoint:
                yield checkpoint
                return
        except AmbiguousWeightsError as error:
            if not error.keys:  # several directories
                raise
            *others, key = error.keys
        for other in others:
            with opened(key=other):
                pass
        with opened(key=key) as checkpoint:
            yield checkpoint

    def _check_pickle(self, name: str, pickled: PickleFile, progress_callback: ProgressCallback) -> _Findings:
        findings = _Findings(self.directory)
        for entry in pickled.others.values():
            findings.add_error(entry.error)
        with findings.collected():
            if self.level == "full" and pickled.check_every_byte(progress_callback):
                findings.checked_bytes = pickled.size
            else:
                findings.warnings.append(f"'{name}' is a pickle: it loads, but its bytes were not verified.")
        return findings

    def _warn_of_other_tools_files(self) -> None:
        """Warn of files that other tools would read next to, or in place of, the save that hfshard reads."""
        for name in self.folder.stale_copies():
            self.findings.warnings.append(
                f"'{name}' is the plain copy of an earlier save, which only other tools read. hfshard reads the "
                "current one. The next save replaces it."
            )
        if (message := self.folder.describe_plain_weights()) is not None:
            self.findings.warnings.append(message)

    def _warn_of_strays(self, index: CheckpointIndex | None) -> None:
        used = set(self.files) | (set(index.weight_map.values()) | set(index.files) if index is not None else set())
        own = self.names
        for name in self.folder.names():
            is_own = own.is_shard(name) or own.is_commit_temporary(name) or name == own.single
            is_stray = is_own and name not in used and name.endswith(SAFETENSORS_SUFFIX)
            if is_stray and self.folder.version(name) is not None:
                self.findings.warnings.append(
                    f"'{name}' is not part of a checkpoint here; the next save by hfshard keeps or deletes it."
                )
