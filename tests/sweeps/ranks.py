"""The sweep of a rank: two save together, and one of them is stopped at each of its calls."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.distributed.gloo import free_port
from tests.sweeps.child import LONGEST_SECONDS, End, RankFork, Run, Scope, tell
from tests.sweeps.directory import FAILURES, Baseline, SavesSuite
from tests.sweeps.directory_models import Content, aligned_limit_of, sharded_model
from tests.sweeps.directory_transitions import Transition, all_transitions
from tests.sweeps.engine import INJECTIONS, Judgement, Point, injection
from tests.sweeps.rank_calls import join, shard

SWEPT = (
    "fresh->single",
    "fresh->sharded",
    "single->single",
    "single->sharded",
    "single->sharded+config",
    "sharded->single",
    "sharded->single+config",
    "sharded->sharded",
    "sharded->sharded+config",
    "sharded->more",
    "bin->sharded+config",
    "identical-sharded",
    "wreck-sharded-80",
)
"""Of the table of saves by one process."""
OF_AN_OWNER = ("fresh->sharded", "sharded->sharded")
"""Those in which the other rank is stopped, too: it writes one of the files."""


class RanksSuite(SavesSuite):
    """Saves by two ranks of a model under `fully_shard`; rank 0 commits, and keeps the store.

    All that one process's saves are judged by counts here, too. Besides, the survivor raises an HfshardError that names
    the stopped rank, within seconds; where the stopped one had told already that all is done, it may say so.
    """

    name = "distributed"
    kinds = ("kill", "int", "enospc", "eio", "full")
    failures = (*FAILURES, "survivor")
    warmed = (Content(1),)

    def __init__(self, target: str = "hfshard") -> None:
        super().__init__(target)
        self._survivor: RankFork
        self._stopped_save: Callable[[], Callable[[], None]]
        self._save: Callable[[], None]

    def transitions(self) -> tuple[Transition, ...]:
        """Those of the table, for rank 0, and some for rank 1."""
        known = {one.name: one for one in all_transitions()}
        return (*(known[name] for name in SWEPT), *(replace(known[name], name=f"{name}@1") for name in OF_AN_OWNER))

    def warm(self, place: Path) -> None:
        """Import what a rank needs, too."""
        import torch._dynamo  # slow in each fork, as the others
        import torch.distributed.fsdp  # noqa: F401

        import hfshard.distributed.save_on_ranks  # noqa: F401

        super().warm(place)

    def unstopped(self, transition: Transition, directory: Path) -> Callable[[], None]:
        """Start the survivor, and give what the other rank does."""
        port = free_port()
        stopped = _stopped_rank(transition)
        words = directory.parent.parent / f"{directory.parent.name}.words"

        def prepare(rank: int) -> Callable[[], None]:
            join(port, rank, 2)
            return sharded_save(transition, directory)

        def survive() -> None:
            tell(words, End.of(prepare(1 - stopped)))

        words.unlink(missing_ok=True)
        self._survivor = RankFork(survive, words)
        self._stopped_save = lambda: prepare(stopped)
        return lambda: self._save()

    def prepare(self) -> None:
        """Join the group."""
        self._save = self._stopped_save()

    def aim(self, point: Point[Transition, Baseline], root: Path) -> tuple[str, Scope]:
        """Count by threads: the one that writes an owner's files makes calls of the same names as the first."""
        call, recorded = point.call, point.recorded
        if call.thread == 0:
            return injection(call, INJECTIONS[point.kind]), Scope(threads=False)
        here = str(recorded.recorded_in)
        path = here + re.findall(re.escape(here) + r'([^">]*)[">]', call.text)[-1]
        earlier = [one for one in recorded.calls[: point.ordinal] if one.name == call.name and path in one.text]
        there = root / Path(path).relative_to(recorded.recorded_in.parents[len(Path(self.inside).parts) - 1])
        return f"{call.name}:{INJECTIONS[point.kind].format(k=len(earlier) + 1)}", Scope(path=str(there))

    def baseline(self, transition: Transition, before: Path, after: Path, run: Run) -> tuple[Baseline, tuple[str, ...]]:
        """What each reader loads, and that the other rank has saved."""
        ends = self._survivor.ends()
        baseline, problems = super().baseline(transition, before, after, run)
        return baseline, (*problems, *(f"the other rank: {end}" for end in ends if end.status != "saved"))

    def judge(self, point: Point[Transition, Baseline], run: Run, directory: Path) -> Judgement:
        """Hear the survivor, and judge what is left as of a save by one process."""
        start = time.monotonic()
        end = self._survivor.ends()[-1]
        seconds = time.monotonic() - start
        found = super().judge(point, run, directory)
        if problem := _problem(end, run, _stopped_rank(point.recorded.transition), seconds):
            found.add("survivor", problem)
            if found.category in self.fine:
                found.category = "hung" if end.status == "hung" else "survivor"
        return found


def sharded_save(transition: Transition, directory: Path) -> Callable[[], None]:
    """Shard a model over the ranks; gives what saves it."""
    save = transition.new
    model = sharded_model(save.content)
    shard(model, ())
    limit = aligned_limit_of(save.content, save.layout)
    return lambda: model.save_pretrained(directory, max_shard_size=limit, variant=save.variant)


def _stopped_rank(transition: Transition) -> int:
    return int(transition.name.endswith("@1"))


def _problem(end: End, run: Run, stopped: int, seconds: float) -> str:
    """What is wrong with how the survivor's call ended; empty when nothing."""
    if end.status in ("hung", "died") or seconds > LONGEST_SECONDS:
        return f"{end} after {seconds:.0f} s"
    if end.status == "saved":
        return "" if run.status == "saved" else f"it saved, and rank {stopped} {run.status}: {run.report[:200]}"
    if run.status == "saved":
        return f"{end}, though rank {stopped} saved"
    return "" if end.is_ours and end.rank == stopped else str(end)
