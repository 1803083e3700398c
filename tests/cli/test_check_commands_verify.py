"""`hfshard verify`, on whole checkpoints and on every way to damage one."""

from __future__ import annotations

import json
import os
import pty
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Run, save_example
from tests.helpers import forkserver

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def flip_bit(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 0x10
    path.write_bytes(raw)


def put_a_directory_there(path: Path) -> None:
    path.unlink()
    path.mkdir()


def copy_over(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes())


def overwrite(path: Path, text: str) -> None:
    path.write_text(text)


def test_whole_checkpoint_is_zero(example: Path, run: Run) -> None:
    done = run("verify", example)
    assert (done.returncode, done.stderr) == (0, "")
    # 404,096 + 64,204 bytes: the two shards with their headers of 4,096 bytes.
    assert done.stdout == f"{example}: whole: 3 files, 468.3 KB compared with their checksums\n"


def test_json_of_a_whole_checkpoint(example: Path, run: Run) -> None:
    done = run("verify", example, "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert report["level"] == "full"
    assert report["problems"] == []
    assert report["warnings"] == []
    assert report["checked_bytes"] == 404_096 + 64_204
    assert sorted(report["files"]) == [FIRST, SECOND, INDEX]


# What is done to the directory -> (file, tensor) that must be named.
Damage = Callable[[Path], None]
DAMAGES: dict[str, tuple[Damage, str, str | None]] = {
    "flipped bit in the middle of a tensor": (lambda d: flip_bit(d / FIRST, 300_000), FIRST, "embed"),
    "flipped bit in a small tensor": (lambda d: flip_bit(d / SECOND, (d / SECOND).stat().st_size - 1), SECOND, None),
    "flipped bit in a header": (lambda d: flip_bit(d / SECOND, 20), SECOND, None),
    "flipped bit in the padding": (lambda d: flip_bit(d / SECOND, 4090), SECOND, None),
    "truncated shard": (lambda d: os.truncate(d / FIRST, 10_000), FIRST, None),
    "empty shard": (lambda d: os.truncate(d / FIRST, 0), FIRST, None),
    "bytes after the end": (lambda d: os.truncate(d / SECOND, 100_000), SECOND, None),
    "missing shard": (lambda d: (d / SECOND).unlink(), SECOND, None),
    "shard that is a directory": (lambda d: put_a_directory_there(d / SECOND), SECOND, None),
    "shards swapped": (lambda d: copy_over(d / SECOND, d / FIRST), FIRST, "embed"),
    "git-lfs pointer": (
        lambda d: overwrite(d / FIRST, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        FIRST,
        None,
    ),
    "index cut short": (lambda d: os.truncate(d / INDEX, 100), INDEX, None),
    "index that is a list": (lambda d: overwrite(d / INDEX, "[]"), INDEX, None),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_one_and_names_file_and_tensor(kind: str, example: Path, run: Run) -> None:
    damage, file, tensor = DAMAGES[kind]
    damage(example)
    done = run("verify", example, "--format", "json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is False
    named = {(Path(problem["file"]).name, problem["tensor"]) for problem in report["problems"]}
    assert {name for name, _ in named} == {file}
    if tensor is not None:
        assert (file, tensor) in named
    assert all(problem["message"] for problem in report["problems"])


def test_every_damaged_file_is_named_at_once(example: Path, run: Run) -> None:
    flip_bit(example / FIRST, 300_000)
    os.truncate(example / SECOND, 10_000)
    done = run("verify", example)
    assert done.returncode == 1
    assert f"DAMAGED  {example / FIRST}, tensor embed\n" in done.stdout
    assert f"DAMAGED  {example / SECOND}\n" in done.stdout
    assert f"\n{example}: DAMAGED: " in done.stdout
    assert done.stdout.endswith(" in 2 files\n")
    assert "10000" in done.stdout
    assert done.stderr == ""


def test_structure_reads_no_data(example: Path, run: Run) -> None:
    flip_bit(example / FIRST, 300_000)  # beyond the 4 KiB of the tensor that its sample covers
    done = run("verify", example, "--level", "structure")
    assert done.returncode == 0
    assert done.stdout == f"{example}: whole: 3 files, in structure; no bytes were compared with checksums\n"


def test_structure_finds_a_shard_of_another_save(example: Path, run: Run, tmp_path: Path) -> None:
    state_dict = {"embed": torch.zeros(1000, 100), "layer.weight": torch.zeros(150, 100)}
    state_dict |= {"layer.bias": torch.ones(50, dtype=torch.bfloat16), "step": torch.tensor(8)}
    import hfshard

    hfshard.save_state_dict(state_dict, tmp_path / "other", max_shard_size="100KB")
    (example / SECOND).write_bytes((tmp_path / "other" / SECOND).read_bytes())
    done = run("verify", example, "--level", "structure")
    assert done.returncode == 1
    assert SECOND in done.stdout
    assert FIRST not in done.stdout


def test_variant_is_verified_alone(example: Path, run: Run) -> None:
    save_example(example, variant="fp16")
    flip_bit(example / FIRST, 300_000)
    assert run("verify", example, "--variant", "fp16").returncode == 0
    assert run("verify", example).returncode == 1


def test_stock_checkpoint_is_zero_with_a_warning(tmp_path: Path, run: Run) -> None:
    save_file({"w": torch.ones(10)}, tmp_path / "model.safetensors")
    done = run("verify", tmp_path)
    assert done.returncode == 0
    assert done.stdout == f"{tmp_path}: whole: 1 file, in structure; no bytes were compared with checksums\n"
    assert done.stderr.startswith("hfshard: warning: ")
    assert "model.safetensors" in done.stderr


def test_directory_without_weights_is_one(tmp_path: Path, run: Run) -> None:
    done = run("verify", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"hfshard: There is no checkpoint in '{tmp_path}'")


@pytest.mark.parametrize("option", [None, "--no-progress"])
def test_bar_is_shown_on_a_terminal_unless_unwanted(
    option: str | None, example: Path, child_environment: dict[str, str]
) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (25, 100))
    command = ["-m", "hfshard", "verify", example, *([option] if option else [])]
    done = forkserver.run(command, env=child_environment, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # EIO: the other end is closed
        pass
    os.close(ours)
    assert done.returncode == 0
    assert done.stdout.endswith("compared with their checksums\n")
    assert ("Verifying: " in shown.decode()) == (option is None)
    assert option is None or shown == b""
