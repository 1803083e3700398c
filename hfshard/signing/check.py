"""Files compared with a signature that was checked: before they are read, and the very ones that are open."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Final

from hfshard._util.progress import ProgressCallback, bytes_bar
from hfshard._util.text import list_some
from hfshard._util.threads import cancellable, in_threads
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.constants import (
    CONFIG_NAME,
    FILES_AT_ONCE,
    MAX_CONFIG_BYTES,
)
from hfshard.disk.safe_open import is_users_link, open_regular, read_small
from hfshard.errors import CheckpointChangedError, SignatureError
from hfshard.format.digests import sha256_of
from hfshard.format.index import FileDigest
from hfshard.pickles.pickle_file import PickleFile
from hfshard.shards.shard import SafetensorsShard
from hfshard.shards.shard_file import SafetensorsFile
from hfshard.signing.files import SeenFile, hash_files, list_files, seen_file
from hfshard.signing.open_weights import OpenWeights
from hfshard.signing.read_files import is_needed, is_read, may_be_left_out, references_elsewhere
from hfshard.signing.upstream import SignedManifest, digests_by_library

_SHOWN: Final = 5
"""Names in a message."""


@dataclass
class SignedPlace:
    """A directory, and what a signature that was checked says of it."""

    root: str
    manifest: SignedManifest
    below: str = ""
    """The folder in it that is loaded, with a slash at its end; "": all of it."""
    has_code: bool = False
    """Whether code of the checkpoint may be run."""
    seen: dict[str, SeenFile] = field(default_factory=dict)
    """The files that were compared by their names, as they were then."""
    open_weights: OpenWeights = field(default_factory=OpenWeights)
    """Those that were compared while they are open."""
    objects: Mapping[str, str] = field(default_factory=dict)
    """Of a store: file -> the name under which it lies there, where that is not the same."""

    def check_beside(self) -> None:
        """Compare every file that a load reads beside the weights.

        Raises:
            SignatureError: One differs, is missing, or was added.
        """
        there, signed = self._names_read(), self.manifest.digests.keys()
        self._refuse(missing_files=filter(self._is_needed, signed - there), added_files=there - signed)
        self.check(sorted(there))
        if self.has_code:
            self._refuse_other_code()

    def compare_names(self, there: Set[str]) -> tuple[set[str], list[SignatureError]]:
        """Of the files that are there, name those that are signed; and say which are missing, and which were added."""
        signed = self.manifest.digests.keys()
        added, missing = sorted(self._added(there)), sorted(signed - there)
        return {*there} & signed, [*map(self.not_signed, added), *map(self.missing, missing)]

    def left_out(self, there: Set[str]) -> list[str]:
        """Of the files that are there, those that who signed left out on purpose, as no load takes them."""
        unsigned = there - self.manifest.digests.keys()
        return sorted(unsigned - self._added(unsigned))

    def check_all(self, progress: bool | None = None) -> None:
        """Compare every file that is there, those of other weights too.

        Raises:
            SignatureError: One differs or was added, or a load needs it and it is missing.
        """
        names, signed = self.names_there(), self.manifest.digests.keys()
        self._refuse(missing_files=filter(self._is_needed, signed - names), added_files=self._added(names))
        names &= signed
        total = sum(os.path.getsize(os.path.join(self.root, name)) for name in names)
        with bytes_bar("Verifying", total, progress) as progress_callback:
            self.check(sorted(names), progress_callback)

    def check(self, names: Collection[str], progress_callback: ProgressCallback | None = None) -> None:
        """Hash files, and compare them with what was signed.

        Raises:
            SignatureError: One differs.
        """
        for name, (found, seen) in self.hashed(names, progress_callback).items():
            if found != self.manifest.digests.get(name):
                raise self.differs(name)
            self.seen[name] = seen

    def hashed(
        self, names: Collection[str], progress_callback: ProgressCallback | None = None
    ) -> dict[str, tuple[dict[str, str], SeenFile]]:
        """Hash files as the signature does: path -> digests, and which file it was."""
        if self.manifest.is_plain:
            plain = hash_files(self.root, names, progress_callback)
            return {name: ({name: digest}, seen) for name, (digest, seen) in plain.items()}
        result: dict[str, tuple[dict[str, str], SeenFile]] = {}
        for name in names:
            path = os.path.join(self.root, name)
            os.close(open_regular(path, self.root))
            before = seen_file(path)
            digests = digests_by_library(self.root, [name], self.manifest.serialization)
            if before is None or before != seen_file(path):
                raise self.differs(name)
            result[name] = digests, before
        return result

    def check_opened(self, checkpoint: OpenCheckpoint, progress: bool | None = None) -> None:
        """Compare the files of weights that are open, whatever has their names by now, and the others once more.

        Raises:
            SignatureError: One differs, or is not signed.
        """
        files: dict[str, SafetensorsShard | PickleFile] = {**checkpoint.shards, **checkpoint.pickles}
        below = os.path.relpath(checkpoint.directory, self.root)
        names = {name: os.path.normpath(os.path.join(below, name)) for name in files}
        entry = os.path.normpath(os.path.join(below, checkpoint.weights.name))
        self._refuse(missing_files=(), added_files={entry, *names.values()} - self.manifest.digests.keys())
        total = sum(file.size for file in files.values())
        with bytes_bar("Verifying", total, progress) as progress_callback:
            in_threads(
                lambda name, cancelled: self._check_open_file(
                    names[name], files[name], checkpoint, name, cancellable(progress_callback, cancelled)
                ),
                sorted(files, key=lambda name: -files[name].size),
                FILES_AT_ONCE,
            )
        raw = checkpoint.raw_index
        if raw is not None and self._digests_of(entry, raw) != self.manifest.digests[entry]:
            raise self.differs(entry)
        # The config that was read is the one that is there, if nothing changed since it was compared.
        self.confirm()
        if not checkpoint.is_unchanged():
            raise CheckpointChangedError(
                f"The checkpoint in '{checkpoint.directory}' was replaced while its signature was checked. Load it "
                "again when the process that saves there is done.",
                path=checkpoint.directory,
            )

    def confirm(self) -> None:
        """Look once more, when a load is done, whether files have been touched since they were compared, or have come.

        Raises:
            SignatureError: One was changed meanwhile, or came and is not as it was signed.
            CheckpointChangedError: One is as it was signed, but need not have been when it was read.
        """
        self.open_weights.confirm()
        changed = [name for name, seen in self.seen.items() if seen_file(os.path.join(self.root, name)) != seen]
        there = [name for name in changed if os.path.lexists(os.path.join(self.root, name))]
        come = self._names_read() - self.seen.keys()
        self._refuse(missing_files=set(changed) - set(there), added_files=come - self.manifest.digests.keys())
        self.check(sorted({*there, *come}))
        if changed:
            path = os.path.join(self.root, changed[0])
            raise CheckpointChangedError(
                f"'{path}' was replaced while the checkpoint was loaded. Load it again when nothing changes it.",
                path=path,
            )

    def differs(self, name: str, damaged: Collection[str] = ()) -> SignatureError:
        """The error for a file that is not the one that was signed, or that was not signed."""
        if name not in self.manifest.digests:
            return self.not_signed(name)
        path = self._path(name)
        which = f" (tensor {list_some(sorted(damaged), _SHOWN, quote=True)})" if damaged else ""
        return SignatureError(
            f"'{path}' is not the file that was signed{which}: it was changed, or the signature is that of another "
            f"checkpoint. Download it again, or ask who signed it; to see all that differs, run: hfshard verify "
            f"{self.root} --public-key KEY",
            path=path,
        )

    def not_signed(self, name: str) -> SignatureError:
        """The error for a file that was added."""
        path = self._path(name)
        if self._is_ignored(name):
            return SignatureError(
                f"'{path}' is not covered by the signature: who signed the checkpoint left it out on purpose, and a "
                "load takes it. Remove it, or ask for a signature of all files.",
                path=path,
            )
        return SignatureError(
            f"'{path}' is not covered by the signature: it was added after the checkpoint was signed, or belongs to "
            "another one. Remove it, or ask who signed the checkpoint.",
            path=path,
        )

    def missing(self, name: str) -> SignatureError:
        """The error for a file that is gone."""
        path = self._path(name)
        return SignatureError(f"'{path}' was signed, and is missing. Download the checkpoint again.", path=path)

    def became_link(self, name: str) -> SignatureError | None:
        """The error for a signed file, or the signature, that is a link now, unless the Hub's cache made it."""
        path = self._path(name)
        if self.manifest.allows_links or not is_users_link(path, self.root):
            return None
        return SignatureError(
            f"'{path}' was written as a file, and is a link now, which the signature does not allow. Put the file in "
            "its place, or download the checkpoint again.",
            path=path,
        )

    def names_there(self, *, takes_debris: bool = False) -> set[str]:
        """The files that are there: those that hfshard would sign, and those that were signed."""
        names = set(list_files(self.root, takes_debris=takes_debris).names)
        others = self.manifest.digests.keys() - names
        return names | {name for name in others if os.path.lexists(os.path.join(self.root, name))}

    def _names_read(self) -> set[str]:
        """The files that are there, and that a load may read beside the weights."""
        there = {name for name in self.names_there() if is_read(name, has_code=self.has_code)}
        return there & self.manifest.digests.keys() | self._added(there)

    def _added(self, names: Collection[str]) -> set[str]:
        """Those that are not signed, and not left out on purpose where that may be."""
        unsigned = set(names) - self.manifest.digests.keys()
        return {name for name in unsigned if not (self._is_ignored(name) and may_be_left_out(name))}

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
                f"'{file.path}' was changed between its being opened and the check of its signature, so that what is "
                "open need not be what was signed. Load it again when nothing changes it.",
                path=file.path,
            )
        self.seen[name] = seen

    def _refuse(self, *, missing_files: Iterable[str], added_files: Iterable[str]) -> None:
        for name in sorted(added_files):
            raise self.not_signed(name)
        for name in sorted(missing_files):
            raise self.missing(name)

    def _is_ignored(self, name: str) -> bool:
        """Whether who signed left a file out on purpose."""
        return any(name == path or name.startswith(f"{path}/") for path in self.manifest.ignored)

    def _refuse_other_code(self) -> None:
        """Refuse a config whose code is another repo's, which this signature does not cover."""
        for path in {os.path.join(self.root, folder, CONFIG_NAME) for folder in ("", self.below)}:
            if not os.path.lexists(path):
                continue
            raw, _ = read_small(path, self.root, MAX_CONFIG_BYTES)
            for reference in references_elsewhere(raw):
                raise code_elsewhere(path, reference)


def code_elsewhere(config: str, reference: str) -> SignatureError:
    """Return the error for a config whose code is another repo's."""
    return SignatureError(
        f"'{config}' takes its code from another repo ({reference!r:.200}), which the signature does not cover. "
        "Load it without trust_remote_code, or without the public key.",
        path=config,
        actual=reference,
    )
