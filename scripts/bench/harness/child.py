"""The fresh process of one measurement, which measuring.py starts: `-m bench.harness.child QUESTION PEER CONTEXT`."""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

from bench.harness.measuring import measure
from bench.harness.question import Context, SkipPeer, question_of


def main(name: str, peer_name: str, raw_context: str) -> None:
    """Prepare, wait for the parent's word, measure, answer; each answer is a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer

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
    answers.flush()
    os._exit(0)  # what threads of a library do at exit is not waited for


if __name__ == "__main__":
    main(*sys.argv[1:])
