"""How long it takes to plan the files of 1,000 to 1,000,000 tensors and to write their index, and how that grows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench.harness.figures import Data, at_most, ratio, runs_of, seconds, skipped, table
from bench.harness.question import SIDE, Context, Job, Peer, Question, Target
from bench.markdown import paragraphs

if TYPE_CHECKING:
    from torch import Tensor

COUNTS = (1_000, 10_000, 100_000, 1_000_000)
TINY_COUNTS = (1_000,)
HUB_MOST = 100_000
"""More take huggingface_hub minutes."""
ELEMENTS = 256
"""Of each tensor: 512 bytes, a few times its entry in a header, so that both cut about as many files."""
MAX_SHARD_BYTES = 320_000
"""About 500 tensors a file, as large mixtures of experts have."""
EXPERTS = 128
FIRST_FITTED = 10_000
"""From here on the exponent is fitted: below it, what does not grow is most of the time."""
EXPONENT = 1.1
HUB_FACTOR = 0.3


def peers(context: Context) -> list[Peer]:
    """The lines of the table."""
    found = []
    for count in TINY_COUNTS if context.params == "tiny" else COUNTS:
        hub = hub_key(count) if count <= HUB_MOST else ""
        every = SIDE if count > HUB_MOST else 1
        found.append(Peer(our_key(count), f"hfshard, {count:,}", _ours(count), every=every, base=hub))
        if hub:
            found.append(Peer(hub, f"huggingface_hub, {count:,} (no index)", _theirs(count)))
    return found


def our_key(count: int) -> str:
    """The key of hfshard's line for that many tensors."""
    return f"hfshard {count}"


def hub_key(count: int) -> str:
    """The key of huggingface_hub's line for that many tensors."""
    return f"huggingface_hub {count}"


def make_tensors(count: int) -> dict[str, Tensor]:
    """Tensors named as those of a mixture of experts, each with a storage of its own."""
    import torch

    return {
        f"model.layers.{number // EXPERTS}.mlp.experts.{number % EXPERTS}.down_proj.weight": torch.empty(
            ELEMENTS, dtype=torch.bfloat16
        )
        for number in range(count)
    }


def _ours(count: int) -> Callable[[Context], Job]:
    def prepare(context: Context) -> Job:
        import hfshard
        from hfshard.format.index import CheckpointIndex, FileDigest

        tensors = make_tensors(count)
        plans: list[Any] = []

        def index() -> None:
            [plan] = plans
            # What a save adds is as long as here: digests of the file, its sample and of each tensor.
            files = {
                shard.file: FileDigest(shard.nbytes, "0" * 64, None, "0" * 32, "0" * 16 * len(shard.tensors))
                for shard in plan.shards
            }
            CheckpointIndex(plan.weight_map, plan.total_size, plan.total_size // 2, files=files).to_json()

        hfshard.plan_shards(make_tensors(1))  # the first call imports
        return Job(
            [("plan", lambda: plans.append(hfshard.plan_shards(tensors, MAX_SHARD_BYTES))), ("index", index)],
            lambda: {"files": len(plans[0].shards)},
        )

    return prepare


def _theirs(count: int) -> Callable[[Context], Job]:
    def prepare(context: Context) -> Job:
        from huggingface_hub import split_torch_state_dict_into_shards

        tensors = make_tensors(count)
        found: list[Any] = []
        split_torch_state_dict_into_shards(make_tensors(1))  # the first call imports
        return Job(
            [
                (
                    "plan",
                    lambda: found.append(split_torch_state_dict_into_shards(tensors, max_shard_size=MAX_SHARD_BYTES)),
                )
            ],
            lambda: {"files": len(found[0].filename_to_tensors)},
        )

    return prepare


def exponent(data: Data, prefix: str, phase: str) -> float | None:
    """The slope of log seconds over log tensors, by least squares over the medians; None with fewer than two."""
    points = []
    for count in COUNTS:
        runs = runs_of(data, f"{prefix} {count}")
        if runs and count >= FIRST_FITTED:
            points.append((math.log(count), math.log(statistics.median(seconds(run, phase) for run in runs))))
    if len(points) < 2:
        return None
    slope, _ = statistics.linear_regression(*zip(*points))
    return slope


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    ours, theirs = exponent(data, "hfshard", "index"), exponent(data, "huggingface_hub", "plan")
    fits = [
        f"{name} grows with the exponent {slope:.2f}"
        for name, slope in (("hfshard", ours), ("huggingface_hub", theirs))
        if slope is not None
    ]
    cut = ", ".join(
        f"{peer['title']}: {peer['runs'][0]['result']['files']}" for peer in data["peers"].values() if peer["runs"]
    )
    return paragraphs(
        f"Tensors of {2 * ELEMENTS} bytes, each with its own storage, about 500 a file. *Index*: from the call to the"
        " end of the index's JSON, with a digest for each tensor; huggingface_hub's split alone stands beside it."
        + (f" From {FIRST_FITTED:,} tensors on " + ", ".join(fits) + "." if fits else ""),
        table(data, list(data["peers"]), [("plan", "plan: "), ("index", "index: ")], "huggingface_hub"),
        f"Files: {cut}.",
        skipped(data),
    )


def targets(data: Data) -> list[Target]:
    """What is aimed at, and what was measured of it."""
    pair = ratio(data, our_key(HUB_MOST), hub_key(HUB_MOST), "index")
    return [
        Target(
            f"plan and index: exponent from 10,000 to 1,000,000 tensors ≤ {EXPONENT}",
            *at_most(EXPONENT, exponent(data, "hfshard", "index") if runs_of(data, our_key(COUNTS[-1])) else None),
        ),
        Target(
            f"plan and index, 100,000 tensors: time ≤ {HUB_FACTOR} × huggingface_hub's split",
            *at_most(HUB_FACTOR, pair),
        ),
    ]


QUESTION = Question("plan", "Plan", peers, lambda context: None, lambda context, peer: [], render, targets)
