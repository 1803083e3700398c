"""Mapped, read at once, or by way of staging memory: the same tensors, and bounded memory and threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import hfshard
from hfshard.disk.direct_io import is_cached
from hfshard.errors import DamagedCheckpointError, InvalidArgumentError
from hfshard.shards import read_tensors
from hfshard.shards.read_tensors import check_read_mode, read_from, start_read_ahead, stretches_of
from hfshard.shards.shard_file import SafetensorsFile
from tests.helpers.page_cache import make_cold
from tests.helpers.threads import no_thread_is_left

CPU = torch.device("cpu")


def _is_cached(shard: SafetensorsFile, start: int, count_bytes: int) -> bool:
    with shard.opened() as fd:
        return is_cached(fd, start, count_bytes)


@cache
def tensors() -> dict[str, torch.Tensor]:
    """The same ones each time; nobody changes them."""
    generator = torch.Generator().manual_seed(3)
    return {
        "large": torch.randn(1500, 1501, generator=generator),  # 9 MB: several pieces, and an odd end
        "small.a": torch.randn(3, generator=generator),
        "wide": torch.randn(700, 801, generator=generator, dtype=torch.float64),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "complex": torch.randn(300_001, generator=generator, dtype=torch.complex128),
        "bytes": torch.arange(3_000_001).to(torch.uint8),
        **{f"many.{i}": torch.full((i % 7,), i, dtype=torch.int16) for i in range(600)},
    }


@contextmanager
def opened(path: Path) -> Iterator[SafetensorsFile]:
    shard = SafetensorsFile(str(path), str(path.parent))
    try:
        yield shard
    finally:
        shard.close()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("limit", "is_cold", "direct"),
    [("5MB", True, ""), ("5MB", False, "0"), ("1GB", True, "0"), ("1GB", False, "")],  # any two together
)
def test_every_way_of_reading_gives_the_same_tensors(
    limit: str, is_cold: bool, direct: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HFSHARD_DIRECT", direct)
    expected = tensors()
    hfshard.save_state_dict(expected, tmp_path, max_shard_size=limit)
    for read in ("auto", "mmap", "pread"):
        if is_cold:
            for path in tmp_path.glob("*.safetensors"):
                make_cold(path)
        assert_same(hfshard.load_state_dict(tmp_path, read=read), expected)


@pytest.mark.parametrize("is_cold", [True, False])
def test_the_way_of_a_gpu_gives_the_same_tensors(is_cold: bool, tmp_path: Path) -> None:
    hfshard.save_state_dict(tensors(), tmp_path)
    path = tmp_path / "model.safetensors"
    if is_cold:
        make_cold(path)
    with opened(path) as shard:
        found = read_tensors._read_at_once([(shard, list(shard.header.tensors))], CPU, staged=True)
    assert_same(dict(sorted(found.items())), dict(sorted(tensors().items())))


@pytest.mark.parametrize("read", ["mmap", "pread"])
def test_a_file_of_others_whose_tensors_are_not_aligned_is_read_too(read: str, tmp_path: Path) -> None:
    expected = {"a": torch.arange(3, dtype=torch.uint8), "b": torch.randn(400_000), "c": torch.randn(2, 900_001)}
    save_file(expected, tmp_path / "model.safetensors", metadata={"format": "pt", "x": "y" * 3})
    assert_same(hfshard.load_state_dict(tmp_path, read=read), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("read", ["mmap", "pread"])
def test_tensors_that_were_read_are_private_and_outlive_the_files(read: str, tmp_path: Path) -> None:
    expected = tensors()
    hfshard.save_state_dict(expected, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    found = hfshard.load_state_dict(tmp_path, read=read)  # type: ignore[arg-type]
    found["large"].zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(found["wide"], expected["wide"])


def test_a_mapping_ends_with_its_last_tensor(tmp_path: Path) -> None:
    hfshard.save_state_dict(tensors(), tmp_path)
    (tmp_path / "model.safetensors").read_bytes()  # into the page cache: what reads ahead keeps the mapping for a while
    found = hfshard.load_state_dict(tmp_path, keys=["large", "wide"])
    mapped = [str(tmp_path) in Path("/proc/self/maps").read_text()]
    del found["large"]
    mapped.append(str(tmp_path) in Path("/proc/self/maps").read_text())
    del found
    mapped.append(str(tmp_path) in Path("/proc/self/maps").read_text())

    assert mapped == [True, True, False]


def test_one_tensor_of_a_file_read_at_once_keeps_only_its_own_memory(tmp_path: Path) -> None:
    hfshard.save_state_dict(tensors(), tmp_path)
    found = hfshard.load_state_dict(tmp_path, read="pread")
    assert found["large"].untyped_storage().nbytes() == 1500 * 1501 * 4
    assert found["many.6"].untyped_storage().nbytes() == 12


def test_what_the_page_cache_lacks_is_read_ahead_and_nothing_else(tmp_path: Path) -> None:
    hfshard.save_state_dict({"first": torch.ones(16_000_000), "second": torch.ones(2_000_000)}, tmp_path)
    path = tmp_path / "model.safetensors"
    make_cold(path)
    with opened(path) as shard:
        info = shard.header.tensors["second"]
        for thread in start_read_ahead([(shard, stretches_of(shard, ["second"]))]):
            thread.result()
        assert _is_cached(shard, shard.header.data_start + info.begin, info.nbytes)
        assert start_read_ahead([(shard, stretches_of(shard, ["second"]))]) == []
        assert not _is_cached(shard, shard.header.data_start, 48_000_000)  # of 64; the kernel reads around a page


def test_the_files_may_be_closed_while_they_are_read_ahead(tmp_path: Path) -> None:
    hfshard.save_state_dict({"x": torch.randn(2_000_000)}, tmp_path)
    make_cold(tmp_path / "model.safetensors")
    files = len(os.listdir("/proc/self/fd"))
    shard = SafetensorsFile(str(tmp_path / "model.safetensors"), str(tmp_path))
    threads = start_read_ahead([(shard, stretches_of(shard, ["x"]))])
    shard.close()
    for thread in threads:
        thread.result()
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("is_cold", [True, False])
@pytest.mark.parametrize("staged", [True, False])
def test_a_file_that_was_cut_short_is_an_error_that_names_it(staged: bool, is_cold: bool, tmp_path: Path) -> None:
    hfshard.save_state_dict(tensors(), tmp_path)
    path = tmp_path / "model.safetensors"
    with opened(path) as shard:
        os.truncate(path, path.stat().st_size - 4096)
        if is_cold:
            make_cold(path)
        was_cut = r"model\.safetensors' was truncated while it was being read"
        with no_thread_is_left(), pytest.raises(DamagedCheckpointError, match=was_cut):
            read_tensors._read_at_once([(shard, list(shard.header.tensors))], CPU, staged=staged)


def test_where_the_kernel_can_not_map_ahead_it_reads_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hfshard.save_state_dict({"x": torch.randn(2_000_000)}, tmp_path)
    make_cold(tmp_path / "model.safetensors")
    monkeypatch.setattr("hfshard.shards.shard_file._POPULATE_READ", 9999)
    with opened(tmp_path / "model.safetensors") as shard:
        for thread in start_read_ahead([(shard, stretches_of(shard, ["x"]))]):
            thread.result()
        shard.tensor("x").sum()  # waits for what is still under way
        assert _is_cached(shard, shard.header.data_start, 8_000_000)


def test_a_file_that_was_cut_short_ends_no_process_that_reads_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hfshard.save_state_dict({"x": torch.randn(2_000_000)}, tmp_path)
    path = tmp_path / "model.safetensors"
    with opened(path) as shard:
        assert shard.mapping.nbytes() == 8_004_096
        os.truncate(path, 5_000_000)
        monkeypatch.setattr("hfshard.shards.read_tensors.is_prefaulted", lambda *_stretch: False)
        for thread in start_read_ahead([(shard, stretches_of(shard, ["x"]))]):
            thread.result()


def test_reading_ahead_leaves_half_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hfshard.save_state_dict({"x": torch.ones(16_000_000)}, tmp_path)
    make_cold(tmp_path / "model.safetensors")
    monkeypatch.setattr("hfshard.shards.read_tensors._available_bytes", lambda: 2 * 8 * 1024 * 1024)
    with opened(tmp_path / "model.safetensors") as shard:
        for thread in start_read_ahead([(shard, stretches_of(shard, ["x"]))]):
            thread.result()
        assert _is_cached(shard, shard.header.data_start, 8_000_000)
        assert not _is_cached(shard, shard.header.data_start + 24_000_000, 40_000_000)


def test_nothing_wanted_is_nothing_read(tmp_path: Path) -> None:
    hfshard.save_state_dict(tensors(), tmp_path)
    with opened(tmp_path / "model.safetensors") as shard:
        for read in ("auto", "mmap", "pread"):
            assert read_from([(shard, [])], read, CPU) == {}


def test_a_mode_that_means_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="'auto', 'mmap' or 'pread'"):
        check_read_mode("fast")
    with pytest.raises(InvalidArgumentError, match="Cannot combine read='mmap' with disable_mmap=True"):
        hfshard.load_state_dict(tmp_path, read="mmap", disable_mmap=True)
    assert check_read_mode("auto", disable_mmap=True) == "pread"
    assert check_read_mode("auto", disable_mmap=False) == "auto"
