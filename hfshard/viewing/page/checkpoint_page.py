"""The page of one checkpoint: modules by bytes, files, dtypes, ties, the largest tensors, metadata."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from math import prod
from typing import Any, Final

from hfshard._util.text import format_size
from hfshard.training.run.manifest import CheckpointManifest
from hfshard.viewing.inspection import FileEntry, Inspection, TensorEntry
from hfshard.viewing.module_tree import natural_order, split_name
from hfshard.viewing.page.page import NO_NAME, Fact, Page, shown, shown_value
from hfshard.viewing.run_listing import Part
from hfshard.viewing.tensor_values import MeasuredValues, ValueSummary

_MOST_FILES: Final = 500
_MOST_TIES: Final = 200
_MOST_METADATA: Final = 100
"""Rows of the tables; the page says how many more there are. The search finds every tensor and every tied name."""

_LARGEST: Final = 20


@dataclass(frozen=True, slots=True)
class _FileRow:
    name: str
    nbytes: int
    tensors: int | None
    checksum: str
    percent: float
    """Of the limit, or of the largest file where none is known; above 100: the file is larger than the limit."""


@dataclass(frozen=True, slots=True)
class _DtypeRow:
    dtype: str
    tensors: int
    parameters: int
    nbytes: int
    percent: float
    """Of all bytes."""


@dataclass(frozen=True, slots=True)
class _TensorRow:
    name: str
    node: int
    """In the tree of the data, for a link into it."""
    dtype: str
    shape: str
    parameters: int
    nbytes: int
    file: str


def make_checkpoint_page(
    found: Inspection, max_shard_size: int | None = None, measured: MeasuredValues | None = None
) -> Page:
    """Lay out what was found in a checkpoint.

    Args:
        found: What it consists of.
        max_shard_size: Bytes that the bars of the files are measured by; None: the largest file.
        measured: What its numbers are like; None: that is not shown.
    """
    whole = max_shard_size or max((file.nbytes for file in found.files), default=0)
    tree = make_name_tree([*(tensor.name for tensor in found.tensors), *found.tied_names])
    ties = sorted(found.tied_names.items())
    metadata = sorted(found.metadata.items())
    return Page(
        kind="checkpoint",
        title=shown(found.place),
        facts=(*_facts(found), *([] if measured is None else [values_fact(measured)])),
        view={
            "has_map": any(tensor.nbytes for tensor in found.tensors),
            "entry": shown_value(found.entry),
            "key": None if found.key is None else shown_value(found.key),
            "files": _some([_file_row(file, whole) for file in found.files[:_MOST_FILES]], found.files),
            "has_checksums": any(_checksum(file) for file in found.files[:_MOST_FILES]),
            "max_shard_size": max_shard_size,
            "dtypes": [
                _DtypeRow(row.dtype, row.tensors, row.parameters, row.nbytes, _percent(row.nbytes, found.nbytes))
                for row in found.dtypes
            ],
            "largest": [_tensor_row(tensor, tree) for tensor in found.largest(_LARGEST)],
            "ties": _some(
                [(shown(name) or NO_NAME, shown(stored) or NO_NAME) for name, stored in ties[:_MOST_TIES]], ties
            ),
            "metadata": _some(
                [(shown_value(key), shown_value(value)) for key, value in metadata[:_MOST_METADATA]], metadata
            ),
        },
        data=_data(found, tree) | ({} if measured is None else {"values": values_data(measured, tree)}),
    )


def _facts(found: Inspection) -> tuple[Fact, ...]:
    shards = [file for file in found.files if file.tensors is not None]
    dtypes = [row.dtype for row in found.dtypes]
    short = _short_count(found.parameters)
    exact = f"{found.parameters:,}"
    more = f" and {len(dtypes) - 3} more" if len(dtypes) > 3 else ""
    return (
        Fact("weights", format_size(found.nbytes), f"{found.nbytes:,} bytes"),
        Fact("parameters", short, exact if short != exact else ""),
        Fact("tensors", f"{len(found.tensors):,}", f"and {len(found.tied_names):,} tied" if found.tied_names else ""),
        Fact("files", f"{len(shards):,}", f"largest {format_size(max((file.nbytes for file in shards), default=0))}"),
        Fact("dtypes", ", ".join(islice(dtypes, 3)) + more if dtypes else "none"),
        Fact("checksums", "yes" if found.is_verifiable else "none", "" if found.is_verifiable else "by another tool"),
        *([Fact("signature", found.signature, "not checked here")] if found.signature else []),
    )


def _data(found: Inspection, tree: NameTree) -> dict[str, Any]:
    """Columns with an entry for each node of the tree, and tables of what is in many."""
    kinds: dict[tuple[str, tuple[int, ...], int], int] = {}
    dtypes = {row.dtype: number for number, row in enumerate(found.dtypes)}
    files = {file.name: number for number, file in enumerate(found.files) if file.tensors is not None}
    kind_of = [0] * len(tree.label)
    file_of = [0] * len(tree.label)
    for tensor in found.tensors:
        node = tree.node_of[tensor.name]
        kind_of[node] = kinds.setdefault((tensor.dtype, tensor.shape, tensor.nbytes), len(kinds)) + 1
        file_of[node] = files[tensor.file] + 1
    return {
        "labels": coded_labels(tree.labels),
        "label": tree.label,
        "depth": tree.depth,
        "kind": kind_of,
        "file": file_of,
        "kinds": [[dtypes[dtype], shape, nbytes] for dtype, shape, nbytes in kinds],
        "dtypes": list(map(shown, dtypes)),
        "files": [shown(file.name) for file in found.files],
        "ties": [[tree.node_of[name], tree.node_of[stored]] for name, stored in found.tied_names.items()],
    }


def _file_row(file: FileEntry, whole: int) -> _FileRow:
    return _FileRow(shown(file.name), file.nbytes, file.tensors, shown(_checksum(file)), _percent(file.nbytes, whole))


def _checksum(file: FileEntry) -> str:
    kinds = (("sha256", file.digest.sha256), ("xxh3", file.digest.xxh3))
    return next((f"{kind} {digest}" for kind, digest in kinds if digest is not None), "")


def _tensor_row(tensor: TensorEntry, tree: NameTree) -> _TensorRow:
    return _TensorRow(
        name=shown(tensor.name) or NO_NAME,
        node=tree.node_of[tensor.name],
        dtype=shown(tensor.dtype),
        shape=" × ".join(map(str, tensor.shape)) or "scalar",
        parameters=prod(tensor.shape),
        nbytes=tensor.nbytes,
        file=shown(tensor.file),
    )


def _some(rows: Sequence[Any], all_of_them: Collection[Any]) -> dict[str, Any]:
    """What a table shows, and how many rows it leaves out."""
    return {"rows": rows, "more": len(all_of_them) - len(rows)}


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 2) if whole else 0.0


def _short_count(number: int) -> str:
    """Of 22,713,728: "22.7 M"."""
    for power, unit in ((12, "T"), (9, "B"), (6, "M")):
        if number >= 10**power:
            return f"{number / 10**power:.1f} {unit}"
    return f"{number:,}"


# Dotted names as a tree in columns, so that a page has each prefix once.


_MOST_CHARACTERS: Final = 2_500_000
"""Of all labels of a page, as they are coded. What has more is no model's: each label is cut to its share."""
_SHORTEST_SHARE: Final = 20


@dataclass(frozen=True, slots=True)
class NameTree:
    """The nodes of a tree of modules, each before what is in it, siblings in natural order; the root is the first.

    A module with nothing but one other module or tensor in it is one node with that: "encoder.layer", "lm_head.weight".
    """

    labels: list[str]
    """Every label that a node has, once, made fit to be shown."""
    label: list[int]
    """Of each node: where its label stands in `labels`."""
    depth: list[int]
    """Of each node: how many are above it."""
    node_of: dict[str, int]
    """Name -> its node, which may have others below it."""


def coded_labels(labels: Sequence[str]) -> list[int | str]:
    """Write labels so that each has only what the one before it does not begin with.

    Returns:
        Of each label two entries: how many characters (UTF-16) it has in common with the one before, and the rest.
    """
    coded = _coded(labels)
    if sum(len(rest) for rest in coded[1::2] if isinstance(rest, str)) <= _MOST_CHARACTERS:
        return coded
    most = max(_SHORTEST_SHARE, _MOST_CHARACTERS // len(labels))
    return _coded([label if len(label) <= most else f"{label[:most]}…" for label in labels])


def _coded(labels: Sequence[str]) -> list[int | str]:
    coded: list[int | str] = []
    for before, label in pairwise(("", *labels)):
        common = _common(before, label) if before.isascii() and label.isascii() else 0
        coded += (common, label[common:])
    return coded


def _common(one: str, other: str) -> int:
    differing = (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(differing, min(len(one), len(other)))


@dataclass(slots=True)
class _Branch:
    """A node while the tree is built."""

    name: str | None = None
    """The whole name that ends here."""
    parts: dict[str, _Branch] = field(default_factory=dict)


def make_name_tree(names: Iterable[str]) -> NameTree:
    """Make the tree of these names, in time that is linear but for sorting siblings."""
    root = _Branch()
    for name in names:
        branch = root
        for part in split_name(name):
            following = branch.parts.get(part)
            if following is None:
                following = branch.parts[part] = _Branch()
            branch = following
        branch.name = name
    return _in_columns(root)


def _in_columns(root: _Branch) -> NameTree:
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
    tree.labels.extend(map(shown, places))
    return tree


# Histograms of tensors on the page of a checkpoint: they are drawn when a tensor is chosen.


_DIGITS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""Heights of bins in 61 steps, a character each: what has any is at least 1."""


def values_fact(measured: MeasuredValues) -> Fact:
    """Tell at the top of a page whether any number is none."""
    nan = sum(one.nan for one in measured.tensors.values())
    inf = sum(one.inf for one in measured.tensors.values())
    odd = sum(bool(one.nan or one.inf) for one in measured.tensors.values())
    note = f"in {odd:,} tensor{'s' if odd > 1 else ''}" if odd else ""
    return Fact("NaN, inf", f"{nan:,}, {inf:,}" if odd else "none", note)


def values_data(measured: MeasuredValues, tree: NameTree) -> dict[str, Any]:
    """Lay out what the numbers of tensors are like, by the tensors' nodes: two names may look alike when shown."""
    return {
        "rows": [_row(tree.node_of[name], one) for name, one in measured.tensors.items() if name in tree.node_of],
        "leftOut": measured.left_out,
        "unknown": measured.unknown,
    }


def _row(node: int, one: ValueSummary) -> list[Any]:
    most = max(one.bins, default=1)
    heights = "".join(_DIGITS[-(-count * (len(_DIGITS) - 1) // most)] for count in one.bins)
    numbers = [_short(number) for number in (one.minimum, one.maximum, one.mean, one.std, one.low, one.high)]
    return [node, one.elements, one.nan, one.inf, *numbers, heights, most]


def _short(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.5g}")


# What a step of a run has beside its model, on the page of its checkpoint: the optimizer, the state, other files.


@dataclass(frozen=True, slots=True)
class _PartRow:
    part: Part
    nbytes: int
    files: int
    percent: float
    """Of the checkpoint."""


def with_step(page: Page, manifest: CheckpointManifest, parts: Mapping[Part, int], counts: Mapping[Part, int]) -> Page:
    """Add to the page of a model what was saved with it.

    Args:
        page: Of the checkpoint's model.
        manifest: Of the checkpoint.
        parts: The bytes of each part of it.
        counts: The files of each.
    """
    total = sum(parts.values())
    rows = [_PartRow(part, size, counts[part], round(100 * size / max(1, total), 2)) for part, size in parts.items()]
    metrics = ", ".join(f"{name} {value:.6g}" for name, value in sorted(manifest.metrics.items()))
    fact = Fact("step of a run", f"{manifest.step:,}", shown_value(metrics)[:200])
    step = {"rows": rows, "nbytes": total, "problem": None}
    return replace(page, facts=(*page.facts, fact), view={**page.view, "step": step})


def with_problem(page: Page, message: str) -> Page:
    """Add to the page of a model why nothing is known of what was saved with it."""
    return replace(page, view={**page.view, "step": {"rows": (), "nbytes": 0, "problem": shown_value(message)}})
