"""How long a save takes, and what memory: hfshard (flushed, hashed) and its peers, into a new directory each time."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

from bench.harness.figures import Data, at_most, peak_at_most, ratio, skipped, table
from bench.harness.inputs import make_specs, written
from bench.harness.models import make_flat_tensors, make_model, make_tensors, total_bytes
from bench.harness.question import SIDE, Context, Job, Peer, Question, SkipPeer, Target
from bench.machine.limits import aligned, anonymous, files_of, hashing, random_memory, sync_files, write_files
from bench.markdown import paragraphs

BASE, SYNCED, LIMIT, HASH = "transformers", "transformers fsync", "limit", "hash"
OURS = ("hfshard sha256", "hfshard xxh3", "hfshard none")
VIEWS = ("hfshard strided", "hfshard flat")
PEAK_MIB = 64


def peers(context: Context) -> list[Peer]:
    """The lines of the table."""

    def line(key: str, title: str, prepare: Callable[[Context], Job], every: int = 1) -> Peer:
        limit = f"{LIMIT} | {HASH}" if key == OURS[0] else LIMIT
        return Peer(key, title, prepare, every=every, base=SYNCED, limit=limit)

    return [
        line(BASE, "transformers `save_pretrained` (not flushed, not hashed)", with_transformers),
        line(SYNCED, "the same, then fsync of its files and the directory", with_fsync),
        line("hfshard sha256", "hfshard, sha256", lambda context: with_hfshard(context, "sha256")),
        line("hfshard xxh3", "hfshard, xxh3", lambda context: with_hfshard(context, "xxh3")),
        line("hfshard none", "hfshard, no checksum", lambda context: with_hfshard(context, None)),
        line(LIMIT, "the limit: O_DIRECT from memory, flushed", at_the_limit),
        line(HASH, "the limit of sha256: as many bytes in memory, all cores", hash_alone),
        line("hfshard strided", "hfshard, no checksum, transposed views", strided, SIDE),
        line("hfshard flat", "hfshard, no checksum, views of one buffer", flat, SIDE),
        line("huggingface_hub", "huggingface_hub `save_torch_model`", with_hub, SIDE),
        line("safetensors", "safetensors `save_file`, a file at a time", with_safetensors, SIDE),
        line("torch.save", "`torch.save`, one file", with_torch, SIDE),
        line("torch DCP", "torch DCP, `FileSystemWriter` (flushed)", with_dcp, SIDE),
    ]


def with_transformers(context: Context) -> Job:
    """`save_pretrained` of the same model."""
    return transformers_job(context, make_model(context.size, context.specs))


def with_fsync(context: Context) -> Job:
    """What it takes transformers until the bytes are on the disk."""
    model = make_model(context.size, context.specs)

    def save() -> None:
        model.save_pretrained(context.target, max_shard_size=context.size.shard_size)
        sync_files(context.target)

    return _job(context, save)


def with_hfshard(context: Context, checksum: Any) -> Job:
    """`hfshard.save_model` of the same model."""
    return hfshard_job(context, make_model(context.size, context.specs), checksum)


def transformers_job(context: Context, model: Any) -> Job:
    """A save by transformers; the model lies on any device."""
    size = context.size.shard_size
    return _job(context, lambda: model.save_pretrained(context.target, max_shard_size=size))


def hfshard_job(context: Context, model: Any, checksum: Any) -> Job:
    """A save by hfshard; the model lies on any device."""
    import hfshard

    hfshard.save_model  # noqa: B018  imported before the clock starts, and so is this:
    import_module("hfshard.models.collect")
    size = context.size.shard_size
    return _job(context, lambda: hfshard.save_model(model, context.target, max_shard_size=size, checksum=checksum))


def strided(context: Context) -> Job:
    """Every matrix transposed: no tensor's bytes lie in order."""
    return _state_dict(context, {name: tensor.t() for name, tensor in make_tensors(context.specs).items()})


def flat(context: Context) -> Job:
    """Every tensor a piece of one buffer."""
    return _state_dict(context, make_flat_tensors(context.specs))


def _state_dict(context: Context, tensors: dict[str, Any]) -> Job:
    import hfshard

    hfshard.save_state_dict  # noqa: B018
    size = context.size.shard_size
    return _job(context, lambda: hfshard.save_state_dict(tensors, context.target, max_shard_size=size, checksum=None))


def _job(context: Context, save: Callable[[], object]) -> Job:
    return Job([("save", save)], lambda: written(context))


def with_hub(context: Context) -> Job:
    """huggingface_hub's own sharded save."""
    from huggingface_hub import save_torch_model

    model = make_model(context.size, context.specs)
    size = context.size.shard_size
    return _job(context, lambda: save_torch_model(model, context.target, max_shard_size=size))


def with_safetensors(context: Context) -> Job:
    """The plain writer, one shard after another, as the plan of hfshard cuts them."""
    from safetensors.torch import save_file

    import hfshard

    tensors = make_tensors(context.specs)
    plan = hfshard.plan_shards(tensors, context.size.shard_size)

    def save() -> None:
        for shard in plan.shards:
            save_file({name: tensors[name] for name in shard.names}, context.target / shard.file)

    return _job(context, save)


def with_torch(context: Context) -> Job:
    """`torch.save` of the same tensors."""
    import torch

    tensors = make_tensors(context.specs)
    return _job(context, lambda: torch.save(tensors, context.target / "pytorch_model.bin"))


def with_dcp(context: Context) -> Job:
    """torch.distributed.checkpoint in one process, with as many threads as there are cores."""
    dcp: Any = import_module("torch.distributed.checkpoint")
    warnings.simplefilter("ignore")
    tensors = make_tensors(context.specs)
    writer = dcp.FileSystemWriter(context.target, thread_count=os.cpu_count() or 1)
    return _job(context, lambda: dcp.save(tensors, storage_writer=writer, no_dist=True))


def at_the_limit(context: Context) -> Job:
    """Write as many bytes from aligned memory into files of the shards' size."""
    from hfshard._util.text import parse_size

    files = files_of(context.target, total_bytes(context.specs), parse_size(context.size.shard_size))
    memory = random_memory(files)
    try:
        write_files(anonymous(aligned(1)), [(context.directory / "probe", 1)])
    except OSError as error:
        raise SkipPeer(f"no O_DIRECT here: {error}") from error
    finally:
        (context.directory / "probe").unlink(missing_ok=True)
    return _job(context, lambda: write_files(memory, files))


def hash_alone(context: Context) -> Job:
    """Hash as many bytes, cut evenly."""
    return Job([("save", hashing(total_bytes(context.specs)))])


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    return paragraphs(
        "A new empty directory each time. hfshard's time includes the fsync of every file and of the directory;"
        " of the peers only DCP flushes. The limit of the line with sha256 is the larger of both, in the same round.",
        table(data, list(data["peers"]), [("save", "")], "transformers with fsync"),
        skipped(data),
    )


def targets(data: Data) -> list[Target]:
    """What is aimed at, and what was measured of it."""
    found = [
        Target(
            f"save, {name}: time ≤ 1.1 × the flushed O_DIRECT write",
            *at_most(1.1, ratio(data, f"hfshard {name}", LIMIT)),
        )
        for name in ("none", "xxh3")
    ]
    larger = ratio(data, OURS[0], f"{LIMIT} | {HASH}")
    text = "save, sha256: time ≤ 1.2 × the larger of that write and hashing on all cores"
    found.append(Target(text, *at_most(1.2, larger)))
    for names, what in ((OURS, "contiguous"), (VIEWS[:1], "strided"), (VIEWS[1:], "flat buffer")):
        text = f"save, {what}: peak memory ≤ {PEAK_MIB} MiB more"
        found.append(Target(text, *peak_at_most(PEAK_MIB, data, names)))
    return found


QUESTION = Question("save", "Save", peers, make_specs, lambda context, peer: [], render, targets, held=2.0)
