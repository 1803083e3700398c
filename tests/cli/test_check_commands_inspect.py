"""`hfshard inspect`, on checkpoints of ours and of others."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from subprocess import PIPE

import torch
from safetensors.torch import save_file

from tests.cli.conftest import Run, save_example
from tests.helpers import forkserver

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_text_shows_shards_dtypes_tensors_tied_names_and_metadata(example: Path, run: Run) -> None:
    done = run("inspect", example)
    assert (done.returncode, done.stderr) == (0, "")
    digests = [hashlib.sha256((example / name).read_bytes()).hexdigest()[:12] for name in SHARDS]
    assert (
        done.stdout
        == f"""\
checkpoint  {example}
entry file  model.safetensors.index.json
weights     460.1 KB in 2 files
tensors     4 tensors, 115,051 parameters
checksums   yes

file                                  size                        tensors  checksum
model-00001-of-00002.safetensors  404.1 KB  ████████████████████        1  sha256 {digests[0]}…
model-00002-of-00002.safetensors   64.2 KB  ███▏                        3  sha256 {digests[1]}…

dtype  tensors  parameters      size
F32          2     115,000  460.0 KB  ████████████████████
BF16         1          50     100 B  ▏
I64          1           1       8 B  ▏

largest tensors  dtype  shape     parameters      size  file
embed            F32    1000×100     100,000  400.0 KB  model-00001-of-00002.safetensors
layer.weight     F32    150×100       15,000   60.0 KB  model-00002-of-00002.safetensors
layer.bias       BF16   50                50     100 B  model-00002-of-00002.safetensors
step             I64    scalar             1       8 B  model-00002-of-00002.safetensors

tied name  stored as
unembed    embed

metadata
note      for tests
"""
    )


def test_json_has_everything(example: Path, run: Run) -> None:
    done = run("inspect", example, "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    files = found.pop("files")
    assert [(file["name"], file["tensors"]) for file in files] == [(SHARDS[0], 1), (SHARDS[1], 3)]
    for file in files:
        raw = (example / file["name"]).read_bytes()
        assert file["size"] == len(raw)
        assert file["sha256"] == hashlib.sha256(raw).hexdigest()
    tensors = found.pop("tensors")
    assert {
        tensor["name"]: (tensor["dtype"], tensor["shape"], tensor["nbytes"], tensor["file"]) for tensor in tensors
    } == {
        "embed": ("F32", [1000, 100], 400_000, SHARDS[0]),
        "layer.weight": ("F32", [150, 100], 60_000, SHARDS[1]),
        "layer.bias": ("BF16", [50], 100, SHARDS[1]),
        "step": ("I64", [], 8, SHARDS[1]),
    }
    assert found == {
        "directory": str(example),
        "entry": "model.safetensors.index.json",
        "key": None,
        "is_verifiable": True,
        "signature": None,
        "total_size": 460_108,
        "total_parameters": 115_051,
        "dtypes": [
            {"dtype": "F32", "tensors": 2, "parameters": 115_000, "nbytes": 460_000},
            {"dtype": "BF16", "tensors": 1, "parameters": 50, "nbytes": 100},
            {"dtype": "I64", "tensors": 1, "parameters": 1, "nbytes": 8},
        ],
        "tied_names": {"unembed": "embed"},
        "metadata": {"note": "for tests"},
    }


def test_text_shows_five_tensors_and_all_when_asked(tmp_path: Path, run: Run) -> None:
    save_file({f"t{number}": torch.ones(number) for number in range(1, 9)}, tmp_path / "model.safetensors")
    few, all_of_them = run("inspect", tmp_path).stdout, run("inspect", tmp_path, "--tensors").stdout
    assert re.findall(r"^t\d", few, re.MULTILINE) == ["t8", "t7", "t6", "t5", "t4"]
    assert "largest tensors" in few
    assert sorted(re.findall(r"^t\d", all_of_them, re.MULTILINE)) == ["t1", "t2", "t3", "t4", "t5", "t6", "t7", "t8"]
    assert "largest" not in all_of_them


def test_variant_is_a_checkpoint_of_its_own(example: Path, run: Run) -> None:
    save_example(example, variant="fp16", checksum="xxh3")
    done = run("inspect", example, "--variant", "fp16")
    assert done.returncode == 0, done.stderr
    assert "model.safetensors.index.fp16.json" in done.stdout
    assert "model.fp16-00001-of-00002.safetensors" in done.stdout
    assert "xxh3 " in done.stdout
    assert "\nmodel-0000" not in done.stdout


def test_stock_single_file_is_shown_without_checksums(minilm: Path, run: Run) -> None:
    done = run("inspect", minilm)
    assert (done.returncode, done.stderr) == (0, "")
    assert "weights     90.9 MB in 1 file\n" in done.stdout
    assert "tensors     104 tensors, 22,713,728 parameters\n" in done.stdout
    assert "checksums   none: saved by another tool\n" in done.stdout
    line = "embeddings.word_embeddings.weight          F32    30522×384  11,720,448  46.9 MB  model.safetensors\n"
    assert line in done.stdout


def test_pickled_weights_are_shown(tmp_path: Path, run: Run) -> None:
    torch.save({"w": torch.ones(10, 10, dtype=torch.float16)}, tmp_path / "pytorch_model.bin")
    done = run("inspect", tmp_path, "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["tensors"] == [
        {"name": "w", "dtype": "F16", "shape": [10, 10], "nbytes": 200, "file": "pytorch_model.bin"}
    ]
    assert found["entry"] == "pytorch_model.bin"


def test_damaged_checkpoint_is_one_message_on_stderr(example: Path, run: Run) -> None:
    (example / SHARDS[1]).unlink()
    done = run("inspect", example)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"hfshard: File '{example / SHARDS[1]}' is missing. ")
    assert done.stderr.count("\n") == 1


def test_names_that_would_move_the_cursor_are_escaped(tmp_path: Path, run: Run) -> None:
    save_file({"a\x1b[2Jb": torch.ones(1)}, tmp_path / "model.safetensors", {"note": "x\x1b]0;title\x07"})
    done = run("inspect", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "a\\x1b[2Jb" in done.stdout


def test_output_in_a_poor_encoding_is_escaped(example: Path, run: Run) -> None:
    done = run("inspect", example, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u2588\\u2588" in done.stdout


def test_reader_that_goes_away_is_no_error(tmp_path: Path, child_environment: dict[str, str]) -> None:
    # More than a pipe holds (64 KiB), so that the command meets the closed end while it writes.
    save_file({f"tensor.{number:05d}": torch.ones(1) for number in range(5000)}, tmp_path / "model.safetensors")
    command = ["-m", "hfshard", "inspect", tmp_path, "--tensors"]
    with forkserver.start(command, env=child_environment, stdout=PIPE, stderr=PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline().startswith("checkpoint")
        child.stdout.close()
        assert child.wait(110) == 141
        assert child.stderr.read() == ""
