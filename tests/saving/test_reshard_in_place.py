"""Re-sharding in place with little disk: whole at any time, one shard twice on the disk at most, and it ends."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import hfshard
from hfshard.errors import IntegrityError, InvalidArgumentError
from tests.flows.test_whole_properties import SETTINGS
from tests.helpers.random_state_dicts import assert_same, random_tensor

UNIT = 256 * 1024


def tensors(count: int, nbytes: int) -> dict[str, torch.Tensor]:
    return {f"layer.{number:03d}": random_tensor(number, torch.uint8, (nbytes,)) for number in range(count)}


def weights_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix == ".safetensors")


def layout(directory: Path) -> dict[str, list[str]]:
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    files: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        files.setdefault(file, []).append(name.removeprefix("layer."))
    return files


def assert_holds(directory: Path, state_dict: dict[str, torch.Tensor]) -> None:
    loaded = hfshard.load_state_dict(directory, verify="full")
    assert loaded.keys() == state_dict.keys()
    for name, tensor in state_dict.items():
        assert_same(loaded[name], tensor, name)


def test_files_are_merged_while_they_fit(tmp_path: Path) -> None:
    state_dict = tensors(7, 1000)
    hfshard.save_state_dict(state_dict, tmp_path, max_shard_size=4096 + 1500)
    hfshard.reshard_checkpoint(tmp_path, tmp_path, 4096 + 3500, low_disk=True)
    assert layout(tmp_path) == {
        "model-00001-of-00003.safetensors": ["000", "001", "002"],
        "model-00002-of-00003.safetensors": ["003", "004", "005"],
        "model-00003-of-00003.safetensors": ["006"],
    }
    assert_holds(tmp_path, state_dict)
    assert weights_in(tmp_path) == sorted(layout(tmp_path))
    assert not (tmp_path / ".cache").exists()


def test_an_invalid_setting_is_an_error_even_if_all_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hfshard.save_state_dict(tensors(3, 1000), tmp_path, max_shard_size=4096 + 1500)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setenv("HFSHARD_WRITERS", "0")

    with pytest.raises(InvalidArgumentError, match="HFSHARD_WRITERS must be a positive number"):
        hfshard.reshard_checkpoint(tmp_path, tmp_path, 4096 + 1500, low_disk=True)

    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_is_split_and_others_stay(tmp_path: Path) -> None:
    state_dict = {**tensors(6, 1000), "layer.large": random_tensor(9, torch.uint8, (9000,))}
    hfshard.save_state_dict(state_dict, tmp_path, max_shard_size=4096 + 6000)
    assert sorted(layout(tmp_path).values()) == [["000", "001", "002", "003", "004", "005"], ["large"]]
    before = {name: (tmp_path / name).stat().st_ino for name in weights_in(tmp_path)}
    hfshard.reshard_checkpoint(tmp_path, tmp_path, 4096 + 2500, low_disk=True)
    found = layout(tmp_path)
    assert sorted(map(tuple, found.values())) == [("000", "001"), ("002", "003"), ("004", "005"), ("large",)]
    [large] = [file for file, names in found.items() if names == ["large"]]
    assert (tmp_path / large).stat().st_ino in before.values()
    assert sorted(found) == [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    assert_holds(tmp_path, state_dict)


def save_files(directory: Path, files: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A checkpoint of another tool with these files, in this order."""
    weight_map: dict[str, str] = {}
    for number, state_dict in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(state_dict, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(state_dict, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return {name: tensor for state_dict in files for name, tensor in state_dict.items()}


def test_taken_names_cut_a_merged_file_only_between_the_old_ones(tmp_path: Path) -> None:
    """One file is split and two are merged: three again, whose names are taken; half of the merged one is in c."""
    sizes = [{"a1": 100_000, "a2": 100_000}, {"b": 10_000}, {"c1": 30_000, "c2": 10_000}]
    files = [{name: random_tensor(size, torch.uint8, (size,)) for name, size in file.items()} for file in sizes]
    state_dict = save_files(tmp_path, files)
    hfshard.reshard_checkpoint(tmp_path, tmp_path, 120_000, low_disk=True)
    assert sorted(map(sorted, layout(tmp_path).values())) == [["a1"], ["a2"], ["b"], ["c1", "c2"]]
    assert_holds(tmp_path, state_dict)


@settings(SETTINGS, max_examples=20)
@given(
    sizes=st.lists(st.lists(st.integers(0, 40_000), min_size=1, max_size=4), min_size=2, max_size=6),
    limit=st.integers(5_000, 120_000),
    strays=st.lists(st.integers(2, 9), max_size=3),
)
def test_no_layout_and_no_stray_file_loses_a_tensor(
    sizes: list[list[int]], limit: int, strays: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("layout")
    state_dict = save_files(
        directory,
        [
            {f"{number}.{at}": random_tensor(number * 10 + at, torch.uint8, (size,)) for at, size in enumerate(file)}
            for number, file in enumerate(sizes)
        ],
    )
    for count in strays:
        stray = directory / f"model-00001-of-{count:05d}.safetensors"
        if not stray.exists():
            save_file({"stray": torch.ones(1)}, stray, metadata={"format": "pt"})
    hfshard.reshard_checkpoint(directory, directory, limit, low_disk=True)
    assert_holds(directory, state_dict)


def test_nothing_to_do_is_nothing_done(tmp_path: Path) -> None:
    hfshard.save_state_dict(tensors(6, 1000), tmp_path, max_shard_size=4096 + 2500)
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    index = hfshard.reshard_checkpoint(tmp_path, tmp_path, 4096 + 2500, low_disk=True)
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == before
    raw = (tmp_path / "model.safetensors.index.json").read_bytes()
    assert index == hfshard.CheckpointIndex.from_json(raw, "")


def test_aliases_and_metadata_stay(tmp_path: Path) -> None:
    state_dict = tensors(6, 1000)
    state_dict["tied"] = state_dict["layer.003"]
    hfshard.save_state_dict(state_dict, tmp_path, max_shard_size=4096 + 1500, metadata={"note": [1]})
    index = hfshard.reshard_checkpoint(tmp_path, tmp_path, 4096 + 2500, low_disk=True)
    assert (index.tied_names, index.metadata) == ({"tied": "layer.003"}, {"note": [1]})
    loaded = hfshard.load_state_dict(tmp_path, verify="full")
    assert loaded["tied"] is loaded["layer.003"]


def test_names_that_are_taken_make_one_more_file(tmp_path: Path) -> None:
    hfshard.save_state_dict(tensors(4, 1000) | {"layer.x": torch.zeros(3, 1000, dtype=torch.uint8)}, tmp_path,
                            max_shard_size=4096 + 2500)  # fmt: skip
    count = len(weights_in(tmp_path))
    (tmp_path / f"model-00002-of-0000{count - 1}.safetensors").write_bytes(b"somebody's, and no file of weights")
    hfshard.reshard_checkpoint(tmp_path, tmp_path, 4096 + 4500, low_disk=True)
    assert (tmp_path / f"model-00002-of-0000{count - 1}.safetensors").read_bytes().startswith(b"somebody's")
    assert f"model-00002-of-0000{count - 1}.safetensors" not in layout(tmp_path)
    assert hfshard.verify_checkpoint(tmp_path).ok


def test_a_file_without_tensors_goes(tmp_path: Path) -> None:
    for seed in (0, 10):  # the second save has an empty file, as all names of the first are in use
        state_dict = {f"layer.{number}": random_tensor(seed + number, torch.uint8, (1000,)) for number in range(2)}
        hfshard.save_state_dict(state_dict, tmp_path, max_shard_size=4096 + 1000)
    assert len(weights_in(tmp_path)) == 3
    for _ in range(2):
        hfshard.reshard_checkpoint(tmp_path, tmp_path, 4096 + 1000, low_disk=True)
        assert weights_in(tmp_path) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        assert_holds(tmp_path, state_dict)


def write_stock(directory: Path, state_dict: dict[str, torch.Tensor], files: int) -> None:
    """As transformers writes it: no checksums."""
    weight_map: dict[str, str] = {}
    items = list(state_dict.items())
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = dict(items[number * len(items) // files : (number + 1) * len(items) // files])
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in state_dict.values())
    index = {"metadata": {"total_size": total, "total_parameters": 77}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_files_of_another_tool_get_checksums_where_they_stay_too(tmp_path: Path) -> None:
    state_dict = {**tensors(5, 1000), "layer.large": random_tensor(9, torch.uint8, (3000,))}
    write_stock(tmp_path, state_dict, 6)
    index = hfshard.reshard_checkpoint(tmp_path, tmp_path, 4096 + 3200, low_disk=True)
    assert index.is_verifiable
    assert index.total_parameters == 77
    assert [len(names) for names in layout(tmp_path).values()] == [3, 2, 1]
    large = tmp_path / layout_of(index, "layer.large")
    assert large.stat().st_size < 4096 + 3000  # its header was not written anew
    assert_holds(tmp_path, state_dict)


def layout_of(index: hfshard.CheckpointIndex, name: str) -> str:
    return index.weight_map[name]


@contextmanager
def no_links() -> Iterator[None]:
    kept = os.link

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    os.link = refuse
    try:
        yield
    finally:
        os.link = kept


def test_without_links_files_that_stay_keep_their_names(tmp_path: Path) -> None:
    state_dict = {**tensors(4, 1000), "layer.large": random_tensor(9, torch.uint8, (3000,))}
    hfshard.save_state_dict(state_dict, tmp_path, max_shard_size=4096 + 1500)
    with no_links():
        hfshard.reshard_checkpoint(tmp_path, tmp_path, 4096 + 2200, low_disk=True)
    assert_holds(tmp_path, state_dict)
    assert weights_in(tmp_path) == sorted(layout(tmp_path))
    hfshard.reshard_checkpoint(tmp_path, tmp_path, 4096 + 2200, low_disk=True)
    assert len({name.split("-of-")[1] for name in weights_in(tmp_path)}) == 1
    assert_holds(tmp_path, state_dict)


def test_damage_in_a_later_group_leaves_a_whole_checkpoint_and_the_damage(tmp_path: Path) -> None:
    state_dict = tensors(6, 9000)
    hfshard.save_state_dict(state_dict, tmp_path, max_shard_size=4096 + 9500)
    last = tmp_path / weights_in(tmp_path)[-1]
    raw = bytearray(last.read_bytes())
    raw[-1] ^= 1
    last.write_bytes(raw)
    with pytest.raises(IntegrityError, match=r"Tensor 'layer\.005'"):
        hfshard.reshard_checkpoint(tmp_path, tmp_path, 4096 + 18_500, low_disk=True)
    report = hfshard.verify_checkpoint(tmp_path)
    assert [problem.tensor for problem in report.problems] == ["layer.005"]
    assert len(weights_in(tmp_path)) == 4
    intact = [f"layer.00{number}" for number in range(5)]
    loaded = hfshard.load_state_dict(tmp_path, keys=intact)
    assert all(torch.equal(loaded[name], state_dict[name]) for name in intact)


def held_bytes(directory: Path) -> int:
    """Bytes of the files in a directory, and of those that are gone from it and that this process has open."""
    held: dict[int, int] = {}
    for above, _, names in os.walk(directory):
        for name in names:
            try:
                status = os.stat(os.path.join(above, name))
            except FileNotFoundError:
                continue
            held[status.st_ino] = status.st_size
    for fd in os.listdir("/proc/self/fd"):
        try:
            target, status = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(int(fd))
        except OSError:
            continue
        if target.startswith(str(directory)) and target.endswith(" (deleted)"):
            held[status.st_ino] = status.st_size
    return sum(held.values())


def most_during(action: Callable[[], object], measure: Callable[[], int]) -> int:
    """The most that was measured just before each call by which a file may go, and at the end."""
    found: list[int] = []
    releasing = {os.unlink, os.remove, os.rename, os.replace, os.truncate, os.ftruncate, os.close}

    def watch(frame: object, event: str, function: object) -> None:
        if event == "c_call" and function in releasing:
            sys.setprofile(None)
            found.append(measure())
            sys.setprofile(watch)

    sys.setprofile(watch)
    try:
        action()
    finally:
        sys.setprofile(None)
    return max(*found, measure())


@pytest.mark.parametrize(("old", "new"), [(2 * UNIT, 8 * UNIT), (8 * UNIT, 2 * UNIT)])
def test_no_more_than_one_shard_is_there_twice(old: int, new: int, tmp_path: Path) -> None:
    state_dict = tensors(32, UNIT - 3000)
    hfshard.save_state_dict(state_dict, tmp_path, max_shard_size=old)
    total = held_bytes(tmp_path)
    most = most_during(
        lambda: hfshard.reshard_checkpoint(tmp_path, tmp_path, new, low_disk=True), lambda: held_bytes(tmp_path)
    )
    headers = 40 * 4096 + 64 * 1024
    assert most <= total + 8 * UNIT + headers
    assert len(weights_in(tmp_path)) == 32 * UNIT // new
    assert_holds(tmp_path, state_dict)
