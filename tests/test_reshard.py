"""A checkpoint that is re-sharded is the one that a save with the new size would have written, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import hfshard
from hfshard.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    IntegrityError,
    InvalidArgumentError,
    InvalidSizeError,
    MissingShardError,
    NotEnoughSpaceError,
    UnsafePathError,
    UnsafePickleError,
)
from hfshard.loading.source import CheckpointSource
from hfshard.resharding.reshard import reshard_source
from hfshard.saving.options import SaveOptions
from hfshard.storage.disk.fsops import locked_directory
from tests.helpers.random_state_dicts import assert_same, random_tensor

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

SIZES = ("6KB", "9KB", "1MB")
"""Of the 9,216 bytes of tensors of `floats`: five files, three, and one."""


def floats() -> dict[str, torch.Tensor]:
    """Nine tensors of 1,024 bytes."""
    return {f"layer.{number}.weight": random_tensor(number, torch.float32, (16, 16)) for number in range(9)}


def odd() -> dict[str, torch.Tensor]:
    """What formats and torch differ about."""
    tied = random_tensor(1, torch.bfloat16, (40, 8))
    return {
        "complex": random_tensor(2, torch.complex128, (7, 3)),
        "half complex": random_tensor(3, torch.complex32, (5,)),
        "fp8": random_tensor(4, torch.float8_e4m3fn, (100,)),
        "fp4": random_tensor(5, torch.float4_e2m1fn_x2, (3, 8)),
        "tied": tied,
        "also tied": tied,
        "empty": torch.empty(0, 4, dtype=torch.float16),
        "0-d": torch.tensor(7),
        "bool": random_tensor(6, torch.bool, (33,)),
    }


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def weights_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix in (".safetensors", ".bin"))


@pytest.mark.parametrize("new", SIZES)
@pytest.mark.parametrize("old", SIZES)
@pytest.mark.parametrize("is_in_place", [False, True], ids=["elsewhere", "in place"])
def test_the_files_are_those_of_a_save(old: str, new: str, is_in_place: bool, tmp_path: Path) -> None:
    metadata = {"note": {"for": ["tests"]}} if old == new or old != "1MB" else {}
    for size in (old, new):
        hfshard.save_state_dict(floats(), tmp_path / size, max_shard_size=size, metadata=metadata)
    target = tmp_path / old if is_in_place else tmp_path / "new"
    index = hfshard.reshard_checkpoint(tmp_path / old, target, new)
    assert len(set(index.weight_map.values())) == {"6KB": 9, "9KB": 3, "1MB": 1}[new]
    assert files_in(target) == files_in(tmp_path / new)
    assert hfshard.verify_checkpoint(target).ok
    assert sorted(os.listdir(target)) == sorted(files_in(target))


@pytest.mark.parametrize("checksum", ["sha256", "xxh3", None])
@pytest.mark.parametrize("packing", ["greedy", "balanced"])
def test_arguments_mean_what_they_mean_in_a_save(checksum: Any, packing: Any, tmp_path: Path) -> None:
    hfshard.save_state_dict(floats(), tmp_path / "old", max_shard_size="1MB", variant="fp16")
    arguments = {"packing": packing, "checksum": checksum, "variant": "fp16"}
    want = hfshard.save_state_dict(floats(), tmp_path / "want", max_shard_size="9KB", **arguments)
    assert hfshard.reshard_checkpoint(tmp_path / "old", tmp_path / "new", "9KB", **arguments) == want
    assert files_in(tmp_path / "new") == files_in(tmp_path / "want")
    assert "model.safetensors.index.fp16.json" in files_in(tmp_path / "new")


@pytest.mark.parametrize("sizes", [("5KB", "1MB"), ("1MB", "5KB"), ("5KB", "5KB"), ("1MB", "1MB")])
def test_complex_tied_fp8_fp4_empty_and_scalar_tensors_come_through(sizes: tuple[str, str], tmp_path: Path) -> None:
    hfshard.save_state_dict(odd(), tmp_path / "old", max_shard_size=sizes[0])
    hfshard.reshard_checkpoint(tmp_path / "old", tmp_path / "new", sizes[1])
    loaded = hfshard.load_state_dict(tmp_path / "new", verify="full")
    assert loaded.keys() == odd().keys()
    for name, tensor in odd().items():
        assert_same(loaded[name], tensor, name)
    assert loaded["tied"] is loaded["also tied"]
    hfshard.reshard_checkpoint(tmp_path / "new", tmp_path / "new", sizes[0])
    again = hfshard.load_state_dict(tmp_path / "new", verify="full")
    assert again.keys() == odd().keys()
    for name, tensor in odd().items():
        assert_same(again[name], tensor, name)


def test_a_dtype_that_torch_lacks_passes_through(tmp_path: Path) -> None:
    entries = {
        "__metadata__": {"format": "pt"},
        "six": {"dtype": "F6_E2M3", "shape": [8], "data_offsets": [0, 6]},
        "one": {"dtype": "U8", "shape": [2], "data_offsets": [6, 8]},
    }
    raw = json.dumps(entries).encode()
    (tmp_path / "old").mkdir()
    file = tmp_path / "old" / "model.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + b"sixbit!!")
    index = hfshard.reshard_checkpoint(tmp_path / "old", tmp_path / "new", 1)
    assert index.weight_map == {
        "six": "model-00001-of-00002.safetensors", "one": "model-00002-of-00002.safetensors",
    }  # fmt: skip
    assert (tmp_path / "new" / "model-00001-of-00002.safetensors").read_bytes().endswith(b" sixbit")
    assert (tmp_path / "new" / "model-00002-of-00002.safetensors").read_bytes().endswith(b" !!")
    assert index.total_parameters == 10


def test_a_tensor_too_large_for_its_file_goes_back_to_where_it_was(tmp_path: Path) -> None:
    large = {"embed": torch.ones(3000), **floats(), "head": torch.zeros(3000)}
    for size in ("9KB", "1MB"):
        hfshard.save_state_dict(large, tmp_path / size, max_shard_size=size)
    assert hfshard.CheckpointIndex.from_json(
        (tmp_path / "9KB" / "model.safetensors.index.json").read_bytes(), ""
    ).weight_map["head"] == "model-00004-of-00005.safetensors"  # fmt: skip
    hfshard.reshard_checkpoint(tmp_path / "9KB", tmp_path / "new", "1MB")
    assert files_in(tmp_path / "new") == files_in(tmp_path / "1MB")
    hfshard.reshard_checkpoint(tmp_path / "9KB", tmp_path / "same", "9KB")
    assert files_in(tmp_path / "same") == files_in(tmp_path / "9KB")


def test_what_stood_in_every_file_stands_in_every_file(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    save_file(floats(), tmp_path / "old" / "model.safetensors", metadata={"format": "pt", "made by": "hand"})
    hfshard.reshard_checkpoint(tmp_path / "old", tmp_path / "new", "9KB")
    for name in weights_in(tmp_path / "new"):
        with safe_open(tmp_path / "new" / name, "pt") as file:
            assert file.metadata() == {"hfshard": "1", "made by": "hand", "format": "pt"}
    hfshard.reshard_checkpoint(tmp_path / "new", tmp_path / "new", "1MB")
    with safe_open(tmp_path / "new" / "model.safetensors", "pt") as file:
        assert file.metadata()["made by"] == "hand"


# Casts


@pytest.mark.parametrize("size", ["6KB", "1MB"])
@pytest.mark.parametrize(("old", "new"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float64", "float16")])
def test_a_cast_is_the_save_of_cast_tensors(old: str, new: str, size: str, tmp_path: Path) -> None:
    large = torch.randn(1_200_007, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    state_dict = {"large": large.to(getattr(torch, old)), "count": torch.arange(9)}
    state_dict |= {"odd": torch.tensor([1e-9, 1e9, float("inf"), float("nan"), -0.0], dtype=getattr(torch, old))}
    state_dict |= {"complex": torch.ones(3, dtype=torch.complex64)}
    hfshard.save_state_dict(state_dict, tmp_path / "old", max_shard_size=size)
    hfshard.reshard_checkpoint(tmp_path / "old", tmp_path / "new", size, dtype=new)
    loaded = hfshard.load_state_dict(tmp_path / "new", verify="full")
    for name in ("large", "odd"):
        assert_same(loaded[name], state_dict[name].to(getattr(torch, new)), name)
    for name in ("count", "complex"):
        assert_same(loaded[name], state_dict[name], name)


def test_a_cast_says_so_in_the_config(tmp_path: Path) -> None:
    hfshard.save_state_dict(floats(), tmp_path / "m")
    for key, want in (("dtype", "dtype"), ("torch_dtype", "torch_dtype"), ("other", "dtype")):
        (tmp_path / "m" / "config.json").write_text(json.dumps({key: "float32", "n": 1}))
        hfshard.reshard_checkpoint(tmp_path / "m", tmp_path / key, dtype=torch.bfloat16)
        config = json.loads((tmp_path / key / "config.json").read_text())
        assert config[want] == "bfloat16"
        assert config["n"] == 1
        assert hfshard.verify_checkpoint(tmp_path / key).ok


@pytest.mark.parametrize("what", ["config", "fp8"])
def test_a_quantized_checkpoint_is_not_cast(what: str, tmp_path: Path) -> None:
    state_dict = floats() | ({"fp8": torch.ones(3).to(torch.float8_e4m3fn)} if what == "fp8" else {})
    hfshard.save_state_dict(state_dict, tmp_path / "q")
    if what == "config":
        (tmp_path / "q" / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(InvalidArgumentError, match=r"quantized .*dequantize the model first"):
        hfshard.reshard_checkpoint(tmp_path / "q", tmp_path / "new", dtype="bfloat16")
    assert not (tmp_path / "new").exists()
    hfshard.reshard_checkpoint(tmp_path / "q", tmp_path / "new", "6KB")


# What goes along


def test_what_lies_beside_goes_along_and_weights_of_others_do_not(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    hfshard.save_state_dict(floats(), old, max_shard_size="9KB")
    beside = {
        "config.json": "{}", "generation_config.json": '{"max_new_tokens": 5}', "tokenizer.json": '{"a": 1}',
        "modeling_own.py": "x = 1\n", "README.md": "# theirs\n", "chat_template.jinja": "{{ x }}",
    }  # fmt: skip
    for name, text in beside.items():
        (old / name).write_text(text)
    for name in (
        "training_args.bin",
        "optimizer.pt",
        "model.fp16.safetensors",
        "adapter_config.json",
        ".gitattributes",
    ):
        (old / name).write_text("{}")
    (old / "onnx").mkdir()
    new.mkdir()
    (new / "README.md").write_text("# mine\n")
    result = reshard_source(CheckpointSource(str(old)), str(new), SaveOptions(max_shard_size="1MB"))
    assert result.companion_files == ("README.md", "chat_template.jinja", "modeling_own.py", "tokenizer.json")
    assert sorted(os.listdir(new)) == sorted([*beside, "model.safetensors"])
    for name in beside.keys() - {"README.md"}:
        assert (new / name).read_text() == beside[name]
    assert (new / "README.md").read_text() == "# mine\n"
    assert set(result.index.files) == {"model.safetensors", "config.json", "generation_config.json"}
    assert hfshard.verify_checkpoint(new).ok


def test_links_out_of_the_source_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    hfshard.save_state_dict(floats(), tmp_path / "old")
    (tmp_path / "secret").write_text("s")
    (tmp_path / "old" / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(UnsafePathError, match=r"tokenizer\.json' is a link to .*secret', outside"):
        hfshard.reshard_checkpoint(tmp_path / "old", tmp_path / "new")
    (tmp_path / "old" / "tokenizer.json").unlink()
    (tmp_path / "old" / "tokenizer.json").symlink_to("nowhere")
    with pytest.raises(MissingShardError, match=r"tokenizer\.json"):
        hfshard.reshard_checkpoint(tmp_path / "old", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_pipe_is_left_where_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hfshard.save_state_dict(floats(), tmp_path / "old")
    os.mkfifo(tmp_path / "old" / "pipe.json")
    hfshard.reshard_checkpoint(tmp_path / "old", tmp_path / "new")
    assert os.listdir(tmp_path / "new") == ["model.safetensors"]
    assert "is a pipe, a socket or a device: it is not copied" in caplog.text


def test_a_save_in_place_touches_nothing_else(tmp_path: Path) -> None:
    hfshard.save_state_dict(floats(), tmp_path / "m", max_shard_size="1MB")
    (tmp_path / "m" / "tokenizer.json").write_text("t")
    (tmp_path / "m" / "model.fp16.safetensors").write_bytes(b"somebody else's")
    os.chmod(tmp_path / "m" / "model.safetensors", 0o640)
    hfshard.reshard_checkpoint(tmp_path / "m", tmp_path / "m", "9KB")
    assert weights_in(tmp_path / "m") == [
        "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors",
        "model.fp16.safetensors",
    ]  # fmt: skip
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "t"
    assert (tmp_path / "m" / "model-00001-of-00003.safetensors").stat().st_mode & 0o777 == 0o640


# Damage and refusals


def flip(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("low_disk", [False, True])
@pytest.mark.parametrize("old", ["20KB", "1MB"])
def test_a_damaged_source_is_not_written_anew(old: str, low_disk: bool, tmp_path: Path) -> None:
    state_dict = {f"layer.{number}": random_tensor(number, torch.uint8, (6000,)) for number in range(6)}
    hfshard.save_state_dict(state_dict, tmp_path / "m", max_shard_size=old)
    last = weights_in(tmp_path / "m")[-1]
    flip(tmp_path / "m" / last, -1)  # past the 4 KiB of the tensor that its sample has
    before = files_in(tmp_path / "m")
    with pytest.raises(IntegrityError, match=rf"Tensor 'layer\.5' of shard '.*{last}' is damaged") as caught:
        hfshard.reshard_checkpoint(tmp_path / "m", tmp_path / "m", "12KB" if old == "1MB" else "1MB", low_disk=low_disk)
    assert (caught.value.fqn, caught.value.path) == ("layer.5", str(tmp_path / "m" / last))
    assert files_in(tmp_path / "m") == before
    with pytest.raises(IntegrityError):
        hfshard.reshard_checkpoint(tmp_path / "m", tmp_path / "elsewhere", "12KB")
    assert not (tmp_path / "elsewhere").exists()


def test_a_source_without_checksums_is_said_to_be_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "old").mkdir()
    save_file(floats(), tmp_path / "old" / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level("INFO", logger="hfshard"):
        result = reshard_source(CheckpointSource(str(tmp_path / "old")), str(tmp_path / "new"), SaveOptions())
    assert not result.is_compared
    assert "has no checksums: its structure was checked, its bytes can't be" in caplog.text
    assert reshard_source(CheckpointSource(str(tmp_path / "new")), str(tmp_path / "again"), SaveOptions()).is_compared


def test_bad_arguments_touch_nothing(tmp_path: Path) -> None:
    hfshard.save_state_dict(floats(), tmp_path / "m")
    before = files_in(tmp_path / "m")
    for error, match, arguments in (
        (InvalidArgumentError, "lies in the checkpoint", {"dst": tmp_path / "m" / "sub"}),
        (InvalidArgumentError, "lies in the checkpoint", {"dst": f"{tmp_path}/m/../m/sub"}),
        (InvalidArgumentError, "low_disk .* in place", {"low_disk": True}),
        (InvalidArgumentError, "low_disk .* no dtype", {"low_disk": True, "dst": tmp_path / "m", "dtype": "float16"}),
        (InvalidArgumentError, "dtype must be one of", {"dtype": "int8"}),
        (InvalidArgumentError, "dtype must be one of", {"dtype": torch.complex64}),
        (InvalidArgumentError, "packing must be", {"packing": "tight"}),
        (InvalidArgumentError, "checksum must be", {"checksum": "md5"}),
        (InvalidArgumentError, "variant", {"variant": "../x"}),
        (InvalidSizeError, "Invalid size", {"max_shard_size": "0GB"}),
        (CheckpointNotFoundError, "no directory", {"src": tmp_path / "nowhere"}),
        (CheckpointNotFoundError, "no checkpoint", {"use_safetensors": False}),
    ):
        values: dict[str, Any] = {"src": tmp_path / "m", "dst": tmp_path / "new", **arguments}
        with pytest.raises(error, match=match):
            hfshard.reshard_checkpoint(**values)
        assert files_in(tmp_path / "m") == before
        assert os.listdir(tmp_path) == ["m"]


def test_a_folder_of_the_target_is_not_resharded_over_what_stands_above_it(tmp_path: Path) -> None:
    hfshard.save_state_dict({"w": torch.zeros(3)}, tmp_path / "m")
    hfshard.save_state_dict(floats(), tmp_path / "m" / "sub")
    before = files_in(tmp_path / "m")
    with pytest.raises(InvalidArgumentError, match=r"to re-shard that in place, give '.*/m/sub' twice"):
        hfshard.reshard_checkpoint(tmp_path / "m", tmp_path / "m", "9KB", subfolder="sub")
    assert files_in(tmp_path / "m") == before
    hfshard.reshard_checkpoint(tmp_path / "m", tmp_path / "m" / "sub", "9KB", subfolder="sub")
    assert len(weights_in(tmp_path / "m" / "sub")) == 3


def test_in_place_by_another_path_is_in_place(tmp_path: Path) -> None:
    hfshard.save_state_dict(floats(), tmp_path / "m")
    (tmp_path / "link").symlink_to("m")
    hfshard.reshard_checkpoint(tmp_path / "m", tmp_path / "link", "9KB")
    assert len(weights_in(tmp_path / "m")) == 3
    assert hfshard.verify_checkpoint(tmp_path / "m").ok


def test_a_full_disk_is_told_before_the_first_byte(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    free_bytes = shutil.disk_usage(tmp_path).free
    entry = {"dtype": "U8", "shape": [free_bytes], "data_offsets": [0, free_bytes]}
    raw = json.dumps({"w": entry}).encode()
    with open(tmp_path / "old" / "model.safetensors", "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        try:
            file.truncate(8 + len(raw) + free_bytes)  # a hole: no bytes on the disk
        except OSError:
            pytest.skip("A FILE OF THIS SIZE CAN'T BE MADE HERE.")
    with pytest.raises(NotEnoughSpaceError, match=r"needs .* bytes, .* are free"):
        hfshard.reshard_checkpoint(tmp_path / "old", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def times_open(directory: Path) -> int:
    """How often this process has a directory open."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{fd}") == str(directory)
    return count


@pytest.mark.parametrize("what", ["another save", "a shard in place", "a shard removed"])
def test_a_source_that_changes_meanwhile_is_an_error(what: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    hfshard.save_state_dict(floats(), source, max_shard_size="9KB")
    target.mkdir()
    with ThreadPoolExecutor(1) as pool:
        with locked_directory(str(target), wait_seconds=10):
            running = pool.submit(hfshard.reshard_checkpoint, source, target)
            while times_open(target) < 2 and not running.done():
                time.sleep(0.001)  # until it has opened the source, and waits for the target
            if what == "another save":
                hfshard.save_state_dict({"w": torch.ones(2)}, source)
            elif what == "a shard in place":
                flip(source / "model-00002-of-00003.safetensors", -1)
            else:
                (source / "model-00002-of-00003.safetensors").unlink()
        with pytest.raises(CheckpointChangedError, match=r"was replaced or changed while it was re-sharded"):
            running.result()
    assert os.listdir(target) == []


# Pickles


def write_bins(directory: Path, state_dict: dict[str, Any], *, files: int = 1) -> Path:
    directory.mkdir()
    if files == 1:
        torch.save(state_dict, directory / "pytorch_model.bin")
        return directory
    weight_map: dict[str, str] = {}
    for number in range(files):
        name = f"pytorch_model-{number + 1:05d}-of-{files:05d}.bin"
        part = dict(
            list(state_dict.items())[number * len(state_dict) // files : (number + 1) * len(state_dict) // files]
        )
        torch.save(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 9}, "weight_map": weight_map}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return directory


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("size", ["9KB", "1MB"])
@pytest.mark.parametrize("is_in_place", [False, True], ids=["elsewhere", "in place"])
def test_pickles_become_the_files_of_a_save(files: int, size: str, is_in_place: bool, tmp_path: Path) -> None:
    state_dict = {**floats(), "t": random_tensor(1, torch.float32, (20, 10)).t(), "e": torch.empty(0)}
    old = write_bins(tmp_path / "old", state_dict, files=files)
    hfshard.save_state_dict(state_dict, tmp_path / "want", max_shard_size=size)
    target = old if is_in_place else tmp_path / "new"
    hfshard.reshard_checkpoint(old, target, size)
    assert files_in(target) == files_in(tmp_path / "want")


def test_ties_of_a_pickle_are_stored_once(tmp_path: Path) -> None:
    embed = torch.ones(30, 4)
    old = write_bins(tmp_path / "old", {"embed": embed, "head": embed, "part": embed[:3]})
    index = hfshard.reshard_checkpoint(old, old)
    assert index.tied_names == {"head": "embed"}
    assert index.total_size == 480 + 48
    assert weights_in(old) == ["model.safetensors"]


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_an_unsafe_pickle_is_refused_by_the_name_of_what_it_asks_for(tmp_path: Path) -> None:
    old = write_bins(tmp_path / "old", {"w": Evil()})
    with pytest.raises(UnsafePickleError, match=r"asks for 'posix\.system'"):
        hfshard.reshard_checkpoint(old, tmp_path / "new")
    assert weights_in(old) == ["pytorch_model.bin"]
    assert not (tmp_path / "new").exists()


def test_pickles_that_are_outranked_are_not_converted_in_place(tmp_path: Path) -> None:
    old = write_bins(tmp_path / "old", floats())
    hfshard.save_state_dict({"other": torch.ones(2)}, tmp_path / "safe")
    shutil.copy(tmp_path / "safe" / "model.safetensors", old)
    with pytest.raises(InvalidArgumentError, match=r"has 'model\.safetensors' too, which is what is loaded"):
        hfshard.reshard_checkpoint(old, old, use_safetensors=False)
    assert weights_in(old) == ["model.safetensors", "pytorch_model.bin"]
    hfshard.reshard_checkpoint(old, tmp_path / "new", use_safetensors=False)
    assert hfshard.load_state_dict(tmp_path / "new").keys() == floats().keys()
    with pytest.raises(InvalidArgumentError, match=r"low_disk is for safetensors"):
        hfshard.reshard_checkpoint(old, old, use_safetensors=False, low_disk=True)


def test_a_damaged_pickle_is_refused(tmp_path: Path) -> None:
    old = write_bins(tmp_path / "old", floats())
    (old / "pytorch_model.bin").write_bytes((old / "pytorch_model.bin").read_bytes()[:-2000])
    with pytest.raises(DamagedCheckpointError, match=r"pytorch_model\.bin"):
        hfshard.reshard_checkpoint(old, old)
    assert os.listdir(old) == ["pytorch_model.bin"]
