"""What the processes of a stress do: save and load until they are told to stop, and log what came of it."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.errors import CommitUnfinishedError, HfshardError, RemoteChangedError
from hfshard.format.stored_save import SaveId
from hfshard.places.source import CheckpointSource, use_checkpoint
from hfshard.saving.pipeline import save_request
from hfshard.saving.save_request import SaveOptions, SaveRequest
from tests.sweeps.store_places import StorePlace, lead_to

FROZEN = 7.0
"""In a shard that no save changes: it is copied on the server."""
_VALUES = 1_000_000
"""Of each writer, above those of the writer before it."""


def request_of(value: int) -> SaveRequest:
    """Four shards: three of this value, one that is always the same; and a config of this value."""
    tensors = {f"layer.{at}": torch.full((4,), float(value)) for at in range(3)}
    tensors["frozen"] = torch.full((4,), FROZEN)
    config = json.dumps({"value": value}).encode() + b"\n"
    return SaveRequest(tensors=tensors, options=SaveOptions(max_shard_size=1, progress=False), config=config)


def write(place: StorePlace, url: str, number: int, folder: Path, settings: Mapping[str, str], most: int) -> None:
    """Save one value after another, until there is a file `stop`, or so many."""
    _begin(place, url, settings)
    value = number * _VALUES
    with (folder / f"writer-{number}").open("w", encoding="utf-8") as log:
        while most and not (folder / "stop").exists():
            most -= 1
            value += 1
            began = time.monotonic()
            with _noting_ids() as ids:
                outcome, words = _save(place, value)
            line = {"value": value, "outcome": outcome, "began": began, "ended": time.monotonic(), "words": words}
            log.write(json.dumps({**line, "id": [ids[-1].number, ids[-1].id] if ids else None}) + "\n")


def read(place: StorePlace, url: str, number: int, folder: Path, settings: Mapping[str, str]) -> None:
    """Load until there is a file `stop`."""
    _begin(place, url, settings)
    with (folder / f"reader-{number}").open("w", encoding="utf-8") as log:
        while not (folder / "stop").exists():
            began = time.monotonic()
            found: dict[str, Any]
            try:
                found = {"value": _load(place)}
            except Exception as error:
                found = {"error": "".join(traceback.format_exception(error))}
            log.write(json.dumps({**found, "began": began, "ended": time.monotonic()}) + "\n")


def _begin(place: StorePlace, url: str, settings: Mapping[str, str]) -> None:
    os.environ.update(settings)
    lead_to(url, place.scheme)
    torch.set_num_threads(1)


def _save(place: StorePlace, value: int) -> tuple[str, str]:
    try:
        save_request(request_of(value), place.address)
    except RemoteChangedError:
        return "overtaken", ""
    except CommitUnfinishedError as error:
        return "untold" if "It is unknown whether" in str(error) else "unfinished", str(error)
    except HfshardError as error:
        return "failed", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "unclear", f"{type(error).__name__}: {error}"
    return "saved", ""


def _load(place: StorePlace) -> int | str:
    """The one value of a checkpoint, or a mixture in words."""
    source = CheckpointSource(place.address)
    local = source.find_local()
    assert local is not None and local.folder is not None
    folder = local.folder

    def use(checkpoint: OpenCheckpoint) -> tuple[dict[str, float], Any]:
        tensors = checkpoint.read(checkpoint.keys)
        values = {name: float(tensor[0]) for name, tensor in tensors.items()}
        return values, json.loads(folder.read_small("config.json", 1000))["value"]

    values, config = use_checkpoint(source, LoadOptions(verify="full", progress=False), use, local)
    whole = {"layer.0": float(config), "layer.1": float(config), "layer.2": float(config), "frozen": FROZEN}
    return int(config) if values == whole else f"{values} beside {config}"


@contextmanager
def _noting_ids() -> Iterator[list[SaveId]]:
    """Note number and id of each save that begins."""
    noted: list[SaveId] = []
    after = SaveId.after

    def noting(*args: Any, **keywords: Any) -> SaveId:
        noted.append(after(*args, **keywords))
        return noted[-1]

    with patch.object(SaveId, "after", noting):
        yield noted
