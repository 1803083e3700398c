"""The tensors, chunks and keys of a directory of torch.distributed.checkpoint."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

from hfshard.errors import (
    AmbiguousWeightsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    HfshardError,
    InvalidArgumentError,
    MissingShardError,
    UnsafePathError,
    UnsafePickleError,
)
from hfshard.foreign.byte_runs import ByteRun
from hfshard.foreign.dcp_directory import read_dcp_directory
from tests.foreign.dcp_files import Box, halves, save_dcp, tensors_of
from tests.helpers.evil import Evil
from tests.helpers.tensor_bytes import assert_same


def read(directory: Path, key: str | None = None) -> dict[str, torch.Tensor]:
    """Read all tensors of the model in a directory."""
    return tensors_of(read_dcp_directory(str(directory), key))


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    assert_same(found, expected)


def in_four(shape: tuple[int, int], row: int, column: int) -> list[Box]:
    """Four chunks of a matrix, as of a mesh with two dimensions."""
    return [
        ((0, 0), (row, column)),
        ((0, column), (row, shape[1] - column)),
        ((row, 0), (shape[0] - row, column)),
        ((row, column), (shape[0] - row, shape[1] - column)),
    ]


CHUNKS: dict[str, tuple[tuple[int, ...], list[Box]]] = {
    "rows": ((5, 3), halves((5, 3), 0)),
    "columns": ((5, 3), halves((5, 3), 1)),
    "a mesh of two dimensions": ((5, 7), in_four((5, 7), 3, 4)),
    "the middle of three": ((4, 5, 6), halves((4, 5, 6), 1)),
    "the last of three": ((4, 5, 6), halves((4, 5, 6), 2)),
    "the last two of four": ((2, 3, 4, 5), [(offsets, sizes) for offsets, sizes in halves((2, 3, 4, 5), 2)]),
    "one element, and none": ((1,), [((0,), (1,)), ((1,), (0,))]),
    "no elements": ((0, 3), [((0, 0), (0, 3))]),
    "no dimensions": ((), [((), ())]),
}


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_chunks_are_joined(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    shape, chunks = CHUNKS[name]
    tensor = (torch.randn(shape) * 3).to(dtype)
    save_dcp(tmp_path, {"model.w": tensor}, {"model.w": chunks})

    assert_same(read(tmp_path), {"w": tensor})


def test_rows_of_a_chunk_are_one_run(tmp_path: Path) -> None:
    save_dcp(tmp_path, {"model.w": torch.ones(100, 8)}, {"model.w": halves((100, 8), 1)})

    table = read_dcp_directory(str(tmp_path))

    first, second = table.tensors["w"].runs
    assert first == ByteRun("__0_0.distcp", first.offset, size=16, start=0, rows=100, stride=32)
    assert second == ByteRun("__1_0.distcp", second.offset, size=16, start=16, rows=100, stride=32)
    assert table.framework == "torch DCP (2 files)"
    assert table.is_verifiable


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_what_torch_saves_is_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = {
        "w": torch.randn(5, 3),
        "ids": torch.arange(4),
        "transposed": torch.randn(4, 6).t(),
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "empty": torch.empty(0, 3),
        "scale": torch.tensor(2.5),
        "half": torch.randn(3).half(),
    }
    optimizer = {
        "state": {"w": {"exp_avg": torch.ones(5, 3), "step": torch.tensor(1.0)}},
        "param_groups": [{"lr": 0.1}],
    }
    save({"model": model, "optimizer": optimizer, "step": 3}, checkpoint_id=tmp_path, no_dist=True)

    check(read(tmp_path), model)


# Names: which of the saved tensors are the model's.


W, M = torch.ones(2, 2), torch.zeros(2, 2)
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]] = {
    "the model alone": ({"model.a.w": W}, {}),
    "Accelerate": ({"model.a.w": W}, {"model.a.w": ("model", "a.w")}),
    "torchtitan": (
        {
            "a.w": W,
            "optimizer.state.a.w.exp_avg": M,
            "optimizer.param_groups.a.w.lr": 0.1,
            "train_state.step": 3,
            "lr_scheduler.last_epoch": 2,
            "dataloader.dp_rank_0": b"x",
        },
        {"a.w": ("a.w",), "optimizer.state.a.w.exp_avg": ("optimizer", "state.a.w.exp_avg")},
    ),
    "nested in an app": (
        {"app.model.a.w": W, "app.optimizer.state.a.w.exp_avg": M, "app.optimizer.param_groups.0.lr": 0.1},
        {
            "app.model.a.w": ("app", "model", "a.w"),
            "app.optimizer.state.a.w.exp_avg": ("app", "optimizer", "state", "a.w", "exp_avg"),
            "app.optimizer.param_groups.0.lr": ("app", "optimizer", "param_groups", 0, "lr"),
        },
    ),
    "Lightning": (
        {"state_dict.a.w": W, "optimizer_0.state.a.w.exp_avg": M, "global_step": 3},
        {"optimizer_0.state.a.w.exp_avg": ("optimizer_0", "state", "a.w", "exp_avg")},
    ),
    "flattened by hand": ({"a.w": W, "optimizer.state.a.w.exp_avg": M}, {
        "a.w": ("a.w",), "optimizer.state.a.w.exp_avg": ("optimizer.state.a.w.exp_avg",),
    }),
    "with a counter": ({"model.a.w": W, "steps": torch.tensor(3.0)}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_model_is_found(name: str, tmp_path: Path) -> None:
    state, paths = LAYOUTS[name]
    save_dcp(tmp_path, state, paths=paths)

    check(read(tmp_path), {"a.w": W})


def test_a_tensor_in_too_many_pieces_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file could name its bytes millions of times, and take all memory."""
    boxes: list[Box] = [((0, at, column), (4, 2, 2)) for column in (0, 2) for at in (0, 2)]
    weight = torch.arange(64.0).reshape(4, 4, 4)
    save_dcp(tmp_path, {"model.w": weight}, {"model.w": boxes})

    monkeypatch.setattr("hfshard.foreign.byte_runs._MOST_PIECES", 12)
    check(read(tmp_path), {"w": weight})
    monkeypatch.setattr("hfshard.foreign.byte_runs._MOST_PIECES", 11)
    with pytest.raises(InvalidArgumentError, match=r"has tensor 'model\.w' in too many pieces: more than 11"):
        read(tmp_path)


def test_several_models_are_named_and_one_is_chosen(tmp_path: Path) -> None:
    save_dcp(tmp_path, {"model.w": W, "ema.w": M, "b": W})

    with pytest.raises(AmbiguousWeightsError) as caught:
        read(tmp_path)

    assert caught.value.keys == ("", "ema", "model")
    assert str(caught.value) == (
        f"'{tmp_path}' contains several sets of weights: '' (1 tensor), 'ema' (1 tensor), 'model' (1 tensor). Nothing "
        "was loaded. Pass one: hfshard.load_model or load_state_dict(..., key='ema'), or --key ema on the command line."
    )
    check(read(tmp_path, "ema"), {"w": M})
    check(read(tmp_path, ""), {"b": W})


def test_a_key_above_several_dicts_joins_their_names(tmp_path: Path) -> None:
    paths: dict[str, tuple[str | int, ...]] = {"net.a.w": ("net", "a", "w"), "net.b.w": ("net", "b", "w")}
    save_dcp(tmp_path, {"net.a.w": W, "net.b.w": M}, paths=paths)

    check(read(tmp_path, "net"), {"a.w": W, "b.w": M})


def test_a_key_without_tensors_is_refused(tmp_path: Path) -> None:
    save_dcp(tmp_path, {"model.w": W})

    with pytest.raises(InvalidArgumentError, match=r"has no tensors under key='nix'\. Its weights are under 'model'\."):
        read(tmp_path, "nix")


def test_a_directory_of_an_optimizer_has_no_weights(tmp_path: Path) -> None:
    save_dcp(tmp_path, {"optimizer.state.w.exp_avg": W, "step": 3})

    with pytest.raises(CheckpointNotFoundError, match="no weights that hfshard recognizes: its entries are"):
        read(tmp_path)


# Directories that are damaged, incomplete or made to harm.


def change_metadata(directory: Path, change: Callable[[Metadata], object]) -> None:
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    change(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))


def place_of(metadata: Metadata, offsets: tuple[int, ...] = (0, 0)) -> Any:
    return metadata.storage_data[MetadataIndex("model.w", offsets)]


def set_place(**values: Any) -> Callable[[Metadata], object]:
    return lambda metadata: vars(place_of(metadata)).update(values)


def set_chunk(number: int, **values: Any) -> Callable[[Metadata], object]:
    def change(metadata: Metadata) -> None:
        described: Any = metadata.state_dict_metadata["model.w"]
        for name, value in values.items():
            setattr(described.chunks[number], name, torch.Size(value))

    return change


def _repeat_chunks(metadata: Metadata) -> None:
    """Have as many chunks as the square of what the file has, none of which has an element."""
    empty = ChunkStorageMetadata(torch.Size([0]), torch.Size([0]))
    one = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([0]), [empty] * 3000)
    metadata.state_dict_metadata.update(dict.fromkeys(map(str, range(3000)), one))


def _nest_path(metadata: Metadata) -> None:
    """Name a tensor by a list whose text has 2**60 brackets."""
    nested: list[Any] = []
    for _ in range(60):
        nested = [nested, nested]
    metadata.planner_data["model.w"] = ("model", nested)


def _collide(metadata: Metadata) -> None:
    """Add places whose keys in a dict would be compared each with each."""
    info = next(iter(metadata.storage_data.values()))
    for offsets in product((0, sys.hash_info.modulus), repeat=8):
        metadata.storage_data[MetadataIndex("model.w", torch.Size(offsets))] = info


CHANGES: dict[str, tuple[Callable[[Metadata], object], type[HfshardError], str]] = {
    "a file outside": (set_place(relative_path="../x.distcp"), UnsafePathError, "outside of its directory"),
    "an absolute path": (set_place(relative_path="/etc/passwd"), UnsafePathError, "outside of its directory"),
    "a missing file": (set_place(relative_path="__9_0.distcp"), MissingShardError, "__9_0.distcp"),
    "an item behind the end": (set_place(offset=10**9), DamagedCheckpointError, "its bytes end at"),
    "a huge item": (set_place(length=1 << 61), DamagedCheckpointError, "its bytes end at"),
    "a negative offset": (set_place(offset=-1), DamagedCheckpointError, "does not describe a checkpoint"),
    "an offset of a float": (set_place(offset=0.5), DamagedCheckpointError, "does not describe a checkpoint"),
    "the middle of an item": (set_place(offset=64), DamagedCheckpointError, "of the tensor 'model.w'"),
    "a cut item": (set_place(length=700), DamagedCheckpointError, "its item is not one that torch.save has written"),
    "an item of 3 bytes": (set_place(length=3), DamagedCheckpointError, "its item is not one that"),
    "transforms": (
        set_place(transform_descriptors=["stream.zstd"]),
        InvalidArgumentError,
        r"transforms \(stream.zstd\)",
    ),
    "another shape": (set_chunk(0, sizes=(1, 2)), DamagedCheckpointError, "its chunk has the shape"),
    "a chunk out of bounds": (set_chunk(1, offsets=(9, 0)), DamagedCheckpointError, "is out of its bounds"),
    "a chunk without a place": (set_chunk(1, offsets=(1, 0)), DamagedCheckpointError, "is in no file"),
    "a chunk twice": (set_chunk(1, offsets=(0, 0)), DamagedCheckpointError, "pieces that overlap"),
    "a missing chunk": (
        lambda metadata: vars(metadata.state_dict_metadata["model.w"])["chunks"].pop(),
        DamagedCheckpointError,
        "has 16 of its 32 bytes",
    ),
    "one list of chunks again and again": (_repeat_chunks, DamagedCheckpointError, "there again and again"),
    "one path again and again": (
        lambda metadata: metadata.planner_data.update(dict.fromkeys(map(str, range(3000)), ("model",) * 3000)),
        DamagedCheckpointError,
        "there again and again",
    ),
    "lists of lists in a path": (_nest_path, DamagedCheckpointError, "does not describe a checkpoint"),
    "offsets of one hash": (_collide, DamagedCheckpointError, "names that all have the same hash"),
    "65 dimensions": (
        lambda metadata: vars(metadata.state_dict_metadata["model.w"]).update(size=torch.Size([1] * 65)),
        DamagedCheckpointError,
        "in place of sizes, or too many",
    ),
    "no tensors": (lambda metadata: metadata.state_dict_metadata.clear(), CheckpointNotFoundError, "no weights"),
    "something else": (
        lambda metadata: vars(metadata).update(state_dict_metadata=3),
        DamagedCheckpointError,
        "does not describe a checkpoint",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_metadata_are_refused(name: str, tmp_path: Path) -> None:
    change, error, message = CHANGES[name]
    save_dcp(tmp_path / "d", {"model.w": torch.arange(8.0).reshape(4, 2)}, {"model.w": halves((4, 2), 0)})
    change_metadata(tmp_path / "d", change)

    with pytest.raises(error, match=message):
        read(tmp_path / "d")


@pytest.mark.parametrize("field", ["planner_data", "storage_meta", "version"])
def test_nothing_in_the_metadata_is_run(field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = save_dcp(tmp_path / "d", {"model.w": W})
    setattr(metadata, field, {"model.w": Evil()})
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UnsafePickleError, match=r"asks for 'posix\.system', which is nothing a checkpoint of torch"):
        read(tmp_path / "d")

    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("raw", [b"", b"\x80\x04", b"garbage", b"\x80\x04K\x03.", b"\x80\x04}."])
def test_metadata_that_are_no_pickle_of_torch_are_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(raw)

    with pytest.raises((UnsafePickleError, DamagedCheckpointError), match=r"\.metadata"):
        read(tmp_path)


@pytest.mark.parametrize("step", range(0, 3000, 37))
def test_a_changed_byte_of_the_metadata_is_an_error_or_the_same(step: int, tmp_path: Path) -> None:
    expected = {"w": torch.arange(8.0).reshape(4, 2)}
    save_dcp(tmp_path, {"model.w": expected["w"]}, {"model.w": halves((4, 2), 0)})
    raw = bytearray((tmp_path / ".metadata").read_bytes())
    raw[step % len(raw)] ^= 1 << (step % 8)
    (tmp_path / ".metadata").write_bytes(raw)

    try:
        found = read(tmp_path)
    except HfshardError:
        return
    assert all(isinstance(tensor, torch.Tensor) for tensor in found.values())
