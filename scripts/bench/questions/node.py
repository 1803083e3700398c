"""Costs of four processes of one node that read one checkpoint at once, each the whole of it or a quarter."""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.figures import (
    MEGABYTE,
    STATES,
    Data,
    Target,
    at_most,
    markdown_table,
    paragraphs,
    runs_of,
    seconds,
    show,
    show_ratio,
    spread,
    who_is_first,
)
from bench.harness.inputs import make_source, read_limit, source_shards, sum_of
from bench.harness.measuring import anonymous_bytes, cpu_seconds
from bench.harness.processes import COUNT, Processes, free_port, join_group, number_in
from bench.harness.question import SIDE, Context, Job, Peer, Question

if TYPE_CHECKING:
    from torch import Tensor

LIMIT = "limit"
SECTOR = 512
"""Bytes, in /proc/diskstats."""
MOST_READ = 1.05
"""Models' sizes from the disk, in all."""

Load = Callable[[], Iterable["Tensor"]]
"""Loads, and gives the tensors that this process has then, or its parts of them."""

MakeLoad = Callable[..., Load]
"""Prepares the load of one process, by its number."""


def _model_by_transformers(context: Context, rank: int, **arguments: Any) -> Load:
    """`from_pretrained` of the class."""
    import torch
    from transformers import LlamaForCausalLM

    return lambda: _parts_of(LlamaForCausalLM.from_pretrained(context.source, dtype=torch.bfloat16, **arguments))


def _model_by_hfshard(context: Context, rank: int, **arguments: Any) -> Load:
    """The same class, by `hfshard.load_model`."""
    import torch
    from transformers import LlamaForCausalLM

    import hfshard

    load = hfshard.load_model
    return lambda: _parts_of(load(LlamaForCausalLM, context.source, dtype=torch.bfloat16, **arguments))


def _parts_of(model: Any) -> Iterable[Tensor]:
    return [getattr(one, "_local_tensor", one).detach() for one in model.parameters()]


def _spread(context: Context, rank: int, make: MakeLoad, size: str, **arguments: Any) -> Load:
    """A model with a `distributed_config` in which a size is the number of processes."""
    from transformers.distributed.configuration_utils import DistributedConfig

    sizes: dict[str, Any] = {size: COUNT}
    return make(context, rank, distributed_config=DistributedConfig(**sizes), **arguments)


def _spread_by_dcp(context: Context, rank: int) -> Load:
    """torch.distributed.checkpoint into the rows of tensors, as FSDP2 has them; making them is in the time."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    dcp: Any = import_module("torch.distributed.checkpoint")
    api: Any = import_module("torch.distributed.tensor")
    mesh = init_device_mesh("cpu", (COUNT,))
    shapes = json.loads(context.specs.read_text())

    def load() -> list[Tensor]:
        tensors = {
            name: api.empty(shape, dtype=torch.bfloat16, device_mesh=mesh, placements=[api.Shard(0)])
            for name, shape in shapes
        }
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(context.source)))
        return [tensor.to_local() for tensor in tensors.values()]

    return load


def _files_by_safetensors(context: Context, rank: int) -> Load:
    """State dicts, mapped."""
    from safetensors.torch import load_file

    return lambda: [one for path in source_shards(context) for one in load_file(path).values()]


def _names_by_safetensors(context: Context, rank: int) -> Load:
    """A quarter of the names, mapped."""
    names = _names_of(context, rank)
    return _by_safetensors(context, lambda file, name: file.get_tensor(name) if name in names else None)


def _rows_by_safetensors(context: Context, rank: int) -> Load:
    """A quarter of the rows of each tensor."""

    def get(file: Any, name: str) -> Tensor:
        one = file.get_slice(name)
        rows = one.get_shape()[0]
        part: Tensor = one[rank * rows // COUNT : (rank + 1) * rows // COUNT]
        return part

    return _by_safetensors(context, get)


def _by_safetensors(context: Context, get: Callable[[Any, str], Tensor | None]) -> Load:
    from safetensors import safe_open

    def load() -> list[Tensor]:
        found = []
        for path in source_shards(context):
            with safe_open(path, framework="pt") as file:
                found += [get(file, name) for name in list(file.keys())]
        return [tensor for tensor in found if tensor is not None]

    return load


def _names_by_hfshard(context: Context, rank: int, **arguments: Any) -> Load:
    """A quarter of the names, by `hfshard.load_state_dict`."""
    import hfshard

    names = sorted(_names_of(context, rank))
    load = hfshard.load_state_dict
    return lambda: load(context.source, keys=names, **arguments).values()


def _names_of(context: Context, rank: int) -> set[str]:
    """A quarter of the names, in the model's order and by their bytes, as a stage of a pipeline has them."""
    shapes = json.loads(context.specs.read_text())
    total = sum(math.prod(shape) for _, shape in shapes)
    found, before = set(), 0
    for name, shape in shapes:
        if before * COUNT // total == rank:
            found.add(name)
        before += math.prod(shape)
    return found


@dataclass(frozen=True)
class Way:
    """One way in which four processes load, in either state of the page cache."""

    key: str
    title: str
    make: MakeLoad
    every: int = 1
    is_group: bool = False
    """They are ranks of a gloo group."""
    has_sum: bool = True
    """All bytes together are those of the model, once each or by each."""

    def prepare(self, context: Context) -> Job:
        """Import, start the processes, and give the job that lets them go."""
        modules = ["torch", "transformers.models.llama.modeling_llama", "hfshard.models.build"]
        for name in [*modules, *(BY_RANKS if self.is_group else ())]:
            import_module(name)
        readers = _Readers(context, self)
        return Job([("read", readers.run)], readers.result)


BY_RANKS = (
    "transformers.distributed.configuration_utils",
    "hfshard.distributed.load_on_ranks",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
)
"""Modules that the first call on ranks would import."""
FULL_TITLE, PREAD_TITLE = 'hfshard, `verify="full"` (sha256)', 'hfshard, `read="pread"`'

_whole = (
    Way("transformers", "transformers `from_pretrained`", _model_by_transformers),
    Way("hfshard", "hfshard `load_model`", _model_by_hfshard),
    Way("hfshard full", FULL_TITLE, partial(_model_by_hfshard, verify="full")),
    Way("hfshard pread", PREAD_TITLE, partial(_model_by_hfshard, read="pread"), SIDE),
    Way("safetensors", "safetensors `load_file`, a file at a time", _files_by_safetensors, SIDE),
)
_names = (
    Way("safetensors names", "safetensors `safe_open`, `get_tensor`", _names_by_safetensors),
    Way("hfshard names", "hfshard `load_state_dict(keys=)`", _names_by_hfshard),
    Way("hfshard names full", FULL_TITLE, partial(_names_by_hfshard, verify="full"), SIDE),
    Way("hfshard names pread", PREAD_TITLE, partial(_names_by_hfshard, read="pread"), SIDE),
)
_fsdp = partial(_spread, size="fsdp_size")
_ranks = partial(Way, is_group=True)
_rows = (
    _ranks("transformers fsdp", "transformers `from_pretrained`, FSDP2", partial(_fsdp, make=_model_by_transformers)),
    _ranks("hfshard fsdp", "hfshard `load_model`, FSDP2", partial(_fsdp, make=_model_by_hfshard)),
    _ranks(
        "hfshard fsdp full",
        'hfshard, FSDP2, `verify="full"` (sha256)',
        partial(_fsdp, make=_model_by_hfshard, verify="full"),
    ),
    _ranks("torch DCP", "torch DCP, `HuggingFaceStorageReader`, into DTensors", _spread_by_dcp, SIDE),
    Way("safetensors rows", "safetensors `safe_open`, `get_slice`", _rows_by_safetensors, SIDE),
)
_tp = partial(_spread, size="tp_size")
_columns = tuple(
    _ranks(f"{who} tp", f"{title}, tensor parallel", partial(_tp, make=make), SIDE, has_sum=False)
    for who, title, make in (
        ("transformers", "transformers `from_pretrained`", _model_by_transformers),
        ("hfshard", "hfshard `load_model`", _model_by_hfshard),
    )
)
GROUPS = {"whole": _whole, "names": _names, "rows": _rows, "rows or columns": _columns}
"""The part of the model that each process has -> the ways to load that; the others are compared with the first."""

_MAPPED = (
    "What is mapped need not be copied: under FSDP2 and tensor parallelism hfshard reads each rank's part into memory"
    " of its own (see the private memory), as a GPU needs it, and has all ranks agree on what is loaded."
)
_CHECKS = "safetensors checks only headers, and builds no model."
WHY = {
    "transformers fsdp": _MAPPED,
    "transformers tp": _MAPPED,
    "torch DCP": "torch DCP has no model to build, and checks nothing of the files.",
    "safetensors": _CHECKS,
    "safetensors names": _CHECKS,
    "safetensors rows": _CHECKS,
}
"""Reasons for being before hfshard."""


def peers(context: Context) -> list[Peer]:
    """The lines of the tables: each in both states of the page cache."""
    found = []
    for state in STATES:
        limit = f"{LIMIT}/{state}" if state == "cold" else ""
        for group in GROUPS.values():
            for way in group:
                base = "" if way is group[0] else f"{group[0].key}/{state}"
                found.append(Peer(way.key, way.title, way.prepare, state, way.every, base, limit))
    title = "the limit: one process, O_DIRECT into a few blocks again and again"
    return [*found, Peer(LIMIT, title, lambda context: read_limit("read", source_shards(context)), "cold")]


class _Readers:
    """Forks of this process, which has imported what they need; ready when made."""

    def __init__(self, context: Context, way: Way) -> None:
        self._source = context.source
        self._has_sum = way.has_sum
        self._measured: list[dict[str, Any]] = []
        self._peak = 0
        self._disk = 0
        gc.collect()
        gc.freeze()  # so that no collection writes to the pages that they share
        port = free_port() if way.is_group else 0
        self._processes = Processes(_read, context, way.make, port, method="fork")
        self._processes.answers()
        self._first_shares = self._shares()
        self._first = self._anonymous()

    def run(self) -> None:
        """Let all go at once, and wait until the last one has read every byte of its part."""
        disk = _sectors_read(self._source)
        begin = time.perf_counter()
        self._processes.tell("go")
        self._measured = self._processes.answers(meanwhile=self._sample)
        self._disk = _sectors_read(self._source) - disk
        for one in self._measured:
            one["ready"] -= begin

    def result(self) -> dict[str, Any]:
        """Collect the figures, in bytes but for "ready" and "cpu"; the processes end.

        "read" is the sum of `read_bytes` of /proc/PID/io, and "disk" the count of /proc/diskstats; "private" the
        highest sum of their anonymous memory, and "pss" their share of all memory once all of them have loaded, each
        beyond that before.
        """
        shares = self._shares()
        self._processes.end()
        found = {
            "ready": round(max(one["ready"] for one in self._measured), 4),
            "cpu": round(sum(one["cpu"] for one in self._measured), 3),
            "read": sum(one["read"] for one in self._measured),
            "disk": self._disk * SECTOR,
            "private": self._peak,
            "pss": shares - self._first_shares,
        }
        if self._has_sum:
            sums = [one["sum"] for one in self._measured]
            found["sum"] = sums[0] if len(set(sums)) == 1 else sum(sums) & (2**64 - 1)
        return found

    def _shares(self) -> int:
        self._processes.tell("pss")
        return sum(self._processes.answers())

    def _sample(self) -> None:
        self._peak = max(self._peak, self._anonymous() - self._first)

    def _anonymous(self) -> int:
        return sum(map(anonymous_bytes, self._processes.pids))


def _read(pipe: Connection, rank: int, context: Context, make: MakeLoad, port: int) -> None:
    """Prepare, load when told, read every byte, and tell this process's share of all memory before and after."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if port:
        join_group(rank, port)
    load = make(context, rank)
    pipe.send("ready")
    _tell_share(pipe)
    pipe.recv()
    measured, tensors = _measure(load)
    pipe.send(measured)
    _tell_share(pipe)
    pipe.recv()  # the rank that keeps the store waits for the others, too
    del tensors
    os._exit(0)


def _tell_share(pipe: Connection) -> None:
    pipe.recv()
    pipe.send(number_in("smaps_rollup", "Pss") * 1024)


def _measure(load: Load) -> tuple[dict[str, Any], Sequence[Tensor]]:
    cpu = cpu_seconds()
    read = number_in("io", "read_bytes")
    tensors = list(load())
    ready = time.perf_counter()
    total = sum_of(tensors)
    read = number_in("io", "read_bytes") - read
    return {"ready": ready, "cpu": cpu_seconds() - cpu, "read": read, "sum": total}, tensors


def _sectors_read(path: Path) -> int:
    """Count the sectors read so far from the disk of a file, by any process; 0 where the system does not say."""
    device = path.stat().st_dev
    numbers = [str(os.major(device)), str(os.minor(device))]
    with suppress(OSError):
        for line in Path("/proc/diskstats").read_text().splitlines():
            fields = line.split()
            if fields[:2] == numbers:
                return int(fields[5])
    return 0


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    parts = [
        f"{COUNT} processes of this machine load the same checkpoint of {data['bytes'] / MEGABYTE:.0f} MB at once,"
        " and read every byte that they have then; they are forks of one that has imported what they need. *Whole*:"
        " each has the model. *Names*: each has a quarter of the tensors. *Rows*, *columns*: each has a quarter of each"
        " tensor, under FSDP2 or tensor parallelism as a rank of a gloo group. Time is that of the last one. *From"
        " disk*: the sum of `read_bytes` of their /proc/PID/io, which counts what a process has asked the disk for, so"
        " that a page that all map is counted once; the disk's own count, of all that runs on the machine, is beside"
        " it. Private: the highest sum of their anonymous memory. Pss: the sum of their shares of all memory in the"
        " end, with the pages of the files that they map."
    ]
    titles = ["", "s (min–max)", "× the first", "× the limit", "ready s", "CPU s", "MB from disk", "× the model"]
    titles += ["the disk's count", "private MB", "Pss MB", "rounds"]
    for state in STATES:
        for title, group in GROUPS.items():
            names = [f"{way.key}/{state}" for way in group] + ([f"{LIMIT}/{state}"] if state == "cold" else [])
            first = who_is_first(data, [way.key for way in group], state, WHY)
            rows = [_row(data, name) for name in names if runs_of(data, name)]
            parts += [f"### {COUNT} processes, {title}, {state}", first, markdown_table(titles, rows)]
    return paragraphs(*parts)


def _row(data: Data, name: str) -> list[str]:
    peer = data["peers"][name]
    runs = runs_of(data, name)

    def middle(field: str) -> float:
        values: list[float] = [run["result"][field] for run in runs]
        return statistics.median(values)

    def megabytes(field: str) -> str:
        return f"{middle(field) / MEGABYTE:.0f}"

    cells = [peer["title"], show(spread(seconds(run) for run in runs))]
    cells += [show_ratio(data, name, peer["base"]), show_ratio(data, name, peer["limit"])]
    if name.startswith(f"{LIMIT}/"):
        return [*cells, "", "", megabytes("read"), *[""] * 4, str(len(runs))]
    cells += [f"{middle('ready'):.2f}", f"{middle('cpu'):.2f}", megabytes("read")]
    cells += [f"{middle('read') / data['bytes']:.3f}", megabytes("disk"), megabytes("private"), megabytes("pss")]
    return [*cells, str(len(runs))]


def targets(data: Data) -> list[Target]:
    """The aims, and what was measured of them."""
    found = []
    for state in STATES:
        for way in chain(*GROUPS.values()):
            if way.key.startswith("hfshard"):
                text = f"{COUNT} processes, {way.key.removeprefix('hfshard').strip() or 'whole'}, {state}"
                read = [run["result"]["read"] / data["bytes"] for run in runs_of(data, f"{way.key}/{state}")]
                text = f"{text}: from the disk"
                found.append(at_most(text, MOST_READ, max(read, default=None), "the model", digits=3))
    return found


QUESTION = Question(
    name="node",
    title="Many processes of one node",
    peers=peers,
    make_inputs=make_source,
    files=source_shards,
    render=render,
    targets=targets,
    held=COUNT + 1,
    side_by_side=1,
)
