"""What processes do that save into one place side by side, and that read it meanwhile."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hfshard.errors import CheckpointChangedError, RemoteChangedError
from tests.crash.saves.generations import Content
from tests.crash.saves.readers import Reader, Verdict, model_verdict, read
from tests.crash.saves.targets import ALIGNED_HEADER, limit_of, sharded_class, sharded_model
from tests.stores.sweep.child import prepare
from tests.stores.sweep.places import StorePlace, lead_to

GENERATIONS = 5
"""Of which each has a config of its own; the first one comes again after the last."""
CONTENTS = [Content(generation, own_config=True) for generation in range(1, GENERATIONS + 1)]
_LAYOUTS = ("three", "two", "single")
_MEET_SECONDS = 100.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """How processes do things side by side, however fast each of them is: each waits for others before each of its own.

    Attributes:
        folder: For their marks.
        name: Whose.
        others: For whom it waits, until they have begun as many things as it has.
    """

    folder: Path
    name: str
    others: tuple[str, ...] = ()

    def begin(self, number: int) -> None:
        """Begin a thing; they are numbered from 0."""
        (self.folder / f"{self.name}-{number}").touch()
        deadline = time.monotonic() + _MEET_SECONDS
        for other in self.others:
            while not (self.folder / f"{other}-{number}").exists():
                assert time.monotonic() < deadline, f"{other} does not begin its number {number}"
                time.sleep(0.005)


def write_many(place: StorePlace, first: int, saves: int, meeting: Meeting | None = None) -> None:
    """Save one generation after the other, in changing layouts; prints how often each thing came of it."""
    prepare()
    lead_to(place.url, place.scheme)
    came: Counter[str] = Counter()
    for number in range(first, first + saves):
        if meeting is not None:
            meeting.begin(number - first)
        content = CONTENTS[number % GENERATIONS]
        limit = limit_of(content, _LAYOUTS[number % 3]) + ALIGNED_HEADER
        try:
            sharded_model(content).save_pretrained(place.address, max_shard_size=limit)
            came["saved"] += 1
        except RemoteChangedError:
            came["lost"] += 1
    sys.stdout.write(json.dumps(came))


def read_many(place: StorePlace, stop: Path, meeting: Meeting) -> None:
    """Load until a file is there, and once more; prints how often each thing came of it."""
    prepare()
    lead_to(place.url, place.scheme)
    came: Counter[str] = Counter()
    is_last = False
    while not is_last:
        is_last = stop.exists()
        meeting.begin(came.total())
        try:
            verdict = model_verdict(sharded_class("bert").from_pretrained(place.address), CONTENTS)
        except CheckpointChangedError:
            verdict = Verdict("changed")
        except Exception as error:
            verdict = Verdict("error", detail=f"{type(error).__name__}: {error}")
        came[verdict.kind if verdict.kind in ("whole", "changed") else str(verdict)] += 1
    sys.stdout.write(json.dumps(came))


def stock_verdicts(directory: Path) -> list[Verdict]:
    """What stock readers find in a copy."""
    return [read(Reader(name), directory, CONTENTS) for name in ("transformers", "hub", "hfshard-full")]
