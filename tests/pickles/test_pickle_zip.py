"""Zips that torch would read in another way than they were checked are refused."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from hfshard.errors import DamagedCheckpointError
from hfshard.pickles.pickle_file import PickleFile
from hfshard.pickles.read_pickle import read_pickle
from tests.attacks.files.torchfile import mapping, pickled, tensor, zipped

GOOD = mapping({"good": tensor("0", (2,))})
EVIL = mapping({"evil": tensor("0", (2,))})
STORAGES = {"0": bytes(8)}


def refused(path: Path, problem: str) -> bool:
    with pytest.raises(DamagedCheckpointError, match=f"is not a valid PyTorch checkpoint: .*{problem}"):
        read_pickle(str(path), str(path.parent))
    return True


def test_a_second_pickle_in_large_letters_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(zipped(GOOD, STORAGES, {"DATA.PKL": pickled(EVIL)}))
    assert refused(path, "two of its records have the same name")

    path.write_bytes(zipped(EVIL, STORAGES, {"xdata.pkl": pickled(GOOD)}).replace(b"/data.pkl", b"/DATA.PKL"))
    assert list(torch.load(path)) == ["evil"]
    assert refused(path, "it holds 2 pickles")


def test_a_byte_order_in_large_letters_counts(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(zipped(GOOD, {"0": bytes([0, 0, 128, 63, 63, 128, 0, 0])}, {"BYTEORDER": b"big"}, byteorder=None))
    found = PickleFile(str(path), str(tmp_path)).stored_tensors()["good"]

    assert torch.load(path)["good"][1] == 1
    assert isinstance(found, torch.Tensor)
    assert found[1] == 1


def test_two_zips_in_one_file_are_refused(tmp_path: Path) -> None:
    evil, good = zipped(EVIL, STORAGES), zipped(GOOD, STORAGES)
    assert len(evil) == len(good)
    end = 22
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(evil[:-end] + good)

    with zipfile.ZipFile(path) as archive:
        assert b"good" in archive.read("archive/data.pkl")
    assert list(torch.load(path)) == ["evil"]
    assert refused(path, "its directory is not where its end says")


def test_what_lies_behind_the_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(zipped(GOOD, STORAGES))
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"more"
    assert refused(path, "its directory is not where its end says")


@pytest.mark.parametrize(
    ("from_end", "what"),
    [(98 - 48, "where the directory begins"), (98 - 32, "records"), (42 - 8, "where the long end is")],
)
def test_long_ends_are_held_to_what_torch_reads(tmp_path: Path, from_end: int, what: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"weight": torch.ones(2)}, path)
    raw = bytearray(path.read_bytes())
    assert bytes(raw[-98:-94] + raw[-42:-38] + raw[-22:-18]) == b"PK\6\6PK\6\7PK\5\6"
    assert list(read_pickle(str(path), str(tmp_path)).value) == ["weight"]
    raw[-from_end] ^= 1
    path.write_bytes(raw)

    with pytest.raises(DamagedCheckpointError):
        read_pickle(str(path), str(tmp_path))


def test_a_record_of_two_names_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(zipped(GOOD, STORAGES).replace(b"archive/version", b"archive/versio\0"))
    assert refused(path, "a record has two names")
