"""The benchmarks run from end to end at a tiny size, and what is written of them is what was measured."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.helpers import processes

BENCH = REPOSITORY / "scripts" / "bench"


def run(arguments: list[str], environment: dict[str, str], script: str = "run.py") -> subprocess.CompletedProcess[str]:
    done = processes.run([BENCH / script, *arguments], env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return done


def tables(markdown: str) -> list[list[list[str]]]:
    """The tables as rows of cells."""
    found: list[list[list[str]]] = [[]]
    for line in markdown.splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


@pytest.fixture
def place(tmp_path: Path) -> list[str]:
    """Arguments that put everything below the test's own directory, at the tiny size, once round."""
    (tmp_path / "data").mkdir()
    arguments = ["--directory", str(tmp_path / "data"), "--out", str(tmp_path / "RESULTS.md")]
    return [*arguments, "--params", "tiny", "--rounds", "1"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, forking_environment: dict[str, str]) -> Path:
    """A directory of the results of save and verify, and of the data, if any is left; the tests only read it.

    The run takes half a minute: of the workers of one test run, one measures, and the others wait for it.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    directory = base / "measured"
    with open(base / "measured.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            made = Path(tempfile.mkdtemp(dir=base))
            (made / "data").mkdir()
            where = ["--directory", str(made / "data"), "--out", str(made / "RESULTS.md")]
            run(["save", "verify", "--main-peers", *where, "--params", "tiny", "--rounds", "1"], forking_environment)
            made.rename(directory)  # only now, so that nobody takes half a run for one
    return directory


def test_a_run_writes_a_table_with_all_columns_for_each_question(measured: Path) -> None:
    tables_written = tables((measured / "RESULTS.md").read_text(encoding="utf-8"))
    ends = ["CPU s", "peak MiB", "MB read", "MB written", "rounds"]
    targets, _, *of_questions = [table[0] for table in tables_written]
    assert targets == ["target", "measured", "met", "model"]
    assert of_questions == [
        ["", "s (min–max)", "× transformers with fsync", "× the limit", *ends],
        ["", "s (min–max)", "× the plain loop", "× the limit", *ends],
    ]
    for table in tables_written[2:]:
        assert {len(row) for row in table} == {len(table[0])}


def test_a_run_tells_the_machine_and_the_main_peers(measured: Path) -> None:
    _, machine, save, _ = tables((measured / "RESULTS.md").read_text(encoding="utf-8"))
    assert [row[0] for row in machine[2:8]] == ["CPU", "memory", "kernel", "file system", "disk", "Python"]
    assert [row[0].split()[0] for row in save[2:7]] == ["transformers", "the", "hfshard,", "hfshard,", "hfshard,"]


def test_a_run_leaves_no_data(measured: Path) -> None:
    assert list((measured / "data").iterdir()) == []


def test_raw_figures_count_the_bytes_and_the_pages_that_were_dropped(measured: Path) -> None:
    figures = json.loads((measured / "results.json").read_text(encoding="utf-8"))
    # 2 bytes for each of 2,000 x 128 of the embedding, of 147,712 in each of 2 layers, and of 128 in the last norm.
    assert figures["save"]["bytes"] == 1_103_104
    [ours] = figures["save"]["peers"]["hfshard sha256"]["runs"]
    assert ours["written"] >= 1_103_104
    assert ours["result"]["bytes"] >= 1_103_104
    [cold_run] = figures["verify"]["peers"]["hfshard sha256/cold"]["runs"]
    assert cold_run["resident"] == 0.0


def test_one_question_alone_replaces_its_section_only(
    measured: Path, tmp_path: Path, place: list[str], forking_environment: dict[str, str]
) -> None:
    for name in ("RESULTS.md", "results.json"):
        shutil.copy(measured / name, tmp_path)
    written = (measured / "RESULTS.md").read_text(encoding="utf-8")
    run(["ranks", *place], forking_environment)
    again = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    title = "\n## A thousand ranks\n"
    assert (title in written, title in again) == (False, True)
    assert tables(again)[1:-1] == tables(written)[1:]
    printed = run(["--readme", "--out", str(tmp_path / "RESULTS.md")], forking_environment).stdout.splitlines()
    assert (printed[0], printed[-1]) == (
        "<!-- measured: python scripts/bench/run.py --readme -->",
        "<!-- /measured -->",
    )
    assert [row[0] for row in tables("\n".join(printed))[0][2:]] == [
        "save, sha256 of every file, flushed to disk",
        "save, no checksum, flushed to disk",
    ]


def test_another_checkout_is_measured_in_turns(tmp_path: Path, child_environment: dict[str, str]) -> None:
    shutil.copytree(REPOSITORY / "hfshard", tmp_path / "before" / "hfshard", ignore=shutil.ignore_patterns("*.pyc"))
    with open(tmp_path / "before" / "hfshard" / "verify.py", "a") as module:
        module.write("\n\n_verify = verify_checkpoint\n\n\ndef verify_checkpoint(*args, **kwargs):\n")
        module.write("    import time\n\n    time.sleep(1)\n    return _verify(*args, **kwargs)\n")
    (tmp_path / "data").mkdir()

    arguments = [tmp_path / "before", "verify", "--params", "tiny", "--rounds", "1", "--directory", tmp_path / "data"]
    done = processes.run([BENCH / "against.py", *arguments], env=child_environment, timeout=600)

    [table] = tables(done.stdout)
    assert table[0] == ["", "before, s", "now, s", "now / before", "before, MiB", "now, MiB", ""]
    assert [row[0] for row in table[2:]][:1] == ["verify: hfshard, sha256 cold"], done.stderr
    assert all(float(row[1]) > 1 > float(row[2]) for row in table[2:]), done.stdout
    assert list((tmp_path / "data").iterdir()) == []


def test_a_checkout_without_the_package_is_refused(tmp_path: Path, child_environment: dict[str, str]) -> None:
    done = processes.run([BENCH / "against.py", tmp_path, "save"], env=child_environment)

    assert done.returncode == 2
    assert done.stderr.endswith(f"error: {tmp_path} holds no hfshard/: name the folder of another checkout\n")


@pytest.mark.slow
def test_every_question_runs_with_every_peer(
    tmp_path: Path, place: list[str], child_environment: dict[str, str]
) -> None:
    run([*place, "--device", "cuda"], child_environment)
    figures = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    of_one_process = ["save", "load", "reshard", "foreign", "verify", "small", "tiny", "imports", "push"]
    others = ["stores", "distributed", "zero3", "node", "ranks", "gpu"]
    assert list(figures) == [*of_one_process, *others]
    not_run = {name for data in figures.values() for name in data["skipped"]}
    optional = ("fastsafetensors", "runai", "instanttensor", "pinned copy", "sync", "dcp")
    without_deepspeed = ("bin zero", "safetensors zero", "hfshard zero", "hfshard-none zero", "merge-weights", "zero3 ")
    on_gpu = ("transformers", "hfshard load", "hfshard save", "limit")
    assert [name for name in not_run if not name.startswith(optional + without_deepspeed + on_gpu)] == []


def test_the_written_results_are_those_of_the_raw_figures(child_environment: dict[str, str]) -> None:
    results = BENCH / "RESULTS.md"
    if not results.exists():
        pytest.skip("nothing was measured yet")
    assert run(["--render"], child_environment).stdout == results.read_text(encoding="utf-8")


def test_the_table_of_the_readme_is_that_of_the_results(child_environment: dict[str, str]) -> None:
    printed = run(["--readme"], child_environment).stdout.strip()
    if not printed:
        pytest.skip("nothing was measured yet")
    assert printed + os.linesep in (REPOSITORY / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("script", ["run.py", "resume.py"])
@pytest.mark.parametrize(
    ("option", "path", "words"),
    [
        ("--directory", "nowhere", "there is no directory '{}'. Make it, or name another one."),
        ("--out", "nowhere/RESULTS.md", "there is no directory '{}'. Make it, or name another one."),
        ("--out", "", "'{}' is a directory. Name a file in it."),
    ],
)
def test_a_place_that_does_not_exist_is_a_sentence(
    script: str, option: str, path: str, words: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    given = tmp_path / path

    done = processes.run([BENCH / script, option, given], env=child_environment)

    named = given.parent if given.suffix else given
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"{script}: error: argument {option}: {words.format(named)}\n")
    assert list(tmp_path.iterdir()) == []
