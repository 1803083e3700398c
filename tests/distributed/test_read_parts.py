"""Parts of stored tensors, read straight into local tensors: their values, and how many bytes are read for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint, open_checkpoint
from hfshard.distributed.layout import MeshLayout, Placement, held_box
from hfshard.distributed.read_parts import PartMapper, read_parts, stored_tensors
from hfshard.distributed.spread_tensor import SpreadTensor
from hfshard.errors import DamagedCheckpointError, InvalidArgumentError, StateDictMismatchError

MIB = 2**20

ROWS = MeshLayout((2,), (0, 1), (Placement(0),))
COLUMNS = MeshLayout((2,), (0, 1), (Placement(1),))
LAYOUTS = [
    ROWS,
    COLUMNS,
    MeshLayout((3, 3), tuple(range(9)), (Placement(0), Placement(0))),  # uneven, and some are empty
    MeshLayout((2, 2), (0, 1, 2, 3), (Placement(0, 2), Placement(0))),  # FSDP over tensor parallelism
    MeshLayout((2,), (0, 1), (Placement(0, 3),)),  # query, key and value in one
    MeshLayout((2, 2), (0, 1, 2, 3), (Placement(0), Placement(1))),
    MeshLayout((2, 2), (0, 1, 2, 3), (Placement(None), Placement(0))),  # HSDP
]

TENSORS = {
    "plain": torch.arange(96, dtype=torch.float32).view(12, 8),
    "uneven": torch.arange(35, dtype=torch.bfloat16).view(7, 5),
    "experts": torch.arange(120, dtype=torch.int16).view(6, 4, 5),
    "real_pairs": torch.view_as_complex(torch.arange(48, dtype=torch.float64).view(12, 2, 2)),
    "float8": torch.arange(48, dtype=torch.uint8).view(12, 4).view(torch.float8_e4m3fn),
    "float4": torch.arange(48, dtype=torch.uint8).view(12, 4).view(torch.float4_e2m1fn_x2),
    "flags": torch.arange(48).view(12, 4) % 3 == 0,
    "empty": torch.zeros(0, 3),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of several files."""
    directory = tmp_path_factory.mktemp("saved")
    hfshard.save_state_dict({**TENSORS, "number": torch.tensor(7)}, directory, max_shard_size="1kB")
    return directory


@pytest.fixture
def opened(saved: Path) -> Iterator[OpenCheckpoint]:
    """The same, open."""
    with open_checkpoint(str(saved)) as checkpoint:
        yield checkpoint


def _spread(whole: torch.Tensor, layout: MeshLayout, coordinate: tuple[int, ...], local: torch.Tensor) -> SpreadTensor:
    shape = tuple(whole.shape)
    return SpreadTensor(shape, local.dtype, layout, shape, None, coordinate, local)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view of integers, which torch can select from and compare."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _held(whole: torch.Tensor, layout: MeshLayout, coordinate: tuple[int, ...]) -> torch.Tensor:
    """The bits of a rank's part."""
    part = _bits(whole)
    for dim, intervals in enumerate(held_box(tuple(whole.shape), layout, coordinate)):
        part = part.index_select(
            dim, torch.tensor([at for start, stop in intervals for at in range(start, stop)]).int()
        )
    return part


def _room(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory full of something else for a part of some bits."""
    room = torch.full_like(part, 1)
    return torch.view_as_complex(room.view(torch.float64)) if dtype.is_complex else room.view(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_reads_its_part_bit_for_bit_and_no_byte_more(opened: OpenCheckpoint, layout: MeshLayout) -> None:
    for _, coordinate in layout.coordinates():
        parts = {name: _held(whole, layout, coordinate) for name, whole in TENSORS.items()}
        rooms = {name: _room(part, TENSORS[name].dtype) for name, part in parts.items()}
        wanted = [(name, _spread(TENSORS[name], layout, coordinate, room)) for name, room in rooms.items()]

        count_bytes = read_parts(opened, wanted)

        assert all(torch.equal(_bits(rooms[name]), part) for name, part in parts.items())
        assert count_bytes == sum(part.nbytes for part in parts.values())


def test_read_over_the_network_takes_short_runs_together(
    opened: OpenCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hfshard.shards.shard_file.is_networked", lambda _device: True)
    left = torch.zeros(12, 4)

    count_bytes = read_parts(opened, [("plain", _spread(TENSORS["plain"], COLUMNS, (0,), left))])

    assert torch.equal(left, TENSORS["plain"][:, :4])
    assert count_bytes == 11 * 32 + 16  # all but the last row's end


def test_plain_targets_of_any_strides_dtype_and_size(opened: OpenCheckpoint) -> None:
    turned = torch.zeros(8, 12).t()
    halves = torch.zeros(12, 8, dtype=torch.float16)
    number = torch.tensor(0)
    twice = torch.zeros(12, 8)
    parameter = torch.nn.Parameter(torch.zeros(12, 8))
    version = parameter._version

    count_bytes = read_parts(
        opened, [("plain", turned), ("number", number), ("plain", halves), ("plain", twice), ("plain", parameter)]
    )

    assert torch.equal(turned, TENSORS["plain"])
    assert torch.equal(halves, TENSORS["plain"].half())
    assert torch.equal(twice, TENSORS["plain"])
    assert torch.equal(parameter.data, TENSORS["plain"])
    assert parameter._version > version
    assert number == 7
    assert count_bytes == 4 * 384 + 8


def test_rectangle_of_what_a_rank_holds(opened: OpenCheckpoint) -> None:
    # a parameter of two experts, of 12 x 8 each, whose columns are spread; the stored tensor is the second expert
    layout = MeshLayout((2,), (0, 1), (Placement(2),))
    local = torch.zeros(2, 12, 4)
    held = SpreadTensor((2, 12, 8), torch.float32, layout, (2, 12, 8), None, (1,), local)

    read_parts(opened, [("plain", held.view(((1, 2), (0, 12), (0, 8)), (12, 8)))])

    assert torch.equal(local[1], TENSORS["plain"][:, 4:])
    assert not local[0].any()


def test_large_tensors_are_read_in_blocks(tmp_path: Path) -> None:
    whole = torch.arange(3 * MIB, dtype=torch.int32).view(3, MIB)
    hfshard.save_state_dict({"whole": whole}, tmp_path)
    rows = torch.zeros(2, MIB, dtype=torch.int32)
    columns = torch.zeros(3, MIB // 2, dtype=torch.int64)

    with open_checkpoint(str(tmp_path)) as checkpoint:
        counts = [
            read_parts(checkpoint, [("whole", _spread(whole, ROWS, (0,), rows))]),
            read_parts(checkpoint, [("whole", _spread(whole, COLUMNS, (1,), columns))]),
        ]

    assert torch.equal(rows, whole[:2])
    assert torch.equal(columns, whole[:, MIB // 2 :].long())
    assert counts == [8 * MIB, 6 * MIB]


@pytest.mark.parametrize("kept", ["pytorch_model.bin", "tensors.pt"])
def test_parts_of_a_pickle(tmp_path: Path, kept: str) -> None:
    whole = TENSORS["plain"]
    torch.save({"whole": whole, "turned": whole.t().contiguous().t()}, tmp_path / kept)
    left = torch.zeros(12, 4)
    right = torch.zeros(12, 4)

    with open_checkpoint(str(tmp_path), weights_name=kept) as checkpoint:
        described = stored_tensors(checkpoint)
        count_bytes = read_parts(
            checkpoint,
            [("whole", _spread(whole, COLUMNS, (0,), left)), ("turned", _spread(whole, COLUMNS, (1,), right))],
        )

    assert torch.equal(left, whole[:, :4])
    assert torch.equal(right, whole[:, 4:])
    assert count_bytes == 2 * 192
    assert described["whole"].shape == (12, 8)
    assert described["whole"].is_meta


def test_stored_tensors_are_described(opened: OpenCheckpoint) -> None:
    described = stored_tensors(opened)

    assert {name: (tuple(one.shape), one.dtype) for name, one in described.items()} == {
        "plain": ((12, 8), torch.float32),
        "uneven": ((7, 5), torch.bfloat16),
        "experts": ((6, 4, 5), torch.int16),
        "real_pairs": ((12, 2), torch.complex128),
        "float8": ((12, 4), torch.float8_e4m3fn),
        "float4": ((12, 4), torch.float4_e2m1fn_x2),
        "flags": ((12, 4), torch.bool),
        "empty": ((0, 3), torch.float32),
        "number": ((), torch.int64),
    }


def test_tied_names_are_read_too(tmp_path: Path) -> None:
    weight = torch.arange(4.0)
    hfshard.save_state_dict({"head": weight, "embedding": weight}, tmp_path)
    head, embedding = torch.zeros(4), torch.zeros(4)

    with open_checkpoint(str(tmp_path)) as checkpoint:
        read_parts(checkpoint, [("head", head), ("embedding", embedding)])
        names = set(stored_tensors(checkpoint))

    assert torch.equal(head, weight)
    assert torch.equal(embedding, weight)
    assert names == {"head", "embedding"}


def test_what_does_not_fit_is_refused_before_anything_is_read(opened: OpenCheckpoint) -> None:
    room = torch.zeros(12, 8)

    with pytest.raises(StateDictMismatchError, match=r"has no tensor 'absent'.*inspect --tensors"):
        read_parts(opened, [("plain", room), ("absent", room)])
    with pytest.raises(StateDictMismatchError, match=r"'uneven'.*has the shape \[7, 5\], not \[12, 8\]"):
        read_parts(opened, [("plain", room), ("uneven", room)])
    with pytest.raises(InvalidArgumentError, match="it has no memory"):
        read_parts(opened, [("plain", room), ("plain", torch.empty(12, 8, device="meta"))])
    with pytest.raises(InvalidArgumentError, match="it is expanded"):
        read_parts(opened, [("plain", room), ("plain", torch.zeros(12, 1).expand(12, 8))])
    with pytest.raises(
        InvalidArgumentError, match=r"torch.float32, to which torch cannot cast the stored torch.float4"
    ):
        read_parts(opened, [("plain", room), ("float4", torch.zeros(12, 4))])

    assert not room.any()


def test_file_that_was_truncated_meanwhile(tmp_path: Path) -> None:
    hfshard.save_state_dict({"whole": TENSORS["plain"]}, tmp_path)

    with (
        open_checkpoint(str(tmp_path)) as checkpoint,
        pytest.raises(DamagedCheckpointError, match="was truncated while it was being read"),
    ):
        os.truncate(tmp_path / "model.safetensors", 500)
        read_parts(checkpoint, [("whole", torch.zeros(12, 8))])


CPU = torch.device("cpu")


def test_plain_tensors_are_mapped_where_they_are_like_the_stored_ones(opened: OpenCheckpoint, saved: Path) -> None:
    mapper = PartMapper(opened, "auto")
    plain = torch.empty(12, 8, device="meta")

    assert mapper.map_like("plain", plain.t().contiguous().t(), torch.float32, CPU) is None  # other strides
    assert mapper.map_like("plain", plain, torch.bfloat16, CPU) is None
    assert mapper.map_like("plain", plain, torch.float32, torch.device("meta")) is None
    assert mapper.map_like("plain", plain[1:], torch.float32, CPU) is None
    assert mapper.map_like("empty", torch.empty(0, 3), torch.float32, CPU) is None
    found = {
        name: mapper.map_like(name, torch.empty_like(whole, device="meta"), whole.dtype, CPU)
        for name, whole in TENSORS.items()
        if name != "empty"
    }
    mapper.start_read_ahead()

    files = {path.name: path.read_bytes() for path in saved.iterdir()}
    for name, tensor in found.items():
        assert tensor is not None, name
        assert (tensor.dtype, tensor.shape) == (TENSORS[name].dtype, TENSORS[name].shape)
        assert torch.equal(_bits(tensor), _bits(TENSORS[name]))
        _bits(tensor).zero_()
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == files
    assert mapper.map_like("plain", plain, torch.float32, CPU) is None  # its memory has an owner


def test_nothing_is_mapped_that_was_asked_to_be_read(opened: OpenCheckpoint) -> None:
    like = torch.empty(12, 8, device="meta")

    assert PartMapper(opened, "pread").map_like("plain", like, torch.float32, CPU) is None
    assert PartMapper(opened, "mmap").map_like("plain", like, torch.float32, CPU) is not None


def test_tensors_of_pickles_and_unaligned_ones_are_not_mapped(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(3)}, tmp_path / "tensors.pt")
    raw = b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'  # 54 bytes: data begin at byte 62
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0\0\0\0\0\0\x80\x3f")

    for name, size in (("tensors.pt", 3), ("odd.safetensors", 2)):
        with open_checkpoint(str(tmp_path), weights_name=name) as checkpoint:
            mapped = PartMapper(checkpoint, "mmap").map_like("x", torch.empty(size), torch.float32, CPU)
            room = torch.zeros(size)
            read_parts(checkpoint, [("x", room)])
        assert mapped is None
        assert room[-1] == 1


def test_file_that_was_truncated_before_it_is_mapped(tmp_path: Path) -> None:
    hfshard.save_state_dict({"whole": TENSORS["plain"]}, tmp_path)

    with (
        open_checkpoint(str(tmp_path)) as checkpoint,
        pytest.raises(DamagedCheckpointError, match="was truncated while it was being read"),
    ):
        os.truncate(tmp_path / "model.safetensors", 500)
        PartMapper(checkpoint, "auto").map_like("whole", torch.empty(12, 8), torch.float32, CPU)
