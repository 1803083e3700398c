"""A described file of torch.save: its tensors have their bytes, its data is data, and all else is a name."""

from __future__ import annotations

import io
import pickle
import zlib
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import pytest
import torch

from hfshard.errors import DamagedCheckpointError, UnsafePickleError
from hfshard.pickles.described_file import OTHER, described_file, meaning, reject_code, size_of
from hfshard.pickles.pickle_opcodes import DescribedObject, GlobalReference, describe_pickle


class Unknown:
    """Is no data."""


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "older"])
def test_tensors_have_their_bytes_and_objects_their_meaning(is_zip: bool, tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    value = {
        "weight": weight,
        "view": weight.view(2, 3).T,
        "parameter": torch.nn.Parameter(weight[:2]),
        "ordered": OrderedDict(a=1),
        "queue": deque([1, 2]),
        "dtype": torch.int16,
        "unknown": Unknown(),
    }
    torch.save(value, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)

    with described_file(str(tmp_path / "a.pt"), str(tmp_path)) as file:
        found: dict[str, Any] = file.value
        tensors = [file.tensor(found[name]) for name in ("weight", "view", "parameter", "ordered")]

        assert [None if one is None else one.tolist() for one in tensors] == [
            [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
            [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]],
            [0.0, 1.0],
            None,
        ]
        assert [meaning(found[name]) for name in ("ordered", "queue", "dtype")] == [{"a": 1}, [1, 2], torch.int16]
        assert meaning(found["unknown"]) is OTHER
        assert f"{__name__}.Unknown" in file.names


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "older"])
def test_bytes_of_tensors_are_found_and_not_read(is_zip: bool, tmp_path: Path) -> None:
    weight = torch.arange(12.0)
    value = {
        "view": weight[2:8].view(2, 3),
        "columns": weight.view(3, 4).T,
        "one": weight.view(3, 4)[:, 1:2][1:2],
        "none": torch.empty(0, 5),
        "parameter": torch.nn.Parameter(weight[3:]),
        "half": torch.arange(4).half(),
        "other": Unknown(),
    }
    torch.save(value, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
    raw = (tmp_path / "a.pt").read_bytes()

    with described_file(str(tmp_path / "a.pt"), str(tmp_path)) as file:
        found = {name: file.find(one) for name, one in file.value.items()}

    assert found["other"] is None
    tensors = {name: one for name, one in found.items() if one is not None}
    assert [name for name, one in tensors.items() if not one.is_contiguous] == ["columns"]
    assert {name: one.shape for name, one in tensors.items()} == {
        "view": (2, 3),
        "columns": (4, 3),
        "one": (1, 1),
        "none": (0, 5),
        "parameter": (9,),
        "half": (4,),
    }
    first = tensors["view"]
    assert raw[first.offset : first.offset + 24] == weight[2:8].numpy().tobytes()
    assert [tensors[name].offset - first.offset for name in ("one", "parameter")] == [12, 4]
    assert first.storage.size == 48
    assert (first.storage.crc32 == zlib.crc32(weight.numpy().tobytes())) is is_zip
    assert tensors["half"].dtype == torch.float16


def test_dtypes_without_a_storage_of_their_own(tmp_path: Path) -> None:
    torch.save([torch.arange(3).to(torch.float8_e4m3fn), torch.arange(3).to(torch.uint16)], tmp_path / "a.pt")

    with described_file(str(tmp_path / "a.pt"), str(tmp_path)) as file:
        found = [file.find(one) for one in file.value]

    assert [(one.dtype, one.shape, one.storage.size) for one in found if one is not None] == [
        (torch.float8_e4m3fn, (3,), 3),
        (torch.uint16, (3,), 6),
    ]


class Forged:
    """Is saved as a call that rebuilds a tensor with other arguments."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        storage = torch.arange(4.0).untyped_storage()
        typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
        return torch._utils._rebuild_tensor_v2, (typed, *self.arguments)


@pytest.mark.parametrize(
    ("first", "size", "stride", "metadata"),
    [
        (1, (4,), (1,), None),
        (0, (5,), (1,), None),
        (0, (2, 3), (3, 1), None),
        (-1, (2,), (1,), None),
        (0, (-1,), (1,), None),
        (0, (2,), (-1,), None),
        (0, (2,), (1, 1), None),
        (0, (2.0,), (1,), None),
        (0, None, (1,), None),
        (2**70, (1,), (1,), None),
        (0, (0, 10**5000), (1, 1), None),
        (0, (2,), (1,), {"neg": True}),
    ],
)
def test_tensor_that_is_not_in_its_storage_is_damaged(
    first: int, size: Any, stride: Any, metadata: Any, tmp_path: Path
) -> None:
    last = [] if metadata is None else [metadata]
    torch.save([Forged(first, size, stride, False, OrderedDict(), *last)], tmp_path / "a.pt")

    with described_file(str(tmp_path / "a.pt"), str(tmp_path)) as file:
        (forged,) = file.value
        with pytest.raises(DamagedCheckpointError, match="describes a tensor that it does not contain"):
            file.find(forged)


def test_what_is_no_file_of_torch_save_is_damaged_or_unsafe(tmp_path: Path) -> None:
    for content, error, message in (
        (b"PK\x03\x04", DamagedCheckpointError, "a.pt"),
        (b"\x80\x02", UnsafePickleError, "a.pt"),
        (b"", DamagedCheckpointError, "is not a PyTorch checkpoint, but an empty file"),  # a disk was full
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", DamagedCheckpointError, "git-lfs"),
    ):
        (tmp_path / "a.pt").write_bytes(content)
        with pytest.raises(error, match=message), described_file(str(tmp_path / "a.pt"), str(tmp_path)):
            pass


def test_names_that_run_code_are_rejected_and_harmless_ones_are_not() -> None:
    reject_code("a.pt", frozenset({"builtins.getattr", "types.SimpleNamespace", "mine.system", "numpy.dtype"}))
    for name in ("os.system", "builtins.eval", "types.FunctionType"):
        with pytest.raises(UnsafePickleError, match=f"asks for '{name}'"):
            reject_code("a.pt", frozenset({"mine.Own", name}))


HONEST = (
    int, float, bool, complex, str, bytes, bytearray, list, dict, tuple, set, frozenset, range, slice, object,
    2**80, 1j, b"x", bytearray(b"x"), {1}, frozenset((1,)), range(3), slice(1, 2), ..., NotImplemented, "-".join,
)  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", HONEST, ids=lambda value: getattr(value, "__name__", repr(value)))
def test_plain_values_are_not_taken_for_code_in_any_protocol(value: Any, protocol: int) -> None:
    described = describe_pickle(io.BytesIO(pickle.dumps([value, Unknown()], protocol)), "a.pt")

    reject_code("a.pt", described.names)

    assert f"{__name__}.Unknown" in described.names


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "function", [eval, exec, open, __import__, compile, setattr], ids=lambda function: function.__name__
)
def test_functions_are_rejected_by_name_in_any_protocol(function: Any, protocol: int) -> None:
    described = describe_pickle(io.BytesIO(pickle.dumps([function, int, range(3)], protocol)), "a.pt")

    with pytest.raises(UnsafePickleError, match="made to run code") as raised:
        reject_code("a.pt", described.names)

    assert raised.value.actual.rpartition(".")[2] == function.__name__


def test_size_is_that_of_the_parts_and_of_bytes_in_them() -> None:
    encoded = DescribedObject("_codecs.encode", ("abc", "latin1"))

    assert size_of(GlobalReference("torch.float32")) == 0
    assert size_of(encoded) == 2 + 3 + 6
    assert size_of(DescribedObject("numpy.array", (), (1, encoded))) == 2 + 11
