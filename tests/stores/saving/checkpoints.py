"""Checkpoints whose weights and config are one number, and what readers find of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from typing import Any

import torch
from safetensors.torch import load
from safetensors.torch import save as to_safetensors

from hfshard.checkpoint.open_checkpoint import open_checkpoint
from hfshard.checkpoint.ranged_folder import StoreFolder
from hfshard.commit.store_commit import store_transaction
from hfshard.commit.transaction import OwnShardWriter
from hfshard.errors import CheckpointNotFoundError
from hfshard.format.index import CheckpointIndex
from hfshard.saving.pipeline import Save
from hfshard.saving.save_request import SaveOptions, SaveRequest
from hfshard.stores.store import Store
from tests.stores.saving.memory_store import MemoryStore

INDEX = "model.safetensors.index.json"
PICKLES = "pytorch_model.bin"


def save_into(store: Store, request: SaveRequest, check: Callable[[], None] = lambda: None) -> CheckpointIndex:
    """Save into an open store as `save_request` does into an address."""
    save = Save({"model": request})
    with store_transaction(store, save.new, OwnShardWriter()) as target:
        save.into(target, check)
    return save.index()


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
        save_into(store, one)
    return store.objects


def loaded(objects: dict[str, bytes]) -> tuple[Any, Any] | None:
    """What hfshard finds in a store: config and weights; None where there is no checkpoint."""
    store = MemoryStore(objects)
    folder = StoreFolder(store, str(store.address))
    try:
        with open_checkpoint(folder) as checkpoint:
            found = {float(tensor[0]) for tensor in checkpoint.read(checkpoint.keys).values()}
            raw = folder.read_small("config.json", 1000) if folder.has("config.json") else b"{}"
    except CheckpointNotFoundError:
        return None
    return json.loads(raw).get("value"), found


def found_in(objects: dict[str, bytes]) -> tuple[Any, Any]:
    """What transformers (config, weights) and huggingface_hub (weights) load from a synced copy.

    Where there is no config, transformers takes the class's own; where there is a lone file and no index,
    huggingface_hub takes that: "part", if it is one of several shards.
    """
    values = json.loads(objects.get("config.json", b"{}"))
    indexed = _by_index(objects, INDEX)
    if "model.safetensors" in objects:
        weights: set[float] | None = _values(objects["model.safetensors"])
    else:
        weights = indexed if INDEX in objects else {1.0} if PICKLES in objects else None
    files = [name for name in objects if name.endswith(".safetensors")]
    hub: Any = indexed
    if INDEX not in objects and len(files) == 1:
        hub = _values(objects[files[0]]) if "-00001-of-00001" in files[0] or "-of-" not in files[0] else "part"
    return None if weights is None else (values.get("value"), weights), hub


def _by_index(objects: dict[str, bytes], index: str) -> set[float] | None:
    weight_map = json.loads(objects[index])["weight_map"] if index in objects else {}
    if not weight_map or not objects.keys() >= set(weight_map.values()):
        return None
    return {float(load(objects[file])[name][0]) for name, file in weight_map.items()}


def _values(raw: bytes) -> set[float]:
    return {float(tensor[0]) for tensor in load(raw).values()}


def settled(objects: dict[str, bytes]) -> set[str]:
    """The names in a store after a save that nothing disturbed: those of its index, its plain copy, and the config."""
    shards = set(json.loads(objects[INDEX])["weight_map"].values())
    (save,) = {name.removesuffix(".safetensors").split("-", 4)[4] for name in shards}
    return {*shards, INDEX, f"model.safetensors.index-{save}.json", "config.json"}
