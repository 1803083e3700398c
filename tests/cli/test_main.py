"""Arguments, exit codes, and what goes to which stream."""

from __future__ import annotations

import configparser
import os
import shutil
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from subprocess import PIPE

import pytest

from tests import REPOSITORY
from tests.cli.conftest import Run, rejected
from tests.helpers import processes


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ([], "COMMAND"),
        (["insepct", "."], "invalid choice: 'insepct'"),
        (["verify"], "PATH"),
        (["verify", ".", "extra"], "unrecognized arguments: extra"),
        (["verify", ".", "--tensors"], "unrecognized arguments: --tensors"),
        (["verify", ".", "--level", "all"], "invalid choice: 'all'"),
        (["verify", "no/such/directory"], "'no/such/directory' is not a directory: it does not exist"),
        (
            ["verify", "org/name"],
            "it does not exist. To use a repo of the Hub, pull it first: hfshard pull org/name NEW_DIR",
        ),
        (["verify", ""], "'' is not a directory"),
        (["inspect", ".", "--format", "yaml"], "invalid choice: 'yaml'"),
        (["revisions", "s3://bucket/hub"], "'s3://bucket/hub' is not a directory: this command needs a directory"),
        (["inspect", "no\x1b[2J"], "'no\\x1b[2J' is not a directory"),
        (["inspect", ".", "\x1b[2J"], "unrecognized arguments: \\x1b[2J"),
        (["inspect", ".", "https://user:TOKEN@host/x"], "unrecognized arguments: https://host/x"),
        (["https://user:TOKEN@host/x"], "invalid choice: 'https://host/x'"),
        (["revisions", "https://user:TOKEN@host/x"], "'https://host/x' is not a directory"),
        (
            ["verify", ".", "--levl", "full"],
            "verify: error: unrecognized arguments: --levl full. Did you mean '--level'?",
        ),
        (["inspect", ".", "--varaint=fp16"], "unrecognized arguments: --varaint=fp16. Did you mean '--variant'?"),
        (["run", "--quite", "train.py"], "unrecognized arguments: --quite. Did you mean '--quiet'?"),
        (["inspect", "nowhere"], "inspect: error: 'nowhere' is not a directory: it does not exist"),
    ],
)
def test_bad_usage_is_two_and_only_on_stderr(arguments: list[str], hint: str, run: Run) -> None:
    err = run.fails(2, *arguments)
    assert err.startswith("usage: hfshard")
    assert hint in err
    assert "TOKEN" not in err
    assert "\x1b" not in err


def test_a_rejected_argument_is_shown_without_its_password_and_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = rejected(capsys, "inspect", "here", "https://me:hunter2@host/x?sig=abc", "\x1b[2J")

    assert shown == r"hfshard inspect: error: unrecognized arguments: https://host/x?… \x1b[2J"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pull", "hf://user:TOKEN@org/x", "out"], "To load from or push to the Hub repo, write 'org/x'."),
        (["pull", "user:TOKEN@host/x", "out"], "'host/x' is neither a directory nor a repo_id"),
        (["show", "user:TOKEN@host/x"], "'host/x' is neither a directory nor a repo_id"),
        (["diff", "user:TOKEN@host/x", "out"], "'host/x' is neither a directory nor a repo_id"),
        (["pull", "abfss://user:TOKEN@c@mine.dfs.core.windows.net/x", "out"], "is not a repo_id"),
        (["pull", "org/x", "out", "--revision", "https://user:TOKEN@host/x"], "revision 'https://host/x'"),
        (["run", "https://user:TOKEN@host/x"], "'https://host/x' is an address, not a program. Pass a path"),
    ],
)
def test_no_message_repeats_the_password_of_an_address(arguments: list[str], said: str, run: Run) -> None:
    done = run(*arguments)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "TOKEN" not in done.stdout + done.stderr


def test_file_in_place_of_the_directory_is_two_and_names_the_directory(tmp_path: Path, run: Run) -> None:
    (tmp_path / "model.safetensors").touch()
    err = run.fails(2, "push", tmp_path / "model.safetensors", "org/name")
    assert f"it is a file; did you mean '{tmp_path}'?" in err


def test_bad_variant_is_one_message(example: Path, run: Run) -> None:
    assert run.fails(2, "inspect", example, "--variant", "../up").startswith("hfshard: The variant '../up' ")


@pytest.mark.parametrize(("directory", "code"), [("whole", 0), ("damaged", 1), ("nowhere", 2)])
def test_closed_streams_leave_the_exit_code(
    directory: str, code: int, example: Path, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    shutil.copytree(example, tmp_path / "whole")
    example.rename(tmp_path / "damaged")
    os.truncate(tmp_path / "damaged/model-00001-of-00002.safetensors", 5000)
    # What `python -m hfshard verify DIR <&- >&- 2>&-` begins with.
    closed = "import os, sys; os.closerange(0, 3); sys.stdin = sys.stdout = sys.stderr = None"
    verify = f"from hfshard.cli.main import main; sys.exit(main(['verify', {str(tmp_path / directory)!r}]))"

    done = processes.run(["-c", f"{closed}; {verify}"], env=child_environment)

    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_full_disk_behind_stdout_is_one_message(example: Path, child_environment: dict[str, str]) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        done = processes.run(["-m", "hfshard", "inspect", example], env=child_environment, stdout=full.fileno())

    assert (done.returncode, done.stderr) == (1, "hfshard: [Errno 28] No space left on device\n")


def test_a_misspelled_path_is_answered_with_the_nearest_name(example: Path, run: Run) -> None:
    error = "it does not exist"

    assert f"/exmaple' is not a directory: {error}. Did you mean 'example'?\n" in run.fails(
        2, "verify", example.parent / "exmaple/"
    )
    assert f"'{example}/other' is not a directory: {error}\n" in run.fails(2, "verify", example / "other")
    file = example / "model.safetensors.index.json"
    assert f"'{file}/x' is not a directory: {error}\n" in run.fails(2, "verify", file / "x")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["verify", "--help"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_disk_behind_the_help_is_one_message(
    arguments: list[str], unbuffered: str, child_environment: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "hfshard", *arguments]
    environment = {**child_environment, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb", buffering=0) as full:
        done = subprocess.run(command, env=environment, stdout=full, stderr=PIPE, text=True)

    assert (done.returncode, done.stderr) == (1, "hfshard: [Errno 28] No space left on device\n")


def test_a_warning_of_the_library_is_a_message(example: Path, tmp_path: Path, run: Run) -> None:
    os.mkfifo(example / "model-00001-of-00002.safetensors.part\x1b[2J")

    done = run("push", example, tmp_path / "hub")

    assert done.returncode == 0
    assert done.stderr.startswith(
        f"hfshard: warning: '{example}/model-00001-of-00002.safetensors.part\\x1b[2J' is a pipe"
    )
    assert done.stderr.count("\n") == 1


HELP = """\
usage: hfshard [-h] [--version] COMMAND ...

Inspect, check, move and rewrite sharded checkpoints.

inspect:
  inspect      show shards, dtypes, the largest tensors, tied names, metadata
  show         write an HTML page: a map of the modules, files, search
  diff         show what differs between two checkpoints, and where
  checkpoints  list a training run's checkpoints, and what is wrong with them

check:
  verify       check every file of a checkpoint or training run
  sign         sign every file of a checkpoint, as OpenSSF Model Signing does

move:
  push         push a checkpoint to a hub as one commit, or to a store
  pull         pull a checkpoint from a hub or a store, and check it
  revisions    list, tag or delete the revisions of a directory hub

rewrite:
  reshard      write a checkpoint in files of another size
  convert      convert .bin, .pt, DeepSpeed's and FSDP's parts to safetensors
  remove       remove a checkpoint, also of a run, or leftovers of killed saves

run:
  run          run a program unchanged, with hfshard enabled

options:
  -h, --help  show this help message and exit
  --version   show program's version number and exit

`hfshard COMMAND --help` shows the arguments of a command.
"""


def test_version_and_help_go_to_stdout(run: Run) -> None:
    version, text = run("--version"), run("--help", COLUMNS="80")
    assert (version.returncode, version.stdout, version.stderr) == (0, "hfshard 0.1.0\n", "")
    assert (text.returncode, text.stderr) == (0, "")
    assert text.stdout == HELP
    assert max(map(len, text.stdout.splitlines())) <= 80


def test_arguments_and_help_need_nothing_but_hfshard(child_environment: dict[str, str]) -> None:
    code = """
import sys
before = set(sys.modules)
from hfshard.cli.main import main, make_parser
make_parser().parse_args(["convert", "a", "b", "--max-shard-size", "5GB"])
for words in (["--help"], ["verify", "--help"]):
    try:
        main(words)
    except SystemExit as stop:
        assert stop.code == 0
loaded = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
assert loaded == {"hfshard"}, loaded
"""
    processes.run_fresh(["-c", code], env=child_environment, check=True)


def test_interrupt_is_130_without_a_traceback(tmp_path: Path, child_environment: dict[str, str]) -> None:
    code = f"""
import signal, sys, time
from hfshard.cli import check_commands, main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
def wait(arguments):
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
check_commands.verify = wait
sys.exit(main.main(["verify", {str(tmp_path)!r}]))
"""
    with processes.start(["-c", code], env=child_environment, stdout=PIPE, stderr=PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=110)[1] == ""
        assert child.returncode == 130


SCRIPT = Path(sys.executable).with_name("hfshard")


def test_new_interpreter_runs_a_command(example: Path, run: Run, child_environment: dict[str, str]) -> None:
    done = processes.run_fresh(["-m", "hfshard", "verify", example], env=child_environment)
    again = run("verify", example)
    assert (done.returncode, done.stdout, done.stderr) == (0, again.stdout, "")


@pytest.mark.skipif(not SCRIPT.exists(), reason=f"hfshard is not installed: there is no {SCRIPT}")
def test_console_script_ends_with_the_code_of_the_command(tmp_path: Path, child_environment: dict[str, str]) -> None:
    """Of commands that need no torch: the next test says that others are the same function."""
    for arguments, code, words in ((["--version"], 0, "hfshard 0.1.0\n"), (["verify", str(tmp_path / "none")], 2, "")):
        command = [str(SCRIPT), *arguments]
        done = subprocess.run(command, env=child_environment, capture_output=True, text=True, timeout=110)
        assert (done.returncode, done.stdout) == (code, words), done.stderr


def test_console_script_is_the_same_function() -> None:
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg", encoding="utf-8")
    name, _, target = setup["options.entry_points"]["console_scripts"].strip().partition(" = ")
    module, _, function = target.partition(":")
    assert name == "hfshard"
    assert callable(getattr(import_module(module), function))
