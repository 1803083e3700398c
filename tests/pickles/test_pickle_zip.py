"""Zips that torch would read in another way than they were checked are refused; other formats are named."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import hfshard
from hfshard.errors import CheckpointNotFoundError, DamagedCheckpointError
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
    assert refused(path, "it contains 2 pickles")


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


def test_a_record_that_reaches_into_what_follows_it_is_refused(tmp_path: Path) -> None:
    raw = bytearray(zipped(GOOD, STORAGES))
    entry = raw.rindex(b"archive/data/0") - 46
    for at in (entry + 20, entry + 24):  # its sizes, compressed and not
        assert raw[at : at + 4] == bytes([8, 0, 0, 0])
        raw[at : at + 4] = bytes([0, 1, 0, 0])
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(raw)
    assert refused(path, "its record 'archive/data/0' overlaps what follows it")


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


def zip_of(*names: str) -> bytes:
    """A zip with records of these names."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name in names:
            file.writestr(name, b"\x80\x02}.")
    return buffer.getvalue()


def tar(name: str) -> bytes:
    """A tar with one file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        file.addfile(tarfile.TarInfo(name))
    return buffer.getvalue()


def torch_script() -> bytes:
    """A scripted module, as torch writes it."""
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2)), buffer)
    return buffer.getvalue()


FORMATS: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "tar": (
        "checkpoint.pth.tar",
        lambda: tar("weights/model.bin"),
        r"but a tar archive.*Unpack it first: tar -xf .*pth\.tar",
    ),
    "torch 0.1": ("old.pt", lambda: tar("sys_info"), r"but a tar written by torch before 0\.1\.10"),
    "TorchScript": ("model.pt", torch_script, r"but a TorchScript archive.*torch\.jit\.load\(.*\.state_dict\(\)"),
    "TensorFlow 1": (
        "model.ckpt",
        lambda: bytes(99) + bytes.fromhex("57fb808b247547db"),
        "but a TensorFlow checkpoint",
    ),
    "safetensors": ("model.bin", lambda: save({"a": torch.ones(2)}), r"Rename it to '.*model\.safetensors'"),
    "GGUF": ("model.bin", lambda: b"GGUF\x03\0\0\0" + bytes(50), r"but a GGUF file.*gguf_file=name"),
    "GGML": ("model.bin", lambda: b"tjgg\x03\0\0\0" + bytes(50), "but a GGML file"),
    "npz": ("model.pt", lambda: zip_of("weight.npy", "bias.npy"), r"a NumPy archive \(\.npz\)"),
    "npy": ("model.pt", lambda: b"\x93NUMPY\x01\0" + bytes(50), "but a NumPy array"),
    "Keras": ("model.ckpt", lambda: b"\x89HDF\r\n\x1a\n" + bytes(50), "but an HDF5 file"),
    "torch.export": (
        "model.pt",
        lambda: zip_of("model/archive_format", "model/byteorder"),
        r"but a torch\.export archive",
    ),
    "a zip of a folder": ("model.pt", lambda: zip_of("model/config.json"), r"without the pickle of torch\.save"),
    "gzip": ("model.pth.tar", lambda: gzip.compress(b"x"), "but a gzip file. Unpack it first"),
    "a pickle": ("model.pt", lambda: pickle.dumps({"a": 1}), r"but a pickle that torch\.save did not write"),
    "a web page": ("model.pt", lambda: b"<!DOCTYPE html><html>", "but a web page, .* Download it again"),
    "nothing": ("model.pt", lambda: b"", "but an empty file"),
    "noise": ("model.pt", lambda: b"\x01" * 600, "begins neither as a zip nor with PyTorch's magic number"),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_another_format_is_named(tmp_path: Path, name: str) -> None:
    file, make, problem = FORMATS[name]
    (tmp_path / file).write_bytes(make())

    with pytest.raises(DamagedCheckpointError, match=problem) as caught:
        hfshard.load_state_dict(tmp_path / file)
    assert str(tmp_path / file) in str(caught.value)
    (found,) = hfshard.verify_checkpoint(tmp_path / file).problems
    assert str(caught.value).startswith(found.message.rstrip("."))


def test_a_checkpoint_of_tensorflow_2_is_named_by_its_index(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt.index").write_bytes(b"x")
    (tmp_path / "model.ckpt.data-00000-of-00001").write_bytes(b"x")
    with pytest.raises(CheckpointNotFoundError, match=r"no file '.*model\.ckpt', but .*of a TensorFlow checkpoint"):
        hfshard.load_state_dict(tmp_path / "model.ckpt")
