"""Several files are checked at once: the report is in their order, whole, and damage in one hides none in another."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import hfshard


def saved(directory: Path, checksum: str = "sha256") -> list[Path]:
    """Twelve files; the later ones are larger, and so are checked first."""
    tensors = {f"t{i:02d}": torch.full((1000 * (i + 1),), float(i)) for i in range(12)}
    hfshard.save_state_dict(tensors, directory, max_shard_size=1, checksum=checksum)  # type: ignore[arg-type]
    return sorted(directory.glob("*.safetensors"))


def flip_last_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("checksum", ["sha256", "xxh3"])
def test_damage_in_several_files_is_reported_in_their_order(checksum: str, tmp_path: Path) -> None:
    shards = saved(tmp_path, checksum)
    for number in (1, 4, 11):
        flip_last_bit(shards[number])
    shards[7].unlink()
    report = hfshard.verify_checkpoint(tmp_path)
    assert [(problem.file, problem.tensor) for problem in report.problems] == [
        (str(shards[1]), "t01"),
        (str(shards[4]), "t04"),
        (str(shards[7]), None),
        (str(shards[11]), "t11"),
    ]
    assert report.files == ("model.safetensors.index.json", *(path.name for path in shards))
    whole = sum(path.stat().st_size for number, path in enumerate(shards) if number not in (1, 4, 7, 11))
    assert report.checked_bytes == whole


def test_every_byte_of_a_whole_checkpoint_is_checked_and_no_thread_is_left(tmp_path: Path) -> None:
    shards = saved(tmp_path)
    threads = threading.active_count()
    report = hfshard.verify_checkpoint(tmp_path)
    assert report.ok and report.checked_bytes == sum(path.stat().st_size for path in shards)
    assert threading.active_count() == threads


def test_a_load_in_full_names_a_damaged_file_of_many(tmp_path: Path) -> None:
    shards = saved(tmp_path)
    flip_last_bit(shards[5])
    with pytest.raises(hfshard.HfshardError, match=rf"{shards[5].name}.*tensor 't05'"):
        hfshard.load_state_dict(tmp_path, verify="full")
