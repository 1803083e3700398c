"""Any state dict and limit: every bit comes back, work grows as the number of tensors, memory does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import hfshard
from hfshard.checkpoint.check_files import check_keys
from hfshard.format.file_names import WeightNames
from hfshard.format.header import build_header, parse_header
from hfshard.format.index import CheckpointIndex
from hfshard.shards.shard_plan import Packing, with_one_more_shard
from hfshard.tensors.parameter_names import compare_keys, match_prefixes, select_keys
from hfshard.tensors.tied import find_shared_tensors
from tests.helpers import processes
from tests.helpers.memory import MIB, peak_during
from tests.helpers.random_state_dicts import DTYPES, Sample, fingerprint, random_tensor, state_dicts
from tests.helpers.tensor_bytes import assert_same, bytes_of

SETTINGS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)

LIMITS = st.one_of(st.integers(1, 9000), st.integers(4096, 80_000), st.just(10**9))
PACKINGS: st.SearchStrategy[Packing] = st.sampled_from(("greedy", "balanced"))


@contextmanager
def saved(sample: Sample, limit: int, packing: Packing) -> Iterator[tuple[Path, hfshard.CheckpointIndex]]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder), hfshard.save_state_dict(sample.state_dict, folder, max_shard_size=limit, packing=packing)


def weights_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@dataclass(frozen=True, slots=True)
class WeightFile:
    """What the header of a file says of it, and how long the file is."""

    name: str
    tensors: list[str]
    header_bytes: int
    size: int

    @classmethod
    def read(cls, path: Path) -> WeightFile:
        """Read it without the package."""
        raw = path.read_bytes()
        header_bytes = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:header_bytes])
        header.pop("__metadata__")
        return cls(path.name, list(header), header_bytes, len(raw))

    @property
    def is_aligned(self) -> bool:
        """Whether the tensors' bytes begin at a page."""
        return self.header_bytes % 4096 == 0

    def fits(self, limit: int) -> bool:
        """Whether it is not over the limit, or holds but one tensor."""
        return self.size <= limit or len(self.tensors) <= 1


def index_on_disk(folder: Path) -> tuple[int, dict[str, str]] | None:
    """The total size and the file of each tensor, as the index file has them; None where there is no such file."""
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return None
    index = json.loads(path.read_text("utf-8"))
    return index["metadata"]["total_size"], index["weight_map"]


@SETTINGS
@given(state_dicts(), LIMITS, PACKINGS)
def test_a_save_keeps_to_its_limit_comes_back_to_the_bit_and_is_made_again(
    sample: Sample, limit: int, packing: Packing
) -> None:
    before = fingerprint(sample.state_dict)
    with saved(sample, limit, packing) as (first, index), saved(sample, limit, packing) as (second, again):
        _assert_every_name_lies_in_exactly_one_file_and_no_file_is_over_the_limit(sample, limit, first, index)
        _assert_every_bit_comes_back_and_ties_are_tied_again(sample, first)
        _assert_stock_safetensors_reads_the_same_bits(sample, first, index)
        assert index == again
        assert {f.name: f.read_bytes() for f in first.iterdir()} == {f.name: f.read_bytes() for f in second.iterdir()}
    assert fingerprint(sample.state_dict) == before


def _assert_every_name_lies_in_exactly_one_file_and_no_file_is_over_the_limit(
    sample: Sample, limit: int, folder: Path, index: hfshard.CheckpointIndex
) -> None:
    files = [WeightFile.read(path) for path in weights_in(folder)]
    places: dict[str, list[str]] = {}
    for file in files:
        for name in file.tensors:
            places.setdefault(name, []).append(file.name)
    assert {name: [file] for name, file in index.weight_map.items()} == places
    # What is not stored is tied to what is: together they are all names, each once.
    assert sorted([*index.weight_map, *index.tied_names]) == sorted(sample.state_dict)
    assert [file for file in files if not file.is_aligned or not file.fits(limit)] == []
    assert [file for file in files if not file.tensors and sample.state_dict] == []
    stored = sum(len(bytes_of(sample.state_dict[name])) for name in index.weight_map)
    data_bytes = sum(file.size - file.header_bytes for file in files)
    assert (index.total_size, data_bytes) == (stored, stored)
    assert index_on_disk(folder) == ((stored, index.weight_map) if len(files) > 1 else None)


def _assert_every_bit_comes_back_and_ties_are_tied_again(sample: Sample, folder: Path) -> None:
    loaded = hfshard.load_state_dict(folder, verify="full")
    assert_same(loaded, sample.state_dict)
    for name, other in sample.tied.items():
        assert loaded[name] is loaded[other]
    assert hfshard.verify_checkpoint(folder).problems == ()


def _assert_stock_safetensors_reads_the_same_bits(sample: Sample, folder: Path, index: hfshard.CheckpointIndex) -> None:
    found: dict[str, torch.Tensor] = {}
    for file in weights_in(folder):
        found |= load_file(file)
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata()["format"] == "pt"
    assert_same(found, {name: sample.state_dict[name] for name in index.weight_map})


@SETTINGS
@given(state_dicts(), LIMITS, PACKINGS)
def test_strides_leave_no_trace_in_the_file(sample: Sample, limit: int, packing: Packing) -> None:
    """A strided save and a contiguous one of the same values are the same files."""
    plain = {
        name: random_tensor(0, tensor.dtype, tuple(tensor.shape)) if tensor.numel() == 0 else _contiguous(tensor)
        for name, tensor in sample.state_dict.items()
        if name not in sample.tied
    }
    untied = Sample({name: sample.state_dict[name] for name in plain}, {})
    with saved(untied, limit, packing) as (first, index), saved(Sample(plain, {}), limit, packing) as (second, _):
        if not index.tied_names:  # two views that happen to be one
            assert {f.name: f.read_bytes() for f in first.iterdir()} == {
                f.name: f.read_bytes() for f in second.iterdir()
            }


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    raw = torch.frombuffer(bytearray(bytes_of(tensor)), dtype=torch.uint8)
    if tensor.dtype.itemsize == 1:
        return raw.reshape(tensor.shape).view(tensor.dtype)
    return raw.view(tensor.dtype).reshape(tensor.shape)


@SETTINGS
@given(state_dicts(dtypes=(torch.complex128, torch.complex32, torch.float64, torch.int8)), LIMITS, PACKINGS)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_complex_of_other_widths_comes_back_though_the_format_lacks_it(
    sample: Sample, limit: int, packing: Packing
) -> None:
    with saved(sample, limit, packing) as (folder, _):
        assert_same(hfshard.load_state_dict(folder, verify="full"), sample.state_dict)
        assert [path.name for path in weights_in(folder) if not WeightFile.read(path).fits(limit)] == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype_comes_back_by_us_and_by_stock_safetensors(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = random_tensor(7, dtype, (3, 4))
    hfshard.save_state_dict({"t": tensor, "u": tensor.t() if dtype.itemsize > 0 else tensor}, tmp_path)
    loaded, stock = hfshard.load_state_dict(tmp_path, verify="full"), load_file(tmp_path / "model.safetensors")
    for found in (loaded, stock):
        assert_same(found, {"t": tensor, "u": tensor.t()})


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
    return partial(with_one_more_shard, hfshard.plan_shards(tensors_of(count), LIMIT), WeightNames())


def index_of(count: int) -> bytes:
    files = hfshard.plan_shards(tensors_of(count), LIMIT).weight_map
    return CheckpointIndex(files, 4 * ELEMENTS * count).to_json()


def header_of(count: int) -> bytes:
    return build_header([(name, "F32", [ELEMENTS], 4 * ELEMENTS) for name in names_of(count)], {})


def header_read(count: int) -> Work:
    raw = header_of(count)
    return partial(parse_header, raw[8:], len(raw) + 4 * ELEMENTS * count, "x")


def keys_checked(count: int) -> Work:
    names = names_of(count)
    contents = {f"{at}": names[at : at + 100] for at in range(0, count, 100)}
    return partial(check_keys, "x/index", {name: file for file, held in contents.items() for name in held}, contents)


def twice_named(count: int) -> dict[str, Tensor]:
    tensors = tensors_of(count)
    return {**tensors, **{f"{name}.tied": tensor for name, tensor in tensors.items()}}


def views(count: int) -> dict[str, Tensor]:
    """Of one storage."""
    flat = torch.zeros(ELEMENTS * count)
    return {name: flat[:size] for size, name in enumerate(names_of(count), start=1)}


def prefixes_matched(count: int) -> Work:
    names = names_of(count)
    return partial(match_prefixes, [f"module.{name.replace('experts', 'experts._orig_mod')}" for name in names], names)


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
    "index written": lambda count: partial(index_of, count),
    "index read": lambda count: partial(CheckpointIndex.from_json, index_of(count), "x"),
    "header written": lambda count: partial(header_of, count),
    "header read": header_read,
    "keys checked": keys_checked,
    "ties of pairs": lambda count: partial(find_shared_tensors, twice_named(count)),
    "ties of one tensor": lambda count: partial(find_shared_tensors, dict.fromkeys(names_of(count), torch.zeros(16))),
    "ties of one storage": lambda count: partial(find_shared_tensors, views(count)),
    "prefixes matched": prefixes_matched,
    "keys selected": lambda count: partial(select_keys, names_of(count), [*names_of(count)[::2], "*.w"]),
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


TENSORS = 16
LIMIT_MIB = 64
"""What a save may take beyond the model."""


def contiguous(total_bytes: int) -> dict[str, torch.Tensor]:
    rows = total_bytes // TENSORS // 4 // 1024
    return {f"layer.{i}.weight": torch.full((rows, 1024), float(i)) for i in range(TENSORS)}


def transposed(total_bytes: int) -> dict[str, torch.Tensor]:
    return {name: tensor.t() for name, tensor in contiguous(total_bytes).items()}


def flat_buffer(total_bytes: int) -> dict[str, torch.Tensor]:
    flat = torch.ones(total_bytes // 4)
    pieces = flat.chunk(TENSORS)
    return {f"layer.{i}.weight": piece.view(-1, 1024) for i, piece in enumerate(pieces)}


def save(kind: str, total_mib: int, folder: str) -> None:
    """Save two files, in a process that has saved nothing before; print the most bytes that it took meanwhile."""
    torch.set_num_threads(1)
    hfshard.save_state_dict({"warm": torch.ones(10)}, os.path.join(folder, "warm"))  # imports, pools
    total = total_mib * MIB
    made: dict[str, Callable[[int], Any]] = {"contiguous": contiguous, "transposed": transposed, "flat": flat_buffer}
    if kind == "module":
        model = nn.ParameterList(contiguous(total).values())
        print(peak_during(lambda: hfshard.save_model(model, folder, max_shard_size=total // 2)))
        return
    state_dict = made[kind](total)
    print(peak_during(lambda: hfshard.save_state_dict(state_dict, folder, max_shard_size=total // 2)))


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "flat", "module"])
@pytest.mark.parametrize("total_mib", [160, pytest.param(1024, marks=pytest.mark.slow)])
def test_a_save_takes_at_most_64_mib_more(
    total_mib: int, kind: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    """Of either size, each of the two files is larger than that."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    child = processes.call(save, kind, total_mib, str(tmp_path / kind), env=child_environment, **pipes)
    said, complaints = child.communicate(120)
    assert child.returncode == 0, complaints
    print(f"\nsave of {total_mib} MiB, {kind}: +{int(said) / MIB:.1f} MiB")
    assert int(said) <= LIMIT_MIB * MIB
