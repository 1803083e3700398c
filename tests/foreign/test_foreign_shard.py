"""A table reads like one safetensors file, whatever its runs are."""

from __future__ import annotations

import os
import random
import threading
import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hfshard.disk.direct_io import BLOCK_BYTES, is_cached
from hfshard.disk.safe_open import identity_of
from hfshard.errors import CheckpointChangedError, DamagedCheckpointError, IntegrityError, UnstorableTensorError
from hfshard.foreign.byte_runs import ByteRun, ForeignTable, ForeignTensor, StoredRecord
from hfshard.foreign.foreign_shard import ForeignShard
from hfshard.shards.ranged_shard import read_full_tensors
from tests.helpers.page_cache import make_cold
from tests.helpers.tensor_bytes import assert_same

ROWS, COLUMNS = 60, 40
ELEMENTS = 5_000_000
"""More than a comparison reads at once."""


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, torch.Tensor]:
    """What is in the files of `table_in`: two halves of a matrix by columns, and a vector in two pieces."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(ROWS, COLUMNS, generator=generator)
    vector = torch.randint(0, 100, (50,), generator=generator)
    left, right = matrix[:, :16].contiguous(), matrix[:, 16:].contiguous()
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "0").write_bytes(b"head" + left.numpy().tobytes() + vector[:20].numpy().tobytes())
    (tmp_path / "r" / "1").write_bytes(right.numpy().tobytes() + vector[20:].numpy().tobytes() + b"tail")
    return {"matrix": matrix, "vector": vector, "none": torch.empty(0, 3, dtype=torch.float16)}


def table_in(directory: Path, records: tuple[StoredRecord, ...] = ()) -> ForeignTable:
    row = 4 * COLUMNS
    return ForeignTable(
        directory=str(directory),
        framework="X",
        tensors={
            "matrix": ForeignTensor(
                torch.float32,
                (ROWS, COLUMNS),
                (ByteRun("r/0", 4, 64, 0, ROWS, row), ByteRun("r/1", 0, row - 64, 64, ROWS, row)),
            ),
            "vector": ForeignTensor(
                torch.int64,
                (50,),
                (ByteRun("r/0", 4 + 64 * ROWS, 160, 0), ByteRun("r/1", (row - 64) * ROWS, 240, 160)),
            ),
            "none": ForeignTensor(torch.float16, (0, 3), ()),
        },
        sizes={name: (directory / name).stat().st_size for name in ("r/0", "r/1")},
        aliases={"head": "matrix"},
        records=records,
    )


def test_all_tensors_are_read(parts: dict[str, torch.Tensor], tmp_path: Path) -> None:
    shard = ForeignShard(table_in(tmp_path))

    found = read_full_tensors([(shard, list(parts))], torch.device("cpu"))

    assert_same(found, parts)
    assert dict(shard.hfshard_metadata.tied_names) == {"head": "matrix"}
    assert shard.is_current()


def test_any_range_of_the_file_is_read(parts: dict[str, torch.Tensor], tmp_path: Path) -> None:
    shard = ForeignShard(table_in(tmp_path))
    whole = memoryview(bytearray(shard.size))
    shard.read_into(0, whole)
    assert bytes(whole[shard.header.data_start :]) == b"".join(one.numpy().tobytes() for one in parts.values())

    for seed in range(300):
        numbers = random.Random(seed)
        begin = numbers.randrange(shard.header.data_start - 5, shard.size)
        part = memoryview(bytearray(numbers.randrange(min(400, shard.size - begin) + 1)))
        shard.read_into(begin, part)
        assert part == whole[begin : begin + len(part)]


def test_each_of_a_few_threads_has_its_own_open_file(tmp_path: Path) -> None:
    raw = bytes(range(256)) * 400
    (tmp_path / "0").write_bytes(raw)
    tensor = ForeignTensor(torch.uint8, (102_400,), (ByteRun("0", 0, 102_400, 0),))
    shard = ForeignShard(ForeignTable(str(tmp_path), "X", {"w": tensor}, {"0": 102_400}))
    together = threading.Barrier(20)
    found: list[bytes] = []

    def read() -> None:
        room = memoryview(bytearray(50_000))
        together.wait()
        shard.read_into(shard.size - 50_000, room)
        found.append(bytes(room))

    threads = [threading.Thread(target=read) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [raw[-50_000:]] * 20
    assert open_files(tmp_path / "0") == 8
    shard.close()
    assert open_files(tmp_path / "0") == 0


def open_files(path: Path) -> int:
    """Count this process's descriptors of a file."""
    return sum(os.path.samefile(one, path) for one in Path("/proc/self/fd").iterdir() if one.exists())


def test_blocks_of_a_tensor_are_read_into_one_buffer(parts: dict[str, torch.Tensor], tmp_path: Path) -> None:
    shard = ForeignShard(table_in(tmp_path))
    tensors = shard.header.tensors

    found = [(bytes(block), block.obj) for block in shard.blocks(tensors["matrix"], block_bytes=4096)]

    assert [len(raw) for raw, _ in found] == [4096, 4096, 1408]
    assert b"".join(raw for raw, _ in found) == parts["matrix"].numpy().tobytes()
    assert len({id(room) for _, room in found}) == 1
    assert list(shard.blocks(tensors["none"])) == []


def test_large_pieces_are_read_past_the_page_cache(tmp_path: Path) -> None:
    half = 3 * BLOCK_BYTES + 4
    raw = random.Random(0).randbytes(2 * half)
    runs = []
    for number in range(2):
        (tmp_path / str(number)).write_bytes(b"lead" + raw[number * half : (number + 1) * half])
        with open(tmp_path / str(number), "rb") as file:
            os.fsync(file.fileno())
        make_cold(tmp_path / str(number))
        runs.append(ByteRun(str(number), 4, half, number * half))
    tensors = {"w": ForeignTensor(torch.int32, (half // 2,), tuple(runs))}
    table = ForeignTable(str(tmp_path), "X", tensors, sizes={"0": half + 4, "1": half + 4})

    with closing(ForeignShard(table)) as shard:
        blocks = [bytes(block) for block in shard.blocks(shard.header.tensors["w"])]

    assert b"".join(blocks) == raw
    assert [len(block) for block in blocks] == [BLOCK_BYTES] * 3 + [4] + [BLOCK_BYTES] * 3 + [4]
    for number in range(2):
        with open(tmp_path / str(number), "rb") as file:
            assert not is_cached(file.fileno(), 0, half)


def test_a_file_that_ends_within_a_large_piece_is_named(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / str(number)).write_bytes(bytes(2 * BLOCK_BYTES))
    runs = tuple(ByteRun(str(number), 0, 2 * BLOCK_BYTES, number * 2 * BLOCK_BYTES) for number in range(2))
    tensors = {"w": ForeignTensor(torch.uint8, (4 * BLOCK_BYTES,), runs)}
    table = ForeignTable(str(tmp_path), "X", tensors, sizes=dict.fromkeys("01", 2 * BLOCK_BYTES))

    with closing(ForeignShard(table)) as shard:
        os.truncate(tmp_path / "1", BLOCK_BYTES + 1)
        with pytest.raises(CheckpointChangedError, match="/1' was replaced or truncated"):
            list(shard.blocks(shard.header.tensors["w"]))


@pytest.mark.parametrize("is_damaged", [False, True])
def test_records_are_compared_with_their_checksums(
    is_damaged: bool, parts: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    raws = {name: (tmp_path / name).read_bytes() for name in ("r/0", "r/1")}
    records = tuple(StoredRecord(name, 0, len(raw), zlib.crc32(raw)) for name, raw in raws.items())
    shard = ForeignShard(table_in(tmp_path, records))
    counts: list[int] = []
    if is_damaged:
        with (tmp_path / "r" / "1").open("r+b") as file:
            file.seek(99)
            file.write(b"x")
        with pytest.raises(IntegrityError, match="have the CRC-32"):
            shard.check_records()
        return

    assert shard.check_records(counts.append) == sum(map(len, raws.values())) == sum(counts)


def test_files_without_checksums_are_not_called_verified(parts: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpointError, match="cannot be verified in full"):
        ForeignShard(table_in(tmp_path)).check_records()


def test_a_file_that_is_replaced_is_noticed(parts: dict[str, torch.Tensor], tmp_path: Path) -> None:
    shard = ForeignShard(table_in(tmp_path))

    (tmp_path / "new").write_bytes(b"x")
    os.replace(tmp_path / "new", tmp_path / "r" / "1")

    assert not shard.is_current()


def test_a_file_that_is_replaced_after_it_was_described_is_noticed(
    parts: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    file = tmp_path / "r" / "1"
    table = replace(table_in(tmp_path), identities={"r/1": identity_of(file.stat())})
    ForeignShard(table).close()
    (tmp_path / "new").write_bytes(file.read_bytes())
    (tmp_path / "new").replace(file)

    with pytest.raises(CheckpointChangedError, match="r/1' was replaced or truncated while"):
        ForeignShard(table)


def test_a_file_that_is_truncated_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(bytes(100_000))
    tensor = ForeignTensor(torch.uint8, (100_000,), (ByteRun("0", 0, 100_000, 0),))
    table = ForeignTable(directory=str(tmp_path), framework="X", tensors={"w": tensor}, sizes={"0": 100_000})
    shard = ForeignShard(table)

    os.truncate(tmp_path / "0", 90_000)

    with pytest.raises(CheckpointChangedError, match="was replaced or truncated"):
        read_full_tensors([(shard, ["w"])], torch.device("cpu"))
    with pytest.raises(CheckpointChangedError, match="was replaced or truncated"):
        ForeignShard(table)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_numbers_are_read(tmp_path: Path) -> None:
    tensors = {"c": torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128), "b": torch.tensor([True, False])}
    raw = b"".join(one.numpy().tobytes() for one in tensors.values())
    (tmp_path / "0").write_bytes(raw)
    table = ForeignTable(
        directory=str(tmp_path),
        framework="X",
        tensors={
            "c": ForeignTensor(torch.complex128, (2,), (ByteRun("0", 0, 32, 0),)),
            "b": ForeignTensor(torch.bool, (2,), (ByteRun("0", 32, 2, 0),)),
        },
        sizes={"0": len(raw)},
    )

    found = read_full_tensors([(ForeignShard(table), list(tensors))], torch.device("cpu"))

    assert_same(found, tensors)


def test_a_dtype_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(b"12")
    tensor = ForeignTensor(torch.quint8, (2,), (ByteRun("0", 0, 2, 0),))
    table = ForeignTable(directory=str(tmp_path), framework="X", tensors={"q": tensor}, sizes={"0": 2})

    with pytest.raises(UnstorableTensorError, match=r"is torch\.quint8, which the safetensors format does not have"):
        ForeignShard(table)


@pytest.mark.parametrize(
    ("last", "is_cast"),
    [(1.00390625, True), (1.0078125, False), (float("nan"), True)],  # 2^-8 is half a bfloat16 step: a tie to even
)
def test_each_weight_is_compared_with_the_cast_of_its_master(tmp_path: Path, last: float, is_cast: bool) -> None:
    masters = torch.cat([torch.zeros(ELEMENTS - 1), torch.tensor([last])])
    weight = torch.cat([torch.zeros(ELEMENTS - 1), torch.tensor([1.0 if last == last else last])]).bfloat16()
    (tmp_path / "masters").write_bytes(masters.numpy().tobytes())
    (tmp_path / "weights").write_bytes(weight.view(torch.int16).numpy().tobytes())
    half = 2 * ELEMENTS
    runs = ByteRun("masters", 0, half, 0), ByteRun("masters", half, half, half)
    table = ForeignTable(
        directory=str(tmp_path),
        framework="X",
        tensors={"up.weight": ForeignTensor(torch.float32, (ELEMENTS,), runs)},
        sizes={"masters": 4 * ELEMENTS, "weights": half},
        trained={"up.weight": ForeignTensor(torch.bfloat16, (ELEMENTS,), (ByteRun("weights", 0, half, 0),))},
    )

    with closing(ForeignShard(table)) as shard:
        if is_cast:
            assert shard.check_values() == 0  # no checksums
            return
        with pytest.raises(IntegrityError, match=r"parameter 'up\.weight' in the model's file is not") as caught:
            shard.check_values()
    assert caught.value.fqn == "up.weight"


@pytest.mark.parametrize(("damage", "message"), [(b"", "has files of different saves"), (b"x", "is damaged: 16 bytes")])
def test_masters_are_compared_in_the_pass_of_checksums(damage: bytes, message: str, tmp_path: Path) -> None:
    """Each byte is read once; damage is named before what follows from it."""
    masters = torch.tensor([1.0, 2.0, 3.0, 4.0]).numpy().tobytes()
    weights = {"a": torch.tensor([1.0, 2.0]).half(), "b": torch.tensor([3.0, 5.0]).half()}
    raws = {"masters": masters, "weights": b"".join(one.numpy().tobytes() for one in weights.values())}
    (tmp_path / "weights").write_bytes(raws["weights"])
    (tmp_path / "masters").write_bytes(damage + masters[len(damage) :])
    table = ForeignTable(
        directory=str(tmp_path),
        framework="X",
        tensors={
            "a": ForeignTensor(torch.float32, (2,), (ByteRun("masters", 0, 8, 0),)),
            "b": ForeignTensor(torch.float32, (2,), (ByteRun("masters", 8, 8, 0),)),
        },
        sizes={"masters": 16, "weights": 8},
        records=tuple(StoredRecord(name, 0, len(raw), zlib.crc32(raw)) for name, raw in raws.items()),
        trained={
            "a": ForeignTensor(torch.float16, (2,), (ByteRun("weights", 0, 4, 0),)),
            "b": ForeignTensor(torch.float16, (2,), (ByteRun("weights", 4, 4, 0),)),
        },
    )
    counts: list[int] = []

    with closing(ForeignShard(table)) as shard, pytest.raises(IntegrityError, match=message) as caught:
        shard.check_records(counts.append)

    assert (caught.value.fqn, counts) == ((None, [16]) if damage else ("b", [16, 8]))
