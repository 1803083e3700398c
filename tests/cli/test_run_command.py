"""A program by `hfshard run` is what it is by `python`: its words are split, it is run both ways, and compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hfshard.cli.run_command import split_command_line, split_python_options
from tests import REPOSITORY
from tests.cli.programs import by_hfshard, by_python
from tests.helpers import processes


@pytest.mark.parametrize(
    ("words", "own", "program"),
    [
        ("run train.py --verify full", "run", "train.py --verify full"),
        ("run --quiet --verify full train.py --quiet", "run --quiet --verify full", "train.py --quiet"),
        ("run --verify=full -m pkg -h", "run --verify=full", "-m pkg -h"),
        ("run --checksum xxh3 -- train.py -- x", "run --checksum xxh3", "train.py -- x"),
        ("run -- --odd.py", "run", "--odd.py"),
        ("run -h train.py", "run -h", "train.py"),
        ("run -", "run", "-"),
        ("run", "run", ""),
        ("run --verify", "run --verify", ""),
        ("verify run --format json", "verify run --format json", ""),
        ("", "", ""),
    ],
)
def test_own_words_end_where_the_program_begins(words: str, own: str, program: str) -> None:
    assert split_command_line(words.split()) == (own.split(), program.split())


@pytest.mark.parametrize(
    ("words", "options", "program", "letters"),
    [
        ("train.py -I", "", "train.py -I", ""),
        ("-X dev -Werror -u train.py", "-X dev -Werror -u", "train.py", "XWu"),
        ("-uW error - -E", "-uW error", "- -E", "uW"),
        ("-XE -Im pkg.module -S", "-XE -I", "-m pkg.module -S", "XI"),
        ("-bbmpkg x", "-bb", "-mpkg x", "bb"),
        ("-c print() -c", "", "-c print() -c", ""),
        ("-u -- -m", "-u", "-m", "u"),
        ("-W", "-W", "", "W"),
    ],
)
def test_options_of_python_end_as_python_reads_them(words: str, options: str, program: str, letters: str) -> None:
    assert split_python_options(words.split()) == (options.split(), program.split(), letters)


@pytest.mark.parametrize(
    "words",
    [
        ["look.py", "--quiet", "--", "--verify", "a b", ""],
        ["./look.py"],
        ["../in here/look.py", "-m", "x"],
        ["-m", "package.look", "-h"],
        ["-mpackage"],
        ["package"],
        ["look.pyz", "1"],
        ["-", "--help"],
        ["-c", "exec(open('look.py').read())", "-c"],
        ["-cexec(open('look.py').read())  # http://x"],
        ["-X", "dev", "-Werror", "-Ou", "look.py", "-I"],
    ],
    ids=" ".join,
)
def test_program_starts_as_by_python(words: list[str], programs: Path, environment: dict[str, str]) -> None:
    (programs / "input").write_text((programs / "look.py").read_text() if words[0] == "-" else "typed\n")
    with open(programs / "input") as first, open(programs / "input") as second:
        expected = by_python(words, programs, environment, stdin=first.fileno())
        found = by_hfshard(words, programs, environment, stdin=second.fileno())

    assert (found.returncode, json.loads(found.stdout)) == (0, json.loads(expected.stdout))
    # The words are those that the shell gave; only the name of Python is longer in its own messages.
    assert found.stderr.startswith("hfshard 0.1.0 is on in ")
    assert found.stderr.count("\n") == 1 + expected.stderr.count("\n")


def test_paths_of_a_script_are_those_by_python(programs: Path, environment: dict[str, str]) -> None:
    for variable in ({"PYTHONSAFEPATH": "1"}, {"PYTHONPATH": ""}, {"PYTHONPATH": f":{programs}::"}):
        expected, found = (way(["look.py"], programs, environment | variable).stdout for way in (by_python, by_hfshard))
        assert found == expected != "", variable


ENDS = {
    "sys.exit(3)": 3,
    "sys.exit('no data')": 1,
    "{}['loss']": 1,
    "raise SystemExit(None)": 0,
    "os.abort()": -signal.SIGABRT,
    "os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
    "os._exit(141)": 141,
}


def test_program_ends_as_by_python(tmp_path: Path, environment: dict[str, str]) -> None:
    for line, code in ENDS.items():
        (tmp_path / "end.py").write_text(f"import os, signal, sys\n\ndef end():\n    {line}\n\nend()\n")
        expected = by_python(["end.py"], tmp_path, environment)
        found = by_hfshard(["--quiet", "end.py"], tmp_path, environment)

        assert (found.returncode, found.stdout, found.stderr) == (code, "", expected.stderr), line


MISSING = {
    "no.py": (2, "can't open file '{}/no.py': [Errno 2] No such file or directory"),
    "-m nowhere": (1, "No module named nowhere"),
    "-mno.where": (
        1,
        "Error while finding module specification for 'no.where' (ModuleNotFoundError: No module named 'no')",
    ),
}


@pytest.mark.parametrize("words", MISSING)
def test_program_that_does_not_exist_is_pythons_own_error_alone(
    words: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    found = by_hfshard(words.split(), tmp_path, environment)

    code, message = MISSING[words]
    assert (found.returncode, found.stderr) == (code, f"{sys.executable}: {message.format(tmp_path)}\n")


def test_interrupt_and_process_are_the_programs_own(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "wait.py").write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # or a job in the background ignores it\n"
        "print(os.getpid(), flush=True)\n"
        "while True:\n    time.sleep(0.01)\n"
    )
    words = ["-m", "hfshard", "run", "--quiet", "wait.py"]
    with processes.start(words, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == f"{child.pid}\n"
        child.send_signal(signal.SIGINT)
        stderr = child.communicate(timeout=110)[1]

    assert child.returncode == -signal.SIGINT
    assert stderr.startswith(f'Traceback (most recent call last):\n  File "{tmp_path}/wait.py", line ')
    assert stderr.endswith("KeyboardInterrupt\n")


def test_closed_streams_stay_closed(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "look.py").write_text("import sys\nsys.exit(5 if sys.stdout is sys.stderr is None else 1)\n")
    command = f"exec '{sys.executable}' -m hfshard run look.py >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, timeout=110).returncode == 5


COUNTS = "import os, sys; print(len(os.environ['PYTHONPATH'].split(os.pathsep)), os.environ['HFSHARD_RUN'])"


def test_one_process_of_a_job_says_that_it_is_on(tmp_path: Path, environment: dict[str, str]) -> None:
    said = "hfshard 0.1.0 is on in -c and the Python processes that it starts: save_pretrained, push_to_hub and "
    inner = f"import os, sys\nos.execv(sys.executable, [sys.executable, '-m', 'hfshard', 'run', '-c', {COUNTS!r}])"

    one = by_hfshard(["-c", COUNTS], tmp_path, environment)
    within = by_hfshard(["--verify", "full", "-c", inner], tmp_path, environment)
    first = by_hfshard(["-c", COUNTS], tmp_path, environment | {"RANK": "0", "SLURM_PROCID": "1"})
    second = by_hfshard(["-c", COUNTS], tmp_path, environment | {"SLURM_PROCID": "1"})

    settings = json.dumps({"prefix": sys.prefix, "verify": "structure", "checksum": "sha256"})
    parts = len(environment["PYTHONPATH"].split(os.pathsep)) + 1
    assert one.stderr == within.stderr == first.stderr
    assert one.stderr.startswith(said)
    assert (one.stderr.count("\n"), second.stderr) == (1, "")
    assert {done.stdout for done in (one, within, first, second)} == {f"{parts} {settings}\n"}


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ([], "Nothing to run. Pass a script"),
        (["-X", "dev"], "Nothing to run"),
        (["-uIm", "package"], "started with -I"),
        (["-E", "look.py"], "started with -E"),
        (["python", "-S", "look.py"], "started with -S"),
        (["--verfy", "full", "look.py"], "unrecognized arguments: --verfy"),
        (["--verify", "all", "look.py"], "invalid choice: 'all'"),
    ],
    ids=" ".join,
)
def test_bad_usage_starts_nothing(words: list[str], hint: str, programs: Path, environment: dict[str, str]) -> None:
    done = by_hfshard(words, programs, environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert hint in done.stderr


def test_folder_that_pythonpath_cannot_name_starts_nothing(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "a:b").mkdir()
    (tmp_path / "a:b" / "hfshard").symlink_to(REPOSITORY / "hfshard")
    folder = str(tmp_path / "a:b")
    code = f"import sys; sys.path.insert(0, {folder!r}); from hfshard.cli.main import main; sys.exit(main())"

    done = by_python(["-c", code, "run", "-c", "print(1)"], tmp_path, environment)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"hfshard: hfshard is in {tmp_path}/a:b/hfshard/cli/startup, but PYTHONPATH ")


def test_help_is_that_of_run(tmp_path: Path, environment: dict[str, str]) -> None:
    done = by_hfshard(["-h", "no.py"], tmp_path, environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: hfshard run [OPTIONS] SCRIPT | -m MODULE")
