"""`hfshard reshard` and `hfshard convert`, as real processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from tests.cli.conftest import Run, save_example


def weights_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix in (".safetensors", ".bin"))


def write_bin(directory: Path, value: Any) -> Path:
    directory.mkdir()
    torch.save(value, directory / "pytorch_model.bin")
    return directory


def test_reshard_shows_what_it_read_and_wrote(example: Path, tmp_path: Path, run: Run) -> None:
    (example / "tokenizer.json").write_text("{}")
    done = run("reshard", example, tmp_path / "new", "--max-shard-size", "1MB")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        f"read     {example}: 468.3 KB in 2 files, every copied byte compared with its checksum",
        f"written  {tmp_path / 'new'}: 464.2 KB in 1 file",
        "copied   tokenizer.json",
    ]
    heads, row = (line.split() for line in lines[4:6])
    assert (heads, row[:4]) == (["file", "size", "tensors", "checksum"], ["model.safetensors", "464.2", "KB", "4"])
    assert lines[-1] == f"To check it at any time, run: hfshard verify {tmp_path / 'new'}"
    assert hfshard.verify_checkpoint(tmp_path / "new").ok


def test_json_says_all_of_it(example: Path, tmp_path: Path, run: Run) -> None:
    done = run("reshard", example, tmp_path / "new", "--format", "json", "--checksum", "xxh3")
    found = json.loads(done.stdout)
    assert [file["name"] for file in found["files_before"]] == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    ]  # fmt: skip
    [file] = found["files"]
    size = os.path.getsize(tmp_path / "new" / "model.safetensors")
    expected = {"name": "model.safetensors", "tensors": 4, "sha256": None, "size": size}
    assert {key: file[key] for key in expected} == expected
    assert len(file["xxh3"]) == 32
    whole = {"total_size": 460_108, "tied_names": {"unembed": "embed"}, "copied": []}
    assert {key: found[key] for key in whole} == whole
    assert found["is_compared"] is True


def test_options_are_those_of_the_function(tmp_path: Path, run: Run) -> None:
    save_example(tmp_path / "old", variant="fp16")
    options = ["--variant", "fp16", "--packing", "balanced", "--dtype", "bfloat16", "--max-shard-size", "50000"]
    assert run("reshard", tmp_path / "old", tmp_path / "new", *options, "--checksum", "none").returncode == 0
    hfshard.reshard_checkpoint(
        tmp_path / "old", tmp_path / "want", 50000, variant="fp16", packing="balanced", dtype="bfloat16", checksum=None
    )
    names = sorted(os.listdir(tmp_path / "want"))
    assert sorted(os.listdir(tmp_path / "new")) == names
    assert all((tmp_path / "new" / name).read_bytes() == (tmp_path / "want" / name).read_bytes() for name in names)


def test_low_disk_in_place(example: Path, run: Run) -> None:
    done = run("reshard", example, example, "--max-shard-size", "40KB", "--low-disk")
    assert done.returncode == 0
    assert len(weights_in(example)) > 2
    assert hfshard.verify_checkpoint(example).ok


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["reshard", "{old}"], 2, "DST"),
        (["reshard", "{old}", "{new}", "--max-shard-size", "0"], 2, "Invalid size 0: it must be at least one byte."),
        (["reshard", "{old}", "{new}", "--max-shard-size", "5XB"], 2, "Invalid size '5XB'."),
        (["reshard", "{old}", "{new}", "--packing", "tight"], 2, "invalid choice: 'tight'"),
        (["convert", "{old}", "{new}", "--low-disk"], 2, "unrecognized arguments: --low-disk"),
        (["reshard", "{old}", "{new}", "--low-disk"], 2, "give the same directory twice"),
        (["reshard", "{old}", "{new}", "--dtype", "int8"], 2, "invalid choice: 'int8'"),
        (["reshard", "{old}", "{old}/sub"], 2, "give a directory outside, or the source itself to re-shard in place."),
        (["reshard", "{new}/nowhere", "{new}"], 1, "There is no directory"),
        (["convert", "{old}", "{new}"], 2, "For files of another size, run: hfshard reshard {old} {new}"),
    ],
)
def test_errors_say_what_to_do(
    arguments: list[str], code: int, words: str, example: Path, tmp_path: Path, run: Run
) -> None:
    places = {"old": example, "new": tmp_path / "new"}
    done = run(*[argument.format(**places) for argument in arguments])
    assert (done.returncode, done.stdout) == (code, "")
    assert words.format(**places) in done.stderr
    assert not (tmp_path / "new").exists()
    assert hfshard.verify_checkpoint(example).ok


def test_damage_is_named(example: Path, tmp_path: Path, run: Run) -> None:
    file = example / "model-00001-of-00002.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    done = run("reshard", example, tmp_path / "new")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"hfshard: Tensor 'embed' of shard '{file}' is damaged" in done.stderr
    assert done.stderr.endswith(f"run 'hfshard verify {example}'.\n")
    assert not (tmp_path / "new").exists()


def test_convert_in_place_removes_the_pickle_and_compares_its_checksums(tmp_path: Path, run: Run) -> None:
    old = write_bin(tmp_path / "old", {"a": torch.ones(3), "b": torch.zeros(2, 2)})
    done = run("convert", old, old)
    assert (done.returncode, done.stderr) == (0, "")
    assert "in 1 file, every copied byte compared with its checksum" in done.stdout.splitlines()[0]
    assert done.stdout.splitlines()[1].startswith(f"written  {old}: ")
    assert weights_in(old) == ["model.safetensors"]
    assert hfshard.load_state_dict(old)["a"].tolist() == [1.0, 1.0, 1.0]


def test_convert_says_that_a_pickle_without_checksums_was_not_compared(tmp_path: Path, run: Run) -> None:
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        old = write_bin(tmp_path / "old", {"a": torch.ones(3)})
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    done = run("convert", old, old)
    assert done.returncode == 0
    assert "in 1 file" in done.stdout.splitlines()[0] and "compared" not in done.stdout.splitlines()[0]
    assert "has no checksums of its tensors: its structure was checked, its bytes could not be." in done.stderr
    assert hfshard.load_state_dict(old)["a"].tolist() == [1.0, 1.0, 1.0]


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_convert_refuses_an_unsafe_pickle_by_name(tmp_path: Path, run: Run) -> None:
    old = write_bin(tmp_path / "old", {"w": Evil()})
    done = run("convert", old, old)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"hfshard: '{old / 'pytorch_model.bin'}' was not loaded: its pickle asks for 'posix.system'" in done.stderr
    assert weights_in(old) == ["pytorch_model.bin"]


def test_convert_of_what_is_safetensors_too_is_refused_in_place(tmp_path: Path, run: Run) -> None:
    old = write_bin(tmp_path / "old", {"w": torch.ones(2)})
    hfshard.save_state_dict({"w": torch.zeros(2)}, tmp_path / "safe")
    os.rename(tmp_path / "safe" / "model.safetensors", old / "model.safetensors")
    done = run("convert", old, old)
    assert (done.returncode, done.stdout) == (2, "")
    assert "has 'model.safetensors' too, which is what is loaded" in done.stderr
    assert weights_in(old) == ["model.safetensors", "pytorch_model.bin"]
