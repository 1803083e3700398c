"""What processes of the sweep do: save, and say what each reader finds. Each is a fork of its own: it may be killed."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from tests.crash.saves.readers import Reader, Verdict, read
from tests.crash.saves.states import perform as perform_save
from tests.crash.saves.targets import TARGETS
from tests.crash.saves.transitions import Save, Transition
from tests.stores.sweep.places import StorePlace, in_directory, lead_to, litter, number_and_id, write_to
from tests.stores.sweep.table import transitions

Verdicts = Mapping[str, Verdict]


def prepare() -> None:
    """Say nothing, and send one file after the other, so that requests come in one order."""
    import torch
    import transformers

    os.environ["HFSHARD_WRITERS"] = "1"
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()


def save(place: StorePlace, url: str, name: str, settings: Mapping[str, str], is_next: bool = False) -> None:
    """Do the save of a transition by way of a URL; print what came of it.

    Args:
        place: Where.
        url: The service's, or a proxy's.
        name: Of the transition.
        settings: More of the environment.
        is_next: It is the save after the one that is broken.
    """
    prepare()
    os.environ.update(settings)
    lead_to(url, place.scheme)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    report = "KeyboardInterrupt"
    with suppress(KeyboardInterrupt):
        transition = transitions()[name]
        report = _report_of(transition.next if is_next else transition.new, place)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a request that nobody waits for may come late
    sys.stdout.write(report)


def _report_of(one: Save, place: StorePlace) -> str:
    """Save; gives what came of it."""
    try:
        _perform(one, place)
    except Exception as error:
        import hfshard

        kind = "" if isinstance(error, hfshard.HfshardError) else "unclear "
        return f"{kind}{type(error).__name__}: {error}"
    return "saved"


def build(place: StorePlace, name: str) -> None:
    """Make what a transition starts from: by hfshard there, by others in a directory whose files are put there."""
    prepare()
    lead_to(place.url, place.scheme)
    transition = transitions()[name]
    for file in transition.bystanders:
        place.bucket.put(f"{place.prefix}/{file}", f"{file} does not belong to the save\n".encode())
    for one in transition.before:
        if one.by == "target":
            _perform(one, place)
            continue
        with tempfile.TemporaryDirectory() as folder:
            objects = place.objects()
            directory = write_to(Path(folder) / "out", objects)
            directory.mkdir(exist_ok=True)
            perform_save(one, directory, TARGETS["hfshard"])
            for file, raw in in_directory(directory).items():
                if objects.get(file) != raw:
                    place.bucket.put(f"{place.prefix}/{file}", raw)


def examine(place: StorePlace, name: str, is_last: bool) -> None:
    """Print what each reader finds, then save again, and print what they find then, and what should not be there.

    Args:
        place: Where; it is used up.
        name: Of the transition.
        is_last: Nothing is saved again.
    """
    prepare()
    lead_to(place.url, place.scheme)
    transition = transitions()[name]
    result: dict[str, Any] = {"found": _verdicts(transition, place)}
    result["litter_found"] = litter(place.objects(), _wanted(transition))
    if not is_last:
        try:
            _perform(transition.next, place)
        except Exception as error:
            result["failed"] = f"{type(error).__name__}: {error}"
    result["after"] = result["found"] if is_last else _verdicts(transition, place)
    result["litter"] = litter(place.objects(), _wanted(transition))
    result["unfinished"] = [] if place.scheme == "az" else _unfinished(place)
    sys.stdout.write(json.dumps(result))


def _unfinished(place: StorePlace) -> list[str]:
    """Name unfinished uploads that are lower than the checkpoint; the next save deletes the others, if nobody sends."""
    splits = filter(None, map(number_and_id, place.objects()))
    highest = max(((number, one) for usual, number, one in splits if usual.endswith(".json")), default=(0, ""))
    left = {key: number_and_id(key) for key in place.bucket.unfinished(place.prefix)}
    return [key for key, split in left.items() if split is None or split[1:] < highest]


def verdicts_of(found: Mapping[str, Mapping[str, Any]]) -> Verdicts:
    """Verdicts that another process has printed."""
    return {label: Verdict(**fields) for label, fields in found.items()}


def _perform(one: Save, place: StorePlace) -> None:
    if one.by == "reshard":
        import hfshard
        from tests.crash.saves.targets import ALIGNED_HEADER, limit_of

        hfshard.reshard_checkpoint(place.address, place.address, limit_of(one.content, one.layout) + ALIGNED_HEADER)
        return
    perform_save(one, cast(Path, place.address), TARGETS["hfshard"])


def _verdicts(transition: Transition, place: StorePlace) -> dict[str, dict[str, Any]]:
    """hfshard reads the store, others a copy."""
    objects = place.objects()
    with tempfile.TemporaryDirectory() as folder:
        copy = write_to(Path(folder) / "copy", objects)
        copy.mkdir(exist_ok=True)
        found = {}
        for reader in transition.readers:
            where = cast(Path, place.address) if reader.name.startswith("hfshard") else copy
            found[reader.label] = asdict(read(reader, where, transition.contents))
        if not transition.new.bare and not transition.new.variant:
            found["hfshard of a copy"] = asdict(read(Reader("hfshard"), copy, transition.contents))
    return found


def _wanted(transition: Transition) -> set[str]:
    """The files beside weights and indexes."""
    wanted = set(transition.bystanders)
    if not (transition.new.bare or transition.new.content.no_config):
        wanted.add("config.json")
    if transition.new.content.arch == "gpt2":
        wanted.add("generation_config.json")
    if transition.new.content.arch == "net":
        wanted.add("README.md")
    return wanted
