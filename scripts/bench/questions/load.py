"""How long a load takes, to ready and to every byte read, from the disk and from the page cache."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.figures import Data, at_most, peers_in, ratio, skipped, table
from bench.harness.inputs import make_source, shards_of, sized
from bench.harness.limits import aligned, anonymous, read_files
from bench.harness.models import make_tensors
from bench.harness.question import SIDE, Context, Job, Peer, Question, SkipPeer, Target
from bench.markdown import paragraphs

if TYPE_CHECKING:
    from torch import Tensor

BASE, LIMIT = "transformers", "limit"
AGAIN = ("transformers again", "hfshard again")
STATES = ("cold", "warm")
PHASES = [("ready", "ready: "), ("read", "read: ")]


def peers(context: Context) -> list[Peer]:
    """The lines of the tables: each in both states of the page cache."""
    found = []
    for state in STATES:

        def line(key: str, title: str, prepare: Callable[[Context], Job], every: int = 1, state: str = state) -> Peer:
            limit = f"{LIMIT}/{state}" if state == "cold" else ""
            return Peer(key, title, prepare, state, every, f"{BASE}/{state}", limit)

        found += [
            line(BASE, "transformers `from_pretrained`", with_transformers),
            line("hfshard", "hfshard `load_model`", lambda context: with_hfshard(context)),
            line(
                "hfshard full",
                'hfshard, `verify="full"` (sha256)',
                lambda context: with_hfshard(context, verify="full"),
                1 if state == "cold" else SIDE,
            ),
            line("hfshard mmap", 'hfshard, `read="mmap"`', lambda context: with_hfshard(context, read="mmap"), SIDE),
            line("hfshard pread", 'hfshard, `read="pread"`', lambda context: with_hfshard(context, read="pread"), SIDE),
            line("safetensors", "safetensors `load_file`, a file at a time", with_safetensors, SIDE),
            line("torch.load", "`torch.load(mmap=True)`, one file", with_torch, SIDE),
            line("torch DCP", "torch DCP, `HuggingFaceStorageReader`", with_dcp, SIDE),
            line("fastsafetensors", "fastsafetensors, on the CPU", with_fastsafetensors, SIDE),
            line("runai", "runai-model-streamer, copied out", with_runai, SIDE),
        ]
        if state == "warm":
            found += [
                line(
                    AGAIN[0],
                    "transformers, the process's second load",
                    lambda c: with_transformers(c, again=True),
                    SIDE,
                ),
                line(AGAIN[1], "hfshard, the process's second load", lambda c: with_hfshard(c, again=True), SIDE),
            ]
        if state == "cold":
            found.append(line(LIMIT, "the limit: O_DIRECT into a few blocks again and again", at_the_limit))
            found.append(line("fresh memory", "O_DIRECT into fresh memory", into_fresh_memory, SIDE))
    return found


def make_inputs(context: Context) -> None:
    """The checkpoint of hfshard, and the same tensors as one file of torch.save."""
    make_source(context)
    pickled = context.directory / "pytorch_model.bin"
    if not pickled.exists():
        import torch

        torch.save(make_tensors(context.specs), pickled)


def files(context: Context, peer: Peer) -> list[Path]:
    """What this peer reads."""
    if peer.key == "torch.load":
        return [context.directory / "pytorch_model.bin"]
    return shards_of(context.source)


def with_transformers(context: Context, *, again: bool = False) -> Job:
    """`from_pretrained` of the class."""
    import torch
    from transformers import LlamaForCausalLM

    return _job(
        lambda: LlamaForCausalLM.from_pretrained(context.source, dtype=torch.bfloat16),
        lambda model: model.parameters(),
        again=again,
    )


def with_hfshard(context: Context, *, again: bool = False, **options: Any) -> Job:
    """The same class, by `hfshard.load_model`."""
    import torch
    from transformers import LlamaForCausalLM

    import hfshard

    if "read" in options and "read" not in inspect.signature(hfshard.load_model).parameters:
        raise SkipPeer("this hfshard has no read= argument")
    import_module("hfshard.pretrained.build")  # which the first call would import

    return _job(
        lambda: hfshard.load_model(LlamaForCausalLM, context.source, dtype=torch.bfloat16, **options),
        lambda model: model.parameters(),
        again=again,
    )


def with_safetensors(context: Context) -> Job:
    """A state dict, mapped."""
    from safetensors.torch import load_file

    return _state_dict(
        lambda: {name: one for path in shards_of(context.source) for name, one in load_file(path).items()}
    )


def with_torch(context: Context) -> Job:
    """A state dict, mapped, of a pickle."""
    import torch

    return _state_dict(lambda: torch.load(context.directory / "pytorch_model.bin", mmap=True, weights_only=True))


def with_dcp(context: Context) -> Job:
    """torch.distributed.checkpoint into tensors that it is given; making them is in the time, as for the others."""
    import torch

    dcp: Any = import_module("torch.distributed.checkpoint")
    warnings.simplefilter("ignore")
    shapes = json.loads(context.specs.read_text())

    def load() -> dict[str, Tensor]:
        tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes}
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(context.source)), no_dist=True)
        return tensors

    return _state_dict(load)


def with_fastsafetensors(context: Context) -> Job:
    """Its loader without a GPU."""
    import torch

    fastsafetensors = import_module("fastsafetensors")

    def load() -> dict[str, Tensor]:
        loader = fastsafetensors.SafeTensorsFileLoader(fastsafetensors.SingleGroup(), torch.device("cpu"), nogds=True)
        loader.add_filenames({0: [str(path) for path in shards_of(context.source)]})
        buffers = loader.copy_files_to_device()
        kept.append((loader, buffers))
        return {name: buffers.get_tensor(name) for name in loader.get_keys()}

    kept: list[Any] = []
    return _state_dict(load)


def with_runai(context: Context) -> Job:
    """Its tensors are views of a buffer that it uses again, so each is cloned."""
    streamer_class = import_module("runai_model_streamer").SafetensorsStreamer

    def load() -> dict[str, Tensor]:
        with streamer_class() as streamer:
            streamer.stream_files([str(path) for path in shards_of(context.source)])
            return {name: tensor.clone() for name, tensor in streamer.get_tensors()}

    return _state_dict(load)


def at_the_limit(context: Context) -> Job:
    """The files' bytes, and no memory for them."""
    paths = sized(shards_of(context.source))
    return Job([("read", lambda: read_files(None, paths))])


def into_fresh_memory(context: Context) -> Job:
    """The same into memory that nobody has touched, whose pages the kernel has to clear first."""
    paths = sized(shards_of(context.source))

    def load() -> None:
        read_files(anonymous(sum(aligned(size) for _, size in paths)), paths)

    return Job([("read", load)])


def _state_dict(load: Callable[[], dict[str, Tensor]]) -> Job:
    return _job(load, lambda state_dict: state_dict.values())


def _job(load: Callable[[], Any], tensors_of: Callable[[Any], Iterable[Tensor]], *, again: bool = False) -> Job:
    if again:  # transformers compiles about a thousand patterns at the first load of a process
        load()
    found: dict[str, Any] = {}

    def read() -> None:
        found["sum"] = sum_of(tensors_of(found["loaded"]))

    def ready() -> None:
        found["loaded"] = load()

    return Job([("ready", ready), ("read", read)], lambda: {"sum": found["sum"]})


def sum_of(tensors: Iterable[Tensor]) -> int:
    """Every byte of the tensors, once, in the model's order: the sum of their 64-bit words."""
    import torch

    # One thread: with several, each waits for the others at every parameter, and one that lost its core stops all.
    torch.set_num_threads(1)
    total = 0
    for tensor in {one.data_ptr(): one.detach() for one in tensors}.values():
        words = tensor.view(-1).view(torch.int64) if tensor.data_ptr() % 8 == 0 else tensor.view(-1).view(torch.int16)
        total += int(words.sum(dtype=torch.int64))
    return total & (2**64 - 1)


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    stayed = max(
        (run.get("resident", 0) for name, peer in data["peers"].items() if "cold" in name for run in peer["runs"]),
        default=0,
    )
    parts = [
        "*Ready*: the call has returned. *Read*: from the call to the end of a pass over every byte of every parameter"
        " (torch's sum of 64-bit words, in the model's order, in one thread), the same for all; their sums agree."
    ]
    for state in STATES:
        how = (
            f"Cold: the files' pages were dropped by posix_fadvise; by mincore at most {stayed:.1%} of them stayed."
            if state == "cold"
            else "Warm: the files were dropped, then read once by 8 MiB, so that their pages lie alike for all."
        )
        parts += [f"### Load, {state}", how, table(data, peers_in(data, state), PHASES)]
    return paragraphs(*parts, skipped(data))


def targets(data: Data) -> list[Target]:
    """What is aimed at, and what was measured of it."""

    def one(text: str, limit: float, key: str, phase: str) -> Target:
        state = text.split()[1].rstrip(",:")
        return Target(text, *at_most(limit, ratio(data, f"{key}/{state}", f"{BASE}/{state}", phase)))

    return [
        one("load, cold, to fully read: time ≤ 0.6 × transformers", 0.6, "hfshard", "read"),
        one("load, warm, to ready: time ≤ 0.35 × transformers", 0.35, "hfshard", "ready"),
        Target(
            "load, warm, to ready, second load of a process: time ≤ 0.35 × transformers",
            *at_most(0.35, ratio(data, f"{AGAIN[1]}/warm", f"{AGAIN[0]}/warm", "ready")),
        ),
        one("load, warm, to fully read: time ≤ 0.85 × transformers", 0.85, "hfshard", "read"),
        one(
            "load, cold, sha256 on the way, to fully read: time ≤ 0.8 × transformers without",
            0.8,
            "hfshard full",
            "read",
        ),
    ]


QUESTION = Question("load", "Load", peers, make_inputs, files, render, targets)
