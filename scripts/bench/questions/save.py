"""Time and memory of a save into a new directory: hfshard (flushed, hashed) and its peers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.harness.figures import Data, Target, at_most, paragraphs, peak_at_most, ratio, table
from bench.harness.inputs import hash_limit, make_specs, write_limit, written
from bench.harness.models import make_flat_tensors, make_model, make_tensors, total_bytes
from bench.harness.question import SIDE, Context, Job, Peer, Question
from bench.machine.limits import sync_files

BASE, SYNCED, LIMIT, HASH = "transformers", "transformers fsync", "limit", "hash"
OURS = ("hfshard sha256", "hfshard xxh3", "hfshard none")
PEAK_MIB = 64

Save = Callable[[Path], object]
"""Saves into a directory."""


def peers(context: Context) -> list[Peer]:
    """The lines of the table."""

    def peer(key: str, title: str, prepare: Callable[[Context], Job], every: int = 1) -> Peer:
        limit = f"{LIMIT} | {HASH}" if key == OURS[0] else LIMIT
        return Peer(key, title, prepare, every=every, base=SYNCED, limit=limit)

    def line(key: str, title: str, make: Callable[[Context], Save], every: int = 1) -> Peer:
        return peer(key, title, lambda context: saving(context, make(context)), every)

    size = context.size.shard_size
    return [
        line(BASE, "transformers `save_pretrained` (not flushed, not hashed)", by_transformers),
        line(SYNCED, "the same, then fsync of its files and the directory", partial(by_transformers, fsync=True)),
        line("hfshard sha256", "hfshard, sha256", partial(by_hfshard, checksum="sha256")),
        line("hfshard xxh3", "hfshard, xxh3", partial(by_hfshard, checksum="xxh3")),
        line("hfshard none", "hfshard, no checksum", partial(by_hfshard, checksum=None)),
        peer(LIMIT, "the limit: O_DIRECT from memory, flushed", lambda context: write_limit(context, "save", size)),
        peer(
            HASH,
            "the limit of sha256: as many bytes in memory, all cores",
            lambda context: hash_limit("save", total_bytes(context.specs)),
        ),
        line("hfshard strided", "hfshard, no checksum, transposed views", _strided, SIDE),
        line("hfshard flat", "hfshard, no checksum, views of one buffer", _flat, SIDE),
        line("huggingface_hub", "huggingface_hub `save_torch_model`", _by_hub, SIDE),
        line("safetensors", "safetensors `save_file`, a file at a time", _by_safetensors, SIDE),
        line("torch.save", "`torch.save`, one file", _by_torch, SIDE),
        line("torch DCP", "torch DCP, `FileSystemWriter` (flushed)", _by_dcp, SIDE),
    ]


def saving(context: Context, save: Save) -> Job:
    """A save into the target, all of whose bytes must be there then."""
    return Job([("save", lambda: save(context.target))], lambda: written(context))


def by_transformers(context: Context, *, fsync: bool = False, shard_size: str = "", model: Any = None) -> Save:
    """Prepare `save_pretrained`, and the flush that it leaves out if asked for; the model lies on any device."""
    model = model or make_model(context.size, context.specs)
    shard_size = shard_size or context.size.shard_size

    def save(directory: Path) -> None:
        model.save_pretrained(directory, max_shard_size=shard_size)
        if fsync:
            sync_files(directory)

    return save


def by_hfshard(context: Context, *, checksum: Any, shard_size: str = "", model: Any = None) -> Save:
    """Prepare `hfshard.save_model` of the same model."""
    import hfshard

    import_module("hfshard.models.collect")  # before the clock starts
    model = model or make_model(context.size, context.specs)
    options: dict[str, Any] = {"max_shard_size": shard_size or context.size.shard_size, "checksum": checksum}
    save = hfshard.save_model
    return lambda directory: save(model, directory, **options)


def _strided(context: Context) -> Save:
    """Every matrix transposed: no tensor's bytes lie in order."""
    return _state_dict(context, {name: tensor.t() for name, tensor in make_tensors(context.specs).items()})


def _flat(context: Context) -> Save:
    """Every tensor a piece of one buffer."""
    return _state_dict(context, make_flat_tensors(context.specs))


def _state_dict(context: Context, tensors: dict[str, Any]) -> Save:
    import hfshard

    save = hfshard.save_state_dict
    return lambda directory: save(tensors, directory, max_shard_size=context.size.shard_size, checksum=None)


def _by_hub(context: Context) -> Save:
    """huggingface_hub's own sharded save."""
    from huggingface_hub import save_torch_model

    model = make_model(context.size, context.specs)
    return lambda directory: save_torch_model(model, directory, max_shard_size=context.size.shard_size)


def _by_safetensors(context: Context) -> Save:
    """The plain writer, one shard after another, as the plan of hfshard cuts them."""
    from safetensors.torch import save_file

    import hfshard

    tensors = make_tensors(context.specs)
    plan = hfshard.plan_shards(tensors, context.size.shard_size)

    def save(directory: Path) -> None:
        for shard in plan.shards:
            save_file({name: tensors[name] for name in shard.names}, directory / shard.file)

    return save


def _by_torch(context: Context) -> Save:
    """`torch.save` of the same tensors."""
    import torch

    tensors = make_tensors(context.specs)
    return lambda directory: torch.save(tensors, directory / "pytorch_model.bin")


def _by_dcp(context: Context) -> Save:
    """torch.distributed.checkpoint in one process, with as many threads as there are cores."""
    dcp: Any = import_module("torch.distributed.checkpoint")
    warnings.simplefilter("ignore")
    tensors = make_tensors(context.specs)
    writer = dcp.FileSystemWriter(context.target, thread_count=os.cpu_count() or 1)
    return lambda directory: dcp.save(tensors, storage_writer=writer, no_dist=True)


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    return paragraphs(
        "A new empty directory each time. hfshard's time includes the fsync of every file and of the directory;"
        " of the peers only DCP flushes. The limit of the line with sha256 is the larger of both, in the same round.",
        table(data, list(data["peers"]), [("save", "")], "transformers with fsync"),
    )


def targets(data: Data) -> list[Target]:
    """The aims, and what was measured of them."""
    write, both = ("the flushed O_DIRECT write", "the larger of that write and hashing on all cores")
    return [
        at_most("save, none: time", 1.1, ratio(data, "hfshard none", LIMIT), write),
        at_most("save, xxh3: time", 1.1, ratio(data, "hfshard xxh3", LIMIT), write),
        at_most("save, sha256: time", 1.2, ratio(data, "hfshard sha256", f"{LIMIT} | {HASH}"), both),
        peak_at_most("save, contiguous", PEAK_MIB, data, OURS),
        peak_at_most("save, strided", PEAK_MIB, data, ["hfshard strided"]),
        peak_at_most("save, flat buffer", PEAK_MIB, data, ["hfshard flat"]),
    ]


QUESTION = Question(
    name="save", title="Save", peers=peers, make_inputs=make_specs, render=render, targets=targets, held=2.0
)
