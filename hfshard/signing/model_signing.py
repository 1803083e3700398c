"""Interface to the model-signing library: sign digests, and verify a signature and read its digests."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hfshard.constants import SIGNATURE_NAME
from hfshard.errors import InvalidArgumentError, SignatureError

SHA256: Final = "sha256"
FILES: Final = "files"
"""The library's default serialization of a model: one digest for each file."""

_ALGORITHMS: Final = {"blake2b": "blake2"}
"""The library's name of an algorithm in signatures -> the name in its functions, if different."""

_MOST_VALUES: Final = 10_000
"""Limit for lists, objects and commas in a signature; a Sigstore one has a hundred, and its payload is one string."""

_OF_OTHER_SHAPE: Final = (AttributeError, IndexError, KeyError, RecursionError, TypeError)
"""Errors that the library raises if JSON, or a key, is of an unexpected kind."""

_print_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Digest:
    """A digest in the form of the library's manifests."""

    algorithm: str
    digest_value: bytes

    @property
    def digest_hex(self) -> str:
        return self.digest_value.hex()


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """The digests of files in a verified signature."""

    digests: dict[str, dict[str, str]]
    """File -> the library's name of it, or of each part of it -> digest in hex."""
    serialization: dict[str, Any]
    """Description of how the digests were computed, in the library's terms."""

    @property
    def is_plain(self) -> bool:
        """True if each file has one sha256."""
        return self.serialization.get("method") == FILES and self.serialization.get("hash_type") == SHA256

    @property
    def allows_links(self) -> bool:
        """True if a link may replace a signed file."""
        return bool(self.serialization.get("allow_symlinks", False))

    @property
    def ignored(self) -> tuple[str, ...]:
        """The paths that were left out on purpose."""
        return tuple(os.path.normpath(path) for path in self.serialization.get("ignore_paths", ()))


class _KnownDigests:
    """Replacement for the library's `hashing.Config`, with known digests, so that the library reads no file."""

    def __init__(self, digests: Mapping[str, str], ignored: Collection[str]) -> None:
        self._digests = digests
        self._ignored = sorted(ignored)

    def hash(self, model_path: Any, *, files_to_hash: Iterable[Any] | None = None) -> Any:
        from model_signing import manifest

        description = {
            "method": FILES,
            "hash_type": SHA256,
            "allow_symlinks": False,
            "ignore_paths": self._ignored,
        }
        serialization = manifest.SerializationType.from_args(description)
        items = [
            serialization.new_item(name, _Digest(SHA256, bytes.fromhex(digest)))  # type: ignore[arg-type]
            for name, digest in self._digests.items()
        ]
        return manifest.Manifest(Path(model_path).name, items, serialization)


class _Reader:
    """Replacement for the library's `hashing.Config`, and for the manifest that it creates, to capture the signed one.

    The library checks the signature first, then compares the two manifests.
    """

    def __init__(self) -> None:
        self.signed: Any = None

    def add_ignored_paths(self, *, model_path: Any, paths: Iterable[Any]) -> None:
        """Do nothing: the caller of `signed_manifest` compares, and knows the paths from the manifest."""

    def hash(self, model_path: Any, *, files_to_hash: Iterable[Any] | None = None) -> _Reader:
        return self

    def __eq__(self, other: object) -> bool:
        self.signed = other
        return True

    __hash__ = None  # type: ignore[assignment]


def sign_digests(
    directory: str, target: str, digests: Mapping[str, str], ignored: Collection[str], choose: Callable[[Any], Any]
) -> None:
    """Sign digests (path in the directory -> sha256 in hex), and write the signature to `target`.

    The signature includes the directory's name, and the paths in it that were left out. `choose` sets the signer of the
    library's `signing.Config`.

    Raises:
        SignatureError: The library rejects the key, or can't sign.
    """
    with _library():
        from model_signing import signing
    known: Any = _KnownDigests(digests, ignored)
    try:
        choose(signing.Config().set_hashing_config(known)).sign(Path(directory), Path(target))
    except OSError:
        raise
    except Exception as error:  # cryptography, OpenSSL, pydantic and sigstore raise errors of their own
        raise SignatureError(
            f"Cannot sign '{directory}': {_reason(error, 'a key')}. A private key must be an elliptic curve key in "
            "PEM (P-256, P-384 or P-521), with its password if it has one.",
            path=directory,
        ) from error


def signed_manifest(
    directory: str, signature: str, choose: Callable[[Any], Any], wanted: str, raw: bytes
) -> SignedManifest:
    """Verify the contents of a signature file, and return what was signed; no file of the model is read.

    `choose` sets the verifier of the library's `verifying.Config`; `wanted` describes the required signer for messages.

    Raises:
        SignatureError: It is not a signature, or one by another signer.
    """
    with _library():
        from model_signing import verifying
    if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > _MOST_VALUES:  # parsed, each byte would take thirty
        raise SignatureError(
            f"'{signature}' is not a valid signature: it has more than {_MOST_VALUES} values. Ask the checkpoint's "
            "publisher for the right file, or do not use it.",
            path=signature,
        )
    reader: Any = _Reader()
    try:
        config = choose(verifying.Config()).set_hashing_config(reader)
    except OSError:
        raise
    except Exception as error:
        raise InvalidArgumentError(
            f"Cannot check a signature with {wanted}: {_reason(error, 'a key')}. A public key must be the public "
            "half of an elliptic curve key in PEM (P-256, P-384 or P-521): openssl ec -in KEY -pubout -out KEY.pub"
        ) from error
    _check_signature(config, directory, signature, raw, wanted)
    if reader.signed is None:
        raise SignatureError(f"'{signature}' could not be read: model-signing did not report the signed files.")
    return SignedManifest(_by_file(reader.signed, signature), dict(reader.signed.serialization_type))


def _check_signature(config: Any, directory: str, signature: str, raw: bytes, wanted: str) -> None:
    with tempfile.TemporaryDirectory(prefix="hfshard-") as folder:  # the file may no longer contain `raw`
        copy = Path(folder, SIGNATURE_NAME)
        copy.write_bytes(raw)
        try:
            with _without_print() if b'"hint"' not in raw and b'"publicKey"' in raw else contextlib.nullcontext():
                config.verify(Path(directory), copy)
        except Exception as error:  # a hostile file can cause any error in any of four libraries
            raise SignatureError(
                f"The signature '{signature}' was not made by {wanted}, or is damaged: {_reason(error, 'JSON')}. Ask "
                "the checkpoint's publisher for the right key, or do not use it.",
                path=signature,
                expected=wanted,
            ) from error


def digests_by_library(directory: str, names: Collection[str], serialization: Mapping[str, Any]) -> dict[str, str]:
    """Hash files with the library as a signature specifies: its name of a file or part -> digest in hex."""
    from model_signing import hashing

    config = hashing.Config()
    algorithm: Any = _ALGORITHMS.get(serialization["hash_type"], serialization["hash_type"])
    try:
        if serialization["method"] == FILES:
            config.use_file_serialization(hashing_algorithm=algorithm, allow_symlinks=True)
        else:
            size = int(serialization["shard_size"])  # a float, once it has been in a signature
            config.use_shard_serialization(hashing_algorithm=algorithm, shard_size=size, allow_symlinks=True)
    except ValueError as error:
        raise SignatureError(
            f"The signature of '{directory}' has digests that model-signing cannot compute: {_reason(error)}. "
            "Install a newer version of it, or ask for a signature with sha256.",
            path=directory,
        ) from error
    config.set_allow_symlinks(True)
    config.set_ignored_paths(paths=(), ignore_git_paths=False)
    found = config.hash(Path(directory), files_to_hash=[Path(directory, name) for name in sorted(names)])
    return {one.identifier: one.digest.digest_hex for one in found.resource_descriptors()}


def _by_file(signed: Any, signature: str) -> dict[str, dict[str, str]]:
    is_in_parts = signed.serialization_type.get("method") != FILES
    digests: dict[str, dict[str, str]] = {}
    for one in signed.resource_descriptors():
        name = one.identifier.rsplit(":", 2)[0] if is_in_parts else one.identifier
        if name.startswith("/") or ".." in name.split("/"):
            raise SignatureError(f"'{signature}' names a file outside the checkpoint: {name!r:.200}.", path=signature)
        digests.setdefault(name, {})[one.identifier] = one.digest.digest_hex
    return digests


@contextlib.contextmanager
def _without_print() -> Any:
    """Redirect to stderr what the library prints for signatures that don't name their key, one thread at a time."""
    with _print_lock, contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def _library() -> Any:
    """Raise an error that names the package to install if the library is missing."""
    try:
        yield
    except ImportError as error:
        raise InvalidArgumentError(
            f"Signatures require the package model-signing, but {error.name or 'a part of it'} is not installed. "
            "Run: pip install 'hfshard[sign]'"
        ) from error


def _reason(error: Exception, what: str = "") -> str:
    """Return type and first line of another library's error: InvalidSignature has no text, others none for a user."""
    if what and isinstance(error, _OF_OTHER_SHAPE) and "assword" not in str(error):
        return f"it is {what} of another kind"
    text = (str(error).strip().splitlines() or [""])[0].rstrip(".?! ")  # the message goes on behind it
    return f"{type(error).__name__}{f': {text:.300}' if text else ''}"
