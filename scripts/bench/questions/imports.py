"""Time of an import in a new interpreter: hfshard's against torch's and transformers', all files cached."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from bench.harness.figures import Data, Target, at_most, paragraphs, ratio, table
from bench.harness.question import Context, Job, Peer, Question

TORCH, CLASS, MIXIN = "torch", "PreTrainedModel", "hfshard mixin"
FREE = 0.05
"""`import hfshard` is free: at most this part of `import torch`."""
LINES = {
    TORCH: ("import torch", TORCH),
    "hfshard": ("import hfshard", TORCH),
    "hfshard functions": ("from hfshard import load_state_dict, save_state_dict", TORCH),
    "transformers": ("import transformers", CLASS),
    CLASS: ("from transformers import PreTrainedModel", CLASS),
    MIXIN: ("from hfshard import ShardedModelMixin", CLASS),
}
"""By key: the import, and the line to compare it with."""


def peers(context: Context) -> list[Peer]:
    """The lines of the table."""
    return [Peer(key, f"`{code}`", _importing(code), base=base) for key, (code, base) in LINES.items()]


def make_inputs(context: Context) -> None:
    """Import all once, so that the files are in the page cache, and their compiled ones too."""
    for code, _ in LINES.values():
        subprocess.run([sys.executable, "-c", code], check=True)


def _importing(code: str) -> Callable[[Context], Job]:
    compiled = compile(code, "<import>", "exec")
    return lambda context: Job([("import", lambda: exec(compiled, {}))])


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    return paragraphs(
        "One line in a new interpreter; the ratio of the first three is to `import torch`, that of the others to"
        " transformers' class, whose import brings torch and what any model of transformers needs.",
        table(data, list(data["peers"]), [("import", "")], "that base", digits=3),
    )


def targets(data: Data) -> list[Target]:
    """The aims, and what was measured of them."""
    return [
        at_most("import hfshard: time", FREE, ratio(data, "hfshard", TORCH), "import torch"),
        at_most(
            "from hfshard import ShardedModelMixin: time",
            1.0,
            ratio(data, MIXIN, CLASS),
            "transformers' PreTrainedModel",
        ),
    ]


QUESTION = Question(
    name="imports", title="Imports", peers=peers, make_inputs=make_inputs, render=render, targets=targets
)
