"""Files in a store compared with a signature: the very bytes that a load reads, and the shards that are open."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from hfshard._util.progress import ProgressCallback, bytes_bar
from hfshard._util.threads import cancellable, in_threads
from hfshard.checkpoint.folder import StoreFolder
from hfshard.checkpoint.load_options import FilesBeside
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.constants import CONFIG_NAME, FILES_AT_ONCE, SIGNATURE_NAME
from hfshard.errors import CheckpointChangedError, InvalidArgumentError, SignatureError
from hfshard.format.digests import sha256_of
from hfshard.format.index import FileDigest
from hfshard.shards.shard import SafetensorsShard
from hfshard.signing.check import SignedPlace, code_elsewhere
from hfshard.signing.files import most_signature_bytes
from hfshard.signing.read_files import is_needed, references_elsewhere
from hfshard.signing.signed_by import SignedBy
from hfshard.signing.upstream import SignedManifest, signed_manifest


@dataclass
class SignedObjects:
    """A checkpoint in a store, and what a signature that was checked says of it.

    Every read is of the object that was listed, or an error, so that what was compared is what is loaded.
    """

    folder: StoreFolder
    beside: FilesBeside
    manifest: SignedManifest
    has_code: bool
    """Whether code of the checkpoint may be run."""
    _compared: Mapping[str, bytes] = field(default_factory=dict)
    """The small files, as they were compared."""
    _signature: Hashable = None
    """What tells the object of the signature that was checked."""

    def check_beside(self) -> None:
        """Compare every file that a load reads beside the weights.

        Raises:
            SignatureError: One differs, is not signed, or is missing.
        """
        self._compared = self.beside.read_all()
        for name, raw in sorted(self._compared.items()):
            self._compare(name, sha256_of(raw))
        for name in sorted(filter(is_needed, self.manifest.digests)):
            if self.folder.was_listed(name.rpartition("/")[0]) and not self.folder.has(name):
                raise self._place.missing(name)
        for reference in references_elsewhere(self._compared.get(CONFIG_NAME, b"")) if self.has_code else ():
            raise code_elsewhere(self.folder.path_of(CONFIG_NAME), reference)

    def check_all(self, progress: bool | None = None) -> None:
        """Refuse what is read by its names, by others (raises InvalidArgumentError)."""
        raise needs_disk(self.folder.path, "is read by transformers itself")

    def check_opened(self, checkpoint: OpenCheckpoint, progress: bool | None = None) -> None:
        """Compare the shards that are open, each streamed once, and the small files once more.

        Raises:
            SignatureError: One differs, or is not signed.
            CheckpointChangedError: Another save came meanwhile.
            InvalidArgumentError: It can only be compared on a disk.
        """
        entry = checkpoint.weights.name
        if checkpoint.pickles:
            raise needs_disk(self.folder.path, "has files of torch.save")
        signed = self.manifest.digests.keys()
        if self.folder.identity(SIGNATURE_NAME) != self._signature:
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
        with bytes_bar("Verifying", sum(one.size for one in shards.values()), progress) as progress_callback:
            in_threads(
                lambda name, cancelled: self._check_shard(
                    name, shards[name], cancellable(progress_callback, cancelled)
                ),
                sorted(shards, key=lambda name: -shards[name].size),
                FILES_AT_ONCE,
            )
        self.confirm()

    def confirm(self) -> None:
        """Look whether the small files are still those that were compared (raises CheckpointChangedError)."""
        if self.beside.read_all() != self._compared:
            raise self._changed()

    def _changed(self) -> CheckpointChangedError:
        path = self.folder.path
        return CheckpointChangedError(
            f"The checkpoint in '{path}' was replaced while it was loaded. Load it again when the process that saves "
            "there is done.",
            path=path,
        )

    @property
    def _place(self) -> SignedPlace:
        objects = {
            name: self.folder.path_of(name).removeprefix(f"{self.folder.path}/") for name in self.manifest.digests
        }
        return SignedPlace(self.folder.path, self.manifest, objects=objects)

    def _check_shard(self, name: str, shard: SafetensorsShard, progress_callback: ProgressCallback) -> None:
        self._compare(name, shard.checked_sha256(FileDigest(), progress_callback))

    def _compare(self, name: str, sha256: str) -> None:
        if self.manifest.digests.get(name) != {name: sha256}:
            raise self._place.differs(name)


def find_signed_objects(folder: StoreFolder, beside: FilesBeside, by: SignedBy, *, has_code: bool) -> SignedObjects:
    """Find the signature in a folder of a store, check it, and every file that a load reads beside the weights.

    Args:
        folder: As it was listed.
        beside: The small files that a load reads.
        by: Who must have signed.
        has_code: Whether code of the checkpoint may be run.

    Raises:
        SignatureError: There is none, or not this one's; a file differs, is not signed, or is missing.
        InvalidArgumentError: Its digests are of another kind.
    """
    sizes = {name: folder.size(name) for name in folder.names()}
    manifest = stored_manifest(folder.path, sizes, lambda limit: folder.read_small(SIGNATURE_NAME, limit), by)
    found = SignedObjects(folder, beside, manifest, has_code, _signature=folder.identity(SIGNATURE_NAME))
    found.check_beside()
    return found


def stored_manifest(place: str, sizes: Mapping[str, int], read: Callable[[int], bytes], by: SignedBy) -> SignedManifest:
    """Check the signature of what lies in a store.

    Args:
        place: Its address.
        sizes: Name of each file there -> bytes.
        read: Reads the signature, of at most so many bytes.
        by: Who must have signed.

    Raises:
        SignatureError: There is none, or not this one's.
        InvalidArgumentError: Its digests are of another kind.
    """
    path = f"{place}/{SIGNATURE_NAME}"
    if SIGNATURE_NAME not in sizes:
        raise SignatureError(
            f"'{place}' has no signature: there is no '{SIGNATURE_NAME}'. Sign the directory that is pushed "
            "there (hfshard sign DIR --private-key KEY), and push it again; or leave out the public key.",
            path=place,
        )
    limit = most_signature_bytes(len(sizes), sum(sizes.values()) - sizes[SIGNATURE_NAME])
    if sizes[SIGNATURE_NAME] > limit:
        raise SignatureError(
            f"'{path}' has {sizes[SIGNATURE_NAME]} bytes, but a signature of such files has at most {limit}. Ask who "
            "published the checkpoint for the right file.",
            path=path,
        )
    manifest = signed_manifest(place, path, by.choose, str(by), read(limit))
    if not manifest.is_plain:
        raise needs_disk(place, "was signed by other digests than sha256 of whole files")
    return manifest


def needs_disk(place: str, why: str) -> InvalidArgumentError:
    """Return the error for what can't be compared in a store."""
    return InvalidArgumentError(
        f"'{place}' {why}: its signature is checked on a disk. Run: hfshard pull {place} DIR && hfshard verify DIR "
        "--public-key KEY",
        path=place,
    )
