"""Work of each of 1,024 simulated ranks in a save of a model of 1 TB, of which no byte is there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from bench.harness.figures import (
    MEGABYTE,
    MIB,
    Data,
    Target,
    at_most,
    markdown_table,
    paragraphs,
    runs_of,
    show,
    spread,
)
from bench.harness.question import Context, Job, Peer, Question

if TYPE_CHECKING:
    from hfshard.distributed.layout import Placement
    from hfshard.distributed.spread_tensor import SpreadTensor
    from hfshard.distributed.tensor_owners import TensorOwners

RANKS, TINY_RANKS = 1024, 64
SEEN = (0, 511, 1023)
"""The ranks that are simulated: the leader, one in the middle, the last one."""
MODELS = {"dense": "Llama, 156 layers", "moe": "61 layers of 256 experts"}
MESHES = {"fsdp": "FSDP 1,024", "2-d": "FSDP 128 × TP / EP 8", "hsdp": "HSDP: 8 copies, FSDP 128"}
MAX_SHARD_SIZE = "5GB"
MOST_SECONDS = 10
MOST_MIB = 500_000_000 / MIB
MOST_UNBALANCED = 1.2
EXPERTS = 256
VOCABULARY = {"dense": 128256, "moe": 129280}
LAYERS = {"dense": 156, "moe": 61}


def peers(context: Context) -> list[Peer]:
    """The lines of the table."""
    return [
        Peer(f"hfshard {model} {mesh} {rank}", f"{MODELS[model]}; {MESHES[mesh]}; rank {rank}", _job(model, mesh, rank))
        for model in MODELS
        for mesh in MESHES
        for rank in (SEEN if context.params != "tiny" else (0,))
    ]


def _job(model: str, mesh: str, rank: int) -> Callable[[Context], Job]:
    def prepare(context: Context) -> Job:
        one = SimulatedRank(model, mesh, rank, is_small=context.params == "tiny")
        return Job([("unite", one.unite), ("plan", one.plan), ("rounds", one.rounds)], one.result)

    return prepare


@dataclass(frozen=True)
class _Tensor:
    """One stored tensor on paper."""

    name: str
    shape: tuple[int, ...]
    kind: str
    """Its split by tensor parallelism: "column", "row", "expert" or "" (not at all)."""
    source_shape: tuple[int, ...] = ()
    """Shape of the parameter that contains an expert's matrix; () for other tensors."""
    window: tuple[tuple[int, int], ...] | None = None
    """Its place there."""


def _tensors_of(model: str, layers: int) -> Iterator[_Tensor]:
    """A Llama as wide as that of 405 billion parameters, or a mixture of experts, which are fused in memory."""
    hidden, feed_forward = (16384, _dense) if model == "dense" else (7168, _experts)
    yield _Tensor("model.embed_tokens.weight", (VOCABULARY[model], hidden), "column")
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", hidden), ("k", 1024), ("v", 1024)):
            yield _Tensor(f"{prefix}self_attn.{name}_proj.weight", (rows, hidden), "column")
        yield _Tensor(f"{prefix}self_attn.o_proj.weight", (hidden, hidden), "row")
        yield from feed_forward(f"{prefix}mlp.", hidden)
        yield _Tensor(f"{prefix}input_layernorm.weight", (hidden,), "")
        yield _Tensor(f"{prefix}post_attention_layernorm.weight", (hidden,), "")
    yield _Tensor("model.norm.weight", (hidden,), "")
    yield _Tensor("lm_head.weight", (VOCABULARY[model], hidden), "column")


def _dense(prefix: str, hidden: int, inner: int = 53248) -> Iterator[_Tensor]:
    yield _Tensor(f"{prefix}gate_proj.weight", (inner, hidden), "column")
    yield _Tensor(f"{prefix}up_proj.weight", (inner, hidden), "column")
    yield _Tensor(f"{prefix}down_proj.weight", (hidden, inner), "row")


def _experts(prefix: str, hidden: int, inner: int = 1536) -> Iterator[_Tensor]:
    yield _Tensor(f"{prefix}gate.weight", (EXPERTS, hidden), "")
    for number in range(EXPERTS):
        one = f"{prefix}experts.{number}."
        for name, rows in (("gate_proj", (0, inner)), ("up_proj", (inner, 2 * inner))):
            window = ((number, number + 1), rows, (0, hidden))
            yield _Tensor(f"{one}{name}.weight", (inner, hidden), "expert", (EXPERTS, 2 * inner, hidden), window)
        window = ((number, number + 1), (0, hidden), (0, inner))
        yield _Tensor(f"{one}down_proj.weight", (hidden, inner), "expert", (EXPERTS, hidden, inner), window)


def _mesh_of(
    name: str, ranks: int, nodes_of: int = 8
) -> tuple[tuple[int, ...], Callable[[str], tuple[Placement, ...]]]:
    """The shape of a mesh, and the placements of a kind of tensor.

    FSDP; FSDP over tensor and expert parallelism within a node; FSDP with copies.
    """
    from hfshard.distributed.layout import Placement

    groups = ranks // nodes_of
    if name == "fsdp":
        return (ranks,), lambda kind: (Placement(0),)
    if name == "hsdp":
        return (nodes_of, groups), lambda kind: (Placement(None), Placement(0))
    within_node = {
        "column": (Placement(0, nodes_of), Placement(0)),
        "row": (Placement(0), Placement(1)),
        "expert": (Placement(1), Placement(0)),
        "": (Placement(0), Placement(None)),
    }
    return (groups, nodes_of), within_node.__getitem__


def _held_by(rank: int, model: str, layers: int, mesh: str, ranks: int) -> dict[str, SpreadTensor]:
    """The parts that a rank has of the tensors; they take no memory."""
    import torch

    from hfshard.distributed.layout import MeshLayout, box_shape, held_box
    from hfshard.distributed.spread_tensor import SpreadTensor

    shape, placements = _mesh_of(mesh, ranks)
    coordinate = tuple(rank // prod(shape[number + 1 :]) % size for number, size in enumerate(shape))
    element = torch.empty((), dtype=torch.bfloat16)
    all_ranks = tuple(range(ranks))
    found = {}
    for tensor in _tensors_of(model, layers):
        layout = MeshLayout(shape, all_ranks, placements(tensor.kind))
        source = tensor.source_shape or tensor.shape
        local = element.expand(box_shape(held_box(source, layout, coordinate)))
        found[tensor.name] = SpreadTensor(tensor.shape, element.dtype, layout, source, tensor.window, coordinate, local)
    return found


class SimulatedRank:
    """A rank of a save, whose steps are called in their order: all but the bytes of tensors, which nobody has.

    Args:
        model: Of `MODELS`.
        mesh: Of `MESHES`.
        rank: Its number; 0 leads.
        is_small: Whether it is one of 64 ranks that save two layers.
    """

    _holders: TensorOwners

    def __init__(self, model: str, mesh: str, rank: int, *, is_small: bool) -> None:
        from hfshard.saving.save_request import SaveOptions, SaveRequest

        ranks = TINY_RANKS if is_small else RANKS
        self.rank = rank
        self.ranks = range(ranks)
        self._held = _held_by(rank, model, 2 if is_small else LAYERS[model], mesh, ranks)
        self._options = SaveOptions(max_shard_size=MAX_SHARD_SIZE)
        self._request = SaveRequest(options=self._options)
        self._found: dict[str, Any] = {"tensors": len(self._held)}
        self._groups = self._order = b""

    def unite(self) -> None:
        """List the tensors of this rank, as all others do, and find the holders of each."""
        from hfshard.distributed.tensor_owners import RankGroup, TensorOwners, list_tensors
        from hfshard.format.index import sha256_of

        listing, meshes = list_tensors(self._request, self._held)
        digest = sha256_of(listing.to_json())
        holding = json.dumps([digest, meshes]).encode()
        self._found["told"] = len(holding)
        self._groups = json.dumps([[list(self.ranks), *json.loads(holding)]]).encode()
        [group] = [RankGroup.from_json(value) for value in json.loads(self._groups)]
        self._holders = TensorOwners.unite([group], {digest: listing})

    def plan(self) -> None:
        """Plan the files, as the leader does, and order them."""
        from hfshard.distributed.rank_writer import WriteTask
        from hfshard.saving.pipeline import Save
        from hfshard.saving.save_request import SaveRequest
        from hfshard.shards.write_shards import WriteJob, file_order
        from hfshard.tensors.stored_tensor import RawTensor

        tensors = {name: RawTensor(layout, _no_bytes) for name, layout in self._holders.layouts.items()}
        self._plan = Save({"model": SaveRequest(tensors=tensors, options=self._options)}).plans["model"]
        jobs = [
            WriteJob(shard.file, file_order({name: tensors[name] for name in shard.names}), {"format": "pt"})
            for shard in self._plan.shards
        ]
        self._order = WriteTask.of("write", jobs, "sha256").to_json(list(tensors))

    def rounds(self) -> None:
        """Understand the order, and find in each round the bytes that go to each owner."""
        from hfshard.distributed.exchange import schedule
        from hfshard.distributed.rank_writer import WriteTask
        from hfshard.distributed.tensor_owners import assign_owners

        order = WriteTask.from_json(self._order, list(self._holders.layouts))
        wanted = [order.wanted_bytes(file, self._holders.layouts) for file in order.files]
        owners = assign_owners([sum(count for _, count in file) for file in wanted], self.ranks)
        streams: dict[int, list[tuple[str, int]]] = {}
        for owner, file in zip(owners, wanted):
            streams.setdefault(owner, []).extend(file)
        loads = [sum(count for _, count in stream) for stream in streams.values()]
        sent = [self._sent_in(windows) for windows in schedule(streams, self._holders)]
        self._found |= {
            "files": len(wanted),
            "owners": len(loads),
            "balance": round(max(loads) / (sum(loads) / len(loads)), 3),
            "rounds": len(sent),
            "sent": sum(sent),
            "most sent": max(sent),
        }

    def result(self) -> dict[str, Any]:
        """Counts, and bytes of tensors and of messages over the store."""
        from hfshard.format.index import CheckpointIndex, FileDigest

        plan = self._plan
        files = {
            shard.file: FileDigest(shard.nbytes, "0" * 64, None, "0" * 32, "0" * 16 * len(shard.tensors))
            for shard in plan.shards
        }
        index = CheckpointIndex(plan.weight_map, plan.total_size, plan.total_size // 2, files=files)
        outcome = json.dumps({"index": asdict(index), "digest": "0" * 64})
        heard = len(self._groups) + len(self._order) + len(outcome)
        return {**self._found, "bytes": plan.total_size, "heard": heard}

    def _sent_in(self, windows: Any) -> int:
        """The bytes that this rank sends to others in a round."""
        sent = 0
        for owner, window in windows.items():
            for name, start, stop in window if owner != self.rank else ():
                parts = self._holders.parts[name]
                number = parts.number_of(self.rank)
                if number is not None and parts.source(number, owner) == self.rank:
                    runs = parts.clip(number, start, stop)
                    sent += 0 if runs is None else runs.total
        return sent


def _no_bytes(_: int) -> Iterator[memoryview]:
    raise AssertionError("a tensor on paper has no bytes")


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    titles = ["", "tensors", "TB", "files", "most ÷ mean of owners", "rounds", "GB sent", "most MB in a round"]
    titles += ["kB told", "kB heard", "CPU s", "peak MiB"]
    return paragraphs(
        f"No tensor is there, but names, shapes and placements. A rank finds who holds what, plans the files of"
        f" {MAX_SHARD_SIZE} as the leader does, and goes through all rounds of the exchange without their bytes; every"
        " rank computes the same, but what it sends itself. Told and heard go over the store: which tensors it has, in"
        " its turn the groups of ranks, the order, and the index. With short signs a rank tells four messages, or five"
        " if it owns files, and hears six; the leader tells eight, and hears four or five of each of the others; beside"
        " them each beats once a second.",
        markdown_table(titles, [_row(data, name) for name in data["peers"] if runs_of(data, name)]),
    )


def _row(data: Data, name: str) -> list[str]:
    runs = runs_of(data, name)
    found = runs[0]["result"]
    return [
        data["peers"][name]["title"],
        f"{found['tensors']:,}",
        f"{found['bytes'] / 1e12:.2f}",
        f"{found['files']:,}",
        f"{found['balance']:.2f}",
        f"{found['rounds']:,}",
        f"{found['sent'] / 1e9:.2f}",
        f"{found['most sent'] / MEGABYTE:.1f}",
        f"{found['told'] / 1e3:.0f}",
        f"{found['heard'] / 1e3:,.0f}",
        show(spread(run["cpu"] for run in runs)),
        f"{max(run['peak'] for run in runs) / MIB:.0f}",
    ]


def targets(data: Data) -> list[Target]:
    """The aims, and what was measured of them."""
    runs = [run for name in data["peers"] for run in runs_of(data, name)]
    most = partial(max, default=None)
    what = f"1 TB on {RANKS:,} ranks"
    planning = f"{what}, planning on any rank"
    owners = f"{what}: the most loaded owner ≤ {MOST_UNBALANCED} × the mean"
    cpu, peak = (most(run["cpu"] for run in runs), most(run["peak"] / MIB for run in runs))
    return [
        at_most(f"{planning}: CPU ≤ {MOST_SECONDS} s", MOST_SECONDS, cpu, digits=1, unit=" s"),
        at_most(f"{planning}: peak memory ≤ 500 MB", MOST_MIB, peak, digits=0, unit=" MiB"),
        at_most(owners, MOST_UNBALANCED, most(run["result"]["balance"] for run in runs)),
    ]


QUESTION = Question(
    name="ranks", title="A thousand ranks", peers=peers, render=render, targets=targets, side_by_side=1, max_rounds=3
)
