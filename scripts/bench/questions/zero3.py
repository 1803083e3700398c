"""Costs of a save of a living DeepSpeed ZeRO-3 model by four ranks: of its partitions, or gathered by DeepSpeed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

from bench.harness.figures import (
    MEGABYTE,
    Data,
    Target,
    at_most,
    markdown_table,
    paragraphs,
    ratio,
    runs_of,
    seconds,
    show,
    show_ratio,
    spread,
)
from bench.harness.group_saves import Save, prepare_ranks, save_when_told, shares, show_megabytes
from bench.harness.processes import COUNT
from bench.harness.question import Context, Job, Peer, Question, SkipPeer
from bench.questions.foreign import build_model, import_deepspeed, loss_of, write_untied_specs

GATHER = "zero3 gather"
SHA256, NONE = OURS = ("zero3 sha256", "zero3 none")
TITLES = {
    GATHER: "DeepSpeed `save_16bit_model`: gathers on rank 0 (flushed after it)",
    SHA256: "hfshard `save_model`, sha256",
    NONE: "hfshard `save_model`, no checksum",
}
TIME, PEAK = 0.5, 0.15
"""Aims: times of the gather, and shares of the model."""


def make_inputs(context: Context) -> None:
    """Write the shapes of the model: each rank builds the same."""
    if not context.specs.exists():
        write_untied_specs(context)


def peers(context: Context) -> list[Peer]:
    """The lines of the table."""
    return [Peer(key, title, partial(_prepare, key=key), base=GATHER) for key, title in TITLES.items()]


def _prepare(context: Context, key: str) -> Job:
    if find_spec("deepspeed") is None:
        raise SkipPeer("pip install deepspeed")
    return prepare_ranks(context, key, save_on_rank)


def save_on_rank(pipe: Connection, rank: int, context: Context, peer: str, port: int) -> None:
    """Train the model for one step under ZeRO-3, in bfloat16, and save it when told to."""
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(COUNT)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import_deepspeed()
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model = build_model(context, torch.bfloat16)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "bf16": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=settings)
    engine.backward(loss_of(engine))
    engine.step()
    save_when_told(pipe, SAVES[peer](context, engine), flushes=peer in OURS)


def _by_deepspeed(context: Context, engine: Any) -> Save:
    """Gather on rank 0, which writes."""
    return lambda: engine.save_16bit_model(str(context.target))


def _by_hfshard(context: Context, engine: Any, checksum: Any) -> Save:
    """`hfshard.save_model` on every rank."""
    import hfshard

    import_module("hfshard.models.saver")  # before the clock starts
    save, size = hfshard.save_model, context.size.shard_size
    return lambda: save(engine, context.target, max_shard_size=size, checksum=checksum)


SAVES: dict[str, Callable[[Context, Any], Save]] = {
    GATHER: _by_deepspeed,
    SHA256: partial(_by_hfshard, checksum="sha256"),
    NONE: partial(_by_hfshard, checksum=None),
}


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    titles = ["", "s (min–max)", "× the gather", "peak of a rank, MB", "× model", "MB written by a rank", "sent"]
    return paragraphs(
        f"{data['bytes'] / MEGABYTE:.0f} MB in bfloat16, partitioned by DeepSpeed ZeRO-3 on {COUNT} ranks of this"
        " machine (gloo), after one step of AdamW. Time, peak, written and sent as in the question before.",
        markdown_table(titles, [_row(data, name) for name in data["peers"] if runs_of(data, name)]),
    )


def _row(data: Data, name: str) -> list[str]:
    return [
        data["peers"][name]["title"],
        show(spread(seconds(run) for run in runs_of(data, name))),
        show_ratio(data, name, GATHER),
        show_megabytes(data, name, "peak"),
        f"{max(shares(data, name, 'peak')):.2f}",
        show_megabytes(data, name, "written"),
        show_megabytes(data, name, "sent", of_all=True) if name in OURS else "",
    ]


def targets(data: Data) -> list[Target]:
    """The aims, and what was measured of them."""
    what = f"save of ZeRO-3 on {COUNT} ranks"
    peak = max((share for name in OURS for share in shares(data, name, "peak")), default=None)
    return [
        at_most(f"{what}: peak memory of a rank ≤ {PEAK} × the model", PEAK, peak),
        *(
            at_most(f"{what}, {name.split()[1]}: time", TIME, ratio(data, name, GATHER), "DeepSpeed's gather")
            for name in OURS
        ),
    ]


QUESTION = Question(
    name="zero3",
    title="Save of a living ZeRO-3 model",
    peers=peers,
    make_inputs=make_inputs,
    render=render,
    targets=targets,
    held=3.0,
    side_by_side=1,
)
