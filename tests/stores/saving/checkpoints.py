"""Checkpoints whose weights and config are one number, and what readers find of them."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any

import torch
from safetensors.torch import load
from safetensors.torch import save as to_safetensors

from hfshard.saving.options import SaveOptions
from hfshard.saving.request import SaveRequest
from hfshard.saving.to_store import save_into
from hfshard.saving.writing import OwnShardWriter
from tests.stores.saving.memory_store import MemoryStore

INDEX = "model.safetensors.index.json"
PICKLES = "pytorch_model.bin"


def config(value: int) -> bytes:
    return b'{\n  "value": %d\n}\n' % value


def weights(value: float) -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.full((4,), float(value)) for i in range(3)}


def request(value: int, config_value: int | None, **more: Any) -> SaveRequest:
    options = SaveOptions(max_shard_size=more.pop("limit", 1), variant=more.pop("variant", None), progress=False)
    files = {"generation_config.json": config(value)} if more.pop("with_files", False) else {}
    raw = None if config_value is None else config(config_value)
    return SaveRequest(tensors=weights(value), options=options, config=raw, model_files=files, **more)


def single(value: float) -> dict[str, bytes]:
    return {"model.safetensors": to_safetensors(weights(value), metadata={"format": "pt"})}


def pickles(value: float) -> dict[str, bytes]:
    raw = BytesIO()
    torch.save(weights(value), raw)
    return {PICKLES: raw.getvalue()}


def stock_shards(value: float) -> dict[str, bytes]:
    files = {name: f"model-0000{at}-of-00003.safetensors" for at, name in enumerate(weights(value), 1)}
    shards = {
        files[name]: to_safetensors({name: tensor}, metadata={"format": "pt"})
        for name, tensor in weights(value).items()
    }
    return shards | {INDEX: json.dumps({"metadata": {"total_size": 48}, "weight_map": files}).encode()}


def saved(*requests: SaveRequest) -> dict[str, bytes]:
    store = MemoryStore()
    for one in requests:
        save_into(store, one, lambda: None, OwnShardWriter())
    return store.objects


def found_in(objects: dict[str, bytes]) -> tuple[Any, Any]:
    """What transformers (config, weights) and huggingface_hub (weights) load from a synced copy.

    Where there is no config, transformers takes the class's own.
    """
    values = json.loads(objects.get("config.json", b"{}"))
    override = values.get("transformers_weights")
    indexed = _by_index(objects, INDEX)
    if override is not None:
        weights = _by_index(objects, override)
    elif "model.safetensors" in objects:
        weights = _values(objects["model.safetensors"])
    else:
        weights = indexed if INDEX in objects else {1.0} if PICKLES in objects else None
    files = [name for name in objects if name.endswith(".safetensors")]
    hub = indexed
    if INDEX not in objects and len(files) == 1 and "placeholder" not in files[0]:
        hub = _values(objects[files[0]])
    return None if weights is None else (values.get("value"), weights), hub


def _by_index(objects: dict[str, bytes], index: str) -> set[float] | None:
    weight_map = json.loads(objects[index])["weight_map"] if index in objects else {}
    if not weight_map or not objects.keys() >= set(weight_map.values()) or "placeholder" in str(weight_map):
        return None
    return {float(load(objects[file])[name][0]) for name, file in weight_map.items()}


def _values(raw: bytes) -> set[float]:
    return {float(tensor[0]) for tensor in load(raw).values()}


def settled(objects: dict[str, bytes]) -> set[str]:
    """The names in a store after a save that nothing disturbed: those of its index, and the small files."""
    return {*json.loads(objects[INDEX])["weight_map"].values(), INDEX, "config.json"}
