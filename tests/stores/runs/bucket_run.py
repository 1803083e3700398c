"""A run in a bucket, looked at without hfshard; and the tiny state that is saved there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hfshard.training import CheckpointManager, TrainingState
from tests.servers.stores.buckets import Bucket

_MANIFEST = re.compile(r"(?P<folder>checkpoint-\d{8})/checkpoint-(?P<number>\d{8})-(?P<id>[0-9a-f]{16})\.json")


@dataclass(frozen=True)
class BucketRun:
    """What lies below one prefix of a bucket."""

    bucket: Bucket
    root: str
    """What a manager is given."""

    @property
    def prefix(self) -> str:
        """What the keys of its objects begin with, without the last slash."""
        return self.root.partition(f"/{self.bucket.name}/")[2]

    def names(self, folder: str = "") -> list[str]:
        """Name all objects, as deep as they lie."""
        names = [key.removeprefix(f"{self.prefix}/") for key in self.bucket.sizes(f"{self.prefix}/")]
        return sorted(name for name in names if name.startswith(folder))

    def folders(self) -> list[str]:
        """Name the folders of checkpoints."""
        return sorted({name.partition("/")[0] for name in self.names("checkpoint-")})

    def read(self, name: str) -> bytes:
        """The bytes of an object."""
        return self.bucket.read(f"{self.prefix}/{name}")

    def put(self, name: str, raw: bytes) -> None:
        """Put an object, as another tool would."""
        self.bucket.put(f"{self.prefix}/{name}", raw)

    def delete(self, name: str) -> None:
        """Delete an object."""
        self.bucket.delete(f"{self.prefix}/{name}")

    def saves(self) -> dict[str, tuple[int, str]]:
        """The newest save of each checkpoint: name of its folder -> number and id."""
        found: dict[str, tuple[int, str]] = {}
        for name in self.names():
            if match := _MANIFEST.fullmatch(name):
                one = int(match["number"]), match["id"]
                found[match["folder"]] = max(one, found.get(match["folder"], one))
        return found

    def objects(self, folder: str) -> list[str]:
        """Name the shards of the newest save of a checkpoint."""
        number, own = self.saves()[folder]
        tail = f"-{number:08d}-{own}.safetensors"
        return [name for name in self.names(f"{folder}/") if name.endswith(tail)]

    def copy_checkpoint(self, source: int, steps: Iterable[int]) -> None:
        """Make checkpoints of these steps like one that is there, numbered as their steps, with few plain copies."""
        folder = f"checkpoint-{source:08d}"
        number, own = self.saves()[folder]
        tail = f"-{number:08d}-{own}"
        shards = {name: self.read(name) for name in self.objects(folder)}
        save = json.loads(self.read(f"{folder}/checkpoint{tail}.json"))
        body = save["hfshard_save"]
        manifest = json.loads(body["small_files"]["checkpoint.json"]["text"])
        for step in steps:
            place, new_tail = f"checkpoint-{step:08d}", f"-{step:08d}-{step:016x}"
            for name, raw in shards.items():
                self.put(name.replace(folder, place).replace(tail, new_tail), raw)
            text = json.dumps({**manifest, "step": step, "save_number": step})
            body |= {"number": step, "id": f"{step:016x}"}
            body["small_files"]["checkpoint.json"]["text"] = text
            self.put(f"{place}/checkpoint{new_tail}.json", json.dumps(save).encode())
            self.put(f"{place}/checkpoint.json", text.encode())

    def litter(self) -> list[str]:
        """Name what belongs to no checkpoint, is no plain copy of one's small files, and not the mark of the newest."""
        found = set(self.names())
        saves = self.saves()
        for folder, (number, own) in saves.items():
            manifest = f"{folder}/checkpoint-{number:08d}-{own}.json"
            save = json.loads(self.read(manifest))["hfshard_save"]
            tailed = [name.rpartition(".") for name in save["objects"]]
            found -= {manifest, *(f"{folder}/{stem}-{number:08d}-{own}.{suffix}" for stem, _, suffix in tailed)}
            small = [*save["small_files"], *(name for name in save["objects"] if name.endswith(".json"))]
            found -= {f"{folder}/{name}" for name in small}
        if saves:
            newest = max(saves, key=lambda folder: saves[folder])
            number, own = saves[newest]
            found -= {f".saves/{newest}-{number:08d}-{own}"}
        return sorted(found)

    def synced(self, target: Path) -> Path:
        """Bring all objects to the disk, as `aws s3 sync` does."""
        return self.bucket.copy_to(self.prefix, target)


class Net(nn.Module):
    """Two layers, of which the first one can be frozen."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 2)
        self.fill(value)

    def fill(self, value: float) -> None:
        """Give all weights one value."""
        with torch.no_grad():
            for weight in self.parameters():
                weight.fill_(value)

    def value(self) -> float:
        """The value of all weights."""
        values = {float(number) for weight in self.parameters() for number in weight.flatten().tolist()}
        assert len(values) == 1, f"a mixture of {values}"
        return values.pop()


def save_steps(manager: CheckpointManager, *steps: int) -> None:
    """Save checkpoints of models whose weights have the numbers of their steps."""
    net = Net()
    for step in steps:
        net.fill(step)
        manager.save(step, TrainingState(model=net), metric={"loss": 1 / (step + 1)})
