"""Work grows as the number of tensors: ten times as many take at most eleven times the function calls, and not many."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfshard
from hfshard.checkpoint.check_files import check_keys
from hfshard.format.file_names import WeightNames
from hfshard.format.header import build_header, parse_header
from hfshard.format.index import CheckpointIndex
from hfshard.shards.shard_plan import with_one_more_shard
from hfshard.tensors.parameter_names import compare_keys, match_prefixes, select_keys
from hfshard.tensors.tied import find_shared_tensors

FEW, FEW_ON_DISK, FEW_IN_LISTS = 250, 200, 100
GROWTH = 10
ALLOWED = 11
"""Times the calls: a logarithm may be in them, a square may not (it would be 100)."""

ELEMENTS = 16
LIMIT = 24_000
"""Bytes of a file: about a hundred of the tensors below, with their entries."""

Work = Callable[[], object]


def calls_of(work: Work) -> int:
    """Functions that are called, of Python's and of C's, in all threads that begin meanwhile."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return count


def assert_linear(prepare: Callable[[int], Work], count: int = FEW) -> None:
    prepare(2)()  # the first call imports
    few, many = (calls_of(prepare(number)) for number in (count, GROWTH * count))
    assert few > count / 2, "it calls too few functions to tell"
    assert many <= ALLOWED * few


def names_of(count: int) -> list[str]:
    return [f"model.layers.{number // 100}.experts.{number % 100}.w" for number in range(count)]


def tensors_of(count: int) -> dict[str, Tensor]:
    return {name: torch.zeros(ELEMENTS) for name in names_of(count)}


def planned(packing: Any, limit: int | str) -> Callable[[int], Work]:
    return lambda count: partial(hfshard.plan_shards, tensors_of(count), limit, packing=packing)


def split_again(count: int) -> Work:
    plan = hfshard.plan_shards(tensors_of(count), LIMIT)
    return lambda: with_one_more_shard(plan, WeightNames())


def index_of(count: int) -> bytes:
    files = hfshard.plan_shards(tensors_of(count), LIMIT).weight_map
    return CheckpointIndex(files, 4 * ELEMENTS * count).to_json()


def index_written(count: int) -> Work:
    return lambda: index_of(count)


def index_read(count: int) -> Work:
    raw = index_of(count)
    return lambda: CheckpointIndex.from_json(raw, "x")


def header_of(count: int) -> bytes:
    return build_header([(name, "F32", [ELEMENTS], 4 * ELEMENTS) for name in names_of(count)], {})


def header_written(count: int) -> Work:
    return lambda: header_of(count)


def header_read(count: int) -> Work:
    raw = header_of(count)
    return lambda: parse_header(raw[8:], len(raw) + 4 * ELEMENTS * count, "x")


def keys_checked(count: int) -> Work:
    names = names_of(count)
    contents = {f"{at}": names[at : at + 100] for at in range(0, count, 100)}
    weight_map = {name: file for file, held in contents.items() for name in held}
    return lambda: check_keys("x/index", weight_map, contents)


def ties_of_pairs(count: int) -> Work:
    tensors = tensors_of(count)
    return lambda: find_shared_tensors({**tensors, **{f"{name}.tied": tensor for name, tensor in tensors.items()}})


def ties_of_one_tensor(count: int) -> Work:
    return lambda: find_shared_tensors(dict.fromkeys(names_of(count), torch.zeros(ELEMENTS)))


def ties_of_one_storage(count: int) -> Work:
    flat = torch.zeros(ELEMENTS * count)
    views = {name: flat[:size] for size, name in enumerate(names_of(count), start=1)}
    return lambda: find_shared_tensors(views)


def prefixes_matched(count: int) -> Work:
    names = names_of(count)
    wrapped = [f"module.{name.replace('experts', 'experts._orig_mod')}" for name in names]
    return lambda: match_prefixes(wrapped, names)


def keys_selected(count: int) -> Work:
    names = names_of(count)
    return lambda: select_keys(names, [*names[::2], "*.w"])


def compared(count: int) -> Work:
    tensors = tensors_of(count)
    others = {f"{name}.other": tensor for name, tensor in tensors.items()}
    return lambda: compare_keys(tensors, others).summary()


PURE: dict[str, Callable[[int], Work]] = {
    "plan of one file": planned("greedy", "5GB"),
    "plan of a hundred tensors a file": planned("greedy", LIMIT),
    "plan of one tensor a file": planned("greedy", 1),
    "balanced plan of a hundred tensors a file": planned("balanced", LIMIT),
    "balanced plan of one tensor a file": planned("balanced", 1),
    "plan with one more file": split_again,
    "index written": index_written,
    "index read": index_read,
    "header written": header_written,
    "header read": header_read,
    "keys checked": keys_checked,
    "ties of pairs": ties_of_pairs,
    "ties of one tensor": ties_of_one_tensor,
    "ties of one storage": ties_of_one_storage,
    "prefixes matched": prefixes_matched,
    "keys selected": keys_selected,
    "names compared": compared,
}


@pytest.mark.parametrize("what", PURE)
def test_what_needs_no_disk_is_linear(what: str) -> None:
    assert_linear(PURE[what])


@pytest.mark.parametrize("limit", ["5GB", LIMIT], ids=["one file", "a hundred tensors a file"])
def test_saving_loading_and_verifying_are_linear(limit: int | str, tmp_path: Path) -> None:
    def saved(count: int) -> Work:
        return partial(hfshard.save_state_dict, tensors_of(count), tmp_path / f"{count}", max_shard_size=limit)

    def loaded(count: int, read: Any = "auto", step: int | None = None) -> Work:
        keys = None if step is None else names_of(count)[::step]
        return partial(hfshard.load_state_dict, tmp_path / f"{count}", keys=keys, read=read)

    assert_linear(saved, FEW_ON_DISK)
    assert_linear(saved, FEW_ON_DISK)  # over what is there: the same bytes
    assert_linear(loaded, FEW_ON_DISK)
    assert_linear(partial(loaded, read="pread"), FEW_ON_DISK)
    assert_linear(partial(loaded, step=3), FEW_ON_DISK)
    assert_linear(lambda count: partial(hfshard.verify_checkpoint, tmp_path / f"{count}"), FEW_ON_DISK)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_modules_with_long_lists_are_linear(device: str, tmp_path: Path) -> None:
    def model_of(count: int, device: str) -> nn.Module:
        with torch.device(device):
            return nn.ModuleList(nn.ParameterList([torch.zeros(ELEMENTS)]) for _ in range(count))

    def saved(count: int) -> Work:
        return partial(hfshard.save_model, model_of(count, "cpu"), tmp_path / f"{count}")

    def loaded(count: int) -> Work:
        return partial(hfshard.load_model, model_of(count, device), tmp_path / f"{count}")

    assert_linear(saved, FEW_IN_LISTS)
    assert_linear(loaded, FEW_IN_LISTS)


@pytest.mark.parametrize(
    ("limit", "most"),
    [("5GB", {"save": 85, "load": 21}), (50_000, {"save": 98, "load": 27})],
    ids=["one file", "shards"],
)
def test_a_small_tensor_takes_few_calls(limit: int | str, most: dict[str, int], tmp_path: Path) -> None:
    calls: dict[str, list[int]] = {"save": [], "load": []}
    for count in (2, 100, 1100):  # the first time imports
        path = tmp_path / f"{count}"
        calls["save"].append(calls_of(partial(hfshard.save_state_dict, tensors_of(count), path, max_shard_size=limit)))
        calls["load"].append(calls_of(partial(hfshard.load_state_dict, path)))
    # Before small tensors were gathered, and headers read in one go: 185 and 46, in shards 162 and 52.
    for what, (_, few, many) in calls.items():
        assert (many - few) / 1000 < most[what], what
