"""Costs of a save by four ranks that hold a quarter of the model each: time, memory, bytes written and sent."""

from __future__ import annotations

import gc
import json
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
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
from bench.harness.inputs import make_source, written
from bench.harness.processes import COUNT, Processes, free_port, join_group, number_in
from bench.harness.question import Context, Job, Peer, Question

BASE, DCP = "transformers", "torch DCP"
FACTORS = {"hfshard sha256": (0.35, 1.0), "hfshard none": (0.2, 0.6)}
"""Peer -> times to aim at: of transformers' gather, and of DCP."""
LOGGER_OF_SENT = "hfshard.distributed.exchange"

Save = Callable[[], object]


def peers(context: Context) -> list[Peer]:
    """The lines of the table."""
    titles = {
        BASE: "transformers `save_pretrained`: gathers on rank 0 (flushed after it)",
        DCP: "torch DCP, `HuggingFaceStorageWriter`, and consolidated on every rank (flushed after it)",
        "hfshard sha256": "hfshard, sha256",
        "hfshard none": "hfshard, no checksum",
    }
    return [Peer(key, title, partial(_prepare, key=key), base=BASE) for key, title in titles.items()]


def _prepare(context: Context, key: str) -> Job:
    """Start the ranks, each a new interpreter, and give the job that lets them go."""
    ranks = Processes(save_on_rank, context, key, free_port(), method="spawn")
    ranks.answers()
    measured: list[dict[str, Any]] = []

    def save() -> None:
        ranks.tell("go")
        measured.extend(ranks.answers())

    def result() -> dict[str, Any]:
        ranks.end()
        by_rank = {key: [one[key] for one in measured] for key in ("seconds", "peak", "written", "sent")}
        return {**written(context), **by_rank}

    return Job([("save", save)], result)


def save_on_rank(pipe: Connection, rank: int, context: Context, peer: str, port: int) -> None:
    """Join, load this rank's part, say so, wait for the word, save, and answer."""
    from transformers import LlamaForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    warnings.simplefilter("ignore")
    join_group(rank, port)
    model: Any = LlamaForCausalLM.from_pretrained(context.source, distributed_config=DistributedConfig(fsdp_size=COUNT))
    for parameter in model.parameters():
        parameter.to_local().sum().item()  # all of its pages are in memory then
    save = SAVES[peer](context, model, rank)
    gc.collect()
    pipe.send("ready")
    pipe.recv()
    pipe.send(measure(save, flushes=peer.startswith("hfshard")))
    pipe.recv()  # the rank that keeps the store waits for the others, too
    os._exit(0)


def _by_transformers(context: Context, model: Any, rank: int) -> Save:
    """Gather on rank 0, which writes."""
    import_module("torch.distributed.checkpoint.state_dict")  # by which it gathers: before the clock starts
    size = context.size.shard_size
    return lambda: model.save_pretrained(context.target, is_main_process=rank == 0, max_shard_size=size)


def _by_dcp(context: Context, model: Any, rank: int) -> Save:
    """Each rank writes its part by DCP, and each makes some of the whole files of all parts."""
    dcp: Any = import_module("torch.distributed.checkpoint")
    consolidation: Any = import_module("torch.distributed.checkpoint._consolidate_hf_safetensors")
    state_dict = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    index = json.loads((context.source / "model.safetensors.index.json").read_text())  # cut as hfshard cuts it
    files = sorted(set(index["weight_map"].values()))
    numbers = {name: files.index(file) + 1 for name, file in index["weight_map"].items()}
    parts = context.target / "parts"
    whole = context.target / "whole"
    whole.mkdir(exist_ok=True)
    writer = dcp.HuggingFaceStorageWriter(str(parts), fqn_to_index_mapping=numbers, save_distributed=True)

    def save() -> None:
        dcp.save(state_dict, storage_writer=writer)
        consolidation.consolidate_safetensors_files_on_every_rank(str(parts), str(whole), numbers)

    return save


def _by_hfshard(context: Context, model: Any, rank: int, checksum: Any) -> Save:
    """`hfshard.save_model` on every rank."""
    import hfshard

    import_module("hfshard.models.saver")  # before the clock starts
    save, size = hfshard.save_model, context.size.shard_size
    return lambda: save(model, context.target, rank == 0, max_shard_size=size, checksum=checksum)


SAVES: dict[str, Callable[[Context, Any, int], Save]] = {
    BASE: _by_transformers,
    DCP: _by_dcp,
    "hfshard sha256": partial(_by_hfshard, checksum="sha256"),
    "hfshard none": partial(_by_hfshard, checksum=None),
}


def measure(save: Save, *, flushes: bool) -> dict[str, Any]:
    """Save together with the other ranks.

    Args:
        save: On every rank.
        flushes: Whether it does; else the disk is flushed in the end, which counts.

    Returns:
        Seconds, and bytes: "peak" (resident, beyond those before), "written", "sent" (tensors, to other ranks).
    """
    import torch.distributed as dist

    sent = _Sent()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    resident = number_in("status", "VmRSS")
    before = number_in("io", "write_bytes")
    begin = time.perf_counter()
    save()
    if not flushes:
        dist.barrier()
        if dist.get_rank() == 0:
            os.sync()
        dist.barrier()
    return {
        "seconds": time.perf_counter() - begin,
        "peak": (number_in("status", "VmHWM") - resident) * 1024,
        "written": number_in("io", "write_bytes") - before,
        "sent": sent.stop(),
    }


class _Sent(logging.Handler):
    """Counts the bytes that the exchange has sent to other ranks, as it logs in the end."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._bytes = 0
        self._logger = logging.getLogger(LOGGER_OF_SENT)
        self._level = self._logger.level
        self._logger.addHandler(self)
        self._logger.setLevel(logging.DEBUG)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the count of all orders so far."""
        assert isinstance(record.args, tuple) and isinstance(record.args[0], int)
        self._bytes = record.args[0]

    def stop(self) -> int:
        """Listen no more, and return the bytes."""
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)
        return self._bytes


def _shares(data: Data, name: str, field: str, *, of_all: bool = False) -> list[float]:
    """The highest figure of any rank in each run, or the sum of all, as a share of the model."""
    gather = sum if of_all else max
    return [gather(run["result"][field]) / data["bytes"] for run in runs_of(data, name)]


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    titles = [
        "",
        "s (min–max)",
        "× transformers",
        "× DCP",
        "peak MB of a rank",
        "MB written by a rank",
        "by all",
        "sent",
    ]
    return paragraphs(
        f"{data['bytes'] / MEGABYTE:.0f} MB under FSDP2 on {COUNT} ranks of this machine (gloo), loaded by"
        " `from_pretrained(..., distributed_config=DistributedConfig(fsdp_size=4))`; each rank is a fresh process."
        " Time, after the modules that a save needs are imported, is that of all ranks until every file is flushed:"
        " where a library doesn't, by `sync`, which counts. Peak:"
        " VmHWM beyond what was resident before, of the rank that needs most. Written: `write_bytes`. Sent: bytes of"
        " tensors from rank to rank, counted by the exchange itself.",
        markdown_table(titles, [_row(data, name) for name in data["peers"] if runs_of(data, name)]),
    )


def _row(data: Data, name: str) -> list[str]:
    def megabytes(field: str, *, of_all: bool = False) -> str:
        values = _shares(data, name, field, of_all=of_all)
        return f"{statistics.median(values) * data['bytes'] / MEGABYTE:.0f}"

    return [
        data["peers"][name]["title"],
        show(spread(seconds(run) for run in runs_of(data, name))),
        show_ratio(data, name, BASE),
        show_ratio(data, name, DCP),
        megabytes("peak"),
        megabytes("written"),
        megabytes("written", of_all=True),
        megabytes("sent", of_all=True) if name in FACTORS else "",
    ]


def targets(data: Data) -> list[Target]:
    """The aims, and what was measured of them."""
    what = f"save on {COUNT} ranks"

    def cost(text: str, limit: float, field: str, *, of_all: bool = False, unit: float = 1.0) -> Target:
        values = [value / unit for name in FACTORS for value in _shares(data, name, field, of_all=of_all)]
        return at_most(f"{what}: {text}", limit, max(values, default=None))

    found = [
        cost("peak memory of a rank ≤ 0.15 × the model", 0.15, "peak"),
        cost("written by a rank ≤ 1.3 × a quarter", 1.3, "written", unit=1 / COUNT),
        cost("written by all ≤ 1.1 × the model", 1.1, "written", of_all=True),
        cost("sent ≤ 1 × the model", 1.0, "sent", of_all=True),
    ]
    for name, (of_gather, of_dcp) in FACTORS.items():
        time_of = f"{what}, {name.split()[1]}: time"
        found.append(at_most(time_of, of_gather, ratio(data, name, BASE), "transformers' gather"))
        found.append(at_most(time_of, of_dcp, ratio(data, name, DCP), "DCP"))
    return found


QUESTION = Question(
    name="distributed",
    title="Save on many ranks",
    peers=peers,
    make_inputs=make_source,
    render=render,
    targets=targets,
    held=3.0,
    side_by_side=1,
)
