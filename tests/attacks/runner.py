"""Runs attacks in children of one warm process: forked, limited, watched, and killed when they hang.

python -m tests.attacks.runner        reads lists of requests from stdin, a JSON list per line, and answers likewise
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import REPOSITORY
from tests.attacks.watch import Audit, Inotify, mapped_bytes, peak_bytes, reset_peak

MEMORY_BYTES = 3 * 1024**3
"""Address space that a child may take beyond what it has: a bomb meets MemoryError, not the machine's end."""
HANG_SECONDS = 10.0
CHUNK = 10
"""Attacks in one child: a fork of torch costs as much as several loads."""


def main() -> None:
    """Answer requests until stdin ends."""
    _warm_up()
    for line in sys.stdin:
        print(json.dumps(_answers(json.loads(line))), flush=True)


def _warm_up() -> None:
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
        os.chdir("/")


def _answers(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run attacks in one child; those that it did not live to answer, in a child each."""
    answers = _forked(requests)
    if len(answers) == len(requests) and not any(answer["hang"] or answer["signal"] for answer in answers):
        return answers
    if len(requests) == 1:
        return answers
    alive = [answer for answer in answers if not answer["hang"] and not answer["signal"]]
    left = [{**request, "root": request["root"] + "-alone"} for request in requests[len(alive) :]]
    return alive + [_forked([request])[0] for request in left]


def _forked(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run attacks in one child; the last answer says if it hung or was killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _child(requests, writing)
    os.close(writing)
    received, is_done = _read_until_quiet(reading)
    if not is_done:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) and is_done else 0
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError("an attack could not be built: its traceback stands above")
    answers: list[dict[str, Any]] = []
    for line in received.splitlines():
        part = json.loads(line)
        if "entry" not in part:
            answers.append({**part, "runs": {}, "hang": False, "signal": 0})
        else:
            answers[-1]["runs"][part["entry"]] = part
    if not answers:
        answers.append({"name": requests[0]["name"], "file": "", "runs": {}})
    answers[-1].update(hang=not is_done, signal=killed_by)
    return answers


def _read_until_quiet(fd: int) -> tuple[bytes, bool]:
    """All that a child writes, and whether it ended by itself: it hangs when it writes nothing for ten seconds."""
    received = b""
    with os.fdopen(fd, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], HANG_SECONDS)[0]:
            piece = pipe.read(1 << 16)
            if not piece:
                return received, True
            received += piece
    return received, False


def _child(requests: list[dict[str, Any]], writing: int) -> None:
    code = 1
    try:
        memory = mapped_bytes() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        audit = Audit()
        with os.fdopen(writing, "w") as pipe:
            for request in requests:
                for part in _attacked(request, audit):
                    pipe.write(json.dumps(part) + "\n")
                    pipe.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _busy_seconds() -> float:
    """Wall time, less what this process waited for a processor: others' load is not its own."""
    waited = int(Path("/proc/self/schedstat").read_text().split()[1])
    return time.perf_counter() - waited / 1e9


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
            start = _busy_seconds()
            audit.armed = entry not in ("save", "reshard")  # they have their own reasons to make and remove files
            outcome = enter(entry, place.checkpoint, verify)
            audit.armed = False
            yield {
                **outcome,
                "entry": f"{entry}/{verify}",
                "seconds": _busy_seconds() - start,
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
        paths = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, **offline, "HF_HOME": str(home), "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "tests.attacks.runner"]
        self._process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, names: list[str], root: Path, **options: Any) -> list[dict[str, Any]]:
        """Run attacks, each in a directory of its own below `root`; what came of each entry."""
        assert self._process.stdin is not None and self._process.stdout is not None
        requests = [{"name": name, "root": str(root / str(at)), **options} for at, name in enumerate(names)]
        self._process.stdin.write(json.dumps(requests) + "\n")
        self._process.stdin.flush()
        answers: list[dict[str, Any]] = json.loads(self._process.stdout.readline())
        return answers

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


if __name__ == "__main__":
    main()
