"""The index of a checkpoint: which file holds which tensor, and how to tell that a file is the one that was saved."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hfshard.constants import FORMAT_VERSION, MAX_INDEX_BYTES, METADATA_KEY, SAFETENSORS_SUFFIX
from hfshard.errors import DamagedCheckpointError, UnstorableTensorError
from hfshard.storage.format.names import check_file_name
from hfshard.storage.format.strict_json import dump_json, parse_json_object

_DIGEST_HEX: Final = {
    "sha256": "[0-9a-f]{64}",
    "xxh3": "[0-9a-f]{32}",
    "sample": "[0-9a-f]{32}",
    "tensors": "([0-9a-f]{16})*",
}
"""Fields of a file's record that hold digests in hex."""

_REMEDY: Final = "Download or save the checkpoint again."


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What is known of one file of a checkpoint."""

    size: int | None = None
    """Bytes; None for a file that holds this record itself."""
    sha256: str | None = None
    xxh3: str | None = None
    """XXH3, 128 bits."""
    sample: str | None = None
    """XXH3 over the header and the first 4 KiB of its tensors."""
    tensors: str | None = None
    """XXH3 (64 bits, 16 hex digits) of each tensor in the order of their bytes: tells which one is damaged."""

    @property
    def is_verifiable(self) -> bool:
        """Whether a checksum of the whole file is known."""
        return self.sha256 is not None or self.xxh3 is not None

    def as_json(self) -> dict[str, Any]:
        """The fields that are known."""
        values = {name: getattr(self, name) for name in ("size", *_DIGEST_HEX)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """The contents of `model.safetensors.index.json`, or what a single file says of itself."""

    weight_map: dict[str, str]
    """FQN -> file, for every stored tensor."""
    total_size: int | None = None
    """Bytes of tensor data; None where a foreign index does not say."""
    total_parameters: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    """Whatever else the index's metadata hold, without hfshard's own key."""
    files: dict[str, FileRecord] = field(default_factory=dict)
    """File -> record; empty for a checkpoint that hfshard did not write."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Name -> the stored name that it shares its tensor with."""
    undeclared: tuple[str, ...] = ()
    """Aliases that the model's config does not tie by itself."""

    @property
    def is_verifiable(self) -> bool:
        """Whether every file that holds tensors has a checksum."""
        # Not only those of the weight_map: a file without tensors (of an empty state dict) has a checksum too.
        names = set(self.weight_map.values()) | {name for name in self.files if name.endswith(SAFETENSORS_SUFFIX)}
        return bool(names) and all(name in self.files and self.files[name].is_verifiable for name in names)

    def to_json(self) -> bytes:
        """The bytes of the index file: a function of the contents alone.

        Raises:
            UnstorableTensorError: It would be larger than readers take.
        """
        metadata: dict[str, Any] = dict(self.metadata)
        if self.total_size is not None:
            metadata["total_size"] = self.total_size
        if self.total_parameters is not None:
            metadata["total_parameters"] = self.total_parameters
        if self.files:
            metadata[METADATA_KEY] = own_metadata(self.files, self.aliases, self.undeclared)
        raw = dump_json({"metadata": metadata, "weight_map": self.weight_map})
        if len(raw) > MAX_INDEX_BYTES:
            raise UnstorableTensorError(
                f"The index would be {len(raw)} bytes, and readers take {MAX_INDEX_BYTES}: split the model."
            )
        return raw

    @classmethod
    def from_json(cls, raw: bytes, path: str, *, suffix: str = SAFETENSORS_SUFFIX) -> CheckpointIndex:
        """Read an index file without trust.

        Args:
            raw: The file's bytes.
            path: The file, for messages.
            suffix: What the files that it names must end in.

        Raises:
            DamagedCheckpointError: It is not an index, or hfshard's part of it is not what hfshard writes.
            UnsafePathError: It names a file outside the checkpoint's directory.
        """
        value = parse_json_object(raw, path=path, what="Index", remedy=_REMEDY)
        weight_map = value.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise _damaged(path, "it must have a 'weight_map' object that maps names to files")
        checked = {file: check_file_name(file, index_path=path, suffix=suffix) for file in _hashable(weight_map, path)}
        metadata = value.get("metadata")
        metadata = {} if metadata is None else metadata
        if not isinstance(metadata, dict):
            raise _damaged(path, "its 'metadata' must be an object")
        own = parse_own_metadata(metadata.get(METADATA_KEY), path)
        _check_own(own, weight_map, path)
        if own.files and _count(metadata.get("total_size", 0)) is None:
            raise _damaged(path, "its total_size is no number of bytes")
        known = {"total_size", "total_parameters", METADATA_KEY}
        return cls(
            weight_map={name: checked[file] for name, file in weight_map.items()},
            total_size=_count(metadata.get("total_size")),
            total_parameters=_count(metadata.get("total_parameters")),
            metadata={key: item for key, item in metadata.items() if key not in known},
            files=own.files,
            aliases=own.aliases,
            undeclared=own.undeclared,
        )


@dataclass(frozen=True, slots=True)
class OwnMetadata:
    """What hfshard adds to an index or to a single file."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    undeclared: tuple[str, ...] = ()
    digests: FileRecord = FileRecord()
    """Of the single file that holds this itself."""


def own_metadata(
    files: Mapping[str, FileRecord], aliases: Mapping[str, str], undeclared: tuple[str, ...]
) -> dict[str, Any]:
    """hfshard's part of an index's metadata."""
    own: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "files": {name: record.as_json() for name, record in files.items()},
        "aliases": dict(aliases),
    }
    if undeclared:
        own["undeclared"] = sorted(undeclared)
    return own


def single_file_metadata(own: Mapping[str, Any], digests: Mapping[str, str]) -> str:
    """hfshard's part of a single file's `__metadata__`: its own digests first, where they are found to be zeroed."""
    return json.dumps({**digests, **own}, ensure_ascii=False, separators=(",", ":"))


def parse_single_file_metadata(text: str | None, path: str) -> OwnMetadata:
    """Read what `single_file_metadata` wrote; nothing for a file that hfshard did not write, and for a shard ("1").

    Raises:
        DamagedCheckpointError: It is there, and is not what hfshard writes.
    """
    if text is None or text == str(FORMAT_VERSION):
        return OwnMetadata()
    what = "hfshard's metadata in file"
    return parse_own_metadata(parse_json_object(text.encode(), path=path, what=what, remedy=_REMEDY), path)


def parse_own_metadata(value: Any, path: str) -> OwnMetadata:
    """Check hfshard's part of an index or file; nothing where it is missing.

    Raises:
        DamagedCheckpointError: It is there, and is not what hfshard writes, or a newer hfshard wrote it.
        UnsafePathError: It names a file outside the checkpoint's directory.
    """
    if value is None:
        return OwnMetadata()
    if not isinstance(value, dict) or type(value.get("format")) is not int:
        raise _damaged(path, "its 'hfshard' metadata must be an object with a 'format' number")
    if value["format"] != FORMAT_VERSION:
        raise DamagedCheckpointError(
            f"'{path}' is of hfshard's format {value['format']}, and this version reads format {FORMAT_VERSION}. "
            "Run: pip install --upgrade hfshard",
            path=path,
            expected=FORMAT_VERSION,
            actual=value["format"],
        )
    files, aliases, undeclared = value.get("files", {}), value.get("aliases", {}), value.get("undeclared", [])
    if not isinstance(files, dict) or not _is_name_map(aliases):
        raise _damaged(path, "'hfshard.files' must map files to records, and 'hfshard.aliases' names to names")
    if not isinstance(undeclared, list) or not all(isinstance(name, str) and name in aliases for name in undeclared):
        raise _damaged(path, "'hfshard.undeclared' must be a list of aliases")
    for alias, stored in aliases.items():
        if stored in aliases:
            raise _damaged(path, f"the alias '{alias}' points to '{stored}', which is an alias itself")
    for name in files:
        check_file_name(name, index_path=path, suffix=".json" if name.endswith(".json") else SAFETENSORS_SUFFIX)
    records = {name: parse_record(record, name, path) for name, record in files.items()}
    digests = parse_record({key: value[key] for key in _DIGEST_HEX if key in value}, path, path)
    return OwnMetadata(records, aliases, tuple(undeclared), digests)


def check_aliases(aliases: Mapping[str, str], stored_names: Mapping[str, Any], path: str) -> None:
    """Refuse aliases that are stored themselves, or that point to a tensor that is not there.

    Raises:
        DamagedCheckpointError: One is, or does.
    """
    for alias, stored in aliases.items():
        if alias in stored_names:
            raise _damaged(path, f"'{alias}' is both a stored tensor and an alias of '{stored}'")
        if stored not in stored_names:
            raise _damaged(path, f"the alias '{alias}' points to '{stored}', which no file holds")


def _check_own(own: OwnMetadata, weight_map: Mapping[str, str], path: str) -> None:
    if not own.files:
        return
    unlisted = sorted(set(weight_map.values()) - own.files.keys())
    if unlisted:
        raise _damaged(path, f"its 'hfshard.files' lack '{unlisted[0]}', which the weight_map names")
    check_aliases(own.aliases, weight_map, path)


def parse_record(value: Any, name: str, path: str) -> FileRecord:
    """Check the record of a file.

    Raises:
        DamagedCheckpointError: It is not what `FileRecord.as_json` returns.
    """
    problem = f"the record of '{name}' in 'hfshard.files' must hold a size and hex digests"
    if not isinstance(value, dict):
        raise _damaged(path, problem)
    for key, pattern in _DIGEST_HEX.items():
        digest = value.get(key)
        if digest is not None and not (isinstance(digest, str) and re.fullmatch(pattern, digest)):
            raise _damaged(path, problem)
    size = value.get("size")
    if size is not None and _count(size) is None:
        raise _damaged(path, problem)
    return FileRecord(size, **{key: value.get(key) for key in _DIGEST_HEX})


def _hashable(weight_map: dict[str, Any], path: str) -> set[str]:
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise _damaged(path, f"its weight_map maps '{name}' to a {type(file).__name__}, not to a file's name")
    return set(weight_map.values())


def _is_name_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _damaged(path: str, problem: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"Index '{path}' is damaged: {problem}. {_REMEDY}", path=path)
