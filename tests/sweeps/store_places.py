"""Places in a service that hold given objects, and what lies in them, in a form in which random names are alike."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from tests.servers.stores.buckets import BUCKET, BUCKETS, HUB_BUCKET, Bucket
from tests.servers.stores.kinds import SERVICES

INDEX = "model.safetensors.index.json"
_RANDOM = re.compile(rb"[0-9a-f]{16,64}")
"""Digits in names, and digests."""
_OBJECT = re.compile(r"(.+)-(\d{8,15})-([0-9a-f]{16})(\.\w+)?")


@dataclass(frozen=True, slots=True)
class StorePlace:
    """A place in a service, as processes tell each other."""

    scheme: str
    url: str
    """The service's own."""
    prefix: str

    @property
    def address(self) -> str:
        """What hfshard calls it."""
        root = f"hf://buckets/{HUB_BUCKET}" if self.scheme == "hf" else f"{self.scheme}://{BUCKET}"
        return f"{root}/{self.prefix}"

    @property
    def bucket(self) -> Bucket:
        """The bucket that it lies in."""
        return BUCKETS[self.scheme](self.url)

    def objects(self) -> dict[str, bytes]:
        """All that lies there."""
        return self.bucket.objects(self.prefix)

    def with_objects(self, objects: Mapping[str, bytes]) -> StorePlace:
        """A new place beside it that holds these objects."""
        place = StorePlace(self.scheme, self.url, f"sweep/{secrets.token_hex(6)}/place")
        for name, raw in objects.items():
            place.bucket.put(f"{place.prefix}/{name}", raw)
        return place

    def clear(self) -> None:
        """Delete all that lies there."""
        for key in self.bucket.sizes(f"{self.prefix}/"):
            self.bucket.delete(key)


def lead_to(url: str, scheme: str) -> None:
    """Let the clients of a service in this process take this URL for its own."""
    os.environ.update(SERVICES[scheme].environment(url))
    if scheme == "hf":
        from huggingface_hub import constants

        # huggingface_hub has read its environment.
        constants.ENDPOINT = url
        constants.HF_HUB_OFFLINE = False


def alike(objects: Mapping[str, bytes]) -> frozenset[tuple[bytes, str]]:
    """What is the same for two places that differ in random names only."""
    return frozenset(
        (_RANDOM.sub(b"#", name.encode()), hashlib.sha256(_RANDOM.sub(b"#", raw)).hexdigest())
        for name, raw in objects.items()
    )


def number_and_id(name: str) -> tuple[str, int, str] | None:
    """Split the name of an object of a save: usual name, number, id; None for any other object."""
    match = _OBJECT.fullmatch(name)
    return None if match is None else (match[1] + (match[4] or ""), int(match[2]), match[3])


def plain_objects(objects: Mapping[str, bytes]) -> dict[str, bytes]:
    """Those without a number: plain copies, and what other tools uploaded."""
    return {name: raw for name, raw in objects.items() if number_and_id(name) is None}


def litter(objects: Mapping[str, bytes], wanted: set[str]) -> str:
    """What lies there beyond what a whole save needs, or is lacking; empty when nothing.

    A whole save is the highest index of each variant, the objects that it names, and a plain copy of it.
    """
    wanted = set(wanted)
    highest: dict[str, tuple[int, str]] = {}
    for usual, number, one in filter(None, map(number_and_id, objects)):
        if re.fullmatch(r"model\.safetensors\.index(\.\w+)?\.json", usual):
            highest[usual] = max(highest.get(usual, (0, "")), (number, one))
    for usual, (number, one) in highest.items():
        index = numbered(usual, number, one)
        wanted |= {usual, index, *(numbered(name, number, one) for name in _objects_of(objects[index]))}
    parts = [f"+{name}" for name in sorted(objects.keys() - wanted)]
    return " ".join(parts + [f"-{name}" for name in sorted(wanted - objects.keys())])


def numbered(usual: str, number: int, one: str) -> str:
    """The name of the object of a save."""
    stem, dot, suffix = usual.rpartition(".")
    return f"{stem}-{number:08d}-{one}{dot}{suffix}"


def _objects_of(raw: bytes) -> list[str]:
    return list(json.loads(raw)["hfshard_save"]["objects"])
