"""The index of a checkpoint, which maps tensors to files and records the files' digests; and how these are computed."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import xxhash

from hfshard.constants import (
    FINGERPRINT_TENSORS,
    FORMAT_VERSION,
    MAX_INDEX_BYTES,
    MAX_JSON_DEPTH,
    METADATA_KEY,
    SAFETENSORS_SUFFIX,
    WEIGHTS_OVERRIDE_KEY,
)
from hfshard.errors import DamagedCheckpointError, InvalidArgumentError, UnstorableTensorError
from hfshard.format.file_names import check_file_name, suffix_of_shards
from hfshard.format.strict_json import PassOver, dump_json, is_too_deep, parse_json_object

_DIGEST_HEX: Final = {
    "sha256": "[0-9a-f]{64}",
    "xxh3": "[0-9a-f]{32}",
    "fingerprint": "[0-9a-f]{32}",
    "tensor_digests": "([0-9a-f]{16})*",
}
"""Keys of a file's entry with digests -> pattern of the hex digits."""

_REMEDY: Final = "Download or save the checkpoint again."
_COUNTS: Final = ("total_size", "total_parameters")
_NO_TENSORS: Final = (*_COUNTS, "format")
"""Metadata keys that are never names of tensors, whatever their values are."""


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The known size and digests of one file of a checkpoint."""

    size: int | None = None
    """Bytes; None for the file that contains this object itself."""
    sha256: str | None = None
    xxh3: str | None = None
    """XXH3, 128 bits."""
    fingerprint: str | None = None
    """XXH3 over the header and the first 4 KiB of its tensors."""
    tensor_digests: str | None = None
    """XXH3 (64 bits, 16 hex digits) of each tensor, in the order of their bytes, to identify a damaged one."""
    etag: str | None = field(default=None, compare=False, repr=False)
    """ETag of a file that was sent to a store; recorded in another place than the digests."""

    @property
    def is_verifiable(self) -> bool:
        """True if a checksum of the complete file is known."""
        return self.checksum is not None

    @property
    def checksum(self) -> tuple[str, str] | None:
        """The kind and the hex digits of the complete file's checksum, sha256 if known; None if there is none."""
        digests = (("sha256", self.sha256), ("xxh3", self.xxh3))
        return next(((kind, digest) for kind, digest in digests if digest is not None), None)

    def split_tensor_digests(self, names: Collection[str]) -> dict[str, str] | None:
        """Return the digest of each of the file's tensors; None if they are unknown, or for another number of tensors.

        Args:
            names: In the order of the tensors' bytes.
        """
        text = self.tensor_digests
        if text is None or len(text) != TENSOR_DIGEST_HEX * len(names):
            return None
        starts = range(0, len(text), TENSOR_DIGEST_HEX)
        return {name: text[at : at + TENSOR_DIGEST_HEX] for name, at in zip(names, starts, strict=True)}

    def as_json(self) -> dict[str, Any]:
        """Return the known fields."""
        values = {name: getattr(self, name) for name in ("size", *_DIGEST_HEX)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """The contents of `model.safetensors.index.json`, or the same data from a single file."""

    weight_map: dict[str, str]
    """FQN -> file, for every stored tensor."""
    total_size: int | None = None
    """Bytes of tensor data; None if another library's index does not state it."""
    total_parameters: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    """The rest of the index's metadata, without hfshard's own key."""
    files: dict[str, FileDigest] = field(default_factory=dict)
    """File -> digests; empty for a checkpoint that hfshard did not write."""
    tied_names: dict[str, str] = field(default_factory=dict)
    """Name -> the stored name whose tensor it shares."""
    undeclared_ties: tuple[str, ...] = ()
    """Tied names that the model's config does not tie."""

    @property
    def is_verifiable(self) -> bool:
        """True if every file of weights has a checksum."""
        # Not only files in the weight_map: a file without tensors (of an empty state dict) has a checksum too.
        names = set(self.weight_map.values()) | {name for name in self.files if name.endswith(SAFETENSORS_SUFFIX)}
        return bool(names) and all(name in self.files and self.files[name].is_verifiable for name in names)

    def to_json(self) -> bytes:
        """Encode the index file; equal contents give equal bytes.

        Raises:
            UnstorableTensorError: It would be larger, or nested deeper, than what hfshard reads.
        """
        metadata: dict[str, Any] = dict(self.metadata)
        if self.total_size is not None:
            metadata["total_size"] = self.total_size
        if self.total_parameters is not None:
            metadata["total_parameters"] = self.total_parameters
        if self.files:
            metadata[METADATA_KEY] = build_hfshard_metadata(self.files, self.tied_names, self.undeclared_ties)
        raw = dump_json({"metadata": metadata, "weight_map": self.weight_map})
        if len(raw) > MAX_INDEX_BYTES:
            raise UnstorableTensorError(
                f"The index would be {len(raw)} bytes, but hfshard reads at most {MAX_INDEX_BYTES}. Split the model."
            )
        if is_too_deep(raw):
            raise UnstorableTensorError(
                f"The index's metadata would be nested deeper than {MAX_JSON_DEPTH} levels. Pass deep values as text."
            )
        return raw

    @classmethod
    def from_json(cls, raw: bytes, path: str, pass_over: PassOver | None = None) -> CheckpointIndex:
        """Parse the bytes of an index file, and check them.

        Args:
            raw: The file's bytes.
            path: The file, for messages; its name also determines whether its shards are safetensors files or pickles.
            pass_over: Gets the error for a key that occurs twice; if it does not raise it, the last one counts. None:
                the error is raised.

        Raises:
            DamagedCheckpointError: It is not an index, or hfshard's part of it is not what hfshard writes.
            UnsafePathError: It names a file outside the checkpoint's directory.
        """
        value = parse_json_object(raw, path=path, what="Index", remedy=_REMEDY, pass_over=pass_over)
        weight_map = value.get("weight_map")
        if not isinstance(weight_map, dict):
            raise _damaged(path, "it must have a 'weight_map' object that maps names to files")
        suffix = suffix_of_shards(os.path.basename(path))
        checked = {file: check_file_name(file, index_path=path, suffix=suffix) for file in _hashable(weight_map, path)}
        metadata = value.get("metadata")
        metadata = {} if metadata is None else metadata
        if not isinstance(metadata, dict):
            raise _damaged(path, "its 'metadata' must be an object")
        own = _parse_hfshard_metadata(metadata.get(METADATA_KEY), path)
        if not weight_map and not own.files:  # a checkpoint without tensors has a file in a store
            raise _damaged(path, "its 'weight_map' names no file")
        _check_hfshard_metadata(own, weight_map, path)
        if METADATA_KEY not in metadata:
            own = _metadata_of_others(metadata, weight_map)
        if own.files and _count(metadata.get("total_size", 0)) is None:
            raise _damaged(path, "its total_size must be a number of bytes")
        known = {*_COUNTS, METADATA_KEY, *own.tied_names}
        return cls(
            weight_map={name: checked[file] for name, file in weight_map.items()},
            total_size=_count(metadata.get("total_size")),
            total_parameters=_count(metadata.get("total_parameters")),
            metadata={key: item for key, item in metadata.items() if key not in known},
            files=own.files,
            tied_names=own.tied_names,
            undeclared_ties=own.undeclared_ties,
        )


@dataclass(frozen=True, slots=True)
class HfshardMetadata:
    """hfshard's additions to an index or to a single file."""

    files: dict[str, FileDigest] = field(default_factory=dict)
    tied_names: dict[str, str] = field(default_factory=dict)
    undeclared_ties: tuple[str, ...] = ()
    digests: FileDigest = FileDigest()
    """The digests of the single file that contains this."""


def build_hfshard_metadata(
    files: Mapping[str, FileDigest], tied_names: Mapping[str, str], undeclared_ties: tuple[str, ...]
) -> dict[str, Any]:
    """Build hfshard's part of an index's metadata."""
    own: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "files": {name: digest.as_json() for name, digest in files.items()},
        "tied_names": dict(tied_names),
    }
    if undeclared_ties:
        own["undeclared_ties"] = sorted(undeclared_ties)
    return own


def single_file_metadata(own: Mapping[str, Any], digests: Mapping[str, str]) -> str:
    """Encode hfshard's part of a single file's `__metadata__`, with the file's own digests first, so they are found."""
    return json.dumps({**digests, **own}, ensure_ascii=False, separators=(",", ":"))


def parse_file_metadata(metadata: Mapping[str, str], stored_names: Collection[str], path: str) -> HfshardMetadata:
    """Parse the `__metadata__` of a file, from hfshard or another program.

    Args:
        metadata: The file's `__metadata__`.
        stored_names: The names of its tensors.
        path: The file, for messages.

    Raises:
        DamagedCheckpointError: hfshard's part is not what hfshard writes.
    """
    if METADATA_KEY not in metadata:
        return _metadata_of_others(metadata, stored_names)
    return parse_single_file_metadata(metadata[METADATA_KEY], path)


def _metadata_of_others(metadata: Mapping[str, Any], stored_names: Collection[str]) -> HfshardMetadata:
    """Parse tied names as huggingface_hub and safetensors record them: as plain entries.

    Source: huggingface_hub `save_torch_state_dict`, safetensors `save_model`.
    """
    tied_names = {
        name: stored
        for name, stored in metadata.items()
        if name not in _NO_TENSORS and name not in stored_names and isinstance(stored, str) and stored in stored_names
    }
    return HfshardMetadata(tied_names=tied_names, undeclared_ties=tuple(sorted(tied_names)))


def parse_single_file_metadata(text: str | None, path: str) -> HfshardMetadata:
    """Parse the output of `single_file_metadata`; empty for a shard ("1") and for a file not written by hfshard.

    Raises:
        DamagedCheckpointError: It is not what hfshard writes.
    """
    if text is None or text == str(FORMAT_VERSION):
        return HfshardMetadata()
    what = "hfshard's metadata in file"
    return _parse_hfshard_metadata(parse_json_object(text.encode(), path=path, what=what, remedy=_REMEDY), path)


def _parse_hfshard_metadata(value: Any, path: str) -> HfshardMetadata:
    """Parse and check hfshard's part of an index or file; empty if there is none."""
    if value is None:
        return HfshardMetadata()
    _check_format(value, path)
    files = value.get("files", {})
    tied_names = value.get("tied_names", {})
    undeclared_ties = value.get("undeclared_ties", [])
    if not isinstance(files, dict) or not _is_name_map(tied_names):
        raise _damaged(path, "'hfshard.files' must map files to digests, and 'hfshard.tied_names' names to names")
    if not isinstance(undeclared_ties, list) or not all(
        isinstance(name, str) and name in tied_names for name in undeclared_ties
    ):
        raise _damaged(path, "'hfshard.undeclared_ties' must be a list of tied names")
    for name, stored in tied_names.items():
        if stored in tied_names:
            raise _damaged(path, f"'{name}' is tied to '{stored}', which is a tied name itself")
    for name in files:
        check_file_name(name, index_path=path, suffix=".json" if name.endswith(".json") else SAFETENSORS_SUFFIX)
    digests_of_files = {name: parse_file_digest(digest, name, path) for name, digest in files.items()}
    digests = parse_file_digest({key: value[key] for key in _DIGEST_HEX if key in value}, path, path)
    return HfshardMetadata(digests_of_files, tied_names, tuple(undeclared_ties), digests)


def _check_format(value: Any, path: str) -> None:
    if not isinstance(value, dict) or type(value.get("format")) is not int:
        raise _damaged(path, "its 'hfshard' metadata must be an object with a 'format' number")
    if value["format"] != FORMAT_VERSION:
        raise DamagedCheckpointError(
            f"'{path}' has hfshard's format {value['format']}, but this version reads format {FORMAT_VERSION}. "
            "Run: pip install --upgrade hfshard",
            path=path,
            expected=FORMAT_VERSION,
            actual=value["format"],
        )
    if "aliases" in value:
        raise DamagedCheckpointError(
            f"'{path}' was written before hfshard's first release, in another format. "
            "Load it with the version that wrote it, and save it again with this one.",
            path=path,
            expected="tied_names",
            actual="aliases",
        )


def check_tied_names(tied_names: Mapping[str, str], stored_names: Mapping[str, Any], path: str) -> None:
    """Reject tied names that are stored themselves, or whose tensor is in no file.

    Raises:
        DamagedCheckpointError: There is such a name.
    """
    for name, stored in tied_names.items():
        if name in stored_names:
            raise _damaged(path, f"'{name}' is both a stored tensor and tied to '{stored}'")
        if stored not in stored_names:
            raise _damaged(path, f"'{name}' is tied to '{stored}', which no file contains")


def _check_hfshard_metadata(own: HfshardMetadata, weight_map: Mapping[str, str], path: str) -> None:
    if not own.files:
        return
    unlisted = sorted(set(weight_map.values()) - own.files.keys())
    if unlisted:
        raise _damaged(path, f"its 'hfshard.files' lack '{unlisted[0]}', which the weight_map names")
    check_tied_names(own.tied_names, weight_map, path)


def parse_file_digest(value: Any, name: str, path: str) -> FileDigest:
    """Parse and check the digests of a file.

    Raises:
        DamagedCheckpointError: They are not what `FileDigest.as_json` returns.
    """
    problem = f"the entry of '{name}' in 'hfshard.files' must have a size and hex digests"
    if not isinstance(value, dict):
        raise _damaged(path, problem)
    for key, pattern in _DIGEST_HEX.items():
        digest = value.get(key)
        if digest is not None and not (isinstance(digest, str) and re.fullmatch(pattern, digest)):
            raise _damaged(path, problem)
    size = value.get("size")
    if size is not None and _count(size) is None:
        raise _damaged(path, problem)
    return FileDigest(size, **{key: value.get(key) for key in _DIGEST_HEX})


def _hashable(weight_map: dict[str, Any], path: str) -> set[str]:
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise _damaged(path, f"its weight_map maps '{name}' to a {type(file).__name__}, not to the name of a file")
    return set(weight_map.values())


def _is_name_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _damaged(path: str, problem: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"Index '{path}' is damaged: {problem}. {_REMEDY}", path=path)


# The extra key of config.json with which one rename switches config and weights together.
#
# It is inserted as a separate line after the opening brace, so that removing it restores the saved bytes, and their
# checksum holds during a commit and after one that was killed.


_LINE = re.compile(
    rb'\{\n  "' + WEIGHTS_OVERRIDE_KEY.encode() + rb'": "[^"\\/]+-hfshard-[0-9a-f]{16}\.safetensors(?:\.index\.json)?",'
)

_MARK = re.compile(rb"[ \t]{64}\n\Z")
"""Pattern of the line that `with_commit_marker` appends."""


def with_weights_override(config: bytes, weights: str) -> bytes:
    """Insert the key: transformers then loads the file `weights` before all others."""
    key = WEIGHTS_OVERRIDE_KEY.encode()
    if config.startswith(b"{") and key not in config and json.loads(config):
        return b'{\n  "%s": %s,' % (key, json.dumps(weights).encode()) + config[1:]
    return _dump_config({**json.loads(config), WEIGHTS_OVERRIDE_KEY: weights})


def without_weights_override(config: bytes) -> bytes:
    """Remove the key; this restores the saved bytes if a commit of hfshard inserted it."""
    if (line := _LINE.match(config)) is not None:
        return b"{" + config[line.end() :]
    value = json.loads(config)
    return _dump_config({key: value[key] for key in value if key != WEIGHTS_OVERRIDE_KEY})


def _dump_config(value: Any) -> bytes:
    """Encode a config as `dump_json` does, but with NaN and Infinity, which transformers writes."""
    return f"{json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)}\n".encode()


def without_commit_keys(config: bytes) -> bytes:
    """Return the bytes of a config.json as it was saved, without a key or mark that a commit of hfshard inserted."""
    config = without_commit_marker(config)
    return without_weights_override(config) if _LINE.match(config) is not None else config


def without_commit_marker(config: bytes) -> bytes:
    """Remove the line that `with_commit_marker` appends, if there is one."""
    return _MARK.sub(b"", config)


def mark_of(config: bytes) -> str | None:
    """Return the 16 hex digits that `with_commit_marker` appended; None if there are none."""
    match = _MARK.search(config)
    if match is None:
        return None
    bits = match[0].rstrip(b"\n").replace(b" ", b"0").replace(b"\t", b"1")
    return f"{int(bits, 2):016x}"


def with_commit_marker(config: bytes, digits: str) -> bytes:
    """Append a line of blanks and tabs that encode 16 hex digits: the bytes differ, but not the JSON value."""
    bits = f"{int(digits, 16):064b}"
    return without_commit_marker(config) + bits.replace("0", " ").replace("1", "\t").encode() + b"\n"


# Digests: checksums of files and tensors, and the cheap fingerprint that distinguishes the shards of two saves.


Checksum = Literal["sha256", "xxh3"]


Verify = Literal["none", "structure", "full", "sha256"]
"""The checks before any tensor is returned."""


FULL: Final = ("full", "sha256")
"""Levels at which every byte is compared."""


class Hasher(Protocol):
    """The common interface of hashlib's and xxhash's objects."""

    def update(self, data: Any, /) -> None:
        """Hash more bytes."""

    def hexdigest(self) -> str:
        """Return the digest of the bytes so far, in lower-case hex."""


HASHERS: Final[dict[str, Callable[[], Hasher]]] = {"sha256": hashlib.sha256, "xxh3": xxhash.xxh3_128}
"""Kind of checksum -> hasher. The Hub uses sha256, which any tool can check; xxh3 is as fast as memory."""


def check_checksum(checksum: str | None) -> None:
    """Reject an unknown kind of checksum.

    Raises:
        InvalidArgumentError: It is neither None nor a key of `HASHERS`.
    """
    if checksum is not None and checksum not in tuple(HASHERS):
        raise InvalidArgumentError(f"checksum must be 'sha256', 'xxh3' or None, got {checksum!r}.")


def check_verify_level(verify: str) -> None:
    """Reject an unknown value of `verify`.

    Raises:
        InvalidArgumentError: It is not one of `Verify`.
    """
    if verify not in ("none", "structure", "full", "sha256"):
        raise InvalidArgumentError(f"verify must be 'none', 'structure' or 'full' (or 'sha256'), got {verify!r}.")


def new_fingerprint() -> Hasher:
    """Create the hasher for the fingerprint of a file."""
    return xxhash.xxh3_128()


def tensor_hasher() -> Hasher:
    """Create the hasher for the digest of one tensor."""
    return xxhash.xxh3_64()


def tensor_digest(blocks: Iterable[Any]) -> str:
    """Compute the digest of one tensor's bytes, which shows whether this tensor of a damaged file is damaged."""
    hasher = tensor_hasher()
    for block in blocks:
        hasher.update(block)
    return hasher.hexdigest()


def tensor_digest_of_bytes(raw: bytes) -> str:
    """Compute `tensor_digest` of bytes in memory, in a third of the time."""
    return xxhash.xxh3_64_hexdigest(raw)


TENSOR_DIGEST_HEX: Final = 16
"""Hex digits of `tensor_digest`."""


def fingerprint_positions(count: int) -> Sequence[int]:
    """Return the positions of the tensors that go into the fingerprint: all, or 1,024 evenly chosen ones."""
    if count <= FINGERPRINT_TENSORS:
        return range(count)
    return [position * count // FINGERPRINT_TENSORS for position in range(FINGERPRINT_TENSORS)]


def md5_of(raw: bytes) -> str:
    """Return the MD5 in hex, which S3 and GCS use as the ETag of an object that was put in one request."""
    return hashlib.md5(raw, usedforsecurity=False).hexdigest()


def sha256_of(raw: bytes) -> str:
    """Return the sha256 of a small file's bytes, in hex."""
    return hashlib.sha256(raw).hexdigest()


def with_zeroed_digests(header: bytes, digests: Sequence[tuple[str, str]]) -> bytes:
    """Replace the digests in a single file's header by zeros: the digests are computed over these bytes.

    Args:
        header: Everything before the data.
        digests: (key, hex digest) as the file states them.

    Returns:
        The header to hash. A digest that does not occur in it has no effect.
    """
    for name, digest in digests:
        stated = f'\\"{name}\\":\\"{digest}\\"'.encode()
        blank = f'\\"{name}\\":\\"{"0" * len(digest)}\\"'.encode()
        header = header.replace(stated, blank, 1)
    return header
