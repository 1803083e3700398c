"""Sign a checkpoint: the digests that its save recorded, and those of its other files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

from hfshard._util.arguments import wraps_os_errors
from hfshard._util.progress import byte_progress
from hfshard._util.text import shorten_list
from hfshard.checkpoint.locate import adapter_weights, directory_not_found
from hfshard.checkpoint.open_checkpoint import open_checkpoint
from hfshard.commit.directory_state import find_enclosing_hub
from hfshard.constants import MAX_INDEX_BYTES, README, SAFETENSORS_SUFFIX, SIGNATURE_NAME
from hfshard.disk.byte_source import ByteSource, BytesSource, file_source, read_all
from hfshard.disk.fsops import locked_directory, rename, sync_directory, unlink_if_exists, write_file
from hfshard.disk.safe_open import read_small
from hfshard.errors import InvalidArgumentError, SignatureError
from hfshard.format.file_names import INDEX_FILE
from hfshard.format.index import CheckpointIndex, Verify
from hfshard.hub.model_card import CARD_PICTURE, draw_card, merge_card
from hfshard.hub.push_files import detect_variants
from hfshard.places.place import place_to_save
from hfshard.shards.shard_file import SafetensorsFile
from hfshard.signing.model_signing import sign_digests
from hfshard.signing.signed_files import hash_files, list_files
from hfshard.signing.signer import existing_file

_LOCK_SECONDS: Final = 60.0
"""Time to wait for a running save."""

_SHOWN_LINKS: Final = 5
"""Maximum number of links in a message."""


@dataclass(frozen=True, slots=True)
class SignResult:
    """Result of `sign_checkpoint`."""

    signature: str
    """Path of the file that was written."""
    files: tuple[str, ...]
    """Paths, below the directory, of the signed files."""
    read_bytes: int
    """Bytes of the signed files that were read to hash them."""
    recorded_bytes: int
    """Bytes of the signed files whose sha256 the save had recorded."""


@wraps_os_errors("path")
def sign_checkpoint(
    path: str | os.PathLike[str],
    *,
    private_key: str | os.PathLike[str] | None = None,
    password: str | None = None,
    signing_certificate: str | os.PathLike[str] | None = None,
    certificate_chain: Sequence[str | os.PathLike[str]] = (),
    sigstore: Mapping[str, Any] | None = None,
    verify: Verify = "structure",
    card_picture: bool = False,
    progress: bool | None = None,
) -> SignResult:
    """Sign every file of a checkpoint's directory, in the format of OpenSSF Model Signing: `model.sig` next to them.

    For shards whose sha256 the save recorded, the record is signed, once their headers, sizes and fingerprints agree;
    all other files are read. An existing signature is replaced, in one step.

    Args:
        path: A directory on this machine, such as that of a training checkpoint.
        private_key: File of an elliptic curve key (P-256, P-384, P-521), PEM.
        password: Password of the key, if it has one; model-signing does not allow it together with a certificate.
        signing_certificate: File of the certificate of that key, PEM: then anyone who trusts its root can verify.
        certificate_chain: Files of the certificates between it and the root.
        sigstore: In place of a key: keywords of model-signing's `use_sigstore_signer`, such as
            {"use_ambient_credentials": True}; {} asks in the browser.
        verify: "full" reads the shards too, and compares them with their checksums before they are signed.
        card_picture: First show the checkpoint in the directory's README.md, as `push_checkpoint` does in a repo's.
        progress: Whether to show a bar on stderr; None: only on a terminal.

    Returns:
        The signature, the signed files, and how many bytes were read.

    Raises:
        SignatureError: The key can't be used; or a file can't be signed, such as a link, which verifiers reject.
        InvalidArgumentError: There is no key; the path is an address, a directory hub, or one file; or the package
            model-signing is not installed.
        CheckpointNotFoundError: There is no such directory, or it has no weights.
        DamagedCheckpointError: The checkpoint is damaged; nothing was signed.
        DirectoryLockedError: A save there does not end.
        BrowserError: With card_picture: there is no Chromium, or it failed; nothing was written.

    Example:
        hfshard.sign_checkpoint("out", private_key="key.pem")
        assert hfshard.verify_checkpoint("out", public_key="key.pub").ok
    """
    choose = _signer(private_key, password, signing_certificate, certificate_chain, sigstore)
    directory = _directory_to_sign(path)
    with locked_directory(directory, wait_seconds=_LOCK_SECONDS):
        unlink_if_exists(_new_signature(directory))  # left by a process that was killed
        listing = list_files(directory)
        links = [name for name in listing.names if os.path.islink(os.path.join(directory, name))]
        if links:
            raise SignatureError(
                f"'{directory}' has links ({shorten_list(links, _SHOWN_LINKS, quote=True)}), which model_signing "
                "refuses to verify. Sign a copy: hfshard reshard, or hfshard pull REPO DIR.",
                path=os.path.join(directory, links[0]),
            )
        recorded = _recorded(directory, listing.names, verify)
        with _card_in(directory, listing.names) if card_picture else nullcontext():
            listing = list_files(directory)
            others = [name for name in listing.names if name not in recorded]
            sizes = {name: os.path.getsize(os.path.join(directory, name)) for name in listing.names}
            read_bytes = sum(sizes[name] for name in others)
            with byte_progress("Hashing", read_bytes, progress) as progress_callback:
                hashed = hash_files(directory, others, progress_callback)
            digests = recorded | {name: digest for name, (digest, _) in hashed.items()}
            _write(directory, digests, listing.left_out, choose)
    target = os.path.join(directory, SIGNATURE_NAME)
    return SignResult(target, listing.names, read_bytes, sum(sizes[name] for name in recorded))


def _signer(
    private_key: str | os.PathLike[str] | None,
    password: str | None,
    signing_certificate: str | os.PathLike[str] | None,
    certificate_chain: Sequence[str | os.PathLike[str]],
    sigstore: Mapping[str, Any] | None,
) -> Any:
    """Return a function that sets the signer of the library's `signing.Config`."""
    if (private_key is None) == (sigstore is None):
        raise InvalidArgumentError("Name the signer in exactly one way: by a private key, or by Sigstore.")
    if sigstore is not None:
        if signing_certificate is not None or certificate_chain or password is not None:
            raise InvalidArgumentError(
                "Sigstore has its own certificate. Leave out the signing certificate, the certificate chain and the "
                "password."
            )
        return lambda config: config.use_sigstore_signer(**sigstore)
    assert private_key is not None
    key = existing_file(private_key, "private_key")
    if signing_certificate is None:
        if certificate_chain:
            raise InvalidArgumentError("A certificate chain requires a signing certificate. Pass both.")
        # The library passes it to cryptography, which takes bytes, despite the library's annotation.
        secret: Any = None if password is None else password.encode()
        return lambda config: config.use_elliptic_key_signer(private_key=key, password=secret)
    if password is not None:
        raise InvalidArgumentError("model-signing takes no password for a certificate's key. Decrypt the key.")
    certificate = existing_file(signing_certificate, "signing_certificate")
    # The library requires at least one, and the certificate itself adds no trust.
    chain = [existing_file(one, "certificate_chain") for one in certificate_chain] or [certificate]
    return lambda config: config.use_certificate_signer(
        private_key=key, signing_certificate=certificate, certificate_chain=chain
    )


def _directory_to_sign(path: str | os.PathLike[str]) -> str:
    place = place_to_save(path, "path")
    directory = place.address
    if not place.is_read_from_disk:
        raise InvalidArgumentError(
            f"'{directory}' is in a store, but only files on disk can be signed. Run: hfshard pull {directory} DIR",
            path=directory,
        )
    if os.path.isfile(directory):
        raise InvalidArgumentError(
            f"'{directory}' is a file, but only directories can be signed. Pass '{os.path.dirname(directory)}'.",
            path=directory,
        )
    if not os.path.isdir(directory):
        raise directory_not_found(directory)
    if find_enclosing_hub(directory) is not None:
        raise InvalidArgumentError(
            f"'{directory}' is part of a directory hub, whose commits do not change. Sign the directory that is "
            "pushed, and push it: the signature is pushed along with it.",
            path=directory,
        )
    return directory


@contextmanager
def _card_in(directory: str, names: Sequence[str]) -> Iterator[None]:
    """Write the card of a checkpoint, and its picture, as of a signed one; take them back if signing fails."""
    contents: dict[str, ByteSource] = {name: file_source(os.path.join(directory, name)) for name in names}
    card = draw_card({**contents, SIGNATURE_NAME: BytesSource(b"")}, os.path.basename(directory))
    old: dict[str, bytes | None] = dict.fromkeys((CARD_PICTURE, README))
    for name in old.keys() & contents.keys():
        old[name] = read_all(contents[name])
    new = {CARD_PICTURE: card.picture, README: merge_card(old[README], card.text, os.path.basename(directory))}
    try:
        for name, raw in new.items():
            _replace(directory, name, raw)
        yield
    except BaseException:
        for name, before in old.items():
            if before is None:
                unlink_if_exists(os.path.join(directory, name))
            else:
                _replace(directory, name, before)
        raise


def _recorded(directory: str, names: Sequence[str], verify: Verify) -> dict[str, str]:
    """Check every checkpoint of a directory, and return the recorded sha256 of its shards, where there is one."""
    found_variants = detect_variants(name for name in names if "/" not in name)
    adapter = None if found_variants else adapter_weights(directory)
    for variant in sorted(found_variants or {None}, key=lambda one: one or ""):
        with open_checkpoint(directory, variant=variant, verify=verify, weights_name=adapter):
            pass
    found: dict[str, str] = {}
    for name in names:
        if "/" not in name and INDEX_FILE.fullmatch(name):
            path = os.path.join(directory, name)
            raw, _ = read_small(path, directory, MAX_INDEX_BYTES)
            found |= _recorded_in(directory, CheckpointIndex.from_json(raw, path))
    return {name: found[name] for name in names if name in found}


def _recorded_in(directory: str, index: CheckpointIndex) -> dict[str, str]:
    """Return the recorded sha256 of an index's shards, once sizes and fingerprints agree.

    Raises:
        IntegrityError: A shard is not the file that was saved.
    """
    found = {}
    for name, record in index.files.items():
        is_known = name.endswith(SAFETENSORS_SUFFIX) and record.sha256 is not None
        if is_known and record.size is not None and record.fingerprint is not None:
            shard = SafetensorsFile(os.path.join(directory, name), directory)
            try:
                shard.check_size_and_fingerprint(record, with_fingerprint=True)
            finally:
                shard.close()
            assert record.sha256 is not None
            found[name] = record.sha256
    return found


def _write(directory: str, digests: Mapping[str, str], left_out: Sequence[str], choose: Any) -> None:
    """Sign, and replace the old signature."""
    with tempfile.TemporaryDirectory(prefix="hfshard-") as folder:
        made = os.path.join(folder, SIGNATURE_NAME)
        sign_digests(directory, made, digests, left_out, choose)
        with open(made, "rb") as file:
            raw = file.read()
    _replace(directory, SIGNATURE_NAME, raw)


def _replace(directory: str, name: str, raw: bytes) -> None:
    """Write a file in one step."""
    target = os.path.join(directory, name)
    beside = _new_signature(directory)
    try:
        write_file(beside, raw, like=os.stat(target) if os.path.isfile(target) else None)
        rename(beside, target)
        sync_directory(directory)
    finally:
        unlink_if_exists(beside)


def _new_signature(directory: str) -> str:
    return os.path.join(directory, f"{SIGNATURE_NAME}.new")
