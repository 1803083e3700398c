"""Values from strict JSON and named tensors: the way back from what `nested.encode` writes."""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from hfshard.training.parts.nested_types import FACTORIES, NOT_STORED, TYPE_KEY, ObjectState, key_name


def decode_value(nested: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value of strict JSON that `encode` wrote; whatever is wrong with it raises one of Python's own errors."""
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
        return _array(nested, decode_value(nested["bytes"], tensors))
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
    """The names of the tensors that `decode_value` would ask for.

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
    """The entries of an encoded dict whose keys are text, one by one.

    Raises:
        ValueError: It is none.

    Example:
        entries = encoded_entries({"$type": "tensors", "at": "ema", "keys": ["weight"]})
        assert entries == {"weight": {"$type": "tensor", "name": "ema/weight"}}
    """
    if isinstance(nested, dict) and nested.get(TYPE_KEY) == "tensors":
        return {key: {TYPE_KEY: "tensor", "name": f"{nested['at']}/{key_name(key)}"} for key in nested["keys"]}
    if not isinstance(nested, dict) or TYPE_KEY in nested:
        raise ValueError(f"no dict of values by name: {nested!r:.200}")
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


def _array(nested: dict[str, Any], raw: torch.Tensor) -> Any:
    return _numpy_values(raw.numpy().tobytes(), nested["dtype"]).reshape(nested["shape"]).copy()


def _numpy_values(raw: bytes, dtype: str) -> Any:
    import numpy

    kind = numpy.dtype(dtype)
    if kind.hasobject or kind.fields is not None:
        raise ValueError(f"the dtype {dtype!r}")
    if kind.itemsize == 0 or not raw:
        return numpy.zeros(0, kind)
    return numpy.frombuffer(raw, kind)


def _ordered(tensor: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    """The same values in their old memory order: fused optimizers go through memory, not through indexes."""
    if order is None:
        return tensor
    back = [order.index(dimension) for dimension in range(tensor.ndim)]
    return tensor.permute(order).contiguous().permute(back)
