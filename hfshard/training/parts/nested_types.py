"""What encoding and decoding of nested values agree on: how a type is written, and what stands for an object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

TYPE_KEY: Final = "$type"
"""The key by which an encoded object says that it is not a plain dict."""

FACTORIES: Final[dict[str, Any]] = {"int": int, "float": float, "list": list, "dict": dict, "set": set, "str": str}
"""The default factories of a defaultdict that have a name in a file."""


class NotStored:
    """Stands for a value that was not stored: on a restore, the object that was built keeps its own."""


NOT_STORED: Final = NotStored()


@dataclass(frozen=True, slots=True)
class ObjectState:
    """The attributes of an object, which itself was not stored."""

    class_name: str
    attributes: dict[str, Any]


def key_name(key: Any) -> str:
    """How a key of a dict is written in the name of a tensor."""
    return str(key)[:200]
