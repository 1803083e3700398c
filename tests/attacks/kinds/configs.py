"""Attacks through config.json: damage, and the key that tells transformers which weights to load."""

from __future__ import annotations

import functools
import os
from typing import Any

from tests.attacks.files import bases, raw
from tests.attacks.registry import Expected, Place, attack, register

S = raw.SECOND
CONFIG = Expected(raw.CONFIG)
GENERATION = "generation_config.json"
TEXT = raw.config().decode()

JSONS: dict[str, str | bytes] = {
    "empty": "",
    "not-json": "model_type = hfshard_attack",
    "null": "null",
    "list": "[]",
    "number": "5",
    "cut": TEXT[:-5],
    "utf-16": TEXT.encode("utf-16"),
    "invalid-utf-8": TEXT.replace("Tiny", "\udcff").encode("utf-8", "surrogateescape"),
    "deep": '{"a":' * 60_000 + "1" + "}" * 60_000,
}
EXPLICIT: dict[str, Any] = {
    "climbs-out": "../outside/model.safetensors",
    "climbs-out-to-an-index": "../outside/model.safetensors.index.json",
    "backslashes": "..\\outside\\model.safetensors",
    "absolute": "/etc/passwd",
    "absolute-with-suffix": "/etc/passwd.safetensors",
    "bin": "pytorch_model.bin",
    "adapter-bin": "adapter_model.bin",
    "pickle": "weights.pkl",
    "url": "https://example.invalid/model.safetensors",
    "nul": "model\0.safetensors",
    "empty": "",
    "directory": ".",
    "missing": "other.safetensors",
    "number": 7,
    "list": ["model.safetensors"],
    "object": {"file": "model.safetensors"},
    "true": True,
}


def _config(text: str | bytes, place: Place) -> Expected:
    place.write(raw.stock_single() | {raw.CONFIG: text.encode() if isinstance(text, str) else text})
    return CONFIG


def _explicit(value: Any, place: Place) -> Expected:
    text = raw.dumps({"model_type": "hfshard_attack", "transformers_weights": value})
    place.write(raw.stock_single() | bases.stock_bin() | {raw.CONFIG: text.encode()})
    (place.outside / raw.BIN).write_bytes(bases.stock_bin(9)[raw.BIN])
    return Expected("other.safetensors" if value == "other.safetensors" else raw.CONFIG)


for _name, _text in JSONS.items():
    register(f"config-{_name}", functools.partial(_config, _text), entries=("pretrained",))
for _name, _value in EXPLICIT.items():
    register(f"config-weights-{_name}", functools.partial(_explicit, _value))


def _generation(text: str | bytes, place: Place) -> Expected:
    place.write(raw.stock_single() | {GENERATION: text.encode() if isinstance(text, str) else text})
    return Expected(GENERATION)


for _name, _text in JSONS.items():
    register(f"config-generation-{_name}", functools.partial(_generation, _text), entries=("generating",))


@attack("config", entries=("generating",))
def generation_fifo(place: Place) -> Expected:
    """Upstream passes over it in silence."""
    os.mkfifo(place.checkpoint / GENERATION)
    place.write(raw.stock_single())
    return Expected(GENERATION)


@attack("config", entries=("generating",))
def generation_sparse(place: Place) -> Expected:
    """Three gigabytes that cost nothing."""
    place.write(raw.stock_single() | {GENERATION: b"{"})
    os.truncate(place.checkpoint / GENERATION, 3 << 30)
    return Expected(GENERATION)


@attack("config")
def weights_absolute_to_outside(place: Place) -> Expected:
    """An absolute name of weights that load well."""
    return _explicit(str(place.outside / raw.SINGLE), place)


def _shape(name: str, shape: tuple[int, ...], place: Place) -> Expected:
    blobs = raw.tensors()
    blobs[name] = raw.floats(shape)
    place.write({raw.CONFIG: raw.config(), raw.SINGLE: raw.shard(blobs)})
    return Expected("", name)


SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "transposed": ("embed.weight", (4, 8)),
    "flat": ("block.weight", (16,)),
    "one-row-more": ("head.weight", (4, 4)),
    "one-row-less": ("head.weight", (2, 4)),
    "scalar": ("head.bias", ()),
    "empty": ("block.bias", (0,)),
    "extra-dimension": ("block.bias", (4, 1)),
}
for _name, (_key, _dims) in SHAPES.items():
    register(f"model-shape-{_name}", functools.partial(_shape, _key, _dims), entries=("module", "pretrained"))


@attack("model", entries=("module", "pretrained"))
def all_keys_missing(place: Place) -> Expected:
    """A whole checkpoint of another model."""
    place.write({raw.CONFIG: raw.config(), raw.SINGLE: raw.shard({"other": raw.floats((2,))})})
    return Expected("", "missing|none of")


@attack("model", entries=("module",))
def one_key_missing(place: Place) -> Expected:
    """A parameter that nothing would fill."""
    blobs = raw.tensors()
    del blobs["head.bias"]
    place.write({raw.CONFIG: raw.config(), raw.SINGLE: raw.shard(blobs)})
    return Expected("", "head.bias")


@attack("model", entries=("module",))
def one_key_too_many(place: Place) -> Expected:
    """A tensor that no parameter takes."""
    place.write({raw.CONFIG: raw.config(), raw.SINGLE: raw.shard({**raw.tensors(), "stranger": raw.floats((2,))})})
    return Expected("", "stranger")
