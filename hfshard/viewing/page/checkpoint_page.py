"""The page of one checkpoint: modules by bytes, files, dtypes, ties, the largest tensors, metadata."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any, Final

from hfshard._util.text import format_size
from hfshard.viewing.inspection import FileEntry, Inspection
from hfshard.viewing.page.name_tree import NameTree, coded_labels, make_name_tree
from hfshard.viewing.page.page import NO_NAME, Fact, Page, shown, shown_value
from hfshard.viewing.page.values_data import values_data, values_fact
from hfshard.viewing.tensor_entry import TensorEntry
from hfshard.viewing.values.measuring import MeasuredValues

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
