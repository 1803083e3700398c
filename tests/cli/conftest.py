"""Real checkpoints, the command line as a real process, and programs for `hfshard run`."""

from __future__ import annotations

import io
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.cli.main import main
from tests.cli.programs import LOOKS, without_hfshard_on
from tests.helpers import processes


class Run:
    """Runs `hfshard ARGUMENTS` in a process of its own; keywords go into its environment."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment

    def __call__(self, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        command = ["-m", "hfshard", *map(str, arguments)]
        return processes.run(command, env={**self._environment, **environment})

    def ok(self, *arguments: object, code: int = 0, **environment: str) -> str:
        """Run what says nothing on stderr; gives its stdout."""
        done = self(*arguments, **environment)
        assert (done.returncode, done.stderr) == (code, "")
        return done.stdout

    def fails(self, code: int, *arguments: object, **environment: str) -> str:
        """Run what ends with this code and prints nothing to stdout; gives its stderr."""
        done = self(*arguments, **environment)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        return done.stderr


@pytest.fixture
def run(child_environment: dict[str, str]) -> Run:
    """Run `hfshard ARGUMENTS`."""
    return Run(child_environment)


def rejected(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Parse arguments that are bad usage, and return the last line of stderr."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


class Terminal(io.StringIO):
    """A terminal on which something is typed."""

    def isatty(self) -> bool:
        return True


def check_reader_that_goes_away(first_line: str, environment: dict[str, str], *arguments: object) -> None:
    """Close stdout of a command that prints more than a pipe and what reads it hold (72 KiB) after its first line."""
    command = ["-m", "hfshard", *arguments]
    with processes.start(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline().startswith(first_line)
        child.stdout.close()
        assert child.wait(110) == 141
        assert child.stderr.read() == ""


def save_example(directory: Path, **options: object) -> Path:
    """Four tensors and a tied name: "embed" (400,000 bytes) alone in a file, the others (60,108 bytes) in one."""
    embed = torch.arange(100_000, dtype=torch.float32).reshape(1000, 100)
    state_dict = {
        "embed": embed,
        "layer.weight": torch.arange(15_000, dtype=torch.float32).reshape(150, 100),
        "layer.bias": torch.ones(50, dtype=torch.bfloat16),
        "step": torch.tensor(7),
        "unembed": embed,
    }
    hfshard.save_state_dict(state_dict, directory, max_shard_size="100KB", **options)  # type: ignore[arg-type]
    return directory


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The checkpoint of `save_example`."""
    return save_example(tmp_path / "example", metadata={"note": "for tests"})


@pytest.fixture(scope="session")
def environment(child_environment: dict[str, str]) -> dict[str, str]:
    """That of a shell in which nothing runs."""
    return without_hfshard_on(child_environment)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """The same program as a script, a module of a package, a directory, a zip file; "in here" has a space."""
    directory = tmp_path / "in here"
    (directory / "package").mkdir(parents=True)
    for name in ("look.py", "package/__init__.py", "package/look.py", "package/__main__.py"):
        (directory / name).write_text("" if name.endswith("__init__.py") else LOOKS)
    with zipfile.ZipFile(directory / "look.pyz", "w") as archive:
        archive.writestr("__main__.py", LOOKS)
    return directory
