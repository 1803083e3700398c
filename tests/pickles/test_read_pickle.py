"""Whatever torch.save nested is read without running anything, and every tensor's bytes are in the file."""

from __future__ import annotations

import resource
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hfshard.errors import DamagedCheckpointError, UnsafePickleError
from hfshard.pickles.read_pickle import find_mapped_file, iter_nested, read_pickle
from tests.attacks.files.torchfile import call, integer, legacy, mapping, tensor, zipped

FORMATS = pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "older"])


def save(value: Any, path: Path, is_zip: bool = True) -> Path:
    """Save a value with torch.save."""
    torch.save(value, path, _use_new_zipfile_serialization=is_zip)
    return path


def read(path: Path) -> Any:
    """Read it again, by the function under test."""
    return read_pickle(str(path), str(path.parent)).value


@FORMATS
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_whole_run_is_read(tmp_path: Path, is_zip: bool) -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    shared = torch.arange(4.0)
    run = {
        "epoch": 3,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "views": (shared[:2], [shared[2:], OrderedDict(empty=torch.zeros(0))]),
        "sparse": [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.eye(3).to_sparse_csc()],
        "half": nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "best": 0.5,
    }

    contents = read_pickle(str(save(run, tmp_path / "run.pt", is_zip)), str(tmp_path))

    value = contents.value
    assert (value["epoch"], value["best"]) == (3, 0.5)
    assert torch.equal(value["model"]["weight"], model.weight)
    assert torch.equal(value["optimizer"]["state"][0]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert value["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    assert value["views"][1][0].tolist() == [2, 3]
    assert [torch.equal(one.to_dense(), torch.eye(3)) for one in value["sparse"]] == [True] * 3
    assert contents.size == (tmp_path / "run.pt").stat().st_size
    assert contents.check_every_byte() is is_zip


def test_a_damaged_record_deep_in_an_optimizer_is_found(tmp_path: Path) -> None:
    nested = mapping({"optimizer": mapping({"state": b"](" + tensor("0", (4,), numel=8) + b"e"})})
    (tmp_path / "short.pt").write_bytes(zipped(nested, {"0": bytes(16)}))

    with pytest.raises(DamagedCheckpointError, match="a record of 16 bytes contains a storage of 32 bytes"):
        read(tmp_path / "short.pt")


@pytest.mark.parametrize("kind", ["FloatTensor", "FloatStorage"])
def test_memory_that_nobody_has_filled_is_refused(tmp_path: Path, kind: str) -> None:
    body = mapping({"weight": call("torch", kind, integer(64))})
    for wrap in (zipped, legacy):
        (tmp_path / "odd.pt").write_bytes(wrap(body, {}))
        with pytest.raises(DamagedCheckpointError, match=r"'.*odd\.pt' is not a valid PyTorch checkpoint"):
            read(tmp_path / "odd.pt")


def test_memory_that_nobody_has_filled_is_refused_wherever_it_lies(tmp_path: Path) -> None:
    records = {f"x{number}": bytes(256) for number in range(10_000, 14_096)}
    assert len(b"PK\3\4" + bytes(26) + b"archive/data/x10000") + 256 == 305  # so one begins at each byte of a page
    body = mapping({"weight": call("torch", "FloatTensor", integer(64))})
    (tmp_path / "zip.pt").write_bytes(zipped(body, records))

    with pytest.raises(DamagedCheckpointError, match="does not contain the bytes of all its tensors"):
        read(tmp_path / "zip.pt")


def test_a_value_that_contains_itself_is_read(tmp_path: Path) -> None:
    circle: dict[str, Any] = {"weight": torch.ones(2)}
    circle["self"] = [circle, (circle,)]

    found = read(save(circle, tmp_path / "circle.pt"))

    assert found["self"][0] is found
    assert [one.tolist() for one in iter_nested(found) if isinstance(one, torch.Tensor)] == [[1, 1]]


def test_lists_in_lists_are_read_in_any_depth(tmp_path: Path) -> None:
    body = b"]" * 30_000 + b"a" * 29_999
    (tmp_path / "deep.pt").write_bytes(zipped(body, {}))

    assert list(iter_nested(read(tmp_path / "deep.pt"))) == []


def test_what_is_more_than_tensors_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsafePickleError, match=r"asks for 'pathlib\.[\w.]+'") as caught:
        read(save({"model": {}, "out": tmp_path}, tmp_path / "paths.pt"))

    assert str(caught.value.actual).startswith("pathlib.")


@FORMATS
def test_parts_of_tensors_are_not_taken_for_tensors(tmp_path: Path, is_zip: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        save({"weight": DTensor.from_local(torch.ones(2), mesh)}, tmp_path / "rank0.pt", is_zip)
    finally:
        torch.distributed.destroy_process_group()

    with pytest.raises(UnsafePickleError, match=r"it contains a DTensor, .*Each rank saved only its part"):
        read(tmp_path / "rank0.pt")


def test_without_a_descriptor_for_the_list_of_mapped_files_the_place_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(bytes(64))
    storage = torch.UntypedStorage.from_file(str(path), False, 64)
    storages, records = {storage.data_ptr() + 16: 8}, {16: 8}
    assert find_mapped_file(storages, records, str(path)) == storage.data_ptr()

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        found = find_mapped_file(storages, records, str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert found is None
