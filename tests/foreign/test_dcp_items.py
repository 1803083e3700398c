"""Items of torch.distributed.checkpoint: files of torch.save in a file, or safetensors; all else is refused."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from hfshard.disk.direct_io import is_cached
from hfshard.errors import DamagedCheckpointError, HfshardError, InvalidArgumentError, UnsafePickleError
from hfshard.foreign.dcp_items import Chunk, FoundChunk, open_items
from tests.helpers.evil import Evil
from tests.helpers.page_cache import make_cold

BEFORE = b"another item"


def saved(value: Any) -> bytes:
    item = io.BytesIO()
    torch.save(value, item)
    return item.getvalue()


def find(raw: bytes, directory: Path, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> FoundChunk:
    """Find the chunk in an item that is not the first of its file."""
    (directory / "0").write_bytes(BEFORE + raw + b"and another")
    chunk = Chunk((0,) * len(sizes), sizes, "0", len(BEFORE), len(raw))
    with open_items(str(directory), "0", {}) as items:
        items.read_edges([chunk])
        return items.find("w", chunk, dtype)


def check(tensor: torch.Tensor, directory: Path) -> FoundChunk:
    """Check that the bytes of a contiguous tensor are where they are found."""
    found = find(saved(tensor), directory, tuple(tensor.shape), tensor.dtype)
    expected = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    raw = (directory / "0").read_bytes()
    assert raw[found.offset : found.offset + len(expected)] == expected
    return found


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint16, torch.float8_e5m2]
)
def test_a_tensor_is_found(dtype: torch.dtype, tmp_path: Path) -> None:
    found = check(torch.ones(3, 5).to(dtype), tmp_path)

    assert found.order == (0, 1)
    assert found.crc32


def test_parameters_and_large_tensors_are_found(tmp_path: Path) -> None:
    check(nn.Parameter(torch.randn(7)).detach(), tmp_path)
    check(torch.randn(2000, 50), tmp_path)
    assert find(saved(nn.Parameter(torch.ones(7))), tmp_path, (7,)).order == (0,)


def test_a_transposed_tensor_says_its_order(tmp_path: Path) -> None:
    assert find(saved(torch.randn(4, 6).t()), tmp_path, (6, 4)).order == (1, 0)
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert find(saved(last), tmp_path, (2, 3, 4, 5)).order == (0, 2, 3, 1)


def test_items_of_a_cold_file_are_found_past_the_page_cache(tmp_path: Path) -> None:
    # Small pages in the cache would keep the file from coming into it in huge ones.
    items = [saved(torch.full((1000, 1000), number)) for number in (1.0, 2.0)]
    (tmp_path / "0").write_bytes(b"".join(items))
    chunks = [Chunk((0, 0), (1000, 1000), "0", number * len(items[0]), len(items[0])) for number in range(2)]
    path = tmp_path / "0"
    make_cold(path)
    with open(path, "rb") as file, open_items(str(tmp_path), "0", {}) as opened:
        opened.read_edges(chunks)
        found = [opened.find("w", chunk, torch.float32) for chunk in chunks]
        assert not any(is_cached(file.fileno(), chunk.begin, 4096) for chunk in chunks)
    raw = path.read_bytes()
    for number, one in enumerate(found, 1):
        assert raw[one.offset : one.offset + 4_000_000] == torch.full((1000, 1000), number).float().numpy().tobytes()


def test_items_of_safetensors_are_found(tmp_path: Path) -> None:
    safetensors.torch.save_file({"v": torch.ones(3), "w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "0")
    with open_items(str(tmp_path), "0", {}) as items:
        found = items.find("w", Chunk((4, 0), (2, 3), "0", 0, 24), torch.float32)
        with pytest.raises(DamagedCheckpointError, match=r"F32 of shape \[2, 3\] in place of torch.float16"):
            items.find("w", Chunk((4, 0), (2, 3), "0", 0, 12), torch.float16)
        with pytest.raises(DamagedCheckpointError, match="its item is not one that"):
            items.find("u", Chunk((4, 0), (2, 3), "0", 0, 24), torch.float32)

    raw = (tmp_path / "0").read_bytes()
    assert raw[found.offset : found.offset + 24] == torch.arange(6.0).numpy().tobytes()
    assert found.crc32 is None


def rewritten(change: Callable[[str, bytes], tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    """The item of a tensor of shape [4] with other records."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(torch.ones(4)))) as old, zipfile.ZipFile(out, "w", compression) as new:
        for name in old.namelist():
            new.writestr(*change(name, old.read(name)))
    return out.getvalue()


def same(name: str, raw: bytes) -> tuple[str, bytes]:
    return name, raw


def with_record(end: str, new: Callable[[bytes], bytes]) -> Callable[[str, bytes], tuple[str, bytes]]:
    return lambda name, raw: (name, new(raw) if name.endswith(end) else raw)


REFUSED: dict[str, tuple[bytes, type[HfshardError], str]] = {
    "code": (saved(Evil()), UnsafePickleError, r"asks for 'posix\.system'.*Nothing of it was run"),
    "a dict": (saved({"w": torch.ones(4)}), DamagedCheckpointError, "its item is not one that torch.save"),
    "a number": (saved(3), DamagedCheckpointError, "its item is not one that torch.save"),
    "a part of a storage": (saved(torch.ones(8)[4:]), DamagedCheckpointError, "a part of a storage"),
    "an expanded tensor": (saved(torch.ones(1).expand(4)), DamagedCheckpointError, "several in one place"),
    "gaps": (saved(torch.ones(8)[::2]), DamagedCheckpointError, "numbers with gaps"),
    "another shape": (
        saved(torch.ones(5)),
        DamagedCheckpointError,
        r"the shape \[4\] and 16 bytes, but its item has \[5\]",
    ),
    "another dtype": (saved(torch.ones(4).double()), DamagedCheckpointError, "16 bytes, but its item has .* and 32"),
    "another dtype of the same size": (
        saved(torch.ones(4).to(torch.int32)),
        DamagedCheckpointError,
        "the dtypes are torch.float32 and torch.int32",
    ),
    "a sparse tensor": (saved(torch.ones(4).to_sparse()), UnsafePickleError, "asks for 'torch"),
    "compressed": (rewritten(same, zipfile.ZIP_DEFLATED), DamagedCheckpointError, "compressed"),
    "big-endian": (rewritten(with_record("byteorder", lambda raw: b"big")), DamagedCheckpointError, "big-endian"),
    "no pickle": (
        rewritten(lambda name, raw: (name.replace("data.pkl", "other.pkl"), raw)),
        DamagedCheckpointError,
        "0 pickles",
    ),
    "no data": (
        rewritten(lambda name, raw: (name.replace("data/0", "data/1"), raw)),
        DamagedCheckpointError,
        "data/0",
    ),
    "too few bytes": (
        rewritten(with_record("data/0", lambda raw: raw[:8])),
        DamagedCheckpointError,
        "16 bytes, but its item has .* and 8",
    ),
    "a huge pickle": (
        rewritten(with_record("data.pkl", lambda raw: raw + bytes(100_000))),
        DamagedCheckpointError,
        "a record 'data.pkl' of",
    ),
    "nothing": (b"", DamagedCheckpointError, "not a valid safetensors file"),
    "a comment": (saved(torch.ones(4))[:-2] + b"\5\0xxxxx", DamagedCheckpointError, "no end of a zip"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_item_is_refused(name: str, tmp_path: Path) -> None:
    raw, error, message = REFUSED[name]

    with pytest.raises(error, match=message):
        find(raw, tmp_path, (4,))


def test_conjugated_numbers_are_refused(tmp_path: Path) -> None:
    """Their bytes are those before the conjugation."""
    raw = saved(torch.tensor([1 + 2j, 3 - 4j]).conj())

    with pytest.raises(InvalidArgumentError, match=r"its numbers are conjugated.*tensor\.resolve_conj\(\)"):
        find(raw, tmp_path, (2,), torch.complex64)


def test_a_zip_of_another_program_with_the_same_records_is_read(tmp_path: Path) -> None:
    assert find(rewritten(same), tmp_path, (4,)).order == (0,)


def test_a_changed_byte_is_an_error_or_changes_no_place(tmp_path: Path) -> None:
    item = saved(torch.ones(4))
    expected = find(item, tmp_path, (4,))
    for seed in range(500):
        numbers = random.Random(seed)
        raw = bytearray(item)
        raw[numbers.randrange(len(raw))] ^= 1 << numbers.randrange(8)
        try:
            found = find(bytes(raw), tmp_path, (4,))
        except HfshardError:
            continue
        assert found._replace(crc32=None).order == expected.order
        assert len(BEFORE) <= found.offset <= len(BEFORE) + len(item) - 16


@pytest.mark.parametrize("count", range(0, 1200, 40))
def test_a_truncated_item_is_an_error(count: int, tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"of the tensor 'w'|safetensors"):
        find(saved(torch.ones(4))[:count], tmp_path, (4,))
