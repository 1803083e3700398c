"""Run a question: inputs once, then its peers in turns, round by round, each in a fresh process."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from bench.harness.figures import Data
from bench.harness.measuring import Child, ChildFailedError
from bench.harness.models import total_bytes
from bench.harness.question import Context, Peer, Question
from bench.machine import page_cache
from bench.machine.reserve import Reserve

HELD_LEAST = 2**29
"""A process that handles a hundred thousand tensors takes as much."""


def say(text: str) -> None:
    """Show progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def run_question(question: Question, context: Context, rounds: int, *, with_side: bool = True) -> Data:
    """Run all rounds of one question.

    Args:
        question: The question to measure.
        context: Where to run.
        rounds: How often; a question may allow fewer.
        with_side: False leaves out the peers that do not take part in every round.

    Returns:
        The raw figures, as results.json holds them.

    Raises:
        ChildFailedError: hfshard failed, or the inputs could not be made. A peer that fails is noted as skipped.
        RuntimeError: Two peers that should have read the same bytes did not.
    """
    rounds = min(rounds, question.max_rounds)
    begin = time.monotonic()
    with prepared(question, context) as (context, size, held, reserve):
        peers = [peer for peer in question.peers(context) if with_side or peer.every == 1]
        runs, skipped = _run_rounds(question, peers, context, rounds, reserve)
    say(f"{question.name}: {time.monotonic() - begin:.0f} s in all")
    _check_results(question, runs)
    found = {
        peer.name: {"title": peer.title, "base": peer.base, "limit": peer.limit, "runs": runs[peer.name]}
        for peer in peers
    }
    counts = {"rounds": rounds, "params": context.params, "bytes": size, "held": held}
    return {**counts, "skipped": skipped, "peers": found}


@contextmanager
def prepared(question: Question, context: Context) -> Iterator[tuple[Context, int, int, Reserve]]:
    """Make the inputs of a question; yield its setting, the model's bytes, those that are held, and what holds them."""
    with ExitStack() as stack:
        if question.around is not None:
            context = stack.enter_context(question.around(context))
        say(f"{question.name}: making the inputs ({context.params})")
        _make_inputs(question, context)
        size = total_bytes(context.specs) if context.specs.exists() else 0
        held = int(question.held * max(size, 0 if context.params == "tiny" else HELD_LEAST))
        yield context, size, held, stack.enter_context(Reserve(held))


def _make_inputs(question: Question, context: Context) -> None:
    child = Child(question.name, "", context, context.environment)
    try:
        child.prepared()
    finally:
        child.end()


def _run_rounds(
    question: Question, peers: list[Peer], context: Context, rounds: int, reserve: Reserve
) -> tuple[dict[str, list[Data]], dict[str, str]]:
    """Run the peers in turns; return the runs of each, and why peers were skipped."""
    runs: dict[str, list[Data]] = {peer.name: [] for peer in peers}
    skipped: dict[str, str] = {}
    for number in range(rounds):
        due = [peer for peer in peers if number % peer.every == 0 and peer.name not in skipped]
        turn = number % len(due) if due else 0
        for peer, found in run_peers(question, due[turn:] + due[:turn], context, reserve):
            if "skipped" in found:
                skipped[peer.name] = found["skipped"]
                say(f"  skipped: {peer.title} {peer.state}: {found['skipped']}")
                continue
            runs[peer.name].append({"round": number, **found})
            shown = ", ".join(f"{phase} {taken:.2f}" for phase, taken in found["seconds"].items())
            say(f"  {number + 1}/{rounds} {peer.name}: {shown} s, {found['peak'] / 2**20:.0f} MiB")
    return runs, skipped


def run_peers(
    question: Question, peers: list[Peer], context: Context, reserve: Reserve
) -> Iterator[tuple[Peer, dict[str, Any]]]:
    """Run peers, of which some prepare side by side; each is measured alone, while these wait."""
    for at in range(0, len(peers), question.side_by_side):
        reserve.take()
        together = enumerate(peers[at : at + question.side_by_side])
        with ExitStack() as stack:
            runs = [stack.enter_context(_Run(question, peer, context, number)) for number, peer in together]
            for run in runs:
                run.prepare()
            for run in runs:
                yield run.peer, run.measure(reserve)


class _Run:
    """One run of one peer: it prepares from the start, and is measured when it is its turn.

    Raises:
        ChildFailedError: By `prepare` and `measure`, if hfshard's own peer ended in an error.
    """

    def __init__(self, question: Question, peer: Peer, context: Context, number: int) -> None:
        self.peer = peer
        self._question = question
        self._context = replace(context, target=context.directory / f"target-{number}")
        self._skipped = ""
        self._context.target.mkdir()
        self._child = Child(question.name, peer.name, self._context, context.environment)

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.end()
        shutil.rmtree(self._context.target, ignore_errors=True)

    def prepare(self) -> None:
        """Wait until it is ready, or knows why it cannot run."""
        try:
            self._skipped = self._child.prepared().get("skipped", "")
        except ChildFailedError as error:
            self._fail(error)

    def measure(self, reserve: Reserve) -> dict[str, Any]:
        """Let it go; return its figures, rounded to what they mean, or {"skipped": why}. Remove its files."""
        cache: dict[str, float] = {}

        def before_go() -> None:
            if self.peer.state:
                set_state = page_cache.drop if self.peer.state == "cold" else page_cache.fill
                cache["resident"] = round(set_state(self._question.files(self._context, self.peer)), 4)
            reserve.free()

        found: dict[str, Any] = {}
        if not self._skipped:
            reserve.take()
            try:
                found = self._child.measured(before_go) | cache
            except ChildFailedError as error:
                self._fail(error)
        self.__exit__()
        if self._skipped:
            return {"skipped": self._skipped}
        found["seconds"] = {phase: round(taken, 4) for phase, taken in found["seconds"].items()}
        found["cpu"] = round(found["cpu"], 3)
        return found

    def _fail(self, error: ChildFailedError) -> None:
        if self.peer.written_by_hfshard:
            raise error
        last = str(error).splitlines()[-1:] or ["it ended without a word"]
        self._skipped = f"failed: {last[0][:300]}"


def _check_results(question: Question, runs: dict[str, list[Data]]) -> None:
    """Check that all peers that report a sum of what they read ("sum") of a checkpoint ("of") read the same."""
    sums: dict[str, dict[Any, str]] = {}
    for name, found in runs.items():
        for run in found:
            of = run["result"].pop("of", "")
            if (value := run["result"].pop("sum", None)) is not None:
                sums.setdefault(of, {}).setdefault(value, name)
    for different in sums.values():
        if len(different) > 1:
            raise RuntimeError(f"{question.name}: peers disagree on the bytes: {', '.join(different.values())}")
