"""Small files that an index in a store brings along, until they are in the place of those that they replace.

One put of an index gives all readers its weights, and the small files of the same save follow it one by one. So the
index holds what they are going to be, and which objects they replace: a reader that finds one of these still there
takes what the index says in its place. Whatever else it finds was put later, by that save or by hand, and counts. Once
all are in place, the save puts the index once more, bringing nothing: what is deleted or put back then counts too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hfshard.constants import BIN_SUFFIX, CONFIG_NAME, SAFETENSORS_SUFFIX
from hfshard.errors import DamagedCheckpointError
from hfshard.storage.format.names import INDEX_FILE, stays_inside

_KEY: Final = "hfshard_brings"
"""The key beside `weight_map`: name -> {"text": what it is going to be, "replaces": an ETag, or null for no object}."""

_MOST_BYTES: Final = 1 << 20
"""Of one file that is brought along: code and generation configs have a few thousand."""


@dataclass(frozen=True, slots=True)
class BroughtFile:
    """What a small file is going to be."""

    raw: bytes
    replaces: str | None
    """The ETag of the object that it replaces; None: there is none."""


def brings_of(files: Mapping[str, BroughtFile]) -> dict[str, Any]:
    """What is put into the object that an index is; empty where it brings nothing, such as what is no text."""
    brings = {}
    for name, file in files.items():
        text = file.raw.decode("utf-8", errors="replace")
        if len(file.raw) <= _MOST_BYTES and text.encode() == file.raw:
            brings[name] = {"text": text, "replaces": file.replaces}
    return {_KEY: brings} if brings else {}


def brought_by(raw: bytes, path: str) -> dict[str, BroughtFile]:
    """Read what the bytes of an index bring along.

    Args:
        raw: An index that `CheckpointIndex.from_json` has taken.
        path: Its place, for messages.

    Raises:
        DamagedCheckpointError: hfshard did not write it like this.
    """
    if _KEY.encode() not in raw:
        return {}
    brings = json.loads(raw).get(_KEY, {})
    try:
        found = {name: BroughtFile(one["text"].encode(), one["replaces"]) for name, one in brings.items()}
    except (AttributeError, KeyError, TypeError, UnicodeEncodeError) as error:
        raise _damaged(path) from error
    if not all(map(_may_come, found)):
        raise _damaged(path)
    return found


def _damaged(path: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"Index '{path}' is damaged: its '{_KEY}' is not what hfshard writes. Save the checkpoint again.", path=path
    )


def _may_come(name: str) -> bool:
    """Whether a save puts a file of this name after its index, and one that stays inside the checkpoint's place."""
    is_of_weights = name.endswith((SAFETENSORS_SUFFIX, BIN_SUFFIX)) or INDEX_FILE.fullmatch(name) is not None
    return stays_inside(name) and name != CONFIG_NAME and not is_of_weights


def does_bring(value: Mapping[str, Any]) -> bool:
    """Whether the object that an index is brings something, be it damaged."""
    return _KEY in value


def without_brings(value: Mapping[str, Any]) -> dict[str, Any]:
    """The object that an index is, bringing nothing."""
    return {key: item for key, item in value.items() if key != _KEY}
