#!/usr/bin/env python3
"""How long a load to a GPU and a save from it take; asked for with `--device cuda`, skipped aloud without CUDA."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # `bench` is a package of scripts/
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.figures import MIB, Data, at_most, highest, ratio, skipped, table
from bench.inputs import make_source, shards_of
from bench.models import total_bytes
from bench.question import Context, Job, Peer, Question, SkipPeer, Target

PINNED_BYTES = 256 * MIB
"""The buffer that the copy bandwidth is measured with."""
HOST_MIB = 256
BANDWIDTH = 0.7
BASE, LIMIT, SAVE_BASE = "transformers load", "pinned copy", "transformers save"


def peers(context: Context) -> list[Peer]:
    """The lines of the table."""
    return [
        Peer(BASE, "transformers: load", load_with_transformers, "warm", limit=f"{LIMIT}/warm"),
        Peer("hfshard load", "hfshard: load", load_with_hfshard, "warm", base=f"{BASE}/warm", limit=f"{LIMIT}/warm"),
        Peer(LIMIT, "the limit: copies from one page-locked buffer", pinned_copy, "warm"),
        Peer(SAVE_BASE, "transformers: save (not flushed, not hashed)", save_with_transformers),
        Peer("hfshard save sha256", "hfshard: save, sha256", lambda c: save_with_hfshard(c, "sha256"), base=SAVE_BASE),
        Peer("hfshard save none", "hfshard: save, no checksum", lambda c: save_with_hfshard(c, None), base=SAVE_BASE),
    ]


def make_inputs(context: Context) -> None:
    """The checkpoint, where anything will be measured."""
    with contextlib.suppress(SkipPeer):
        _torch(context)
        make_source(context)


def _torch(context: Context) -> Any:
    """Torch with its CUDA context made.

    Raises:
        SkipPeer: No CUDA device, or it was not asked for.
    """
    import torch

    if context.device != "cuda":
        raise SkipPeer("not asked for: --device cuda")
    if not torch.cuda.is_available():
        raise SkipPeer("no CUDA device here")
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    return torch


def _load(context: Context, from_pretrained: Callable[..., Any]) -> Job:
    torch = _torch(context)
    kept: list[Any] = []

    def load() -> None:
        kept.append(from_pretrained(context.source, dtype=torch.bfloat16, device_map="cuda"))
        torch.cuda.synchronize()

    def result() -> dict[str, Any]:
        words = [one.detach().view(-1).view(torch.int64).sum() for one in kept[0].parameters()]
        return {"sum": sum(int(one) for one in words) & (2**64 - 1)}

    return Job([("ready", load)], result)


def load_with_transformers(context: Context) -> Job:
    """Upstream, `device_map="cuda"`."""
    from transformers import LlamaForCausalLM

    return _load(context, LlamaForCausalLM.from_pretrained)


def load_with_hfshard(context: Context) -> Job:
    """The same by hfshard."""
    from transformers import LlamaForCausalLM

    import hfshard

    import_module("hfshard.pretrained.build")  # which the first call would import
    return _load(context, lambda *args, **kwargs: hfshard.load_model(LlamaForCausalLM, *args, **kwargs))


def pinned_copy(context: Context) -> Job:
    """As many bytes as the model has."""
    torch = _torch(context)
    total = total_bytes(context.specs)
    buffer = torch.ones(min(PINNED_BYTES, total), dtype=torch.uint8).pin_memory()
    there = torch.empty(total, dtype=torch.uint8, device="cuda")
    there.zero_()
    torch.cuda.synchronize()

    def copy() -> None:
        for at in range(0, total, len(buffer)):
            piece = there[at : at + len(buffer)]
            piece.copy_(buffer[: len(piece)], non_blocking=True)
        torch.cuda.synchronize()

    return Job([("ready", copy)])


def _model_on_gpu(context: Context) -> Any:
    torch = _torch(context)
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(context.source, dtype=torch.bfloat16)
    return model.to("cuda")


def save_with_transformers(context: Context) -> Job:
    """Upstream."""
    model = _model_on_gpu(context)
    size = context.size.shard_size
    return Job([("save", lambda: model.save_pretrained(context.target, max_shard_size=size))])


def save_with_hfshard(context: Context, checksum: Any) -> Job:
    """The same by hfshard, flushed."""
    import hfshard

    hfshard.save_model  # noqa: B018  imported before the clock starts, and so is this:
    import_module("hfshard.pretrained.collect")
    model = _model_on_gpu(context)
    size = context.size.shard_size
    return Job([("save", lambda: hfshard.save_model(model, context.target, max_shard_size=size, checksum=checksum))])


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    parts = [
        "Loads from the page cache until every parameter is on the GPU; saves into a new directory. Peak memory is the"
        " host's.",
        table(data, list(data["peers"]), [("", "")]),
        skipped(data),
    ]
    return "\n\n".join(filter(None, parts))


def targets(data: Data) -> list[Target]:
    """What issue-wide acceptance asks for."""
    speed = ratio(data, f"{LIMIT}/warm", "hfshard load/warm")
    found = [
        Target(
            "load to cuda: time ≤ 0.5 × transformers", *at_most(0.5, ratio(data, "hfshard load/warm", f"{BASE}/warm"))
        ),
        Target(
            f"load to cuda: ≥ {BANDWIDTH} × the page-locked copy bandwidth",
            speed.show() if speed else "not measured",
            speed.median >= BANDWIDTH if speed else None,
        ),
    ]
    for name in ("hfshard save sha256", "hfshard save none"):
        what = f"save from cuda, {name.split()[-1]}"
        peak = highest(data, [name], "peak")
        shown = at_most(HOST_MIB, peak / MIB if peak is not None else None, 1, " MiB")
        found.append(Target(f"{what}: time ≤ 0.5 × transformers", *at_most(0.5, ratio(data, name, SAVE_BASE))))
        found.append(Target(f"{what}: host memory ≤ {HOST_MIB} MiB more", *shown))
    return found


QUESTION = Question(
    "gpu",
    "GPU",
    peers,
    make_inputs,
    lambda context, peer: shards_of(context.source) if peer.state else [],
    render,
    targets,
)

if __name__ == "__main__":
    from bench.run import main

    sys.exit(main(["gpu", *sys.argv[1:]]))
