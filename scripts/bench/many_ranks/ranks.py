"""What each of 1,024 simulated ranks computes to save a model of 1 TB, and what it tells and hears; on paper."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.harness.figures import MEGABYTE, MIB, Data, at_most, runs_of, skipped, spread
from bench.harness.question import Context, Job, Peer, Question, Target
from bench.markdown import markdown_table, paragraphs

if TYPE_CHECKING:
    from bench.many_ranks.simulation import SimulatedRank

RANKS, TINY_RANKS = 1024, 64
SEEN = (0, 511, 1023)
"""The ranks that are simulated: the leader, one in the middle, the last one."""
MODELS = {"dense": "Llama, 156 layers", "moe": "61 layers of 256 experts"}
MESHES = {"fsdp": "FSDP 1,024", "2-d": "FSDP 128 × TP / EP 8", "hsdp": "HSDP: 8 copies, FSDP 128"}
MAX_SHARD_SIZE = "5GB"
MOST_SECONDS = 10
MOST_MIB = 500_000_000 / MIB
MOST_UNBALANCED = 1.2


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
        one: SimulatedRank = simulated(model, mesh, rank, is_small=context.params == "tiny")
        return Job([("unite", one.unite), ("plan", one.plan), ("rounds", one.rounds)], one.result)

    return prepare


def simulated(model: str, mesh: str, rank: int, *, is_small: bool) -> Any:
    """A rank of a thousand, or small: of 64, with two layers."""
    from bench.many_ranks import paper, simulation

    make = partial({"dense": paper.dense, "moe": paper.mixture}[model])
    tensors = make(layers=2) if is_small else make()
    ranks = TINY_RANKS if is_small else RANKS
    return simulation.SimulatedRank(rank, tensors, paper.meshes(ranks)[mesh], MAX_SHARD_SIZE)


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    titles = [
        "",
        "tensors",
        "TB",
        "files",
        "most ÷ mean of owners",
        "rounds",
        "GB sent",
        "most MB in a round",
        "kB told",
    ]
    titles += ["kB heard", "CPU s", "peak MiB"]
    return paragraphs(
        f"No tensor is there, but names, shapes and placements. A rank finds who holds what, plans the files of"
        f" {MAX_SHARD_SIZE} as the leader does, and goes through all rounds of the exchange without their bytes; every"
        " rank computes the same, but what it sends itself. Told and heard go over the store: which tensors it has, in"
        " its turn the groups of ranks, the order, and the index. With short signs a rank tells four messages, or five"
        " if it owns files, and hears six; the leader tells eight, and hears four or five of each of the others; beside"
        " them each beats once a second.",
        markdown_table(titles, [_row(data, name) for name in data["peers"] if runs_of(data, name)]),
        skipped(data),
    )


def _row(data: Data, name: str) -> list[str]:
    runs = runs_of(data, name)
    found = runs[0]["result"]
    cpu = spread(run["cpu"] for run in runs)
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
        cpu.show() if cpu else "",
        f"{max(run['peak'] for run in runs) / MIB:.0f}",
    ]


def targets(data: Data) -> list[Target]:
    """What is aimed at, and what was measured of it."""
    runs = [run for name in data["peers"] for run in runs_of(data, name)]
    return [
        Target(
            f"1 TB on {RANKS:,} ranks, planning on any rank: CPU ≤ {MOST_SECONDS} s",
            *at_most(MOST_SECONDS, max((run["cpu"] for run in runs), default=None), 1, " s"),
        ),
        Target(
            f"1 TB on {RANKS:,} ranks, planning on any rank: peak memory ≤ 500 MB",
            *at_most(MOST_MIB, max((run["peak"] / MIB for run in runs), default=None), 0, " MiB"),
        ),
        Target(
            f"1 TB on {RANKS:,} ranks: the most loaded owner ≤ {MOST_UNBALANCED} × the mean",
            *at_most(MOST_UNBALANCED, max((run["result"]["balance"] for run in runs), default=None)),
        ),
    ]


QUESTION = Question(
    "ranks",
    "A thousand ranks",
    peers,
    lambda context: None,
    lambda *_: [],
    render,
    targets,
    side_by_side=1,
    max_rounds=3,
)
