"""Time of a load to a GPU and of a save from it; for `--device cuda`, and skipped without CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from bench.harness.figures import MIB, Data, Target, at_most, paragraphs, peak_at_most, ratio, table
from bench.harness.inputs import make_source, source_shards
from bench.harness.models import total_bytes
from bench.harness.question import Context, Job, Peer, Question, SkipPeer
from bench.questions.save import Save, by_hfshard, by_transformers, saving

PINNED_BYTES = 256 * MIB
"""Size of the buffer that measures the copy bandwidth."""
HOST_MIB = 256
BANDWIDTH = 0.7
BASE, LIMIT, SAVE_BASE = "transformers load", "pinned copy", "transformers save"
OURS = {"hfshard save sha256": "sha256", "hfshard save none": None}


def peers(context: Context) -> list[Peer]:
    """The lines of the table."""
    base, limit = f"{BASE}/warm", f"{LIMIT}/warm"
    by_sha256, unhashed = (partial(by_hfshard, checksum=checksum) for checksum in OURS.values())
    return [
        Peer(BASE, "transformers: load", _load_by_transformers, "warm", limit=limit),
        Peer("hfshard load", "hfshard: load", _load_by_hfshard, "warm", base=base, limit=limit),
        Peer(LIMIT, "the limit: copies from one page-locked buffer", _pinned_copy, "warm"),
        Peer(SAVE_BASE, "transformers: save (not flushed, not hashed)", partial(_save, by=by_transformers)),
        Peer("hfshard save sha256", "hfshard: save, sha256", partial(_save, by=by_sha256), base=SAVE_BASE),
        Peer("hfshard save none", "hfshard: save, no checksum", partial(_save, by=unhashed), base=SAVE_BASE),
    ]


def make_inputs(context: Context) -> None:
    """Save the checkpoint, if anything will be measured."""
    with contextlib.suppress(SkipPeer):
        _torch(context)
        make_source(context)


def _torch(context: Context) -> Any:
    """Import torch and make its CUDA context.

    Raises:
        SkipPeer: There is no CUDA device, or it was not asked for.
    """
    import torch

    if context.device != "cuda":
        raise SkipPeer("not asked for: --device cuda")
    if not torch.cuda.is_available():
        raise SkipPeer("no CUDA device here")
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    return torch


def _load_by_transformers(context: Context) -> Job:
    """`from_pretrained` with `device_map="cuda"`."""
    from transformers import LlamaForCausalLM

    return _load(context, LlamaForCausalLM.from_pretrained)


def _load_by_hfshard(context: Context) -> Job:
    """The same by hfshard."""
    from transformers import LlamaForCausalLM

    import hfshard

    import_module("hfshard.models.build")  # before the clock starts
    return _load(context, partial(hfshard.load_model, LlamaForCausalLM))


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


def _pinned_copy(context: Context) -> Job:
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


def _save(context: Context, by: Callable[..., Save]) -> Job:
    """A save of the model from the GPU."""
    torch = _torch(context)
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(context.source, dtype=torch.bfloat16)
    return saving(context, by(context, model=model.to("cuda")))


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    return paragraphs(
        "Loads from the page cache until every parameter is on the GPU; saves into a new directory. Peak memory is the"
        " host's.",
        table(data, list(data["peers"]), [("", "")]),
    )


def targets(data: Data) -> list[Target]:
    """The aims, and what was measured of them."""
    to_cuda = ratio(data, "hfshard load/warm", f"{BASE}/warm")
    speed = ratio(data, f"{LIMIT}/warm", "hfshard load/warm")
    text = f"load to cuda: ≥ {BANDWIDTH} × the page-locked copy bandwidth"
    shown, is_met = (speed.show(), speed.median >= BANDWIDTH) if speed else ("not measured", None)
    found = [at_most("load to cuda: time", 0.5, to_cuda, "transformers"), Target(text, shown, is_met)]
    for name in OURS:
        what = f"save from cuda, {name.split()[-1]}"
        memory = at_most(f"{what}: time", 0.5, ratio(data, name, SAVE_BASE), "transformers")
        found += [memory, peak_at_most(what, HOST_MIB, data, [name])]
    return found


QUESTION = Question(
    name="gpu",
    title="GPU",
    peers=peers,
    make_inputs=make_inputs,
    files=source_shards,
    render=render,
    targets=targets,
    side_by_side=1,
)
