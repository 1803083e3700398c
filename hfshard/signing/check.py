"""Hold a load to a signature: before a file is read, and over the very files that are open."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from hfshard._util.progress import ProgressCallback, bytes_bar
from hfshard._util.text import list_some
from hfshard._util.threads import cancellable, in_threads
from hfshard.constants import (
    BIN_SUFFIX,
    CONFIG_NAME,
    FILES_AT_ONCE,
    MAX_CONFIG_BYTES,
    SAFETENSORS_SUFFIX,
    SIGNATURE_NAME,
    WEIGHTS_SUFFIXES,
)
from hfshard.errors import CheckpointChangedError, SignatureError
from hfshard.signing.files import SeenFile, hash_files, list_files, seen_file
from hfshard.signing.signed_by import SignedBy
from hfshard.signing.upstream import SignedManifest, digests_by_library, signed_manifest
from hfshard.storage.checkpoint.checkpoint import OpenCheckpoint
from hfshard.storage.disk.safe_open import open_regular, read_small
from hfshard.storage.format.index import FileDigest
from hfshard.storage.weights.pickles.pickle_file import PickleFile
from hfshard.storage.weights.safetensors_file import SafetensorsFile
from hfshard.storage.weights.safetensors_shard import SafetensorsShard

_MAX_SIGNATURE_BYTES: Final = 256 * 1024 * 1024
"""The largest signature that is read: a million files of 200 bytes an entry."""

_OWN_STEMS: Final = ("model.", "model-", "pytorch_model.", "pytorch_model-", "optimizer.", "optimizer-")
"""How weights begin that nothing reads but a load that opens them, and looks at them then."""

_READ_WEIGHTS: Final = (SAFETENSORS_SUFFIX, BIN_SUFFIX, ".pt", ".pth", ".ckpt")
"""Weights that a class may read beside a checkpoint's own, such as an adapter; torch reads no others."""

_DOCUMENTS: Final = (".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf")
"""Files for people: no load reads them."""

_FOR_PROGRAMS: Final = (".py", ".json", ".jinja", ".txt", ".model", *_READ_WEIGHTS)
"""Files that are refused, where they are not signed, though who signed left them out on purpose."""

_SHOWN: Final = 5
"""Names in a message."""

_OTHER_REPO: Final = "--"
"""What stands in a config between a repo and the name of code in it."""


class RequiredSignature:
    """What a load asks for when it is given a public key."""

    def __init__(self, by: SignedBy) -> None:
        """Take who must have signed."""
        self.by = by

    def find(self, directory: str, subfolder: str = "", *, has_code: bool = False) -> SignedPlace:
        """Find the signature of a checkpoint, check it, and every file that a load reads beside the weights.

        Args:
            directory: The checkpoint's, with the subfolder.
            subfolder: The end of that path, if the checkpoint lies below the directory or repo that was given: where
                it has no signature of its own, that of the whole counts.
            has_code: Whether code of the checkpoint may be run.

        Raises:
            SignatureError: There is none, or not this one's; a file differs, is missing, or was added.
        """
        place = SignedPlace(*self._manifest(directory, subfolder, has_code=has_code))
        place.check_beside(has_code=has_code)
        return place

    def find_all(self, directory: str, subfolder: str = "") -> SignedPlace:
        """Find the signature, and compare nothing yet (raises as `find`, for the signature)."""
        return SignedPlace(*self._manifest(directory, subfolder, has_code=False))

    def _manifest(self, directory: str, subfolder: str, *, has_code: bool) -> tuple[str, SignedManifest]:
        root = directory
        depth = len([part for part in subfolder.split("/") if part])
        above = os.sep.join(directory.split(os.sep)[:-depth]) if depth else directory
        if depth and (has_code or not os.path.lexists(os.path.join(directory, SIGNATURE_NAME))):
            root = above  # code lies there too
        path = os.path.join(root, SIGNATURE_NAME)
        if not os.path.lexists(path):
            raise SignatureError(
                f"'{root}' has no signature: there is no '{SIGNATURE_NAME}'. If you trust what is there, sign it: "
                f"hfshard sign {root} --private-key KEY; or leave out the public key.",
                path=root,
            )
        read_small(path, root, _MAX_SIGNATURE_BYTES)  # no pipe, no link to elsewhere, not endless
        return root, signed_manifest(root, path, self.by.choose, str(self.by))


def required_signature(public_key: str | os.PathLike[str] | SignedBy | None) -> RequiredSignature | None:
    """What a load asks for when it is given this `public_key`; None: nothing."""
    by = SignedBy.of(public_key)
    return None if by is None else RequiredSignature(by)


@dataclass
class SignedPlace:
    """A directory, and what a signature that was checked says of it."""

    root: str
    manifest: SignedManifest
    seen: dict[str, SeenFile] = field(default_factory=dict)
    """The files that were compared, as they were then."""

    def check_beside(self, *, has_code: bool = False) -> None:
        """Compare every file that a load reads beside the weights.

        Raises:
            SignatureError: One differs, is missing, or was added.
        """
        there = {name for name in list_files(self.root).names if _is_read(name)}
        there = {name for name in there if name.endswith(_FOR_PROGRAMS) or not self.is_ignored(name)}
        signed = {name for name in self.manifest.digests if _is_read(name)}
        self._refuse(missing_files=signed - there, added_files=there - signed)
        self.check(sorted(there))
        if has_code:
            self._refuse_other_code()

    def compare_names(self) -> tuple[set[str], list[SignatureError]]:
        """Name the signed files that are there; and say which are missing, and which were added."""
        there, signed = set(list_files(self.root).names), set(self.manifest.digests)
        added = {name for name in there - signed if not self.is_ignored(name)}
        return there & signed, [self.not_signed(name) for name in sorted(added)] + [
            self.missing(name) for name in sorted(signed - there)
        ]

    def check_all(self, progress: bool | None = None) -> None:
        """Compare every file, those of other weights too.

        Raises:
            SignatureError: One differs, is missing, or was added.
        """
        names, errors = self.compare_names()
        for error in errors:
            raise error
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
        # The index and the config that were read are those that are there, if nothing changed since they were opened.
        self.check(sorted(self.seen.keys() | ({entry} if checkpoint.weights.is_index else set())))
        if not checkpoint.is_unchanged():
            raise CheckpointChangedError(
                f"The checkpoint in '{checkpoint.directory}' was replaced while its signature was checked. Load it "
                "again when the process that saves there is done.",
                path=checkpoint.directory,
            )

    def confirm(self) -> None:
        """Look once more, when a load is done, whether the files beside the weights are those that were compared.

        Raises:
            SignatureError: One was changed meanwhile.
        """
        changed = [name for name, seen in self.seen.items() if seen_file(os.path.join(self.root, name)) != seen]
        self.check(sorted(name for name in changed if os.path.lexists(os.path.join(self.root, name))))
        self._refuse(
            missing_files=[name for name in changed if not os.path.lexists(os.path.join(self.root, name))],
            added_files=(),
        )

    def differs(self, name: str, damaged: Collection[str] = ()) -> SignatureError:
        """The error for a file that is not the one that was signed, or that was not signed."""
        if name not in self.manifest.digests:
            return self.not_signed(name)
        path = os.path.join(self.root, name)
        which = f" (tensor {list_some(sorted(damaged), _SHOWN, quote=True)})" if damaged else ""
        return SignatureError(
            f"'{path}' is not the file that was signed{which}: it was changed, or the signature is that of another "
            f"checkpoint. Download it again, or ask who signed it; to see all that differs, run: hfshard verify "
            f"{self.root} --public-key KEY",
            path=path,
        )

    def not_signed(self, name: str) -> SignatureError:
        """The error for a file that was added."""
        path = os.path.join(self.root, name)
        return SignatureError(
            f"'{path}' is not covered by the signature: it was added after the checkpoint was signed, or belongs to "
            "another one. Remove it, or ask who signed the checkpoint.",
            path=path,
        )

    def missing(self, name: str) -> SignatureError:
        """The error for a file that is gone."""
        path = os.path.join(self.root, name)
        return SignatureError(f"'{path}' was signed, and is missing. Download the checkpoint again.", path=path)

    def _check_open_file(
        self,
        name: str,
        file: SafetensorsShard | PickleFile,
        checkpoint: OpenCheckpoint,
        own_name: str,
        progress_callback: ProgressCallback,
    ) -> None:
        if isinstance(file, SafetensorsFile) and self.manifest.is_plain:
            found = {name: file.checked_sha256(FileDigest(), progress_callback, keep_cached=True)}
            if found != self.manifest.digests[name]:
                raise self.differs(name, file.damaged_tensors(checkpoint.index.files.get(own_name, FileDigest())))
            return
        digests, seen = self.hashed([name], progress_callback)[name]
        if digests != self.manifest.digests[name] or seen[:-1] != file.identity:
            raise self.differs(name)

    def _refuse(self, *, missing_files: Collection[str], added_files: Collection[str]) -> None:
        for name in sorted(added_files):
            raise self.not_signed(name)
        for name in sorted(missing_files):
            raise self.missing(name)

    def is_ignored(self, name: str) -> bool:
        """Whether who signed left a file out on purpose."""
        return any(name == path or name.startswith(f"{path}/") for path in self.manifest.ignored)

    def _refuse_other_code(self) -> None:
        """Refuse a config whose code is another repo's, which this signature does not cover."""
        path = os.path.join(self.root, CONFIG_NAME)
        if not os.path.lexists(path):
            return
        raw, _ = read_small(path, self.root, MAX_CONFIG_BYTES)
        for reference in _references(raw):
            if _OTHER_REPO in reference:
                raise SignatureError(
                    f"'{path}' takes its code from another repo ({reference!r:.200}), which the signature does not "
                    "cover. Load it without trust_remote_code, or without the public key.",
                    path=path,
                    actual=reference,
                )


def _is_read(name: str) -> bool:
    """Whether a load may read a file that is none of the checkpoint's own weights."""
    *folders, last = name.split("/")
    if any(part.startswith(".") for part in (*folders, last)) or last.lower().endswith(_DOCUMENTS):
        return False
    if not folders and last == SIGNATURE_NAME:
        return False
    if last.endswith(WEIGHTS_SUFFIXES):
        return not folders and last.endswith(_READ_WEIGHTS) and not last.startswith(_OWN_STEMS)
    return True


def _references(config: bytes) -> list[str]:
    """The names of code in a config."""
    try:
        found = json.loads(config)
    except (ValueError, RecursionError):
        return []  # whoever reads it says so
    auto_map = found.get("auto_map") if isinstance(found, Mapping) else None
    values = auto_map.values() if isinstance(auto_map, Mapping) else [auto_map]
    return [
        text for value in values for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)
    ]
