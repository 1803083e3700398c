"""What the processes of stores' sweeps do: save, race, read, and say what each reader finds; each may be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import hfshard
from hfshard.errors import CheckpointChangedError, HfshardError, RemoteChangedError
from tests.helpers.processes import Child
from tests.sweeps.directory import companions
from tests.sweeps.directory import perform as perform_save
from tests.sweeps.directory_models import TARGETS, Content, aligned_limit_of, be_quiet, sharded_class, sharded_model
from tests.sweeps.directory_readers import Reader, Verdict, model_verdict, read
from tests.sweeps.directory_transitions import Save, Transition
from tests.sweeps.engine import files_below, write_files
from tests.sweeps.store_places import StorePlace, lead_to, litter, number_and_id

PIPES: Mapping[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
"""For `processes.call`: the streams that `finish` reads."""


def finish(process: Child, seconds: float, may_be_killed: bool = False) -> str:
    """What a process printed.

    Raises:
        RuntimeError: It ended in another way than it should.
        subprocess.TimeoutExpired: It did not end, and was killed.
    """
    with process:
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        out = process.stdout.read() if process.stdout else ""
        words = process.stderr.read() if process.stderr else ""
    if code != 0 and not (may_be_killed and code == -signal.SIGKILL):
        raise RuntimeError(f"A process of the sweep ended with {code}: {out} {words}")
    return out


def lead(place: StorePlace, url: str = "") -> None:
    """Go to a place, by way of a URL or the service's own; send one file after the other, in one order."""
    os.environ["HFSHARD_WRITERS"] = "1"
    be_quiet()
    lead_to(url or place.url, place.scheme)


def save(
    place: StorePlace, url: str, transition: Transition, settings: Mapping[str, str], is_next: bool = False
) -> None:
    """Do the save of a transition by way of a URL; print what came of it.

    Args:
        place: Where.
        url: The service's, or a proxy's.
        transition: Whose.
        settings: More of the environment.
        is_next: It is the save after the one that is broken.
    """
    os.environ.update(settings)
    lead(place, url)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    report = "KeyboardInterrupt"
    with suppress(KeyboardInterrupt):
        report = _report_of(transition.next if is_next else transition.new, place)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a request that nobody waits for may come late
    sys.stdout.write(report)


def _report_of(one: Save, place: StorePlace) -> str:
    """Save; gives what came of it."""
    try:
        _perform(one, place)
    except Exception as error:
        kind = "" if isinstance(error, HfshardError) else "unclear "
        return f"{kind}{type(error).__name__}: {error}"
    return "saved"


def build(place: StorePlace, transition: Transition) -> None:
    """Make what a transition starts from: by hfshard there, by others in a directory whose files are put there."""
    lead(place)
    for file in transition.bystanders:
        place.bucket.put(f"{place.prefix}/{file}", f"{file} does not belong to the save\n".encode())
    for one in transition.before:
        if one.by == "target":
            _perform(one, place)
            continue
        with tempfile.TemporaryDirectory() as folder:
            objects = place.objects()
            directory = write_files(objects, Path(folder) / "out")
            directory.mkdir(exist_ok=True)
            perform_save(one, directory, TARGETS["hfshard"])
            for file, raw in files_below(directory).items():
                if objects.get(file) != raw:
                    place.bucket.put(f"{place.prefix}/{file}", raw)


@dataclass(frozen=True, slots=True)
class Examined:
    """What readers find in a place, and after one more save.

    Attributes:
        found: Reader -> verdict.
        litter_found: What should not be there.
        after: `found` after that save.
        failed: How it failed, if it did.
        litter: `litter_found` after it.
        unfinished: Uploads that are left after it.
    """

    found: Mapping[str, Verdict]
    litter_found: str
    after: Mapping[str, Verdict]
    failed: str
    litter: str
    unfinished: list[str]

    @classmethod
    def from_json(cls, text: str) -> Examined:
        """From what `examine` has printed."""
        fields = json.loads(text)
        for name in ("found", "after"):
            fields[name] = {label: Verdict(**verdict) for label, verdict in fields[name].items()}
        return cls(**fields)


def examine(place: StorePlace, transition: Transition, is_last: bool) -> None:
    """Print what each reader finds, then save again, and print what they find then, and what should not be there.

    Args:
        place: Where; it is used up.
        transition: Whose.
        is_last: Nothing is saved again.
    """
    lead(place)
    wanted = {*transition.bystanders, *companions(transition)}
    found = _verdicts(transition, place)
    litter_found = litter(place.objects(), wanted)
    failed = ""
    if not is_last:
        try:
            _perform(transition.next, place)
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
    after = found if is_last else _verdicts(transition, place)
    unfinished = [] if place.scheme == "az" else _unfinished(place)
    seen = Examined(found, litter_found, after, failed, litter(place.objects(), wanted), unfinished)
    sys.stdout.write(json.dumps(asdict(seen)))


def _unfinished(place: StorePlace) -> list[str]:
    """Name unfinished uploads that are lower than the checkpoint; the next save deletes the others, if nobody sends."""
    splits = filter(None, map(number_and_id, place.objects()))
    highest = max(((number, one) for usual, number, one in splits if usual.endswith(".json")), default=(0, ""))
    left = {key: number_and_id(key) for key in place.bucket.unfinished(place.prefix)}
    return [key for key, split in left.items() if split is None or split[1:] < highest]


def _perform(one: Save, place: StorePlace) -> None:
    if one.by == "reshard":
        hfshard.reshard_checkpoint(place.address, place.address, aligned_limit_of(one.content, one.layout))
        return
    perform_save(one, cast(Path, place.address), TARGETS["hfshard"])


def _verdicts(transition: Transition, place: StorePlace) -> dict[str, Verdict]:
    """hfshard reads the store, others a copy."""
    objects = place.objects()
    with tempfile.TemporaryDirectory() as folder:
        copy = write_files(objects, Path(folder) / "copy")
        copy.mkdir(exist_ok=True)
        found = {}
        for reader in transition.readers:
            where = cast(Path, place.address) if reader.name.startswith("hfshard") else copy
            found[reader.label] = read(reader, where, transition.contents)
        if not transition.new.bare and not transition.new.variant:
            found["hfshard of a copy"] = read(Reader("hfshard"), copy, transition.contents)
    return found


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
    lead(place)
    came: Counter[str] = Counter()
    for number in range(first, first + saves):
        if meeting is not None:
            meeting.begin(number - first)
        content = CONTENTS[number % GENERATIONS]
        limit = aligned_limit_of(content, _LAYOUTS[number % 3])
        try:
            sharded_model(content).save_pretrained(place.address, max_shard_size=limit)
            came["saved"] += 1
        except RemoteChangedError:
            came["lost"] += 1
    sys.stdout.write(json.dumps(came))


def read_many(place: StorePlace, stop: Path, meeting: Meeting) -> None:
    """Load until a file is there, and once more; prints how often each thing came of it."""
    lead(place)
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
