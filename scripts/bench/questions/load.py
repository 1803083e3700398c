"""Time of a load, to ready and to every byte read, from the disk and from the page cache."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.figures import (
    STATES,
    Data,
    Target,
    at_most,
    ours_in,
    paragraphs,
    peak_at_most,
    peers_in,
    ratio,
    runs_of,
    table,
    who_is_first,
)
from bench.harness.inputs import hash_limit, make_source, read_limit, shards_of, sized, source_shards, sum_of
from bench.harness.models import make_model, make_tensors, write_specs
from bench.harness.question import SIDE, Context, Job, Peer, Question, SkipPeer
from bench.machine.limits import aligned, anonymous, read_files

if TYPE_CHECKING:
    from torch import Tensor

BASE, MAPPED, LIMIT, HASH, FRESH = ("transformers", "torch.load", "limit", "hash", "fresh memory")
PHASES = [("ready", "ready: "), ("read", "read: ")]
PEAK_MIB = 64
MANY = "deep"
"""The model whose checkpoint has 198 files; any other has too few tensors for so many."""
WHY = {
    MAPPED: "torch.load maps one file and checks nothing of it, and builds no model.",
    "safetensors": "safetensors maps the files, checks only their headers, and builds no model.",
    "fastsafetensors": "fastsafetensors reads whole files into memory of its own (as much as the model, see the peaks),"
    " which needs no page to be mapped, and builds no model.",
    "runai": "runai-model-streamer reads into memory of its own by many threads, and builds no model.",
}
"""Reasons for being before hfshard."""
WARM = {"": "5 files", " one": "1 file", " many": "198 files"}
"""Ends of the keys of the pairs that load from the page cache to ready, and their checkpoints."""
AGAIN = "transformers again"


def peers(context: Context) -> list[Peer]:
    """The lines of both tables."""

    def cold(key: str, title: str, prepare: Callable[[Context], Job], every: int = 1) -> Peer:
        limit = f"{LIMIT}/cold | {HASH}/cold" if key == "hfshard full" else f"{LIMIT}/cold"
        return Peer(key, title, prepare, "cold", every, f"{BASE}/cold", "" if key == HASH else limit)

    def warm(key: str, title: str, prepare: Callable[[Context], Job], every: int = 1, base: str = BASE) -> Peer:
        return Peer(key, title, prepare, "warm", every, f"{base}/warm")

    full, checked = ('hfshard, `verify="full"` (sha256)', partial(by_hfshard, verify="full"))
    found = [
        cold(BASE, "transformers `from_pretrained`", by_transformers),
        cold("hfshard", "hfshard `load_model`", by_hfshard),
        cold("hfshard full", full, checked),
        cold("hfshard pread", 'hfshard, `read="pread"`', partial(by_hfshard, read="pread"), SIDE),
        cold("safetensors", "safetensors `load_file`, a file at a time", _by_safetensors, SIDE),
        cold(MAPPED, "`torch.load(mmap=True)`, one file", _by_torch),
        cold("torch DCP", "torch DCP, `HuggingFaceStorageReader`", _by_dcp, SIDE),
        cold(
            "torch DCP files",
            "torch DCP, `FileSystemReader` of its own format",
            partial(_by_dcp, reader="FileSystemReader"),
            SIDE,
        ),
        cold("fastsafetensors", "fastsafetensors, on the CPU", _by_fastsafetensors, SIDE),
        cold("runai", "runai-model-streamer, copied out", _by_runai, SIDE),
        cold("instanttensor", "instanttensor", _by_instanttensor, SIDE),
        cold(LIMIT, "the limit: O_DIRECT into a few blocks again and again", _read_alone),
        cold(FRESH, "O_DIRECT into memory of their own", _into_fresh_memory, SIDE),
        cold(HASH, "the limit of sha256: as many bytes in memory, all cores", _hash_alone),
    ]
    for end, files in WARM.items():
        where = _checkpoint(context, end)
        found += [
            warm(BASE + end, f"transformers, {files}", partial(by_transformers, directory=where), 1, BASE + end),
            warm(f"hfshard{end}", f"hfshard, {files}", partial(by_hfshard, directory=where), 1, BASE + end),
        ]
    second = "the process's second load"
    return [
        *found,
        warm(AGAIN, f"transformers, {second}", partial(by_transformers, again=True), SIDE),
        warm("hfshard again", f"hfshard, {second}", partial(by_hfshard, again=True), SIDE, AGAIN),
        warm("hfshard full", full, checked, SIDE),
        warm("safetensors", "safetensors `load_file`, a file at a time", _by_safetensors, SIDE),
        warm(MAPPED, "`torch.load(mmap=True)`, one file", _by_torch, SIDE),
    ]


def _checkpoint(context: Context, end: str) -> Path:
    """The checkpoint of five files, of one, or the one of the model of many tensors."""
    return {"": context.source, " one": context.directory / "one", " many": context.directory / "many"}[end]


def _pickle(context: Context) -> Path:
    """The same tensors as one file of torch.save."""
    return context.directory / "pytorch_model.bin"


def _dcp(context: Context) -> Path:
    """The same tensors as a checkpoint of torch.distributed.checkpoint."""
    return context.directory / "source-dcp"


def make_inputs(context: Context) -> None:
    """Save hfshard's checkpoints, and those of other libraries."""
    import torch

    import hfshard

    make_source(context)
    one, many = _checkpoint(context, " one"), _checkpoint(context, " many")
    hfshard.reshard_checkpoint(context.source, one, max_shard_size="1TB", progress=False)
    deep = replace(context, params="tiny" if context.params == "tiny" else MANY)
    specs = context.directory / "many.json"
    write_specs(deep.size, specs)
    size = "100KB" if context.params == "tiny" else deep.size.shard_size
    hfshard.save_model(make_model(deep.size, specs), many, max_shard_size=size, progress=False)
    torch.save(make_tensors(context.specs), _pickle(context))
    dcp: Any = import_module("torch.distributed.checkpoint")
    warnings.simplefilter("ignore")
    dcp.save(make_tensors(context.specs), storage_writer=dcp.FileSystemWriter(_dcp(context)), no_dist=True)


def files(context: Context, peer: Peer) -> list[Path]:
    """The files that this peer reads."""
    if peer.key == MAPPED:
        return [_pickle(context)]
    if peer.key == "torch DCP files":
        return [path for path in _dcp(context).iterdir() if path.is_file()]
    if peer.key == HASH:
        return []
    end = next((end for end in WARM if end and peer.key.endswith(end)), "")
    return shards_of(_checkpoint(context, end))


def by_transformers(context: Context, *, directory: Path | None = None, again: bool = False) -> Job:
    """`from_pretrained` of the class."""
    from transformers import LlamaForCausalLM

    return _loading_model(context, LlamaForCausalLM.from_pretrained, directory, again=again)


def by_hfshard(context: Context, *, directory: Path | None = None, again: bool = False, **options: Any) -> Job:
    """The same class, by `hfshard.load_model`."""
    from transformers import LlamaForCausalLM

    import hfshard

    import_module("hfshard.models.build")  # before the clock starts
    return _loading_model(context, partial(hfshard.load_model, LlamaForCausalLM, **options), directory, again=again)


def _loading_model(context: Context, load: Callable[..., Any], directory: Path | None, *, again: bool) -> Job:
    import torch

    where = directory or context.source
    of = "many" if where == _checkpoint(context, " many") else ""
    return _loading(lambda: load(where, dtype=torch.bfloat16), lambda model: model.parameters(), again=again, of=of)


def _loading(
    load: Callable[[], Any], tensors_of: Callable[[Any], Iterable[Tensor]], *, again: bool = False, of: str = ""
) -> Job:
    """Load, then read every byte; the sum of the bytes is that `of` a checkpoint, for all its readers alike."""
    if again:  # transformers compiles about a thousand patterns at the first load of a process
        load()
    found: dict[str, Any] = {}

    def ready() -> None:
        found["loaded"] = load()

    def read() -> None:
        found["sum"] = sum_of(tensors_of(found["loaded"]))

    return Job([("ready", ready), ("read", read)], lambda: {"sum": found["sum"], "of": of})


def _loading_tensors(load: Callable[[], dict[str, Tensor]]) -> Job:
    return _loading(load, lambda tensors: tensors.values())


def _by_safetensors(context: Context) -> Job:
    """A state dict, mapped."""
    from safetensors.torch import load_file

    paths = source_shards(context)
    return _loading_tensors(lambda: {name: one for path in paths for name, one in load_file(path).items()})


def _by_torch(context: Context) -> Job:
    """A state dict, mapped, of a pickle."""
    import torch

    return _loading_tensors(lambda: torch.load(_pickle(context), mmap=True, weights_only=True))


def _by_dcp(context: Context, reader: str = "HuggingFaceStorageReader") -> Job:
    """torch.distributed.checkpoint into tensors that it is given; making them is in the time, as for the others.

    Args:
        context: Where to run.
        reader: HuggingFaceStorageReader for safetensors, FileSystemReader for DCP's own format.
    """
    import torch

    dcp: Any = import_module("torch.distributed.checkpoint")
    warnings.simplefilter("ignore")
    shapes = json.loads(context.specs.read_text())
    where = _dcp(context) if reader == "FileSystemReader" else context.source

    def load() -> dict[str, Tensor]:
        tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes}
        dcp.load(tensors, storage_reader=getattr(dcp, reader)(str(where)), no_dist=True)
        return tensors

    return _loading_tensors(load)


def _by_fastsafetensors(context: Context) -> Job:
    """Its loader without a GPU."""
    import torch

    fastsafetensors = import_module("fastsafetensors")
    kept: list[Any] = []

    def load() -> dict[str, Tensor]:
        loader = fastsafetensors.SafeTensorsFileLoader(fastsafetensors.SingleGroup(), torch.device("cpu"), nogds=True)
        loader.add_filenames({0: [str(path) for path in source_shards(context)]})
        buffers = loader.copy_files_to_device()
        kept.append((loader, buffers))
        return {name: buffers.get_tensor(name) for name in loader.get_keys()}

    return _loading_tensors(load)


def _by_runai(context: Context) -> Job:
    """Its tensors are views of a buffer that it uses again, so each is cloned."""
    streamer_class = import_module("runai_model_streamer").SafetensorsStreamer

    def load() -> dict[str, Tensor]:
        with streamer_class() as streamer:
            streamer.stream_files([str(path) for path in source_shards(context)])
            return {name: tensor.clone() for name, tensor in streamer.get_tensors()}

    return _loading_tensors(load)


def _by_instanttensor(context: Context) -> Job:
    """It loads to GPUs alone, and says so."""
    instanttensor = import_module("instanttensor")
    paths = [str(path) for path in source_shards(context)]
    try:
        opened = instanttensor.safe_open(paths, framework="pt", device="cpu")
    except ValueError as error:
        raise SkipPeer(str(error)) from error

    def load() -> dict[str, Tensor]:
        with opened as file:
            return dict(file.tensors())

    return _loading_tensors(load)


def _read_alone(context: Context) -> Job:
    return read_limit("read", source_shards(context))


def _into_fresh_memory(context: Context) -> Job:
    """Read into memory that nobody has touched, whose pages the kernel has to clear first."""
    paths = sized(source_shards(context))

    def load() -> None:
        read_files(anonymous(sum(aligned(size) for _, size in paths)), paths)

    return Job([("read", load)])


def _hash_alone(context: Context) -> Job:
    return hash_limit("read", sum(size for _, size in sized(source_shards(context))))


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    stayed = max((run.get("resident", 0) for name in peers_in(data, "cold") for run in runs_of(data, name)), default=0)
    keys = [name.removesuffix("/cold") for name in peers_in(data, "cold")]
    rivals = [key for key in keys if key not in (LIMIT, HASH, FRESH)]
    how = {
        "cold": f"Cold: the files' pages were dropped by posix_fadvise; by mincore at most {stayed:.1%} of them stayed."
        f" {who_is_first(data, rivals, 'cold', WHY, 'read')}",
        "warm": "Warm: the files were dropped, then read once by 8 MiB, so that their pages lie alike for all.",
    }
    parts = [
        "*Ready*: the call has returned. *Read*: from the call to the end of a pass over every byte of every parameter"
        " (torch's sum of 64-bit words, in the model's order, in one thread), the same for all; their sums agree."
    ]
    for state in STATES:
        parts += [f"### Load, {state}", how[state], table(data, peers_in(data, state), PHASES)]
    return paragraphs(*parts)


def targets(data: Data) -> list[Target]:
    """The aims, and what was measured of them."""

    def cold(name: str, base: str) -> Any:
        return ratio(data, f"{name}/cold", f"{base}/cold", "read")

    read = "load, cold, to every byte read"
    hashing = "hashing on all cores"
    found = [
        at_most(f"{read}: time", 1.05, cold("hfshard", MAPPED), "torch.load(mmap=True)"),
        at_most(f"{read}: time", 0.75, cold("hfshard", BASE), "transformers"),
        at_most(f"{read}, sha256 on the way: time", 1.4, cold("hfshard full", HASH), hashing),
    ]
    for end, shown in WARM.items():
        pair = ratio(data, f"hfshard{end}/warm", f"{BASE}{end}/warm", "ready")
        found.append(at_most(f"load, warm, to ready, {shown}: time", 1.0, pair, "transformers"))
    ours = [name for name in ours_in(data) if "pread" not in name]
    return [*found, peak_at_most("load", PEAK_MIB, data, ours)]


QUESTION = Question(
    name="load",
    title="Load",
    peers=peers,
    make_inputs=make_inputs,
    files=files,
    render=render,
    targets=targets,
    held=2.0,
)
