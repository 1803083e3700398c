"""A replicated save to which all ranks come: each writes its share, and the files are those of a single process."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hfshard
from hfshard.distributed.rank_writer import ReplicaWriter
from hfshard.distributed.rendezvous import GroupSession
from hfshard.distributed.save_on_ranks import save_together
from hfshard.errors import RankFailedError
from hfshard.places.place import place_to_save
from hfshard.saving.save_request import SaveOptions, SaveRequest
from hfshard.shards.write_shards import WriteJob
from hfshard.tensors.stored_tensor import RawTensor, TensorLike, tensor_layout
from tests.distributed.gloo import check_ranks, waiting

FILE_BYTES, FILES = 10 << 20, 4
LIMIT = FILE_BYTES + (1 << 16)


def whole(number: float = 0.0) -> dict[str, torch.Tensor]:
    """Four tensors of 10 MiB, one for each file, and a small one."""
    rows = torch.arange(FILE_BYTES / 4)
    return {f"w{file}": rows + file for file in range(FILES)} | {"buffer": torch.full((2,), number)}


def bytes_written() -> int:
    found = re.search(r"^wchar:\s+(\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def digests_in(directory: Path) -> dict[str, str]:
    files = (path for path in directory.iterdir() if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def share_out(rank: int, place: Path) -> None:
    expected = digests_in(place / "alone")
    assert len([name for name in expected if name.endswith(".safetensors")]) == FILES

    # By all ranks: one file by each.
    before = bytes_written()
    hfshard.save_state_dict(whole(), place / "together", max_shard_size=LIMIT)
    wrote = bytes_written() - before
    assert 0.9 < wrote / FILE_BYTES < 1.1
    assert digests_in(place / "together") == expected

    # Copies that differ: the first rank's count, in the one file that has them.
    dist.barrier()
    before = bytes_written()
    hfshard.save_state_dict(whole(float(rank)), place / "differing", max_shard_size=LIMIT)
    wrote = bytes_written() - before
    assert digests_in(place / "differing") == expected
    assert wrote < 2.1 * FILE_BYTES

    # A second save of the same, and one of other values.
    dist.barrier()
    hfshard.save_state_dict(whole(), place / "together", max_shard_size=LIMIT)
    assert digests_in(place / "together") == expected
    dist.barrier()
    hfshard.save_state_dict(whole(5.0), place / "together", max_shard_size=LIMIT)
    assert hfshard.load_state_dict(place / "together", verify="full")["buffer"].tolist() == [5.0, 5.0]
    dist.barrier()

    # By the first one alone, as before: nobody else need come.
    if rank == 0:
        before = bytes_written()
        with waiting(0.1):
            hfshard.save_state_dict(whole(), place / "by one", max_shard_size=LIMIT)
        assert bytes_written() - before > 3.9 * FILE_BYTES
        assert digests_in(place / "by one") == expected
    dist.barrier()


def test_each_rank_writes_its_share(tmp_path: Path) -> None:
    hfshard.save_state_dict(whole(), tmp_path / "alone", max_shard_size=LIMIT)
    check_ranks(tmp_path / "ranks", 4, share_out, tmp_path)


def fail_on_one(rank: int, place: Path) -> None:
    def blocks(_: int) -> Iterator[memoryview]:
        raise ZeroDivisionError("a tensor that can't be read")

    tensors: dict[str, TensorLike] = dict(whole(7.0))
    if rank == 1:
        tensors = {name: RawTensor(tensor_layout(tensor), blocks) for name, tensor in tensors.items()}
    request = SaveRequest(tensors=tensors, options=SaveOptions(max_shard_size=LIMIT))
    before = digests_in(place / "out")
    expected: type[BaseException] = ZeroDivisionError if rank == 1 else RankFailedError
    with pytest.raises(expected, match="a tensor that can't be read") as caught:
        save_together(request, place_to_save(place / "out"))
    assert "The outcome is unknown" not in str(caught.value)
    dist.barrier()
    assert digests_in(place / "out") == before
    hfshard.save_state_dict(whole(7.0), place / "out", max_shard_size=LIMIT)
    assert hfshard.load_state_dict(place / "out", verify="full")["buffer"].tolist() == [7.0, 7.0]


def test_a_rank_that_fails_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    hfshard.save_state_dict(whole(), tmp_path / "out", max_shard_size=LIMIT)
    check_ranks(tmp_path / "ranks", 2, fail_on_one, tmp_path)


def write_on_two_nodes(rank: int, place: Path) -> None:
    """The same path, which leads each rank somewhere else, as on machines without a common file system."""
    (place / f"node {rank}" / "staging").mkdir(parents=True)
    os.chdir(place / f"node {rank}")
    tensors = {"a": torch.zeros(4), "b": torch.ones(4)}
    with GroupSession("save", range(2), rank) as ranks:
        writer = ReplicaWriter(ranks, tensors)
        if rank == 1:
            writer.follow()
            ranks.finish()
            assert os.listdir("staging") == []
            return
        jobs = [WriteJob(f"staging/{name}", {name: tensor}, {}) for name, tensor in tensors.items()]
        digests = writer.write(jobs, "xxh3", None)
        writer.confirm()
        ranks.finish()
    assert sorted(os.listdir("staging")) == ["a", "b"]
    assert [digest.size for digest in digests] == [os.path.getsize(f"staging/{name}") for name in "ab"]


def test_a_rank_that_sees_another_directory_writes_nothing(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, write_on_two_nodes, tmp_path)


# Replicated models among several ranks: a save is no collective, whoever calls it.


def state_of(path: Path) -> torch.Tensor:
    return hfshard.load_state_dict(path)["w"]


def save_replicas(rank: int, place: Path) -> None:
    state = {"w": torch.full((3,), float(rank))}

    # By the first rank alone, which waits a moment for the others.
    if rank == 0:
        with waiting(0.5):
            hfshard.save_state_dict(state, place / "alone")
    dist.barrier()
    assert state_of(place / "alone").tolist() == [0.0] * 3

    # By another one alone.
    if rank == 1:
        with waiting(0.1):
            hfshard.save_state_dict(state, place / "alone")
    dist.barrier()
    assert state_of(place / "alone").tolist() == [1.0] * 3

    # By all: one save, the first rank's.
    for _ in range(2):
        index = hfshard.save_state_dict(state, place / "together", max_shard_size=5000)
        assert list(index.weight_map) == ["w"]
        assert state_of(place / "together").tolist() == [0.0] * 3
        dist.barrier()

    # By all, each into a directory of its own: none waits for the others' outcome.
    with waiting(0.1):
        hfshard.save_state_dict(state, place / f"of rank {rank}")
    assert state_of(place / f"of rank {rank}").tolist() == [float(rank)] * 3
    dist.barrier()

    # By the main process, as the others say that they are not: nobody waits.
    model = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(3))
    model.module.running_mean.fill_(rank)
    with waiting(1000):  # longer than a test may take
        saved = hfshard.save_model(model, place / "model", is_main_process=rank == 0)
    assert (saved is None) == (rank != 0)
    dist.barrier()
    hfshard.save_model(model, place / "buffers")
    assert hfshard.load_state_dict(place / "buffers")["running_mean"].tolist() == [0.0] * 3


def test_nobody_needs_to_call_and_all_may(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, save_replicas, tmp_path)
