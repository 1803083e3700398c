"""What bears the name of a PyTorch checkpoint and is another format is named, with what to do about it."""

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


def archive(*names: str) -> bytes:
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
        r"but a tar, .*Unpack it first: tar -xf .*pth\.tar",
    ),
    "torch 0.1": ("old.pt", lambda: tar("sys_info"), r"as torch wrote them before 0\.1\.10"),
    "TorchScript": ("model.pt", torch_script, r"but a TorchScript archive.*torch\.jit\.load\(.*\.state_dict\(\)"),
    "TensorFlow 1": ("model.ckpt", lambda: bytes(99) + bytes.fromhex("57fb808b247547db"), "a checkpoint of TensorFlow"),
    "safetensors": ("model.bin", lambda: save({"a": torch.ones(2)}), r"Rename it to '.*model\.safetensors'"),
    "GGUF": ("model.bin", lambda: b"GGUF\x03\0\0\0" + bytes(50), r"but a GGUF file.*gguf_file=name"),
    "GGML": ("model.bin", lambda: b"tjgg\x03\0\0\0" + bytes(50), "but a GGML file"),
    "npz": ("model.pt", lambda: archive("weight.npy", "bias.npy"), r"a NumPy archive \(\.npz\)"),
    "npy": ("model.pt", lambda: b"\x93NUMPY\x01\0" + bytes(50), "but an array of NumPy"),
    "Keras": ("model.ckpt", lambda: b"\x89HDF\r\n\x1a\n" + bytes(50), "but an HDF5 file"),
    "torch.export": ("model.pt", lambda: archive("model/archive_format", "model/byteorder"), r"of torch\.export"),
    "a zip of a folder": ("model.pt", lambda: archive("model/config.json"), r"without the pickle of torch\.save"),
    "gzip": ("model.pth.tar", lambda: gzip.compress(b"x"), "a file compressed by gzip. Unpack it first"),
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
    with pytest.raises(CheckpointNotFoundError, match=r"no file '.*model\.ckpt', but .*of a checkpoint of TensorFlow"):
        hfshard.load_state_dict(tmp_path / "model.ckpt")
