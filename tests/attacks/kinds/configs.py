"""Attacks through config.json: damage, and the key that tells transformers which weights to load."""

from __future__ import annotations

import functools
from typing import Any

from tests.attacks.files import bases, raw
from tests.attacks.registry import Build, Expected, Place, register, register_all, register_contents

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
register_contents("config", raw.stock_single, raw.CONFIG, JSONS, entries=("pretrained",))
register_contents("config-generation", raw.stock_single, GENERATION, JSONS, entries=("generating",))
GENERATIONS: dict[str, Build] = {
    # Upstream passes over it in silence.
    "fifo": lambda place: place.write(raw.stock_single()).fifo(GENERATION).expects(GENERATION),
    # Three gigabytes that cost nothing.
    "sparse": lambda place: (
        place.write(raw.stock_single() | {GENERATION: b"{"}).stretch(GENERATION, 3 << 30).expects(GENERATION)
    ),
}
register_all("config-generation", GENERATIONS, entries=("generating",))


def _explicit(value: Any, place: Place) -> Expected:
    text = raw.dumps({"model_type": "hfshard_attack", "transformers_weights": value})
    place.write(raw.stock_single() | bases.stock_bin() | {raw.CONFIG: text.encode()})
    (place.outside / raw.BIN).write_bytes(bases.stock_bin(9)[raw.BIN])
    return Expected("other.safetensors" if value == "other.safetensors" else raw.CONFIG)


register_all("config-weights", {name: functools.partial(_explicit, value) for name, value in EXPLICIT.items()})
# An absolute name of weights that load well.
register("config-weights-absolute-to-outside", lambda place: _explicit(str(place.outside / raw.SINGLE), place))


def _single(match: str, blobs: dict[str, raw.Blob]) -> Build:
    """Weights in one file, whole in themselves; the error must say what of the model they do not fit."""
    return lambda place: place.write({raw.CONFIG: raw.config(), raw.SINGLE: raw.shard(blobs)}).expects("", match)


SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "transposed": ("embed.weight", (4, 8)),
    "flat": ("block.weight", (16,)),
    "one-row-more": ("head.weight", (4, 4)),
    "one-row-less": ("head.weight", (2, 4)),
    "scalar": ("head.bias", ()),
    "empty": ("block.bias", (0,)),
    "extra-dimension": ("block.bias", (4, 1)),
}
FITS = {name: _single(key, {**raw.tensors(), key: raw.floats(dims)}) for name, (key, dims) in SHAPES.items()}
register_all("model-shape", FITS, entries=("module", "pretrained"))
# A whole checkpoint of another model.
OTHER = _single("missing|none of", {"other": raw.floats((2,))})
register("model-all-keys-missing", OTHER, entries=("module", "pretrained"))
KEYS = {
    # A parameter that nothing would fill.
    "one-key-missing": _single(
        "head.bias", {name: blob for name, blob in raw.tensors().items() if name != "head.bias"}
    ),
    # A tensor that no parameter takes.
    "one-key-too-many": _single("stranger", {**raw.tensors(), "stranger": raw.floats((2,))}),
}
register_all("model", KEYS, entries=("module",))
