"""Saves of state dicts and modules that are spread over ranks: every file is that of a single process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hfshard
from tests.distributed.gloo import check_ranks

SIZES = {"single": {}, "sharded": {"max_shard_size": 9000}, "balanced": {"max_shard_size": 9000, "packing": "balanced"}}


def whole_state() -> dict[str, torch.Tensor]:
    """Tensors of many kinds, the same in every process."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    state = {
        "even": random(16, 24),
        "uneven": random(7, 10).bfloat16(),
        "thin": random(3, 5),
        "long": random(1111),
        "deep": random(6, 5, 4).half(),
        "columns": random(10, 9).t(),
        "steps": torch.arange(13, dtype=torch.int64),
        "mask": random(9, 3) > 0,
        "complex": torch.complex(random(5, 4), random(5, 4)),
        "wide_complex": torch.complex(random(4, 2).double(), random(4, 2).double()),
        "scale": torch.tensor(2.5),
        "empty": random(0, 4),
        "f8": random(8, 8).to(torch.float8_e4m3fn),
        "big": random(64, 96),
    }
    state["tied"] = state["even"]
    return state


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}


def spread(mesh_shape: tuple[int, ...], state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, sharded in different ways; a few stay plain."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b", "c")[: len(mesh_shape)])
    found: dict[str, torch.Tensor] = {}
    done: dict[int, torch.Tensor] = {}
    for number, (name, tensor) in enumerate(state.items()):
        if name in ("mask", "wide_complex"):
            found[name] = tensor
            continue
        placements = [
            Shard((number + axis) % tensor.dim()) if tensor.dim() and (number + axis) % 4 else Replicate()
            for axis in range(len(mesh_shape))
        ]
        if id(tensor) not in done:
            done[id(tensor)] = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
        found[name] = done[id(tensor)]
    return found


def save_spread(rank: int, mesh_shape: tuple[int, ...], place: Path) -> None:
    state = spread(mesh_shape, whole_state())
    if rank:
        state["mask"] = ~state["mask"]  # of what every rank has a copy of, the first one's counts
    for name, options in SIZES.items():
        for _ in range(2):
            index = hfshard.save_state_dict(state, place / name, **options)  # type: ignore[arg-type]
            dist.barrier()
            assert contents(place / name) == contents(place / f"{name}-alone")
            assert set(index.weight_map) == set(whole_state()) - {"tied"}
            if name != "single":
                assert index.to_json() == (place / name / "model.safetensors.index.json").read_bytes()


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_files_are_those_of_a_single_process(tmp_path: Path, mesh_shape: tuple[int, ...]) -> None:
    for name, options in SIZES.items():
        hfshard.save_state_dict(whole_state(), tmp_path / f"{name}-alone", **options)  # type: ignore[arg-type]

    check_ranks(tmp_path / "ranks", torch.Size(mesh_shape).numel(), save_spread, mesh_shape, tmp_path)


def save_copies(rank: int, place: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    copies = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    own = torch.full((2, 3), float(rank // 2))
    state = {
        f"{kind}{number}": DTensor.from_local(own, mesh, placements, run_check=False)
        for kind, mesh, placements in (("one", copies, (Replicate(), Shard(0))), ("each", copies["parts"], (Shard(0),)))
        for number in range(3)
    }

    hfshard.save_state_dict(state, place, max_shard_size=1)


def test_each_tensor_is_one_copy_if_the_ranks_copies_differ(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 4, save_copies, tmp_path / "saved")

    saved = hfshard.load_state_dict(tmp_path / "saved")
    assert len(saved) == 6
    assert [tensor.unique().numel() for tensor in saved.values()] == [1] * 6
    assert [saved[f"each{number}"][0, 0].item() for number in range(3)] == [0.0] * 3  # the first mesh's
