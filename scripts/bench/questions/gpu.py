"""How long a load to a GPU and a save from it take; for `--device cuda`, and skipped without CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

from bench.harness.figures import MIB, Data, at_least, at_most, peak_at_most, ratio, skipped, table
from bench.harness.inputs import make_source, shards_of
from bench.harness.models import total_bytes
from bench.harness.question import Context, Job, Peer, Question, SkipPeer, Target
from bench.markdown import paragraphs
from bench.questions import save

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
    """`from_pretrained` with `device_map="cuda"`."""
    from transformers import LlamaForCausalLM

    return _load(context, LlamaForCausalLM.from_pretrained)


def load_with_hfshard(context: Context) -> Job:
    """The same by hfshard."""
    from transformers import LlamaForCausalLM

    import hfshard

    import_module("hfshard.models.build")  # which the first call would import
    return _load(context, lambda *args, **kwargs: hfshard.load_model(LlamaForCausalLM, *args, **kwargs))


def pinned_copy(context: Context) -> Job:
    """Copy as many bytes as the model has."""
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
    """`save_pretrained` from the GPU."""
    return save.transformers_job(context, _model_on_gpu(context))


def save_with_hfshard(context: Context, checksum: Any) -> Job:
    """The same by hfshard, flushed."""
    return save.hfshard_job(context, _model_on_gpu(context), checksum)


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    return paragraphs(
        "Loads from the page cache until every parameter is on the GPU; saves into a new directory. Peak memory is the"
        " host's.",
        table(data, list(data["peers"]), [("", "")]),
        skipped(data),
    )


def targets(data: Data) -> list[Target]:
    """What is aimed at, and what was measured of it."""
    speed = ratio(data, f"{LIMIT}/warm", "hfshard load/warm")
    found = [
        Target(
            "load to cuda: time ≤ 0.5 × transformers", *at_most(0.5, ratio(data, "hfshard load/warm", f"{BASE}/warm"))
        ),
        Target(
            f"load to cuda: ≥ {BANDWIDTH} × the page-locked copy bandwidth",
            *at_least(BANDWIDTH, speed),
        ),
    ]
    for name in ("hfshard save sha256", "hfshard save none"):
        what = f"save from cuda, {name.split()[-1]}"
        found.append(Target(f"{what}: time ≤ 0.5 × transformers", *at_most(0.5, ratio(data, name, SAVE_BASE))))
        found.append(Target(f"{what}: host memory ≤ {HOST_MIB} MiB more", *peak_at_most(HOST_MIB, data, [name])))
    return found


QUESTION = Question(
    "gpu",
    "GPU",
    peers,
    make_inputs,
    lambda context, peer: shards_of(context.source) if peer.state else [],
    render,
    targets,
    side_by_side=1,
)
