"""A table of runs covers each byte of each tensor exactly once, within its files, or is refused."""

from __future__ import annotations

import pytest
import torch

from hfshard.errors import DamagedCheckpointError, UnsafePathError
from hfshard.foreign.byte_runs import ByteRun, ForeignTable, ForeignTensor, StoredRecord


def table_of(
    *runs: ByteRun,
    shape: tuple[int, ...] = (4, 4),
    sizes: dict[str, int] | None = None,
    aliases: dict[str, str] | None = None,
    name: str = "w",
) -> ForeignTable:
    """Table of one tensor of float32: 64 bytes, in the files "a" and "b/c" of 64 bytes."""
    return ForeignTable(
        directory="/d",
        framework="X",
        tensors={name: ForeignTensor(torch.float32, shape, runs)},
        sizes={"a": 64, "b/c": 64} if sizes is None else sizes,
        aliases=aliases or {},
    )


GOOD: dict[str, tuple[ByteRun, ...]] = {
    "one run": (ByteRun("a", 0, 64, 0),),
    "two files": (ByteRun("a", 32, 32, 0), ByteRun("b/c", 0, 32, 32)),
    "columns": (ByteRun("a", 0, 8, 0, 4, 16), ByteRun("b/c", 0, 8, 8, 4, 16)),
    "columns of other widths": (ByteRun("a", 0, 4, 0, 4, 16), ByteRun("b/c", 0, 12, 4, 4, 16)),
    "rows and columns": (
        ByteRun("a", 0, 8, 0, 2, 16),
        ByteRun("a", 16, 8, 8, 2, 16),
        ByteRun("b/c", 0, 32, 32),
    ),
    "transposed": tuple(ByteRun("a", 16 * at, 4, 4 * at, 4, 16) for at in range(4)),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_tensor_that_is_covered_is_accepted(name: str) -> None:
    table = table_of(*GOOD[name])

    assert table.tensors["w"].nbytes == 64
    assert sum(run.nbytes for run in table.tensors["w"].runs) == 64


BAD: dict[str, tuple[tuple[ByteRun, ...], str]] = {
    "nothing": ((), "has 0 of its 64 bytes"),
    "a gap": ((ByteRun("a", 0, 32, 0), ByteRun("b/c", 0, 28, 36)), "has 60 of its 64 bytes"),
    "twice": ((ByteRun("a", 0, 64, 0), ByteRun("b/c", 0, 64, 0)), "overlap, or are out of its bounds or order"),
    "the wrong order": ((ByteRun("a", 0, 32, 32), ByteRun("b/c", 0, 32, 0)), "overlap, or are out of its bounds"),
    "out of bounds": ((ByteRun("a", 0, 32, 0), ByteRun("b/c", 0, 64, 32)), "overlap, or are out of its bounds"),
    "behind the file": ((ByteRun("a", 8, 64, 0),), "ends at byte 72 of 'a', which has 64"),
    "before the file": ((ByteRun("a", -8, 64, 0),), "has a piece of negative size or offset"),
    "before the tensor": ((ByteRun("a", 0, 64, -1),), "has a piece of negative size or offset"),
    "an empty run": ((ByteRun("a", 0, 0, 0), ByteRun("a", 0, 64, 0)), "has a piece of negative size or offset"),
    "no rows": ((ByteRun("a", 0, 64, 0, 0),), "has a piece of negative size or offset"),
    "rows in rows": ((ByteRun("a", 0, 16, 0, 4, 8),), "overlap, or are out of its bounds"),
    "the same columns": (
        (ByteRun("a", 0, 8, 0, 4, 16), ByteRun("b/c", 0, 8, 0, 4, 16)),
        "pieces of tensor 'w' overlap",
    ),
    "columns that overlap": (
        (ByteRun("a", 0, 8, 0, 4, 16), ByteRun("b/c", 0, 8, 4, 4, 16)),
        "pieces of tensor 'w' overlap",
    ),
    "a column in a run": ((ByteRun("a", 0, 8, 0, 4, 16), ByteRun("b/c", 0, 32, 32)), "pieces of tensor 'w' overlap"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_tensor_that_is_not_covered_is_refused(name: str) -> None:
    runs, message = BAD[name]

    with pytest.raises(DamagedCheckpointError, match=message):
        table_of(*runs)


@pytest.mark.parametrize("shape", [(0, 1 << 61), (0, 1 << 31, 1 << 31)])
def test_an_empty_tensor_that_torch_cannot_have_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DamagedCheckpointError, match="is larger than any tensor, or would be with elements"):
        table_of(shape=shape)


def test_rows_of_a_large_tensor_are_compared_in_windows() -> None:
    shape = (3000, 1000)
    left, right = ByteRun("a", 0, 2000, 0, 3000, 4000), ByteRun("b/c", 0, 2000, 2000, 3000, 4000)
    sizes = {"a": 6_000_000, "b/c": 6_000_000}
    late = ByteRun("b/c", 0, 2000, 4000, 2999, 4000), ByteRun("b/c", 5_998_000, 2000, 11_998_000)

    table_of(left, right, shape=shape, sizes=sizes)
    with pytest.raises(DamagedCheckpointError, match="overlap"):
        table_of(left, *late, shape=shape, sizes=sizes)


def test_a_claim_of_more_bytes_than_the_files_have_is_refused_at_once() -> None:
    with pytest.raises(DamagedCheckpointError, match="ends at byte"):
        table_of(ByteRun("a", 0, 1, 0, 1 << 60, 2), ByteRun("a", 0, 1, 1, 1 << 60, 2), shape=(1 << 59,))
    with pytest.raises(DamagedCheckpointError, match="'a' has 64 bytes, but 128 of tensors"):
        table_of(ByteRun("a", 0, 64, 0), ByteRun("a", 0, 64, 64), shape=(32,))


@pytest.mark.parametrize("name", ["../a", "/a", "b/../a", "a\\b", "C:a", ""])
def test_a_file_outside_of_the_directory_is_refused(name: str) -> None:
    with pytest.raises(UnsafePathError):
        table_of(ByteRun(name, 0, 64, 0), sizes={name: 64})


def test_a_missing_file_is_named() -> None:
    with pytest.raises(DamagedCheckpointError, match=r"its file 'a' is missing\. Copy 'a' there"):
        table_of(ByteRun("a", 0, 64, 0), sizes={})


@pytest.mark.parametrize("name", ["", "__metadata__", "a\n", "a\0", "\ud800"])
def test_a_name_that_no_model_has_is_refused(name: str) -> None:
    with pytest.raises(DamagedCheckpointError, match="a tensor of the name"):
        table_of(ByteRun("a", 0, 64, 0), name=name)


@pytest.mark.parametrize("aliases", [{"head": "v"}, {"w": "w"}])
def test_an_alias_needs_a_tensor(aliases: dict[str, str]) -> None:
    with pytest.raises(DamagedCheckpointError, match="which is not one of its tensors"):
        table_of(ByteRun("a", 0, 64, 0), aliases=aliases)


def test_a_table_is_verifiable_if_its_records_have_all_bytes() -> None:
    tensors = {"w": ForeignTensor(torch.float32, (4, 4), (ByteRun("a", 0, 64, 0),))}
    of_others = (StoredRecord("b", 0, 64, 1), StoredRecord("a", 64, 64, 1))
    for size, expected in ((64, True), (63, False)):
        records = (*of_others, StoredRecord("a", 0, size, 1))
        table = ForeignTable(directory="/d", framework="X", tensors=tensors, sizes={"a": 128}, records=records)
        assert table.is_verifiable == expected
