"""What the described objects of a pickle mean that are only data: containers, numbers, numpy's arrays, paths."""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from typing import Any, Final

import torch

from hfshard.pickles.pickle_opcodes import Described, Named, NameHashes, checked_key

OTHER: Final = object()
"""What is returned for an object that is more than data."""

_SIZED: Final = (str, bytes, bytearray, list, tuple, dict, set, frozenset)
_BYTES: Final = ("_codecs.encode",)
"""What protocol 2 makes the bytes of arrays from."""

_NUMPY_DTYPE: Final = re.compile(r"[<>|=]?[biufc]\d{1,2}")
"""numpy's numbers. Other dtypes hold objects, or fields that may lie outside of the bytes."""

_ARRAY: Final = re.compile(r"numpy\.(_core|core)\.multiarray\._reconstruct")
_SCALAR: Final = re.compile(r"numpy\.(_core|core)\.multiarray\.scalar")
_PATH: Final = re.compile(r"pathlib\.(_local\.)?(Pure)?(Posix|Windows)?Path")
_NAMESPACES: Final = ("argparse.Namespace", "types.SimpleNamespace")
_DICTS: Final = ("collections.defaultdict", "builtins.dict")
_LISTS: Final = ("collections.deque", "builtins.list")


def size_of(value: Named | Described) -> int:
    """How much is copied of the parts of an object that is only data: entries, bytes, or characters."""
    if isinstance(value, Named):
        return 0
    parts = [value.arguments, value.state, value.items, value.pairs]
    inner = [one for part in parts[:2] if isinstance(part, tuple | list) for one in part]
    sizes = [len(one) for one in [*parts, *inner] if isinstance(one, _SIZED)]
    return sum(sizes) + sum(size_of(one) for one in inner if isinstance(one, Described) and one.name in _BYTES)


def meaning(value: Named | Described) -> Any:
    """Return what an object is, with the parts of a container still as they were described; `OTHER` if it is more.

    numpy's arrays and numbers become themselves, namespaces of arguments and defaultdicts dicts, deques lists, paths
    text.

    Raises:
        TypeError, ValueError, LookupError, OverflowError, AttributeError: It is not saved like this.
    """
    if isinstance(value, Named):
        dtype = getattr(torch, value.name.removeprefix("torch."), None) if value.name.startswith("torch.") else None
        return dtype if isinstance(dtype, torch.dtype) else OTHER
    name = value.name
    if name in ("collections.OrderedDict", "collections.Counter"):
        first = value.arguments[0] if value.arguments else {}
        pairs = [*(first.items() if isinstance(first, dict) else first), *value.pairs]
        keys = NameHashes()
        pairs = [(checked_key(key, keys), one) for key, one in pairs]
        return OrderedDict(pairs) if name.endswith("OrderedDict") else Counter(dict(pairs))
    if name in _DICTS:
        return dict(value.pairs)
    if name in _LISTS:
        first = value.arguments[0] if value.arguments else []
        return [*first, *value.items]
    if name in _NAMESPACES:
        return dict(value.state or {}) | dict(value.arguments[0] if value.arguments else {})
    if _PATH.fullmatch(name):
        return "/".join(value.arguments).replace("//", "/", 1)
    return _number(value)


def _number(value: Described) -> Any:
    name = value.name
    arguments = value.arguments
    if _ARRAY.fullmatch(name):
        _version, shape, dtype, is_fortran, raw = value.state
        if not isinstance(shape, tuple) or not all(type(size) is int for size in shape):
            raise TypeError("a shape of more than numbers")
        flat = _from_bytes(raw, _numpy_dtype(dtype), math.prod(shape))
        return flat.reshape(shape, order="F" if is_fortran else "C")
    if _SCALAR.fullmatch(name):
        return _from_bytes(arguments[1], _numpy_dtype(arguments[0]), 1)[0]
    if name == "numpy.dtype":
        return _numpy_dtype(value)
    if name == "_codecs.encode":
        return _bytes_of(value)
    if name == "torch.Size":
        return torch.Size(arguments[0])
    if name == "torch.device":
        return torch.device(*arguments)
    if name == "builtins.complex":
        return complex(*arguments)
    if name in ("builtins.set", "builtins.frozenset"):
        keys = NameHashes()
        items = [checked_key(item, keys) for item in arguments[0]]
        return set(items) if name == "builtins.set" else frozenset(items)
    return OTHER


def _bytes_of(value: Any) -> bytes:
    """Bytes, as they are or as protocol 2 writes them: text of which each character is a byte."""
    if isinstance(value, bytes):
        return value
    text, encoding = value.arguments
    if value.name != "_codecs.encode" or encoding not in ("latin1", "latin-1") or not isinstance(text, str):
        raise TypeError(value.name)
    return text.encode("latin-1")


def _numpy_dtype(value: Any) -> Any:
    """A numpy dtype of numbers.

    Raises:
        TypeError: It is another one.
    """
    import numpy

    if not isinstance(value, Described) or value.name != "numpy.dtype":
        raise TypeError("no dtype")
    code = value.arguments[0]
    order = value.state[1] if value.state is not None else "="
    if not (isinstance(code, str) and isinstance(order, str) and _NUMPY_DTYPE.fullmatch(order + code)):
        raise TypeError("a dtype of more than numbers")
    return numpy.dtype(order + code)


def _from_bytes(raw: Any, dtype: Any, count: int) -> Any:
    import numpy

    data = _bytes_of(raw)
    if len(data) != count * dtype.itemsize:
        raise ValueError("other bytes than elements")
    return numpy.frombuffer(data, dtype=dtype).copy()
