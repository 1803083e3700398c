"""What it costs four processes of one node to read one checkpoint at once, each the whole of it or a quarter."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain

from bench.harness.figures import MEGABYTE, Data, at_most, ratio, runs_of, seconds, skipped, spread, who_is_first
from bench.harness.inputs import make_source, shards_of, sized
from bench.harness.question import SIDE, Context, Job, Peer, Question, Target
from bench.machine.limits import read_files
from bench.many_ranks import loads
from bench.many_ranks.forked_readers import Readers
from bench.many_ranks.loads import READERS, MakeLoad
from bench.markdown import markdown_table, paragraphs

STATES = ("cold", "warm")
LIMIT = "limit"
MOST_READ = 1.05
"""Models' sizes from the disk, in all."""


@dataclass(frozen=True)
class Way:
    """One way in which four processes load, in either state of the page cache."""

    key: str
    title: str
    make: MakeLoad
    every: int = 1
    is_group: bool = False
    """Whether they are ranks of a gloo group."""
    has_sum: bool = True
    """Whether all bytes together are those of the model, once each or by each."""
    modules: tuple[str, ...] = ()
    """What the first call would import."""

    def prepare(self, context: Context) -> Job:
        """Import, start the processes, and give what lets them go."""
        for name in ("torch", "transformers.models.llama.modeling_llama", "hfshard.models.build", *self.modules):
            import_module(name)
        readers = Readers(
            context,
            self.make,
            is_group=self.is_group,
            has_sum=self.has_sum,
        )
        return Job([("read", readers.run)], readers.result)


BY_RANKS = ("transformers.distributed.configuration_utils", "hfshard.distributed.load_on_ranks")
BY_DCP = ("torch.distributed.checkpoint", "torch.distributed.tensor")

WHOLE = (
    Way("transformers", "transformers `from_pretrained`", loads.whole_by_transformers),
    Way("hfshard", "hfshard `load_model`", loads.whole_by_hfshard),
    Way("hfshard full", 'hfshard, `verify="full"` (sha256)', partial(loads.whole_by_hfshard, verify="full")),
    Way(
        "hfshard pread",
        'hfshard, `read="pread"`',
        partial(loads.whole_by_hfshard, read="pread"),
        SIDE,
    ),
    Way("safetensors", "safetensors `load_file`, a file at a time", loads.whole_by_safetensors, SIDE),
)
NAMES = (
    Way("safetensors names", "safetensors `safe_open`, `get_tensor`", loads.names_by_safetensors),
    Way("hfshard names", "hfshard `load_state_dict(keys=)`", loads.names_by_hfshard),
    Way(
        "hfshard names full", 'hfshard, `verify="full"` (sha256)', partial(loads.names_by_hfshard, verify="full"), SIDE
    ),
    Way("hfshard names pread", 'hfshard, `read="pread"`', partial(loads.names_by_hfshard, read="pread"), SIDE),
)
_fsdp = partial(Way, is_group=True, modules=BY_RANKS)
ROWS = (
    _fsdp("transformers fsdp", "transformers `from_pretrained`, FSDP2", loads.spread_by_transformers("fsdp_size")),
    _fsdp("hfshard fsdp", "hfshard `load_model`, FSDP2", loads.spread_by_hfshard("fsdp_size")),
    _fsdp(
        "hfshard fsdp full",
        'hfshard, FSDP2, `verify="full"` (sha256)',
        partial(loads.spread_by_hfshard("fsdp_size"), verify="full"),
    ),
    Way(
        "torch DCP",
        "torch DCP, `HuggingFaceStorageReader`, into DTensors",
        loads.spread_by_dcp,
        SIDE,
        is_group=True,
        modules=BY_DCP,
    ),
    Way("safetensors rows", "safetensors `safe_open`, `get_slice`", loads.rows_by_safetensors, SIDE),
)
_tp = partial(_fsdp, every=SIDE, has_sum=False)
COLUMNS = (
    _tp("transformers tp", "transformers `from_pretrained`, tensor parallel", loads.spread_by_transformers("tp_size")),
    _tp("hfshard tp", "hfshard `load_model`, tensor parallel", loads.spread_by_hfshard("tp_size")),
)
GROUPS = {"whole": WHOLE, "names": NAMES, "rows": ROWS, "rows or columns": COLUMNS}
"""What each process has of the model -> the ways to load that; the others are compared with the first."""

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
"""Why somebody may be before hfshard."""


def peers(context: Context) -> list[Peer]:
    """The lines of the tables: each in both states of the page cache."""
    found = []
    for state in STATES:
        limit = f"{LIMIT}/{state}" if state == "cold" else ""
        for first, *others in GROUPS.values():
            base = f"{first.key}/{state}"
            found.append(Peer(first.key, first.title, first.prepare, state, first.every, "", limit))
            found += [Peer(way.key, way.title, way.prepare, state, way.every, base, limit) for way in others]
    title = "the limit: one process, O_DIRECT into a few blocks again and again"
    return [*found, Peer(LIMIT, title, at_the_limit, "cold")]


def at_the_limit(context: Context) -> Job:
    """The files' bytes, once."""
    paths = sized(shards_of(context.source))
    return Job([("read", lambda: read_files(None, paths))], lambda: {"read": sum(size for _, size in paths)})


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    parts = [
        f"{READERS} processes of this machine load the same checkpoint of {data['bytes'] / MEGABYTE:.0f} MB at once,"
        " and read every byte that they have then; they are forks of one that has imported what they need. *Whole*:"
        " each has the model. *Names*: each has a quarter of the tensors. *Rows*, *columns*: each has a quarter of each"
        " tensor, under FSDP2 or tensor parallelism as a rank of a gloo group. Time is that of the last one. *From"
        " disk*: the sum of `read_bytes` of their /proc/PID/io, which counts what a process has asked the disk for, so"
        " that a page that all map is counted once; the disk's own count, of all that runs on the machine, is beside"
        " it. Private: the highest sum of their anonymous memory. Pss: the sum of their shares of all memory in the"
        " end, with the pages of the files that they map.",
    ]
    for state in STATES:
        for title, group in GROUPS.items():
            names = [f"{way.key}/{state}" for way in group] + ([f"{LIMIT}/{state}"] if state == "cold" else [])
            first = who_is_first(data, [way.key for way in group], state, WHY)
            parts += [f"### {READERS} processes, {title}, {state}", first, _table(data, names)]
    return paragraphs(*parts, skipped(data))


def _table(data: Data, names: Iterable[str]) -> str:
    titles = ["", "s (min–max)", "× the first", "× the limit", "ready s", "CPU s", "MB from disk", "× the model"]
    titles += ["the disk's count", "private MB", "Pss MB", "rounds"]
    return markdown_table(titles, [_row(data, name) for name in names if runs_of(data, name)])


def _row(data: Data, name: str) -> list[str]:
    peer = data["peers"][name]
    runs = runs_of(data, name)

    def middle(field: str) -> float:
        values: list[float] = [run["result"][field] for run in runs]
        return statistics.median(values)

    shown = spread(seconds(run) for run in runs)
    cells = [peer["title"], shown.show() if shown else ""]
    for other in (peer["base"], peer["limit"]):
        found = ratio(data, name, other) if other else None
        cells.append(found.show() if found else "")
    if name.startswith(f"{LIMIT}/"):
        return [*cells, "", "", f"{middle('read') / MEGABYTE:.0f}", *[""] * 4, str(len(runs))]
    return [
        *cells,
        f"{middle('ready'):.2f}",
        f"{middle('cpu'):.2f}",
        f"{middle('read') / MEGABYTE:.0f}",
        f"{middle('read') / data['bytes']:.3f}",
        f"{middle('disk') / MEGABYTE:.0f}",
        f"{middle('private') / MEGABYTE:.0f}",
        f"{middle('pss') / MEGABYTE:.0f}",
        str(len(runs)),
    ]


def targets(data: Data) -> list[Target]:
    """What is aimed at, and what was measured of it."""
    found = []
    for state in STATES:
        for way in chain(*GROUPS.values()):
            if way.key.startswith("hfshard"):
                text = f"{READERS} processes, {way.key.removeprefix('hfshard').strip() or 'whole'}, {state}"
                read = [run["result"]["read"] / data["bytes"] for run in runs_of(data, f"{way.key}/{state}")]
                verdict = at_most(MOST_READ, max(read, default=None), 3)
                found.append(Target(f"{text}: from the disk ≤ {MOST_READ} × the model", *verdict))
    return found


QUESTION: Question = Question(
    "node",
    "Many processes of one node",
    peers,
    make_source,
    lambda context, peer: shards_of(context.source),
    render,
    targets,
    held=READERS + 1,
    side_by_side=1,
)
