"""Runs a question: inputs once, then its peers in turns, round by round, each in a fresh process."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from bench.harness import page_cache
from bench.harness.figures import Data
from bench.harness.measuring import ChildFailedError, run_child
from bench.harness.models import total_bytes
from bench.harness.question import Context, Peer, Question

QUESTIONS = (
    "save",
    "load",
    "reshard",
    "verify",
    "small",
    "tiny",
    "plan",
    "push",
    "memory",
    "training",
    "loader",
    "distributed",
    "ranks",
    "gpu",
)


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
        run_child(question.name, "", context, lambda: None, context.environment)
        peers = [peer for peer in question.peers(context) if with_side or peer.every == 1]
        runs, skipped = _run_rounds(question, peers, context, rounds)
        say(f"{question.name}: {time.monotonic() - begin:.0f} s in all")
        _check_results(question, runs)
        return {
            "rounds": rounds,
            "params": context.params,
            "bytes": total_bytes(context.specs) if context.specs.exists() else 0,
            "skipped": skipped,
            "peers": {
                peer.name: {"title": peer.title, "base": peer.base, "limit": peer.limit, "runs": runs[peer.name]}
                for peer in peers
            },
        }


def _run_rounds(
    question: Question, peers: list[Peer], context: Context, rounds: int
) -> tuple[dict[str, list[Data]], dict[str, str]]:
    """Run the peers in turns; what each run gave, and why peers were skipped."""
    runs: dict[str, list[Data]] = {peer.name: [] for peer in peers}
    skipped: dict[str, str] = {}
    for number in range(rounds):
        due = [peer for peer in peers if number % peer.every == 0 and peer.name not in skipped]
        turn = number % len(due) if due else 0
        for peer in due[turn:] + due[:turn]:
            found = run_peer(question, peer, context)
            if "skipped" in found:
                skipped[peer.name] = found["skipped"]
                say(f"  skipped: {peer.title} {peer.state}: {found['skipped']}")
                continue
            runs[peer.name].append({"round": number, **found})
            shown = ", ".join(f"{phase} {taken:.2f}" for phase, taken in found["seconds"].items())
            say(f"  {number + 1}/{rounds} {peer.name}: {shown} s, {found['peak'] / 2**20:.0f} MiB")
    return runs, skipped


def run_peer(question: Question, peer: Peer, context: Context) -> dict[str, Any]:
    """One run of one peer, rounded to what the figures mean."""
    target = context.directory / "target"
    target.mkdir()
    cache: dict[str, float] = {}

    def before_go() -> None:
        files = question.files(context, peer)
        if peer.state == "cold":
            cache["resident"] = page_cache.drop(files)
        elif peer.state == "warm":
            cache["resident"] = page_cache.fill(files)

    try:
        found = run_child(question.name, peer.name, replace(context, target=target), before_go, context.environment)
    except ChildFailedError as error:
        if peer.written_by_hfshard:
            raise
        last = str(error).splitlines()[-1:] or ["it ended without a word"]
        return {"skipped": f"failed: {last[0][:300]}"}
    finally:
        shutil.rmtree(target)
    if "skipped" not in found:
        found["seconds"] = {phase: round(taken, 4) for phase, taken in found["seconds"].items()}
        found["cpu"] = round(found["cpu"], 3)
        if cache:
            found["resident"] = round(cache["resident"], 4)
    return found


def _check_results(question: Question, runs: dict[str, list[Data]]) -> None:
    """Check that all peers that say what they read ("sum" in their result) read the same."""
    sums: dict[Any, str] = {}
    for name, found in runs.items():
        for run in found:
            if (value := run["result"].pop("sum", None)) is not None:
                sums.setdefault(value, name)
    if len(sums) > 1:
        raise RuntimeError(f"{question.name}: peers disagree on the bytes: {', '.join(sums.values())}")
