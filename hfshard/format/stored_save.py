"""One save in a store: its number and id, which are in the name of each of its objects, and its index's contents."""

from __future__ import annotations

import base64
import binascii
import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from hfshard.constants import MANIFEST_NAME, MAX_INDEX_BYTES, SAFETENSORS_SUFFIX
from hfshard.errors import DamagedCheckpointError, UnsafePathError, UnstorableTensorError
from hfshard.format.file_names import INDEX_FILE, WeightNames, check_file_name, is_safe_file_name
from hfshard.format.index import CheckpointIndex, mark_of, sha256_of, with_commit_marker, without_commit_marker
from hfshard.format.strict_json import parse_json_object

SAVE_FORMAT: Final = 1

MAX_SAVE_BYTES: Final = 2 * MAX_INDEX_BYTES
"""The largest index of a save that is read or written: JSON within JSON has a backslash before each quote."""

_ID_BYTES: Final = 8
"""Random bytes of an id: among a billion saves with one number, two have the same id with a probability of 3 %."""

_NUMBER_DIGITS: Final = 8
"""Digits of a number, with zeros in front, so that a listing is in the order of the saves."""

_MOST_DIGITS: Final = 15
"""The most digits of a number: a longer one is not hfshard's."""

_OBJECT: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{8,15})-(?P<id>[0-9a-f]{16})(?P<suffix>\.\w+)?")

INLINED_BYTES: Final = 1 << 20
"""The largest small file, other than a checkpoint's own index, that is inlined in the index of a save; a larger one has
its own object, as shards do."""

_REMEDY: Final = "Save the checkpoint again."


@dataclass(frozen=True, slots=True, order=True)
class SaveId:
    """The place of a save in the order of saves: by number, then by id."""

    number: int
    id: str
    """16 random hex digits."""

    @classmethod
    def after(cls, others: Iterable[SaveId], least: int = 0) -> Self:
        """Return a new one, whose number is one above the highest.

        Args:
            others: The saves of all objects.
            least: Another number that it must exceed.

        Raises:
            UnstorableTensorError: A name has the highest possible number, which no save of hfshard ever reaches.
        """
        number = 1 + max((one.number for one in others), default=0)
        number = max(number, least + 1)
        if len(str(number)) > _MOST_DIGITS:
            raise UnstorableTensorError(
                f"An object has the number {number - 1:,} in its name, the highest possible one. Delete that object."
            )
        return cls(number, secrets.token_hex(_ID_BYTES))

    def __str__(self) -> str:
        return f"{self.number:0{_NUMBER_DIGITS}d}-{self.id}"

    def object_name(self, file: str) -> str:
        """Return the name of the object with a file of this save.

        Args:
            file: The file's usual name, with or without folders.

        Example:
            SaveId(7, "00112233445566ff").object_name("model-00001-of-00002.safetensors")
            # "model-00001-of-00002-00000007-00112233445566ff.safetensors"
        """
        folder, slash, name = file.rpartition("/")
        stem, dot, suffix = name.rpartition(".")
        return f"{folder}{slash}{stem}-{self}.{suffix}" if dot and stem else f"{file}-{self}"


BEFORE_ALL: Final = SaveId(0, "")
"""Lower than every save."""


def split_object_name(name: str) -> tuple[str, SaveId] | None:
    """Split an object's name into the file's usual name and the save that it belongs to.

    Args:
        name: The name, with or without folders.

    Returns:
        The file's usual name and the save; None if the name has no number and id.
    """
    match = _OBJECT.fullmatch(name)
    if match is None:
        return None
    save_id = SaveId(int(match["number"]), match["id"])
    usual = match["stem"] + (match["suffix"] or "")
    return (usual, save_id) if save_id.object_name(usual) == name else None


def save_in_name(name: str) -> SaveId | None:
    """Return the save whose number and id an object has in its name; None if it has none."""
    split = split_object_name(name)
    return None if split is None else split[1]


def saves_among(names: Iterable[str]) -> set[SaveId]:
    """Return all saves that objects of these names belong to."""
    return {one for one in map(save_in_name, names) if one is not None}


def save_of(name: str, names: WeightNames) -> SaveId | None:
    """Return the save of a checkpoint whose index or shard an object is; None for any other object."""
    split = split_object_name(name)
    if split is None or not (split[0] == names.index or names.is_shard(split[0])):
        return None
    return split[1]


def own_saves(found: Iterable[str], names: WeightNames) -> set[SaveId]:
    """Return the saves of a checkpoint: those with a shard or an index of it, and without weights of another one.

    A user's file whose name happens to end like an object's belongs to none of them.
    """
    own, others = set(), set()
    for name in found:
        split = split_object_name(name)
        if split is None:
            continue
        if save_of(name, names) is not None:
            own.add(split[1])
        elif split[0].endswith(SAFETENSORS_SUFFIX) or INDEX_FILE.fullmatch(split[0]):
            others.add(split[1])
    return own - others


def objects_of_saves(names: Iterable[str]) -> set[str]:
    """Return the names of objects that belong to saves: those with the number and id of weights or of an index.

    Other names with such an ending are names of a user's files.
    """
    splits = {name: split for name in names if (split := split_object_name(name)) is not None}
    saves = {split[1] for name, split in splits.items() if split[0].endswith(SAFETENSORS_SUFFIX) or is_save_index(name)}
    return {name for name, split in splits.items() if split[1] in saves}


def finished_saves(names: Iterable[str]) -> set[SaveId]:
    """Return the saves of a folder that have their index and at least one more object, as every finished save does.

    A lone index was late: it arrived after a higher save had deleted the rest.
    """
    objects = [name for name in names if save_in_name(name) is not None]
    counts = Counter(map(save_in_name, objects))
    return {one for one in saves_among(filter(is_save_index, objects)) if counts[one] > 1}


def checkpoint_save(names: Iterable[str], is_whole: Callable[[SaveId], bool]) -> SaveId | None:
    """Return the save that is the checkpoint of a run's folder; None if none was finished.

    Args:
        names: Names of the objects in the folder.
        is_whole: Returns whether all objects that a save's manifest names exist. It is called if there are several
            saves: the highest manifest may belong to a save that was overtaken, and may have arrived after some of its
            objects were deleted.
    """
    names = set(names)
    found = sorted((one for one in finished_saves(names) if one.object_name(MANIFEST_NAME) in names), reverse=True)
    whole = filter(is_whole, found) if len(found) > 1 else iter(found)
    return next(whole, found[0] if found else None)


def is_save_index(name: str) -> bool:
    """Return whether an object, or a file that was synced from a store, is the index of a save: of a model or a run."""
    split = split_object_name(name)
    return split is not None and (split[0] == MANIFEST_NAME or INDEX_FILE.fullmatch(split[0]) is not None)


@dataclass(frozen=True, slots=True)
class StoredObjectRecord:
    """The record in a save's index of the object of a shard, or of a small file that is not inlined."""

    size: int
    etag: str
    """The ETag when it was put: an object of this name with another one has been damaged or replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSave:
    """The contents of a save's index. Files have their usual names here, regardless of their objects' names."""

    save_id: SaveId
    objects: Mapping[str, StoredObjectRecord]
    """Name of each shard, and of each small file that is not inlined -> its object's record."""
    small_files: Mapping[str, bytes]
    """Name of each inlined file -> its contents: the checkpoint's index, config, code."""
    replaced: Mapping[str, str] = field(default_factory=dict)
    """Name of a small file -> sha256 of the existing plain object, which the save replaces by a copy."""

    @property
    def large_files(self) -> set[str]:
        """Names of the small files that are not inlined, but have their own objects."""
        return {name for name in self.objects if not name.endswith(SAFETENSORS_SUFFIX)}

    def to_json(self) -> bytes:
        """Encode the object to put.

        Raises:
            UnstorableTensorError: It would be larger than what hfshard reads.
        """
        value = {
            "hfshard_save": {
                "format": SAVE_FORMAT,
                "number": self.save_id.number,
                "id": self.save_id.id,
                "objects": {name: {"size": one.size, "etag": one.etag} for name, one in sorted(self.objects.items())},
                "replaced": dict(sorted(self.replaced.items())),
                "small_files": {name: _encoded(raw) for name, raw in sorted(self.small_files.items())},
            }
        }
        raw = json.dumps(value, ensure_ascii=False, indent=1).encode() + b"\n"
        if len(raw) > MAX_SAVE_BYTES:
            raise UnstorableTensorError(
                f"The index of the save would be {len(raw)} bytes, but hfshard reads at most {MAX_SAVE_BYTES}. Split "
                "the model."
            )
        return raw

    @classmethod
    def from_json(cls, raw: bytes, path: str, save_id: SaveId) -> Self:
        """Parse an untrusted index.

        Args:
            raw: The object's bytes.
            path: Its address, for messages.
            save_id: The save in its name.

        Raises:
            DamagedCheckpointError: It is not what hfshard writes, or is in a newer format.
            UnsafePathError: It names a file outside the checkpoint.
        """
        body = parse_json_object(raw, path=path, what="Index", remedy=_REMEDY).get("hfshard_save")
        if isinstance(body, dict) and type(body.get("format")) is int and body["format"] > SAVE_FORMAT:
            raise DamagedCheckpointError(
                f"'{path}' has hfshard's format {body['format']}, but this version reads format {SAVE_FORMAT}. "
                "Run: pip install --upgrade hfshard",
                path=path,
            )
        try:
            if not isinstance(body, dict):
                raise TypeError("it has no save")
            if body["format"] != SAVE_FORMAT or SaveId(body["number"], body["id"]) != save_id:
                raise ValueError("it is the index of another save")
            objects = {
                check_file_name(name, index_path=path, suffix=""): _record(one) for name, one in body["objects"].items()
            }
            small_files = {_inside(name): _decoded(one) for name, one in body["small_files"].items()}
            replaced = {_inside(name): _digest(one) for name, one in body["replaced"].items()}
        except UnsafePathError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, binascii.Error) as error:
            raise DamagedCheckpointError(
                f"Index '{path}' is damaged: it is not what hfshard writes into a store. {_REMEDY}", path=path
            ) from error
        return cls(save_id=save_id, objects=objects, small_files=small_files, replaced=replaced)

    def is_edit(self, name: str, plain: bytes) -> bool:
        """Return whether a plain object is a user's own version of a small file, not a copy that a save has put.

        Copies of JSON files end in a line that encodes the save's id. An object without such a line, or with this
        save's, is a user's if its contents differ; except the one that this save has found and is about to replace.
        """
        is_own = mark_of(plain) in (None, self.save_id.id) and without_commit_marker(plain) != self.small_files.get(
            name
        )
        return is_own and sha256_of(plain) != self.replaced.get(name)


def plain_copy(name: str, raw: bytes, save_id: SaveId) -> bytes:
    """Encode the plain copy of a small file: JSON gets a last line of blanks and tabs, which encodes the save's id."""
    return with_commit_marker(raw, save_id.id) if is_editable(name) else raw


def is_editable(name: str) -> bool:
    """Return whether users may edit a small file's plain copy: it is JSON at the top level, and not an index."""
    return name.endswith(".json") and "/" not in name and INDEX_FILE.fullmatch(name) is None


def plain_index(index: CheckpointIndex, save_id: SaveId) -> bytes:
    """Encode the plain copy of an index, which leads tools that do not know numbers to the objects of a save."""
    weight_map = {name: save_id.object_name(file) for name, file in index.weight_map.items()}
    files = {
        save_id.object_name(file) if file.endswith(SAFETENSORS_SUFFIX) else file: digest
        for file, digest in index.files.items()
    }
    return replace(index, weight_map=weight_map, files=files).to_json()


def save_of_copy(index: CheckpointIndex) -> SaveId | None:
    """Return the save whose index a plain index is a copy of; None if another tool wrote it."""
    names = {*index.weight_map.values(), *(name for name in index.files if name.endswith(SAFETENSORS_SUFFIX))}
    found = set(map(save_in_name, names))
    return found.pop() if len(found) == 1 else None


def _encoded(raw: bytes) -> dict[str, str]:
    try:
        return {"text": raw.decode("utf-8")}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw).decode()}


def _decoded(value: dict[str, str]) -> bytes:
    ((kind, text),) = value.items()
    if kind not in ("text", "base64"):
        raise ValueError(f"an unknown kind of contents: {kind}")
    return text.encode("utf-8") if kind == "text" else base64.b64decode(text, validate=True)


def _record(value: dict[str, Any]) -> StoredObjectRecord:
    size, etag = value["size"], value["etag"]
    if type(size) is not int or size < 0 or not isinstance(etag, str):
        raise TypeError("an object has a size and an ETag")
    return StoredObjectRecord(size, etag)


def _digest(value: str) -> str:
    if not isinstance(value, str):
        raise TypeError("a digest is a text")
    return value


def _inside(name: str) -> str:
    if name.endswith(SAFETENSORS_SUFFIX) or not is_safe_file_name(name):
        raise ValueError(f"not the name of a small file: {name!r}")
    return name
