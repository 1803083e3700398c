"""One run of one peer: its process, its target, and the state of the page cache and of the memory when it is let go."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

from bench.harness.measuring import Child, ChildFailedError
from bench.harness.question import Context, Peer, Question
from bench.machine import page_cache
from bench.machine.reserve import Reserve


class PeerRun:
    """A run that prepares from the start, and is measured when it is its turn.

    Raises:
        ChildFailedError: By `prepare` and `measure`, where a peer that is hfshard's own ended in an error.
    """

    def __init__(self, question: Question, peer: Peer, context: Context, number: int = 0) -> None:
        self.question = question
        self.peer = peer
        self.context = replace(context, target=context.directory / f"target-{number}")
        self.skipped = ""
        self.context.target.mkdir()
        self._child = Child(question.name, peer.name, self.context, context.environment)

    def __enter__(self) -> PeerRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.end()
        shutil.rmtree(self.context.target, ignore_errors=True)

    def prepare(self) -> None:
        """Wait until it is ready, or knows why it can't run."""
        try:
            self.skipped = self._child.prepared().get("skipped", "")
        except ChildFailedError as error:
            self._fail(error)

    def measure(self, reserve: Reserve) -> dict[str, Any]:
        """Let it go; what it took, rounded to what the figures mean, or {"skipped": why}. Its process and files go."""
        cache: dict[str, float] = {}

        def before_go() -> None:
            files = self.question.files(self.context, self.peer)
            if self.peer.state:
                set_state = page_cache.drop if self.peer.state == "cold" else page_cache.fill
                cache["resident"] = round(set_state(files), 4)
            reserve.free()

        found: dict[str, Any] = {}
        if not self.skipped:
            reserve.take()
            try:
                found = self._child.measured(before_go) | cache
            except ChildFailedError as error:
                self._fail(error)
        self.__exit__()
        if self.skipped:
            return {"skipped": self.skipped}
        found["seconds"] = {phase: round(taken, 4) for phase, taken in found["seconds"].items()}
        found["cpu"] = round(found["cpu"], 3)
        return found

    def _fail(self, error: ChildFailedError) -> None:
        if self.peer.written_by_hfshard:
            raise error
        last = str(error).splitlines()[-1:] or ["it ended without a word"]
        self.skipped = f"failed: {last[0][:300]}"
