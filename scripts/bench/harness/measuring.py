"""Runs one peer in a fresh process and measures it: seconds inside, peak memory from outside.

The child imports, builds its input and says so; the parent then flushes the disk, puts the page cache into the state
that is asked for, and lets it go. Seconds are the wall's between the child's own clock readings, CPU seconds those of
the child with all its threads (getrusage), bytes those of /proc/self/io: `read_bytes` counts what was fetched from the
disk, page faults of mapped files and readahead included; `write_bytes` counts pages when they are made dirty, so a save
that is not flushed is counted too. Peak memory is RssAnon + RssShmem of /proc/PID/status, which the parent samples each
SAMPLE_SECONDS (from outside, so that no lock of the child's interpreter hides a peak), above what it was at the start.
"""

from __future__ import annotations

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

from bench.harness.question import Context, Job

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


def run_child(
    question: str, peer: str, context: Context, before_go: Callable[[], object], environment: dict[str, str]
) -> dict[str, Any]:
    """Run one peer, or (peer "") the question's inputs, in a fresh process.

    Returns:
        {"skipped": why}, or seconds by phase, "cpu", "read", "written", "peak" (bytes) and "result".

    Raises:
        ChildFailedError: It ended in an error.
    """
    python_path = os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "bench.harness.child", question, peer, json.dumps(context.as_json())]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **QUIET, **environment, "PYTHONPATH": python_path},
        cwd=context.directory,
    ) as child:
        try:
            return _talk(child, before_go)
        finally:
            child.kill()


def _talk(child: subprocess.Popen[bytes], before_go: Callable[[], object]) -> dict[str, Any]:
    assert child.stdin and child.stdout and child.stderr
    first = _line(child, None)
    if "skipped" in first or "made" in first:
        return first
    os.sync()
    before_go()
    sampler = _Sampler(child.pid)
    child.stdin.write(b"go\n")
    child.stdin.flush()
    answer = _line(child, sampler)
    answer["peak"] = max(sampler.highest, answer.pop("anonymous_end")) - sampler.first
    return answer


class _Sampler:
    """The highest anonymous memory of a process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.first = self.highest = anonymous_bytes(pid)

    def sample(self) -> None:
        self.highest = max(self.highest, anonymous_bytes(self.pid))


def _line(child: subprocess.Popen[bytes], sampler: _Sampler | None) -> dict[str, Any]:
    assert child.stdout and child.stderr
    said, errors = b"", b""
    end = time.monotonic() + CHILD_SECONDS
    wait = SAMPLE_SECONDS if sampler else 1.0
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
        if sampler and child.stdout not in ready:
            sampler.sample()
        if time.monotonic() > end:
            raise ChildFailedError(f"no answer in {CHILD_SECONDS} s")
    answer: dict[str, Any] = json.loads(said)
    return answer


def anonymous_bytes(pid: int) -> int:
    """Memory that no file stands behind, private or shared."""
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            return sum(int(line.split()[1]) * 1024 for line in status if line.startswith((b"RssAnon", b"RssShmem")))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def measure(job: Job) -> dict[str, Any]:
    """Run the phases of a job in this process; seconds add up from phase to phase."""
    seconds: dict[str, float] = {}
    io, cpu = _io(), _cpu_seconds()
    begin = time.perf_counter()
    for phase, action in job.phases:
        action()
        seconds[phase] = time.perf_counter() - begin
    cpu = _cpu_seconds() - cpu
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


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
