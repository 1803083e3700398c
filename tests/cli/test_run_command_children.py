"""hfshard is on in what the program starts: spawned workers, ranks of torchrun, commands."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.viewing.inspection import inspect_checkpoint
from tests.cli.programs import by_hfshard
from tests.helpers import processes

SPAWNS = """
import glob, multiprocessing, sys

def save(directory):
    from transformers import BertConfig, BertModel
    config = BertConfig(vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16)
    BertModel(config).save_pretrained(directory, max_shard_size="5KB")
    BertModel.from_pretrained(directory)
    with open(min(glob.glob(f"{directory}/*.safetensors")), "r+b") as file:
        file.seek(-1, 2)
        last = file.read()
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    try:
        BertModel.from_pretrained(directory)
    except ValueError as error:
        print(type(error).__name__)

if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=save, args=sys.argv[1:])
    worker.start()
    worker.join()
    sys.exit(worker.exitcode)
"""

LOOKS = """
import json, os, sys
from importlib.util import find_spec

find_spec("transformers")  # what an import of it begins with
from hfshard.models.install_settings import current_settings

settings = current_settings()
ranks = [os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ]
with open(f"{sys.argv[1]}-{'-'.join(ranks)}.json", "w") as file:
    json.dump([sys.argv[1:], __name__, settings.verify, settings.checksum, "transformers" in sys.modules], file)
"""
SAVES_A_PART = """
import sys
import torch
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

torch.distributed.init_process_group("gloo")
config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, dtype="float32"
)
model = LlamaForCausalLM(config)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(0.5)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
model.save_pretrained(sys.argv[1], max_shard_size="5KB")
torch.distributed.destroy_process_group()
"""
TORCHRUN = ["--standalone", "--nproc-per-node", "2"]
LINE = "hfshard 0.1.0 is on in "


@pytest.mark.compat
def test_spawned_worker_saves_and_loads_by_way_of_hfshard(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "spawn.py").write_text(SPAWNS)

    done = by_hfshard(["--checksum", "xxh3", "--verify", "full", "spawn.py", "out"], tmp_path, environment)

    assert (done.returncode, done.stdout) == (0, "IntegrityError\n"), done.stderr
    assert done.stderr.startswith(LINE)
    assert done.stderr.count("hfshard") == 2  # twice in the line
    found = inspect_checkpoint(str(tmp_path / "out"))
    shards = [file for file in found.files if file.tensors]
    assert all(shard.digest.xxh3 for shard in shards), found.files


def check_ranks(place: Path, verify: str) -> None:
    """Both ranks have written what `LOOKS` sees."""
    found = {path.name: json.loads(path.read_text()) for path in place.glob("*.json")}
    seen = [["out", "--verify", "none"], "__main__", verify, "sha256", False]
    assert found == {"out-0-2.json": seen, "out-1-2.json": seen}


def test_ranks_of_torchrun_inherit_it(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "look.py").write_text(LOOKS)
    words = ["--verify", "full", "-m", "torch.distributed.run", *TORCHRUN, "look.py", "out", "--verify", "none"]

    done = by_hfshard(words, tmp_path, environment)

    assert done.returncode == 0, done.stderr
    assert done.stderr.count(LINE) == 1
    check_ranks(tmp_path, "full")


def test_torchrun_runs_it_on_each_rank(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "look.py").write_text(LOOKS)
    words = ["-m", "torch.distributed.run", *TORCHRUN, "-m", "hfshard", "run", "look.py", "out", "--verify", "none"]

    done = processes.run(words, env=environment, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stderr.count(LINE) == 1
    check_ranks(tmp_path, "structure")


def test_command_of_the_environment_is_run(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "look.py").write_text(LOOKS)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "launch"
    environment = environment | {"PATH": f"{command.parent}:{environment['PATH']}"}
    lines = f'exec "{sys.executable}" look.py "$1-of-launch"\n'
    command.write_text(f"#!/bin/sh\n{lines}")
    command.chmod(0o755)

    done = by_hfshard(["--checksum", "none", "launch", "out"], tmp_path, environment)
    assert (done.returncode, done.stderr.count(LINE)) == (0, 1)
    seen = [["out-of-launch"], "__main__", "structure", None, False]
    assert json.loads((tmp_path / "out-of-launch-.json").read_text()) == seen

    # A directory that Python can run is the program where it is written as a path, or no command is called so.
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "__main__.py").write_text("import sys\nsys.exit(len(sys.argv) + 3)\n")
    assert by_hfshard(["launch", "again"], tmp_path, environment).returncode == 0
    assert by_hfshard(["./launch", "again"], tmp_path, environment).returncode == 5

    # So is a file that can be run and is none for Python.
    job = tmp_path / "job.sh"
    job.write_text(f"#!/usr/bin/env bash\n{lines}")
    job.chmod(0o755)
    assert by_hfshard(["./job.sh", "job"], tmp_path, environment).returncode == 0
    assert json.loads((tmp_path / "job-of-launch-.json").read_text())[1] == "__main__"
    script = tmp_path / "script"
    script.write_text("#!/usr/bin/env python3\nimport sys\nsys.exit(6)\n")
    script.chmod(0o755)
    assert by_hfshard(["./script"], tmp_path, environment).returncode == 6

    # One that ignores the environment is refused, as Python itself is.
    (tmp_path / "launch" / "__main__.py").unlink()
    for first_line in (f"#!{sys.executable} -sE", "#!/usr/bin/env -S python3 -sE"):
        command.write_text(f"{first_line}\n")
        assert "started with -E" in by_hfshard(["launch", "again"], tmp_path, environment).stderr


def test_bare_word_is_a_command_of_the_environment_whatever_lies_in_the_directory(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "bin").mkdir()
    environment = environment | {"PATH": f"{tmp_path}/bin:{environment['PATH']}"}
    for place, code in (("bin/launch", 3), ("launch", 4), ("alone", 4), ("bin/train.py", 3)):
        (tmp_path / place).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / place).chmod(0o755)
    (tmp_path / "train.py").write_text("import sys\nsys.exit(5)\n")
    words = ["launch", "./launch", "alone", "train.py"]

    found = {word: by_hfshard([word], tmp_path, environment).returncode for word in words}

    assert found == {"launch": 3, "./launch": 4, "alone": 4, "train.py": 5}


def test_pipes_of_a_shell_script_end_as_without_it(tmp_path: Path, environment: dict[str, str]) -> None:
    job = tmp_path / "job.sh"
    job.write_text("#!/usr/bin/env bash\nyes | head -n 1\nexit ${PIPESTATUS[0]}\n")
    job.chmod(0o755)

    done = by_hfshard(["--quiet", "./job.sh"], tmp_path, environment)

    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGPIPE, "y\n", "")


@pytest.mark.slow
@pytest.mark.compat
@pytest.mark.parametrize("is_outside", [True, False], ids=["hfshard run torchrun", "torchrun -m hfshard run"])
def test_ranks_save_their_parts_by_way_of_hfshard(
    is_outside: bool, tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "part.py").write_text(SAVES_A_PART)
    torchrun = ["-m", "torch.distributed.run", *TORCHRUN]

    if is_outside:
        done = by_hfshard([*torchrun, "part.py", "out"], tmp_path, environment)
    else:
        words = [*torchrun, "-m", "hfshard", "run", "part.py", "out"]
        done = processes.run(words, env=environment, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stderr.count(LINE) == 1
    report = hfshard.verify_checkpoint(tmp_path / "out", level="full")
    assert (report.ok, report.warnings) == (True, ())
    weights = hfshard.load_state_dict(tmp_path / "out")
    assert len(weights) == 21
    assert all(torch.equal(weight, torch.full_like(weight, 0.5)) for weight in weights.values())
