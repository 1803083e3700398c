"""Runs a question: inputs once, then its peers in turns, round by round, each in a fresh process."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from bench.harness.figures import Data
from bench.harness.measuring import Child
from bench.harness.models import total_bytes
from bench.harness.peer_run import PeerRun
from bench.harness.question import Context, Peer, Question
from bench.machine.reserve import Reserve

QUESTIONS = (
    "save",
    "load",
    "reshard",
    "verify",
    "diff",
    "small",
    "tiny",
    "imports",
    "plan",
    "push",
    "stores",
    "memory",
    "training",
    "loader",
    "distributed",
    "node",
    "ranks",
    "gpu",
)


HELD_LEAST = 2**29
"""A process that handles a million tensors takes as much."""


def say(text: str) -> None:
    """Show progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def run_question(question: Question, context: Context, rounds: int, *, with_side: bool = True) -> Data:
    """Run all rounds of one question.

    Args:
        question: What to measure.
        context: Where.
        rounds: How often; a question may allow fewer.
        with_side: False leaves out the peers that don't take part in every round.

    Returns:
        The raw figures, as results.json holds them.

    Raises:
        ChildFailedError: hfshard failed, or the inputs could not be made. A peer that fails is noted as skipped.
        RuntimeError: Two peers that should have read the same bytes did not.
    """
    rounds = min(rounds, question.max_rounds)
    begin = time.monotonic()
    with ExitStack() as stack:
        if question.around is not None:
            context = stack.enter_context(question.around(context))
        say(f"{question.name}: making the inputs ({context.params})")
        _make_inputs(question, context)
        peers = [peer for peer in question.peers(context) if with_side or peer.every == 1]
        size = total_bytes(context.specs) if context.specs.exists() else 0
        held = int(question.held * max(size, 0 if context.params == "tiny" else HELD_LEAST))
        with Reserve(held) as reserve:
            runs, skipped = _run_rounds(question, peers, context, rounds, reserve)
        say(f"{question.name}: {time.monotonic() - begin:.0f} s in all")
        _check_results(question, runs)
        return {
            "rounds": rounds,
            "params": context.params,
            "bytes": size,
            "held": held,
            "skipped": skipped,
            "peers": {
                peer.name: {"title": peer.title, "base": peer.base, "limit": peer.limit, "runs": runs[peer.name]}
                for peer in peers
            },
        }


def _make_inputs(question: Question, context: Context) -> None:
    child = Child(question.name, "", context, context.environment)
    try:
        child.prepared()
    finally:
        child.end()


def _run_rounds(
    question: Question, peers: list[Peer], context: Context, rounds: int, reserve: Reserve
) -> tuple[dict[str, list[Data]], dict[str, str]]:
    """Run the peers in turns; what each run gave, and why peers were skipped."""
    runs: dict[str, list[Data]] = {peer.name: [] for peer in peers}
    skipped: dict[str, str] = {}
    for number in range(rounds):
        due = [peer for peer in peers if number % peer.every == 0 and peer.name not in skipped]
        turn = number % len(due) if due else 0
        for peer, found in _run_all(question, due[turn:] + due[:turn], context, reserve):
            if "skipped" in found:
                skipped[peer.name] = found["skipped"]
                say(f"  skipped: {peer.title} {peer.state}: {found['skipped']}")
                continue
            runs[peer.name].append({"round": number, **found})
            shown = ", ".join(f"{phase} {taken:.2f}" for phase, taken in found["seconds"].items())
            say(f"  {number + 1}/{rounds} {peer.name}: {shown} s, {found['peak'] / 2**20:.0f} MiB")
    return runs, skipped


def _run_all(
    question: Question, peers: list[Peer], context: Context, reserve: Reserve
) -> Iterator[tuple[Peer, dict[str, Any]]]:
    """Run peers, of which some prepare side by side; each is measured alone, while these wait."""
    for at in range(0, len(peers), question.side_by_side):
        reserve.take()
        together = enumerate(peers[at : at + question.side_by_side])
        with ExitStack() as stack:
            runs = [stack.enter_context(PeerRun(question, peer, context, number)) for number, peer in together]
            for run in runs:
                run.prepare()
            for run in runs:
                yield run.peer, run.measure(reserve)


def _check_results(question: Question, runs: dict[str, list[Data]]) -> None:
    """Check that all peers that say what they read ("sum" in their result) of a checkpoint ("of") read the same."""
    sums: dict[str, dict[Any, str]] = {}
    for name, found in runs.items():
        for run in found:
            of = run["result"].pop("of", "")
            if (value := run["result"].pop("sum", None)) is not None:
                sums.setdefault(of, {}).setdefault(value, name)
    for different in sums.values():
        if len(different) > 1:
            raise RuntimeError(f"{question.name}: peers disagree on the bytes: {', '.join(different.values())}")
