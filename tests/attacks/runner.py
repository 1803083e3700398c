"""Runs attacks in children of one warm process: forked, limited, watched, and killed when they hang."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

from tests.attacks.watch import Audit, Inotify, limit_memory, peak_bytes, read_until_quiet, reset_peak
from tests.helpers.processes import ForkServer

HANG_SECONDS = 100.0
"""Without a word from a child: one entry of an attack takes milliseconds, on a busy machine seconds."""
CHUNK = 10
"""Attacks in one child: a fork of torch costs as much as several loads."""


def warm_up() -> None:
    """Import everything, and load one good checkpoint, so that no child pays or opens anything for it."""
    import logging
    import tempfile

    import torch
    import transformers

    from tests.attacks import catalogue
    from tests.attacks.entries import enter
    from tests.attacks.files import raw
    from tests.attacks.registry import Place

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.CRITICAL)
    catalogue.load_all()
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder) / "warm")
        place.prepare()
        place.write(raw.stock_sharded())
        for entry in ("state_dict", "module", "pretrained", "verify", "stock"):
            enter(entry, place.checkpoint, "structure")
            enter(entry, place.outside / "nothing", "structure")


def attack(requests: list[dict[str, Any]]) -> None:
    """Run attacks in this child; what came of each entry is a line of JSON on stdout."""
    limit_memory()
    audit = Audit()
    with os.fdopen(os.dup(1), "w") as pipe:
        os.dup2(2, 1)
        for request in requests:
            for part in _attacked(request, audit):
                pipe.write(json.dumps(part) + "\n")
                pipe.flush()


def _attacked(request: dict[str, Any], audit: Audit) -> Iterator[dict[str, Any]]:
    from tests.attacks.catalogue import CONTROLS
    from tests.attacks.entries import enter
    from tests.attacks.kinds.saves import SAVES
    from tests.attacks.registry import ATTACKS, Place

    attack = (ATTACKS | CONTROLS | SAVES)[request["name"]]
    place = Place(Path(request["root"]))
    place.prepare()
    expected = attack.build(place)
    yield {"name": attack.name, "file": expected.file, "match": expected.match, "full": attack.full}
    outside = Inotify(place.outside)
    audit.watch([place.checkpoint, place.root / "hub", Path(os.environ["HF_HOME"])])
    for entry in request.get("entries") or attack.entries:
        for verify in ("structure", "full") if attack.full and entry != "stock" else ("structure",):
            before = reset_peak()
            start = time.process_time()  # of all threads; others' load is not its own, and who sleeps is found to hang
            audit.armed = entry not in ("save", "reshard")  # they have their own reasons to make and remove files
            outcome = enter(entry, place.checkpoint, verify)
            audit.armed = False
            yield {
                **outcome,
                "entry": f"{entry}/{verify}",
                "seconds": time.process_time() - start,
                "peak_bytes": peak_bytes() - before,
                "touched": outside.touched(),
                "audit": audit.take(),
                "executed": place.executed.exists(),
            }
    outside.close()


class Server:
    """A warm process to run attacks in, from a test or a script."""

    def __init__(self, home: Path) -> None:
        offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
        self._environment = {**os.environ, **offline, "HF_HOME": str(home), "PYTHONWARNINGS": "ignore"}
        self._server = ForkServer("tests.attacks.runner:warm_up", environment=self._environment)

    def run(self, names: list[str], root: Path, **options: Any) -> list[dict[str, Any]]:
        """Run attacks, each in a directory of its own below `root`; what came of each entry.

        They run in one child; those that it did not live to answer, in a child each.
        """
        requests = [{"name": name, "root": str(root / str(at)), **options} for at, name in enumerate(names)]
        answers = self._forked(requests)
        alive = [answer for answer in answers if not answer["hang"] and not answer["signal"]]
        if len(requests) in (1, len(alive)):
            return answers
        left = [{**request, "root": request["root"] + "-alone"} for request in requests[len(alive) :]]
        return alive + [self._forked([request])[0] for request in left]

    def _forked(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run attacks in one child; the last answer says if it hung or was killed."""
        with self._server.call(attack, requests, env=self._environment, cwd="/", stdout=PIPE, stderr=2) as child:
            assert child.stdout is not None
            received, is_done = read_until_quiet(child.stdout.fileno(), HANG_SECONDS)
            if not is_done:
                child.kill()
            code = child.wait()
        if code > 0:
            raise RuntimeError("an attack could not be built: its traceback stands above")
        answers = _grouped(received)
        if not answers:
            answers.append({"name": requests[0]["name"], "file": "", "runs": {}})
        answers[-1].update(hang=not is_done, signal=-code if is_done else 0)
        return answers

    def close(self) -> None:
        """End the process."""
        self._server.close()


def _grouped(received: bytes) -> list[dict[str, Any]]:
    """An answer for each attack, with what came of its entries."""
    answers: list[dict[str, Any]] = []
    for line in received.splitlines():
        part = json.loads(line)
        if "entry" in part:
            answers[-1]["runs"][part["entry"]] = part
        else:
            answers.append({**part, "runs": {}, "hang": False, "signal": 0})
    return answers
