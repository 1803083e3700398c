"""Run one peer in a fresh process and measure it: seconds inside, peak memory from outside.

The child imports, builds its input and says so; the parent then flushes the disk, puts the page cache into the state
that is asked for, frees the memory that it held (reserve.py), and lets it go. Seconds are the wall's between the
child's own clock readings, CPU seconds those of the child with all its threads (getrusage), bytes those of
/proc/self/io: `read_bytes` counts what was fetched from the disk, page faults of mapped files and readahead included;
`write_bytes` counts pages when they are made dirty, so a save that is not flushed is counted too. Peak memory is
RssAnon + RssShmem of /proc/PID/status, which the parent samples each SAMPLE_SECONDS (from outside, so that no lock of
the child's interpreter hides a peak), above what it was at the start; "mapped" is the same of RssFile, the pages of
mapped files.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness.question import Context, Job, SkipPeer, question_of

SAMPLE_SECONDS = 0.002
CHILD_SECONDS = 900
"""A child that takes longer hangs."""
SCRIPTS = Path(__file__).resolve().parents[2]

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONDONTWRITEBYTECODE": "",
}


class ChildFailedError(RuntimeError):
    """The child ended with an error; the text is the end of what it said."""


class Child:
    """A fresh process for one peer, or (peer "") for the question's inputs; it imports and prepares from the start."""

    def __init__(self, question: str, peer: str, context: Context, environment: dict[str, str]) -> None:
        python_path = os.pathsep.join([str(SCRIPTS), str(context.checkout), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.harness.measuring", question, peer, json.dumps(context.as_json())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **QUIET, **environment, "PYTHONPATH": python_path},
            cwd=context.directory,
        )

    def prepared(self) -> dict[str, Any]:
        """Wait until it is ready, and return its word: {"ready": True}, {"made": True} or {"skipped": why}.

        Raises:
            ChildFailedError: It ended in an error.
        """
        return self._answer()

    def measured(self, before_go: Callable[[], object]) -> dict[str, Any]:
        """Let it go.

        Returns:
            Seconds by phase, "cpu", "read", "written", "peak", "mapped" (bytes) and "result".

        Raises:
            ChildFailedError: It ended in an error.
        """
        assert self._process.stdin
        os.sync()
        before_go()
        first = resident_bytes(self._process.pid)
        peaks = [*first]
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()
        answer = self._answer(peaks)
        answer["peak"] = max(peaks[0], answer.pop("anonymous_end")) - first[0]
        answer["mapped"] = peaks[1] - first[1]
        return answer

    def _answer(self, peaks: list[int] | None = None) -> dict[str, Any]:
        """Wait for a line of JSON; meanwhile, sample the memory, and keep the peaks."""
        child = self._process
        assert child.stdout and child.stderr
        said, errors = b"", b""
        end = time.monotonic() + CHILD_SECONDS
        wait = 1.0 if peaks is None else SAMPLE_SECONDS
        while not said.endswith(b"\n"):
            ready, _, _ = select.select([child.stdout, child.stderr], [], [], wait)
            if child.stderr in ready:
                errors = (errors + os.read(child.stderr.fileno(), 65536))[-4000:]
            if child.stdout in ready:
                piece = os.read(child.stdout.fileno(), 65536)
                if not piece:
                    errors += child.stderr.read()
                    raise ChildFailedError(errors.decode(errors="replace").strip()[-2000:])
                said += piece
            elif peaks is not None:
                peaks[:] = map(max, peaks, resident_bytes(child.pid))
            if time.monotonic() > end:
                raise ChildFailedError(f"no answer in {CHILD_SECONDS} s")
        answer: dict[str, Any] = json.loads(said)
        return answer

    def end(self) -> None:
        """Kill it, if it still runs."""
        self._process.kill()
        with self._process:  # waits, and closes the pipes
            pass


def anonymous_bytes(pid: int) -> int:
    """Memory that no file stands behind, private or shared."""
    return resident_bytes(pid)[0]


def resident_bytes(pid: int) -> tuple[int, int]:
    """Return that memory, and the pages of mapped files."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}
    return found.get("RssAnon", 0) + found.get("RssShmem", 0), found.get("RssFile", 0)


def measure(job: Job) -> dict[str, Any]:
    """Run the phases of a job in this process; seconds add up from phase to phase."""
    seconds: dict[str, float] = {}
    io, cpu = _io(), cpu_seconds()
    begin = time.perf_counter()
    for phase, action in job.phases:
        action()
        seconds[phase] = time.perf_counter() - begin
    cpu = cpu_seconds() - cpu
    read, written = (after - before for before, after in zip(io, _io()))
    end = anonymous_bytes(os.getpid())
    return {
        "seconds": seconds,
        "cpu": cpu,
        "read": read,
        "written": written,
        "anonymous_end": end,
        "result": job.result(),
    }


def _io() -> tuple[int, int]:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def cpu_seconds() -> float:
    """CPU time of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main(name: str, peer_name: str, raw_context: str) -> None:
    """Prepare, wait for the parent's word, measure, answer; each answer is a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries is not an answer

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    context = Context.from_json(json.loads(raw_context))
    question = question_of(name)
    if not peer_name:
        question.make_inputs(context)
        answer({"made": True})
        return
    [peer] = [one for one in question.peers(context) if one.name == peer_name]
    try:
        job = peer.prepare(context)
    except (SkipPeer, ModuleNotFoundError) as error:
        if peer.written_by_hfshard and isinstance(error, ModuleNotFoundError):
            raise
        answer({"skipped": str(error)})
        return
    gc.collect()
    answer({"ready": True})
    sys.stdin.readline()
    answer(measure(job))
    os._exit(0)  # exit handlers of libraries are not waited for


if __name__ == "__main__":
    main(*sys.argv[1:])
