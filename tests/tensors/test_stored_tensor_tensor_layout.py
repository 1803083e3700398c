"""Bytes that lie in a file are saved as the tensors would be from which they were written."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.errors import DamagedCheckpointError
from hfshard.format.header import build_header
from hfshard.shards.shard_file import SafetensorsFile
from hfshard.shards.write_shards import WriteJob, blank_header, file_order, shard_metadata, write_shards
from hfshard.tensors.stored_tensor import (
    RawTensor,
    TensorLayout,
    TensorLike,
    element_bytes,
    first_bytes,
    is_complex_as_real,
    iter_blocks,
    parameter_count,
    tensor_layout,
    tensor_layouts,
    tensor_specs,
)
from tests.helpers.random_state_dicts import DTYPES, random_tensor

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

ALL = {str(dtype).removeprefix("torch."): random_tensor(7, dtype, (3, 4)) for dtype in DTYPES}
ALL |= {"complex128": random_tensor(8, torch.complex128, (5, 2)), "complex32": random_tensor(9, torch.complex32, (3,))}
ALL |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "large": random_tensor(1, torch.uint8, (9_000_001,))}


def stored(shard: SafetensorsFile) -> dict[str, TensorLike]:
    """The tensors of a file, not decoded."""
    return {
        name: RawTensor(
            TensorLayout(info.dtype, info.shape, info.nbytes, name in shard.complex_as_real),
            partial(shard.blocks, info),
        )
        for name, info in shard.header.tensors.items()
    }


@pytest.fixture
def shard(tmp_path: Path) -> SafetensorsFile:
    hfshard.save_state_dict(ALL, tmp_path / "saved")
    return SafetensorsFile(str(tmp_path / "saved" / "model.safetensors"), str(tmp_path))


def test_the_form_of_a_tensor_is_that_of_its_bytes(shard: SafetensorsFile) -> None:
    assert {name: tensor_layout(value) for name, value in stored(shard).items()} == {
        name: tensor_layout(value) for name, value in ALL.items()
    }
    shard.close()


@pytest.mark.parametrize(
    ("name", "form", "element", "parameters"),
    [
        ("float4_e2m1fn_x2", TensorLayout("F4", (3, 8), 12), 1, 12),
        ("complex128", TensorLayout("F64", (5, 2, 2), 160, complex_as_real=True), 16, 10),
        ("complex32", TensorLayout("F16", (3, 2), 12, complex_as_real=True), 4, 3),
        ("bfloat16", TensorLayout("BF16", (3, 4), 24), 2, 12),
        ("empty", TensorLayout("F32", (0, 3), 0), 4, 0),
        ("scalar", TensorLayout("F32", (), 4), 4, 1),
    ],
)
def test_forms_count_as_torch_counts(name: str, form: TensorLayout, element: int, parameters: int) -> None:
    assert tensor_layout(ALL[name]) == form
    assert (form.element_bytes, form.parameters) == (element, parameters)
    for value in (ALL[name], RawTensor(form, lambda block_bytes: iter(()))):
        assert (element_bytes(value), parameter_count(value)) == (element, parameters)
        assert is_complex_as_real(value) == form.complex_as_real
        assert tensor_layouts([value, ALL["scalar"], value]) == [form, TensorLayout("F32", (), 4), form]


def test_a_dtype_that_torch_lacks_has_a_form() -> None:
    form = TensorLayout("F6_E2M3", (4, 2), 6)
    assert (form.element_bytes, form.parameters) == (1, 8)
    [spec] = tensor_specs({"six": RawTensor(form, lambda block_bytes: iter([memoryview(b"sixbit")]))})
    assert (spec.dtype, spec.shape, spec.nbytes) == ("F6_E2M3", (4, 2), 6)


def test_a_file_of_bytes_is_the_file_of_the_tensors(shard: SafetensorsFile, tmp_path: Path) -> None:
    values: list[Mapping[str, TensorLike]] = [ALL, stored(shard)]
    jobs = []
    for number, tensors in enumerate(values):
        ordered = file_order({name: tensors[name] for name in sorted(ALL)})
        jobs.append(WriteJob(str(tmp_path / str(number)), ordered, shard_metadata(ordered, {"more": "text"})))
        assert blank_header(jobs[-1], None) == blank_header(jobs[0], None)
    records = write_shards(jobs, checksum="sha256")
    assert records[0] == records[1]
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()
    shard.close()


def test_tensors_are_mapped_together_as_they_are_one_by_one(shard: SafetensorsFile) -> None:
    names = list(ALL)[::-1]
    together = shard.tensors(names)
    assert list(together) == names
    for name, tensor in together.items():
        alone = shard.tensor(name)
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (alone.dtype, alone.shape, alone.stride())
        assert (tensor.data_ptr(), tensor.storage_offset()) == (alone.data_ptr(), 0)
        assert tensor.untyped_storage().nbytes() == alone.untyped_storage().nbytes() == ALL[name].nbytes
    assert shard.tensors([]) == {}
    shard.close()


def test_all_blocks_but_the_last_are_full(shard: SafetensorsFile) -> None:
    large = stored(shard)["large"]
    lengths = [len(block) for block in iter_blocks(large, 4_000_000)]
    assert lengths == [4_000_000, 4_000_000, 1_000_001]
    assert b"".join(block.tobytes() for block in iter_blocks(large, 4096)) == ALL["large"].numpy().tobytes()
    assert [block.tobytes() for block in first_bytes(large, 5)] == [ALL["large"][:5].numpy().tobytes()]
    shard.close()


def test_a_file_that_was_truncated_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(build_header([("w", "U8", [9000], 9000)], {}) + bytes(9000))
    shard = SafetensorsFile(str(path), str(tmp_path))
    with open(path, "r+b") as file:
        file.truncate(4096 + 4096)
    blocks = shard.blocks(shard.header.tensors["w"], 4096)
    assert len(next(blocks)) == 4096
    with pytest.raises(DamagedCheckpointError, match=r"'.*short\.safetensors' was truncated while it was being read"):
        next(blocks)
    shard.close()
