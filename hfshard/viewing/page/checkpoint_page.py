"""Page of one checkpoint: modules by bytes, files, dtypes, ties, the largest tensors, metadata."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any, Final

from hfshard._util.text import count_of, format_size, printable
from hfshard.training.run.manifest import CheckpointManifest
from hfshard.viewing.describe import abbreviate_name
from hfshard.viewing.module_tree import common_length, grow_branches, layer_grid, natural_order, parts_of_model
from hfshard.viewing.page.page import NO_NAME, Fact, Page, describe_model, is_path, name_of, printable_value, share_text
from hfshard.viewing.results import FileEntry, Inspection, TensorEntry
from hfshard.viewing.run_listing import PartSize, metrics_text
from hfshard.viewing.tensor_values import MeasuredValues, ValueSummary

_MOST_FILES: Final = 500
_MOST_TIES: Final = 200
_MOST_METADATA: Final = 100
"""The most rows of the tables; the page shows how many more there are. The search finds every tensor and tied name."""

_LARGEST: Final = 20


@dataclass(frozen=True, slots=True)
class _FileRow:
    name: str
    nbytes: int
    tensors: int | None
    checksum: str
    percent: float
    """Percentage of the limit, or of the largest file if there is no limit; above 100, the file exceeds the limit."""


@dataclass(frozen=True, slots=True)
class _TensorRow:
    name: str
    node: int
    """The tensor's node in the data's tree, for a link to it."""
    dtype: str
    shape: str
    parameters: int
    nbytes: int
    file: str


def make_checkpoint_page(
    found: Inspection, max_shard_size: int | None = None, measured: MeasuredValues | None = None
) -> Page:
    """Build the page of a checkpoint, with its numbers if they were measured.

    A file of `max_shard_size` bytes fills its bar; None: the largest file.
    """
    whole = max_shard_size or found.largest_file_bytes
    tree = make_name_tree([*(tensor.name for tensor in found.tensors), *found.tied_names])
    ties = sorted(found.tied_names.items())
    metadata = sorted(found.metadata.items())
    return Page(
        kind="checkpoint",
        title=name_of(found.place),
        place="" if is_path(found.place) else printable(found.place),
        about=describe_model(found.model),
        facts=(*_facts(found), *([] if measured is None else values_facts(measured))),
        view={
            "kind": "checkpoint" if found.model is None or found.model.adapter is None else "adapter",
            "overview": None if measured is None else values_overview(measured),
            "has_map": any(tensor.nbytes for tensor in found.tensors),
            "has_shards": len(found.weights_files) > 1,
            "entry": printable_value(found.entry),
            "key": None if found.key is None else printable_value(found.key),
            "files": _some([_file_row(file, whole) for file in found.files[:_MOST_FILES]], found.files),
            "has_checksums": any(file.digest.is_verifiable for file in found.files[:_MOST_FILES]),
            "max_shard_size": max_shard_size,
            "dtypes": [(row, _percent(row.nbytes, found.nbytes)) for row in found.dtypes],
            "largest": [_tensor_row(tensor, tree) for tensor in found.largest(_LARGEST)],
            "ties": _some(
                [(printable(name) or NO_NAME, printable(stored) or NO_NAME) for name, stored in ties[:_MOST_TIES]], ties
            ),
            "metadata": _some(
                [(printable_value(key), printable_value(value)) for key, value in metadata[:_MOST_METADATA]], metadata
            ),
        },
        data=_data(found, tree) | ({} if measured is None else {"values": values_data(measured, tree)}),
    )


def _facts(found: Inspection) -> tuple[Fact, ...]:
    shards = found.weights_files
    dtypes = [row.dtype for row in found.dtypes]
    short = _short_count(found.parameters)
    exact = f"{found.parameters:,}"
    more = f" and {len(dtypes) - 3} more" if len(dtypes) > 3 else ""
    return (
        Fact("parameters", short, exact if short != exact else ""),
        Fact("weights", format_size(found.nbytes), f"{found.nbytes:,} bytes"),
        Fact(
            "dtype" if len(dtypes) == 1 else "dtypes",
            ", ".join(map(printable, islice(dtypes, 3))) + more if dtypes else "none",
            _mixture(found),
        ),
        Fact("tensors", f"{len(found.tensors):,}", f"and {len(found.tied_names):,} tied" if found.tied_names else ""),
        Fact("files", f"{len(shards):,}", f"largest {format_size(max((file.nbytes for file in shards), default=0))}"),
        Fact("checksums", "yes" if found.is_verifiable else "none", "" if found.is_verifiable else "by another tool"),
        *([Fact("signature", found.signature, "not checked here")] if found.signature else []),
    )


def _mixture(found: Inspection) -> str:
    """Say how much of the weights has the most common dtype, if there are several."""
    largest, *others = found.dtypes or (None,)
    return f"{_percent(largest.nbytes, found.nbytes):.0f} % {printable(largest.dtype)}" if largest and others else ""


def _data(found: Inspection, tree: NameTree) -> dict[str, Any]:
    """Build columns with an entry for each node of the tree, and tables of the values that recur."""
    kinds: dict[tuple[str, tuple[int, ...], int, int], int] = {}
    part_of = parts_of_model([tensor.name for tensor in found.tensors])
    parts = {part: number for number, part in enumerate(dict.fromkeys(part_of.values()))}
    dtypes = {row.dtype: number for number, row in enumerate(found.dtypes)}
    files = {file.name: number for number, file in enumerate(found.files) if file.tensors is not None}
    kind_of = [0] * len(tree.label)
    file_of = [0] * len(tree.label)
    for tensor in found.tensors:
        node = tree.node_of[tensor.name]
        kind_of[node] = (
            kinds.setdefault((tensor.dtype, tensor.shape, tensor.nbytes, parts[part_of[tensor.name]]), len(kinds)) + 1
        )
        file_of[node] = files[tensor.file] + 1
    return {
        "labels": coded_labels(tree.labels),
        "label": tree.label,
        "depth": tree.depth,
        "kind": kind_of,
        "file": file_of,
        "kinds": [[dtypes[dtype], shape, nbytes, part] for dtype, shape, nbytes, part in kinds],
        "parts": [abbreviate_name(printable(part)) for part in parts],
        "dtypes": list(map(printable, dtypes)),
        "files": [printable(file.name) for file in found.files],
        "ties": [[tree.node_of[name], tree.node_of[stored]] for name, stored in found.tied_names.items()],
    }


def _file_row(file: FileEntry, whole: int) -> _FileRow:
    checksum = " ".join(file.digest.checksum or ())
    return _FileRow(printable(file.name), file.nbytes, file.tensors, printable(checksum), _percent(file.nbytes, whole))


def _tensor_row(tensor: TensorEntry, tree: NameTree) -> _TensorRow:
    return _TensorRow(
        name=printable(tensor.name) or NO_NAME,
        node=tree.node_of[tensor.name],
        dtype=printable(tensor.dtype),
        shape=tensor.shape_text(" × "),
        parameters=tensor.parameters,
        nbytes=tensor.nbytes,
        file=printable(tensor.file),
    )


def _some(rows: Sequence[Any], all_of_them: Collection[Any]) -> dict[str, Any]:
    """Return the rows that a table shows, and the number of rows left out."""
    return {"rows": rows, "more": len(all_of_them) - len(rows)}


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 2) if whole else 0.0


def _short_count(number: int) -> str:
    """Shorten a count: 22,713,728 is "22.7 M"."""
    for power, unit in ((12, "T"), (9, "B"), (6, "M")):
        if number >= 10**power:
            return f"{number / 10**power:.1f} {unit}"
    return f"{number:,}"


# Trees of dotted names in columns, so that a page has each prefix once.


_MOST_CHARACTERS: Final = 2_500_000
"""The most characters of all encoded labels of a page. No model has more; beyond it, each label is cut to its share."""
_SHORTEST_SHARE: Final = 20


@dataclass(frozen=True, slots=True)
class NameTree:
    """Nodes of a tree of modules, each before its contents, siblings in natural order; the root comes first.

    A module that contains just one module or tensor shares a node with it: "encoder.layer", "lm_head.weight".
    """

    labels: list[str]
    """Each distinct label of the nodes, escaped for display."""
    label: list[int]
    """For each node, the position of its label in `labels`."""
    depth: list[int]
    """For each node, the number of nodes above it."""
    node_of: dict[str, int]
    """Name -> its node, which may have others below it."""


def coded_labels(labels: Sequence[str]) -> list[int | str]:
    """Encode labels so that each omits the prefix that it shares with the previous one.

    Returns:
        Two entries for each label: the number of leading characters (UTF-16) shared with the previous one, and the
        rest.
    """
    coded = _coded(labels)
    if sum(len(rest) for rest in coded[1::2] if isinstance(rest, str)) <= _MOST_CHARACTERS:
        return coded
    most = max(_SHORTEST_SHARE, _MOST_CHARACTERS // len(labels))
    return _coded([label if len(label) <= most else f"{label[:most]}…" for label in labels])


def _coded(labels: Sequence[str]) -> list[int | str]:
    coded: list[int | str] = []
    for before, label in pairwise(("", *labels)):
        common = common_length(before, label) if before.isascii() and label.isascii() else 0
        coded += (common, label[common:])
    return coded


def make_name_tree(names: Iterable[str]) -> NameTree:
    """Build the tree of these names, in linear time except for sorting siblings."""
    root = grow_branches(names)
    tree = NameTree([], [], [], {})
    places: dict[str, int] = {}
    stack = [("", root, 0)]
    while stack:
        label, branch, depth = stack.pop()
        while branch is not root and branch.name is None and len(branch.parts) == 1:
            ((part, only),) = branch.parts.items()
            label = f"{label}.{part}"
            branch = only
        if branch.name is not None:
            tree.node_of[branch.name] = len(tree.label)
        tree.label.append(places.setdefault(label, len(places)))
        tree.depth.append(depth)
        below = sorted(branch.parts, key=natural_order, reverse=True)
        stack += [(part, branch.parts[part], depth + 1) for part in below]
    tree.labels.extend(map(printable, places))
    return tree


# Histograms on the page of a checkpoint, drawn when a tensor is selected.


_DIGITS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""Heights of bins in 61 steps, a character each; nonempty bins have at least 1."""


_MOST_MODULES: Final = 200
"""The most rows of the overview of values, those with the most numbers."""
_MOST_NAMED: Final = 3
"""The most tensors that a sentence about values names."""
_LONGEST_NAMED: Final = 200
"""The most characters of one of these names."""


@dataclass(frozen=True, slots=True)
class ModuleValues:
    """The numbers of one layer, or of a module outside layers."""

    name: str
    elements: int
    norm: float | None
    """The 2-norm of all its numbers; None if it overflows."""
    norm_percent: float
    """Percentage of the largest norm of a module."""
    zeros: int
    minimum: float | None
    maximum: float | None
    dead_rows: int
    nan: int
    inf: int


def values_overview(measured: MeasuredValues) -> dict[str, Any]:
    """Build the table of values by module, and the sentences about what is odd in them."""
    groups = _modules_of(measured.tensors)
    rows = [_module_values(name, [measured.tensors[each] for each in names]) for name, names in groups.items()]
    largest = set(sorted(rows, key=lambda row: -row.elements)[:_MOST_MODULES])
    most = max((row.norm or 0.0 for row in rows), default=0.0)
    shown = [
        replace(row, norm_percent=round(100 * (row.norm or 0.0) / (most or 1.0), 2)) for row in rows if row in largest
    ]
    return {
        "rows": shown,
        "more": len(rows) - len(shown),
        "has_dead_rows": any(row.dead_rows for row in rows),
        "has_odd": any(row.nan or row.inf for row in rows),
        "sentences": _sentences(measured),
    }


def _modules_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Group tensors by their layer, and others by the module they are in; in natural order."""
    grid = layer_grid(names)
    groups: dict[str, list[str]] = {}
    for name in grid.others:
        groups.setdefault(name.rpartition(".")[0] or name, []).append(name)
    for stack in grid.stacks:
        for (layer, _), members in stack.cells.items():
            groups.setdefault(f"{stack.name}.{layer}" if stack.name else str(layer), []).extend(members)
    return {name: groups[name] for name in sorted(groups, key=natural_order)}


def _module_values(name: str, tensors: Sequence[ValueSummary]) -> ModuleValues:
    elements = sum(one.elements for one in tensors)
    norms = [one.norm for one in tensors if one.minimum is not None]
    known = [norm for norm in norms if norm is not None]
    return ModuleValues(
        name=printable(name) or NO_NAME,
        elements=elements,
        norm=math.hypot(*known) if len(known) == len(norms) else None,
        norm_percent=0.0,
        zeros=sum(one.zeros for one in tensors),
        minimum=min((one.minimum for one in tensors if one.minimum is not None), default=None),
        maximum=max((one.maximum for one in tensors if one.maximum is not None), default=None),
        dead_rows=sum(one.dead_rows for one in tensors),
        nan=sum(one.nan for one in tensors),
        inf=sum(one.inf for one in tensors),
    )


def _sentences(measured: MeasuredValues) -> list[str]:
    tensors = measured.tensors
    odd = [name for name, one in tensors.items() if one.nan or one.inf]
    zero = [name for name, one in tensors.items() if one.elements and one.zeros == one.elements]
    dead = {name: one.dead_rows for name, one in tensors.items() if one.dead_rows and one.zeros < one.elements}
    sentences = []
    if odd:
        sentences.append(f"NaN or infinite numbers in {_named(odd)}.")
    if zero:
        sentences.append(f"All zero: {_named(zero)}.")
    if dead:
        sentences.append(f"{count_of(sum(dead.values()), 'row')} of zeros in {_named(list(dead))}.")
    return sentences or ["All numbers are finite, and no row is all zero."]


def _named(names: Sequence[str]) -> str:
    shown = [(printable(name) or NO_NAME)[:_LONGEST_NAMED] for name in names[:_MOST_NAMED]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")


def values_facts(measured: MeasuredValues) -> list[Fact]:
    """Build the facts at the top of a page that count zeros, and NaN and infinite numbers."""
    nan = sum(one.nan for one in measured.tensors.values())
    inf = sum(one.inf for one in measured.tensors.values())
    odd = sum(bool(one.nan or one.inf) for one in measured.tensors.values())
    note = f"in {count_of(odd, 'tensor')}" if odd else ""
    zeros = sum(one.zeros for one in measured.tensors.values())
    elements = sum(one.elements for one in measured.tensors.values())
    dead = sum(one.dead_rows for one in measured.tensors.values())
    return [
        Fact("zeros", share_text(zeros, elements), f"{count_of(dead, 'row')} of zeros" if dead else ""),
        Fact("NaN, inf", f"{nan:,}, {inf:,}" if odd else "none", note),
    ]


def values_data(measured: MeasuredValues, tree: NameTree) -> dict[str, Any]:
    """Build the data of the histograms by the tensors' nodes, since two names may look alike when shown."""
    return {
        "rows": [_row(tree.node_of[name], one) for name, one in measured.tensors.items() if name in tree.node_of],
        "leftOut": measured.left_out,
        "unknown": measured.unknown,
    }


def _row(node: int, one: ValueSummary) -> list[Any]:
    most = max(one.bins, default=1)
    heights = "".join(_DIGITS[-(-count * (len(_DIGITS) - 1) // most)] for count in one.bins)
    numbers = [_short(number) for number in (one.minimum, one.maximum, one.mean, one.std, one.low, one.high)]
    return [node, one.elements, one.nan, one.inf, *numbers, heights, most, one.zeros, _short(one.norm), one.dead_rows]


def _short(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.5g}")


# The parts of a run's step besides its model, on its checkpoint's page: the optimizer, the state, other files.


def with_step(page: Page, manifest: CheckpointManifest, parts: Sequence[PartSize]) -> Page:
    """Add to a model's page what was saved with it."""
    total = sum(part.nbytes for part in parts)
    rows = [(part, _percent(part.nbytes, total)) for part in parts]
    fact = Fact("step of a run", f"{manifest.step:,}", printable_value(metrics_text(manifest.metrics))[:200])
    step = {"rows": rows, "nbytes": total, "problem": None}
    return replace(page, facts=(*page.facts, fact), view={**page.view, "step": step})


def with_problem(page: Page, message: str) -> Page:
    """Add to a model's page the reason why nothing is known about what was saved with it."""
    return replace(page, view={**page.view, "step": {"rows": (), "nbytes": 0, "problem": printable_value(message)}})
