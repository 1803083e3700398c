"""Bytes of `pytorch_model.bin` compared with the checksums that torch.save wrote: loaded, verified, converted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.errors import CheckpointChangedError, DamagedCheckpointError, IntegrityError
from hfshard.pickles.pickle_file import PickleFile
from hfshard.tensors.stored_tensor import RawTensor
from tests.attacks.files.torchfile import mapping, tensor, zipped
from tests.helpers.tensor_bytes import bytes_of
from tests.saving.helpers import flip, floats, write_bins

DAMAGED = r"pytorch_model-00002-of-00003\.bin' is damaged: its record '.*/data/\d+' does not match the zip's own"


def spoil(path: Path) -> None:
    """Flip one bit of a tensor's bytes."""
    flip(path, path.read_bytes().index(b"/data/") + 200)


def opened(path: Path) -> PickleFile:
    """A pickled file of a directory."""
    return PickleFile(str(path), str(path.parent))


@pytest.fixture
def bins(tmp_path: Path) -> Path:
    """Three pickled shards; one bit of the second is flipped."""
    bins = write_bins(tmp_path / "bins", floats(), files=3)
    spoil(bins / "pytorch_model-00002-of-00003.bin")
    return bins


def test_flipped_bit_of_a_pickle_is_found(bins: Path, tmp_path: Path) -> None:
    hfshard.load_state_dict(bins)
    with pytest.raises(IntegrityError, match=DAMAGED):
        hfshard.load_state_dict(bins, verify="full")
    for target in (bins, tmp_path / "new"):
        with pytest.raises(IntegrityError, match=DAMAGED):
            hfshard.reshard_checkpoint(bins, target)
    assert sorted(os.listdir(tmp_path)) == ["bins"]
    assert not list(bins.glob("*.safetensors"))


def test_every_damaged_pickle_is_reported(bins: Path) -> None:
    spoil(bins / "pytorch_model-00003-of-00003.bin")

    report = hfshard.verify_checkpoint(bins)

    assert [os.path.basename(problem.file) for problem in report.problems] == [
        "pytorch_model-00002-of-00003.bin",
        "pytorch_model-00003-of-00003.bin",
    ]
    assert report.checked_bytes == (bins / "pytorch_model-00001-of-00003.bin").stat().st_size
    assert report.warnings == ()
    assert hfshard.verify_checkpoint(bins, level="structure").ok


def test_whole_pickles_load_in_full(tmp_path: Path) -> None:
    bins = write_bins(tmp_path / "bins", floats(), files=2)

    assert hfshard.load_state_dict(bins, verify="full").keys() == floats().keys()
    assert hfshard.verify_checkpoint(bins).warnings == ()


@pytest.mark.parametrize("kind", ["old", "without checksums"])
def test_pickle_without_checksums_can_not_be_verified_in_full(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    try:
        torch.serialization.set_crc32_options(compute_crc32=False)
        torch.save(floats(), path, _use_new_zipfile_serialization=kind != "old")
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)

    with pytest.raises(DamagedCheckpointError, match=r"pytorch_model\.bin' cannot be verified in full"):
        hfshard.load_state_dict(tmp_path, verify="full")
    report = hfshard.verify_checkpoint(tmp_path)
    assert report.ok
    assert report.checked_bytes == 0
    assert report.warnings == ("'pytorch_model.bin' is a pickle: it loads, but its bytes were not verified.",)
    hfshard.reshard_checkpoint(tmp_path, tmp_path)


def test_pickle_that_was_replaced_is_not_compared(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(floats(), path)
    pickled = opened(path)
    torch.save(floats() | {"more": torch.ones(1)}, path)

    with pytest.raises(CheckpointChangedError, match=r"'.*pytorch_model\.bin' was replaced"):
        pickled.check_every_byte()


def bytes_in(pickled: PickleFile, name: str) -> bytes | None:
    """What is read of a tensor in blocks of 16 bytes; None: it is torch's own."""
    stored = pickled.stored_tensors()[name]
    return b"".join(map(bytes, stored.blocks(16))) if isinstance(stored, RawTensor) else None


def test_tensors_in_a_row_are_read_from_the_file(tmp_path: Path) -> None:
    numbers = torch.arange(10, dtype=torch.int16)
    complex_numbers = torch.tensor([1 + 2j])
    weights = {
        "whole": numbers,
        "part": numbers[3:6],
        "turned": numbers.view(2, 5).t(),
        "every other": numbers[::2],
        "conjugated": complex_numbers.conj(),
        "complex": complex_numbers,
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7, dtype=torch.uint8),
    }
    torch.save({"optimizer": torch.ones(9), "model": weights}, tmp_path / "run.pt")
    pickled = opened(tmp_path / "run.pt")

    assert {name: bytes_in(pickled, name) for name in weights} == {
        "whole": bytes.fromhex("0000010002000300040005000600070008000900"),
        "part": bytes.fromhex("030004000500"),
        "turned": None,
        "every other": None,
        "conjugated": None,
        "complex": bytes.fromhex("0000803f00000040"),
        "empty": None,
        "scalar": b"\x07",
    }
    assert pickled.stored_tensors()["turned"] is pickled.tensors["turned"]


def test_numbers_of_the_other_byte_order_are_those_that_torch_has_turned_round(tmp_path: Path) -> None:
    body, storages = mapping({"weight": tensor("0", (4,))}), {"0": bytes.fromhex("3f800000") * 4}
    path = tmp_path / "big" / "pytorch_model.bin"
    path.parent.mkdir()
    path.write_bytes(zipped(body, storages, byteorder=b"big"))
    pickled = opened(path)

    assert pickled.tensors["weight"].tolist() == [1, 1, 1, 1]
    assert bytes_in(pickled, "weight") is None

    hfshard.reshard_checkpoint(path.parent, tmp_path / "new")
    assert hfshard.load_state_dict(tmp_path / "new")["weight"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("default", [None, *torch.serialization.LoadEndianness])
def test_files_that_do_not_tell_their_byte_order_are_read_as_torch_does(
    tmp_path: Path, default: torch.serialization.LoadEndianness | None
) -> None:
    path, before = tmp_path / "pytorch_model.bin", torch.serialization.get_default_load_endianness()
    body, storages = mapping({"weight": tensor("0", (2,))}), {"0": bytes.fromhex("3f8000003f800000")}
    path.write_bytes(zipped(body, storages, byteorder=None))
    try:
        torch.serialization.set_default_load_endianness(default)
        pickled = opened(path)
    finally:
        torch.serialization.set_default_load_endianness(before)

    is_swapped = default is torch.serialization.LoadEndianness.BIG
    assert bytes_in(pickled, "weight") == (None if is_swapped else storages["0"])
    assert (pickled.tensors["weight"].tolist() == [1, 1]) == is_swapped


def test_where_a_record_is_left_out_no_other_one_is_read_for_it(tmp_path: Path) -> None:
    # The bytes of "b" begin 30 + len("archive/data/b") + 4,052 bytes after those of "a": one page.
    body = mapping({"weight": tensor("b", (1013,))})
    (tmp_path / "pytorch_model.bin").write_bytes(zipped(body, {"a": bytes(4052), "b": b"\1" * 4052}))

    pickled = opened(tmp_path / "pytorch_model.bin")

    assert bytes_in(pickled, "weight") == b"\1" * 4052
    assert pickled.tensors["weight"].view(torch.uint8).unique().tolist() == [1]


def test_files_before_the_zip_format_are_in_memory(tmp_path: Path) -> None:
    torch.save(floats(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)

    assert bytes_in(opened(tmp_path / "pytorch_model.bin"), "layer.0.weight") is None


def test_a_file_that_is_truncated_or_replaced_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"weight": torch.ones(100_000)}, path)
    stored = opened(path).stored_tensors()["weight"]
    assert isinstance(stored, RawTensor)

    blocks = stored.blocks(4096)
    next(blocks)
    os.truncate(path, 200_000)
    with pytest.raises(DamagedCheckpointError, match=r"pytorch_model\.bin' was truncated while it was being read"):
        list(blocks)

    torch.save({"weight": torch.zeros(100_000)}, path)
    stored = opened(path).stored_tensors()["weight"]
    assert isinstance(stored, RawTensor)
    torch.save({"weight": torch.ones(100_000)}, tmp_path / "other")
    os.replace(tmp_path / "other", path)
    with pytest.raises(CheckpointChangedError, match=r"pytorch_model\.bin' was replaced"):
        next(stored.blocks(4096))


def test_a_file_is_open_from_the_first_read_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(floats(), path)
    pickled = opened(path)
    assert times_open(path) == 0

    assert bytes_in(pickled, "layer.0.weight") == bytes_of(floats()["layer.0.weight"])
    assert bytes_in(pickled, "layer.1.weight") == bytes_of(floats()["layer.1.weight"])
    assert times_open(path) == 1

    pickled.close()
    assert times_open(path) == 0


def times_open(path: Path) -> int:
    """How many descriptors of this process are of a file."""
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.path.exists(link) and os.path.samefile(link, path) for link in links)
