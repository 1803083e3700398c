"""Run the cases of one way, each training in a process of its own, and judge the outcomes."""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.resumes.cases import CYCLES, MID_EPOCH, Case, NotApplicableError
from bench.resumes.task import TrainingJob

PROCESS_SECONDS = 120
"""A training that takes longer hangs."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One cell of the table, and the line of the log that explains it."""

    cell: str
    detail: str = ""


class Runner:
    """Runs one way's cases; trainings that several cases share are run once."""

    def __init__(self, way: str, directory: Path) -> None:
        self._way, self._directory = way, directory
        self._killed: dict[str, Path] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["transformers.trainer", "accelerate", "bench.resumes.peers"])

    def outcome(self, case: Case) -> Outcome:
        """Run a case, and judge the outcome."""
        if case.grows:
            return self._growth(case)
        killed = self._killed_run(case)
        directory = self._directory / f"case-{len(list(self._directory.iterdir()))}"
        shutil.copytree(killed, directory)
        if case.damage is not None:
            try:
                case.damage(newest(directory))
            except NotApplicableError:
                return Outcome("–", "one file")
        resumed = self._run(case, directory, phase="resumed", resume=True, kill_after=None, full_from=None)
        straight = read_record(directory / "straight.jsonl")
        outcome = judge(straight, resumed, self._last_save(case), case.damage is not None)
        return _with_full_disk(outcome, directory) if "full_from" in case.training else outcome

    def _killed_run(self, case: Case) -> Path:
        key = json.dumps([case.training, case.times], sort_keys=True)
        if key not in self._killed:
            directory = self._directory / f"run-{len(self._killed)}"
            directory.mkdir(parents=True)
            self._run(case, directory, phase="straight", save_every=None, kill_after=None, full_from=None)
            killed = self._run(case, directory, phase="killed")
            if error := next((line["error"] for line in killed if "error" in line), ""):
                raise RuntimeError(f"{self._way}, {case.title}, before it was killed: {error}")
            self._killed[key] = directory
        return self._killed[key]

    def _last_save(self, case: Case) -> int:
        every, last = case.times["save_every"], case.times["kill_after"]
        return every if "full_from" in case.training else last - last % every

    def _growth(self, case: Case) -> Outcome:
        directory, other = self._directory / "growing", self._directory / "plain"
        directory.mkdir(parents=True)
        other.mkdir()
        once: dict[str, Any] = {"save_every": 1, "kill_after": 1}
        self._run(case, other, phase="killed", **once)
        plain = checkpoint_bytes(newest(other))
        sizes, refused = [], ""
        for cycle in range(CYCLES):
            times = {**once, "kill_after": cycle + 1, "resume": cycle > 0, "user_schedule": True}
            lines = self._run(case, directory, phase=f"cycle-{cycle}", unsafe=bool(refused), **times)
            error = first_line(next((line["error"] for line in lines if "error" in line), ""))
            if error and (refused or not cycle):
                return Outcome("crash", f"{refused}; {error}")
            if error:
                refused = error
                self._run(case, directory, phase=f"cycle-{cycle}", unsafe=True, **times)
            sizes.append(checkpoint_bytes(newest(directory)))
        detail = f"{plain} bytes with one of torch's; {sizes[0]} after the first save, {sizes[-1]} after {CYCLES}"
        grown = f"× {sizes[-1] / plain:.2f}"
        if refused:
            return Outcome(f"crash ({grown} where pickles are trusted)", f"{detail}; {refused}")
        return Outcome(f"resumes, {grown}", detail)

    def _run(self, case: Case, directory: Path, *, unsafe: bool = False, **fields: Any) -> list[dict[str, Any]]:
        from bench.resumes import peers

        job = replace(TrainingJob(self._way, directory, **{**MID_EPOCH, **case.times, **case.training}), **fields)
        target = _run_trusting if unsafe else peers.run
        process = self._context.Process(target=target, args=(job,))
        process.start()
        process.join(PROCESS_SECONDS)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"{job} took more than {PROCESS_SECONDS} s")
        return read_record(directory / f"{job.phase}.jsonl")


def _with_full_disk(outcome: Outcome, directory: Path) -> Outcome:
    """Add what the save on the full disk raised, and what it left."""
    killed = read_record(directory / "killed.jsonl")
    raised = first_line(next((line["full"] for line in killed if "full" in line), "raised nothing"))
    cell = outcome.cell
    if not cell.startswith("exact"):
        cell += ", none is left" if len(checkpoints(directory)) == 1 else ", though one is left"
    return Outcome(cell, f"the save: {raised}; then: {outcome.detail}")


def _run_trusting(job: TrainingJob) -> None:
    """Run a job in which every torch.load may execute the code of a pickle."""
    import torch

    from bench.resumes import peers

    load = torch.load
    torch.load = lambda *args, **kwargs: load(*args, **{**kwargs, "weights_only": False})
    peers.run(job)


def read_record(path: Path) -> list[dict[str, Any]]:
    """The lines of a process's record."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def checkpoints(directory: Path) -> list[Path]:
    """All checkpoints of any way, whole or not."""
    return [path for path in directory.rglob("checkpoint[-_.]*") if path.suffix == ".pt" or path.is_dir()]


def newest(directory: Path) -> Path:
    """The newest of them."""
    found = checkpoints(directory)
    if not found:
        raise FileNotFoundError(f"no checkpoint in {directory}")
    return max(found, key=lambda path: int("".join(filter(str.isdigit, path.name)) or 0))


def checkpoint_bytes(checkpoint: Path) -> int:
    """Bytes of a checkpoint's files."""
    files = [checkpoint] if checkpoint.is_file() else [path for path in checkpoint.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


def judge(straight: list[dict[str, Any]], resumed: list[dict[str, Any]], saved: int, is_damaged: bool) -> Outcome:
    """Compare a resumed process with the straight run."""
    steps = [line for line in resumed if "step" in line]
    error = next((line["error"] for line in resumed if "error" in line), "")
    if error:
        told = "checkpoint" in error or ".safetensors" in error
        return Outcome("error" if told else "crash", first_line(error))
    expected = {line["step"]: line["weights"] for line in straight if "step" in line}
    first = steps[0]["step"]
    start = f"resumed after step {first - 1}"
    wrong = next((line["step"] for line in steps if line["weights"] != expected[line["step"]]), None)
    if wrong is not None:
        return Outcome("silently wrong" if is_damaged else f"differs from step {wrong}", start)
    ends = [next(line["end"] for line in lines if "end" in line) for lines in (straight, resumed)]
    if unequal := [key for key in ends[0] if ends[0][key] != ends[1][key]]:
        words = f"weights exact, {' and '.join(unequal)} not"
        return Outcome("silently wrong" if is_damaged else words, f"{start}; {words}")
    if first == 1:
        return Outcome("starts again", start)
    return Outcome("exact" if first == saved + 1 else "exact, from the one before", start)


def first_line(error: str) -> str:
    """The beginning of an error's message, without colours and the directory of this run."""
    plain = re.sub(r"\x1b\[[0-9;]*m|/\S*hfshard-resume-[^/]*/", "", error)
    return plain.partition("\n")[0][:160].strip()
