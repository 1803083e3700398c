"""Nested Python values as strict JSON and named tensors, and back; keeps the types that JSON alone would lose."""

from __future__ import annotations

import argparse
import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from hfshard.errors import DamagedCheckpointError, UnstorableTensorError
from hfshard.pickles.plain_values import NOT_STORED, NotStored
from hfshard.training.state.step import RestoredStep

_MAX_DEPTH: Final = 40
"""The most levels of nested values: real states have ten, and a value with more contains itself."""

_PLAIN_INT_BITS: Final = 64
"""Longer integers are written in hex, which Python reads at any length."""

OnObject = Callable[[Any], "NotStored | ObjectState | None"]
"""Returns what to store for a value of any other type; None rejects it."""


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor], on_object: OnObject = lambda value: None) -> Any:
    """Convert a value to JSON, and set its tensors aside.

        tensors = {}
        nested = encode({"milestones": Counter({3: 1}), "weight": torch.ones(2)}, "state", tensors)
        assert list(tensors) == ["state/weight"]

    Args:
        value: None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, range, slice, Counter,
            OrderedDict, defaultdict, deque, tensors, torch's Size, dtype and device, numpy arrays and scalars, in any
            nesting. It is not changed.
        path: The prefix of the names of its tensors; it also appears in messages.
        tensors: Receives name -> tensor; the tensors themselves, not copies.
        on_object: Called for every value of another type.

    Returns:
        A value that `json.dumps` accepts.

    Raises:
        UnstorableTensorError: It contains a value that cannot be stored; the message says where.
    """
    return _Encoder(tensors, on_object).encode(value, path, 0)


def decode(nested: Any, tensors: Mapping[str, torch.Tensor], file: str) -> Any:
    """Convert what `encode` returned back to the value.

        assert decode(nested, tensors, "training_state.json")["milestones"] == Counter({3: 1})

    Args:
        nested: What `encode` returned, as it was read from a file: not trusted.
        tensors: Name -> tensor.
        file: The file's name, for messages.

    Raises:
        DamagedCheckpointError: It is not what `encode` writes, or a tensor is missing.
    """
    with as_damage_of(file):
        return decode_value(nested, tensors)


@contextmanager
def as_damage_of(file: str) -> Iterator[None]:
    """Raise what reading an encoded value raises as a DamagedCheckpointError of the file that it is from."""
    try:
        yield
    except (LookupError, ValueError, TypeError, OverflowError, AttributeError, RuntimeError) as error:
        raise DamagedCheckpointError(
            f"'{file}' is damaged: a value in it is not what hfshard writes ({error!r:.200}). "
            "Restore another checkpoint, or download it again.",
            path=file,
        ) from error


class _Encoder:
    def __init__(self, tensors: dict[str, torch.Tensor], on_object: OnObject) -> None:
        self.tensors, self.on_object = tensors, on_object

    def encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise _refused(value, path, f"contains itself, or is nested deeper than {_MAX_DEPTH} levels")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path)
        for types, method in _METHODS:
            if type(value) in types:  # a subclass (a named tuple, an enum, numpy's float64) is more than its base
                return method(self, value, path, depth)
        return self._other(value, path, depth)

    def items(self, values: Iterable[Any], path: str, depth: int) -> list[Any]:
        return [self.encode(value, f"{path}/{number}", depth + 1) for number, value in enumerate(values)]

    def pairs(self, value: Mapping[Any, Any], path: str, depth: int) -> list[Any]:
        return [
            [self.encode(key, f"{path}/key", depth + 2), self.encode(item, f"{path}/{key_name(key)}", depth + 2)]
            for key, item in value.items()
        ]

    def number(self, value: int | float, path: str, depth: int) -> Any:
        if isinstance(value, int):
            return value if value.bit_length() <= _PLAIN_INT_BITS else _typed("int", hex=hex(value))
        return value if math.isfinite(value) else _typed("float", value=repr(value))

    def step(self, value: RestoredStep, path: str, depth: int) -> int:
        return int(value)  # a run may record where it was resumed

    def complex(self, value: complex, path: str, depth: int) -> Any:
        parts = (value.real, value.imag)
        return _typed("complex", items=[self.number(part, path, depth) for part in parts])

    def text(self, value: str, path: str, depth: int) -> Any:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise _refused(value, path, "is text that cannot be written as UTF-8") from error
        return value

    def raw(self, value: bytes | bytearray, path: str, depth: int) -> Any:
        return _typed(type(value).__name__, base64=base64.b64encode(value).decode())

    def dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        kind = type(value).__name__
        if kind == "dict" and TYPE_KEY not in value and all(type(key) is str for key in value):
            names = {key: f"{path}/{key_name(key)}" for key in value}
            tensors = {names[key]: item for key, item in value.items() if isinstance(item, torch.Tensor)}
            is_plain = all(_order(tensor) is None for tensor in tensors.values())
            if value and is_plain and len(tensors) == len(value) and self.tensors.keys().isdisjoint(tensors):
                # One entry for all: an optimizer may have a million parameters, with such a dict for each.
                self.tensors |= {name: tensor.detach() for name, tensor in tensors.items()}
                return _typed("tensors", at=path, keys=[self.text(key, path, depth) for key in value])
            return {
                self.text(key, path, depth): self.encode(item, f"{path}/{key_name(key)}", depth + 1)
                for key, item in value.items()
            }
        more = {}
        if isinstance(value, defaultdict):
            factory = value.default_factory
            if factory is not None and FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
                raise _refused(value, path, f"has the default factory {factory!r}, which cannot be stored")
            more = {"factory": None if factory is None else factory.__name__}
        return _typed(kind, items=self.pairs(value, path, depth), **more)

    def sequence(self, value: list[Any] | tuple[Any, ...], path: str, depth: int) -> Any:
        items = self.items(value, path, depth)
        return items if type(value) is list else _typed(type(value).__name__, items=items)

    def deque(self, value: deque[Any], path: str, depth: int) -> Any:
        return _typed("deque", items=self.items(value, path, depth), maxlen=value.maxlen)

    def set(self, value: set[Any] | frozenset[Any], path: str, depth: int) -> Any:
        # Sorted: each process orders a set of strings differently, and equal states must give equal files.
        members = sorted(value, key=lambda member: (type(member).__name__, repr(member)))
        return _typed(type(value).__name__, items=self.items(members, path, depth))

    def span(self, value: range | slice, path: str, depth: int) -> Any:
        return _typed(type(value).__name__, items=self.items((value.start, value.stop, value.step), path, depth))

    def tensor(self, value: torch.Tensor, path: str) -> Any:
        name, number = path, 2
        while name in self.tensors:  # keys such as 1 and "1"
            name, number = f"{path}~{number}", number + 1
        self.tensors[name] = value.detach()
        order = _order(value)
        return _typed("tensor", name=name) if order is None else _typed("tensor", name=name, order=order)

    def torch_name(self, value: torch.dtype | torch.device, path: str, depth: int) -> Any:
        return _typed(type(value).__name__, value=str(value).removeprefix("torch."))

    def array(self, value: Any, path: str) -> Any:
        flat = np.frombuffer(value.tobytes(), dtype=np.uint8).copy()
        encoded_bytes = self.tensor(torch.from_numpy(flat), path)
        return _typed("ndarray", dtype=value.dtype.str, shape=list(value.shape), bytes=encoded_bytes)

    def _other(self, value: Any, path: str, depth: int) -> Any:
        is_array = type(value) is np.ndarray  # a masked one is more than its values
        if is_array or isinstance(value, np.generic):
            if value.dtype.hasobject or value.dtype.fields is not None:
                raise _refused(value, path, f"has the dtype {value.dtype}")
            if is_array:
                return self.array(value, path)
            return _typed("numpy", dtype=value.dtype.str, base64=base64.b64encode(value.tobytes()).decode())
        stand_in = self.on_object(value)
        if isinstance(stand_in, NotStored):
            return _typed("not_stored")
        if isinstance(stand_in, ObjectState):
            state = {key: self.encode(item, f"{path}/{key}", depth + 2) for key, item in stand_in.attributes.items()}
            return _typed("object", class_name=stand_in.class_name, state=state)
        raise _refused(value, path, "cannot be stored without pickle")


_METHODS: Final[list[tuple[tuple[type, ...], Any]]] = [
    ((torch.Size,), _Encoder.sequence),
    ((int, float), _Encoder.number),
    ((RestoredStep,), _Encoder.step),
    ((complex,), _Encoder.complex),
    ((str,), _Encoder.text),
    ((bytes, bytearray), _Encoder.raw),
    ((dict, OrderedDict, Counter, defaultdict), _Encoder.dict),
    ((list, tuple), _Encoder.sequence),
    ((deque,), _Encoder.deque),
    ((set, frozenset), _Encoder.set),
    ((range, slice), _Encoder.span),
    ((torch.dtype, torch.device), _Encoder.torch_name),
]


def _typed(kind: str, **fields: Any) -> dict[str, Any]:
    return {TYPE_KEY: kind, **fields}


def _refused(value: Any, path: str, why: str) -> UnstorableTensorError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    todo = "Make its owner's state_dict return tensors, numbers, text, lists and dicts instead, and make its "
    todo += "load_state_dict build the object from them."
    if isinstance(value, argparse.Namespace):
        todo = "Pass its dict: vars(args)."
    elif path.partition("/")[0] == "extra":
        todo = "Pass tensors, numbers, text, lists and dicts, and build the object from them after a restore."
    return UnstorableTensorError(
        f"'{path}' is a {kind}: it {why}. {todo}",
        fqn=path,
        actual=kind,
    )


def _order(tensor: torch.Tensor) -> list[int] | None:
    """Return the dimensions in their order in memory, if that is another order (channels_last)."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dimension: -strides[dimension])
    return order if tensor.permute(order).is_contiguous() else None


# Shared definitions of encoding and decoding: the key of a type, and the replacements for objects.


TYPE_KEY: Final = "$type"
"""The key that marks an encoded object as other than a plain dict."""

FACTORIES: Final[dict[str, Any]] = {"int": int, "float": float, "list": list, "dict": dict, "set": set, "str": str}
"""The default factories of a defaultdict that have a name in a file."""


@dataclass(frozen=True, slots=True)
class ObjectState:
    """The attributes of an object, which itself was not stored."""

    class_name: str
    attributes: dict[str, Any]


def key_name(key: Any) -> str:
    """Return the form of a dict's key in the name of a tensor."""
    return str(key)[:200]


# Decoding of what `nested.encode` writes: values from strict JSON and named tensors.


def decode_value(nested: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Decode strict JSON that `encode` wrote; anything wrong with it raises one of Python's own errors."""
    if isinstance(nested, list):
        return [decode_value(item, tensors) for item in nested]
    if not isinstance(nested, dict):
        return nested
    if TYPE_KEY not in nested:
        return {key: decode_value(item, tensors) for key, item in nested.items()}
    kind = nested[TYPE_KEY]
    if kind == "tensor":
        return _ordered(tensors[nested["name"]], nested.get("order"))
    if kind == "tensors":
        return {key: tensors[f"{nested['at']}/{key_name(key)}"] for key in nested["keys"]}
    if kind in _SCALARS:
        return _SCALARS[kind](nested)
    if kind == "ndarray":
        raw = decode_value(nested["bytes"], tensors).numpy().tobytes()
        return _numpy_values(raw, nested["dtype"]).reshape(nested["shape"]).copy()
    if kind == "object":
        return ObjectState(
            nested["class_name"], {key: decode_value(item, tensors) for key, item in nested["state"].items()}
        )
    items = [decode_value(item, tensors) for item in nested["items"]]
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](items)
    if kind == "deque":
        return deque(items, nested["maxlen"])
    if kind == "defaultdict":
        return defaultdict(None if nested["factory"] is None else FACTORIES[nested["factory"]], items)
    raise ValueError(f"the type {kind!r}")


def tensor_names(nested: Any) -> Iterator[str]:
    """Yield the names of the tensors that `decode_value` would request.

    Example:
        assert list(tensor_names([{"$type": "tensor", "name": "ema/weight"}])) == ["ema/weight"]
    """
    if isinstance(nested, list):
        for item in nested:
            yield from tensor_names(item)
    elif isinstance(nested, dict):
        kind = nested.get(TYPE_KEY)
        if kind == "tensor":
            yield nested["name"]
        elif kind == "tensors":
            yield from (f"{nested['at']}/{key_name(key)}" for key in nested["keys"])
        else:
            for item in nested.values():
                yield from tensor_names(item)


def encoded_entries(nested: Any) -> dict[str, Any]:
    """Return the entries of an encoded dict whose keys are text, one by one.

    Raises:
        ValueError: It is not such a dict.

    Example:
        entries = encoded_entries({"$type": "tensors", "at": "ema", "keys": ["weight"]})
        assert entries == {"weight": {"$type": "tensor", "name": "ema/weight"}}
    """
    if isinstance(nested, dict) and nested.get(TYPE_KEY) == "tensors":
        return {key: {TYPE_KEY: "tensor", "name": f"{nested['at']}/{key_name(key)}"} for key in nested["keys"]}
    if not isinstance(nested, dict) or TYPE_KEY in nested:
        raise ValueError(f"not a dict of values by name: {nested!r:.200}")
    return nested


_SCALARS: Final[dict[str, Callable[[dict[str, Any]], Any]]] = {
    "not_stored": lambda nested: NOT_STORED,
    "int": lambda nested: int(nested["hex"], 16),
    "float": lambda nested: {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[nested["value"]],
    "bytes": lambda nested: base64.b64decode(nested["base64"], validate=True),
    "bytearray": lambda nested: bytearray(base64.b64decode(nested["base64"], validate=True)),
    "dtype": lambda nested: _dtype(nested["value"]),
    "device": lambda nested: torch.device(nested["value"]),
    "numpy": lambda nested: _numpy_values(base64.b64decode(nested["base64"], validate=True), nested["dtype"])[0],
}

_CONTAINERS: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "Size": torch.Size,
    "range": lambda items: range(*items),
    "slice": lambda items: slice(*items),
    "complex": lambda items: complex(*items),
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda items: Counter(dict(items)),
}


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the dtype {name!r}")
    return dtype


def _numpy_values(raw: bytes, dtype: str) -> Any:
    kind = np.dtype(dtype)
    if kind.hasobject or kind.fields is not None:
        raise ValueError(f"the dtype {dtype!r}")
    if kind.itemsize == 0 or not raw:
        return np.zeros(0, kind)
    return np.frombuffer(raw, kind)


def _ordered(tensor: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    """Restore the memory order of a tensor: fused optimizers go through memory, not through indexes."""
    if order is None:
        return tensor
    back = [order.index(dimension) for dimension in range(tensor.ndim)]
    return tensor.permute(order).contiguous().permute(back)


# Search in nested values.


def entries_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the entries of a value with their keys or positions; none if it is not a container."""
    if isinstance(value, ObjectState):
        value = value.attributes
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple | deque):
        yield from enumerate(value)


def find_in(value: Any, is_wanted: Callable[[Any], bool], at: str = "") -> str | None:
    """Find the first of the nested values that matches, and return its place.

    Example:
        assert find_in({"d": [1, "x"]}, lambda one: isinstance(one, str)) == "d.1"
    """
    if is_wanted(value):
        return at
    for name, item in entries_of(value):
        place = find_in(item, is_wanted, f"{at}.{name}" if at else str(name))
        if place is not None:
            return place
    return None
