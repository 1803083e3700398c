"""Costs of a save by four ranks that hold a quarter of the model each: time, memory, bytes written and sent."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
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
from bench.harness.inputs import make_source
from bench.harness.processes import COUNT, join_group
from bench.harness.question import Context, Peer, Question

BASE, DCP = "transformers", "torch DCP"
FACTORS = {"hfshard sha256": (0.35, 1.0), "hfshard none": (0.2, 0.6)}
"""Peer -> times to aim at: of transformers' gather, and of DCP."""


def peers(context: Context) -> list[Peer]:
    """The lines of the table."""
    titles = {
        BASE: "transformers `save_pretrained`: gathers on rank 0 (flushed after it)",
        DCP: "torch DCP, `HuggingFaceStorageWriter`, and consolidated on every rank (flushed after it)",
        "hfshard sha256": "hfshard, sha256",
        "hfshard none": "hfshard, no checksum",
    }
    return [
        Peer(key, title, partial(prepare_ranks, key=key, on_rank=save_on_rank), base=BASE)
        for key, title in titles.items()
    ]


def save_on_rank(pipe: Connection, rank: int, context: Context, peer: str, port: int) -> None:
    """Join, load this rank's part, say so, wait for the word, save, and answer."""
    from transformers import LlamaForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    warnings.simplefilter("ignore")
    join_group(rank, port)
    model: Any = LlamaForCausalLM.from_pretrained(context.source, distributed_config=DistributedConfig(fsdp_size=COUNT))
    for parameter in model.parameters():
        parameter.to_local().sum().item()  # all of its pages are in memory then
    save_when_told(pipe, SAVES[peer](context, model, rank), flushes=peer.startswith("hfshard"))


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
    return [
        data["peers"][name]["title"],
        show(spread(seconds(run) for run in runs_of(data, name))),
        show_ratio(data, name, BASE),
        show_ratio(data, name, DCP),
        show_megabytes(data, name, "peak"),
        show_megabytes(data, name, "written"),
        show_megabytes(data, name, "written", of_all=True),
        show_megabytes(data, name, "sent", of_all=True) if name in FACTORS else "",
    ]


def targets(data: Data) -> list[Target]:
    """The aims, and what was measured of them."""
    what = f"save on {COUNT} ranks"

    def cost(text: str, limit: float, field: str, *, of_all: bool = False, unit: float = 1.0) -> Target:
        values = [value / unit for name in FACTORS for value in shares(data, name, field, of_all=of_all)]
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
