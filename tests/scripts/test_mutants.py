"""Seventy-six mutants that can be planted, and verdicts that are what the tests said."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import REPOSITORY

sys.path.append(str(REPOSITORY / "scripts"))  # `mutation` is a package of scripts/

from mutation.mutants import MUTANTS, Mutant
from mutation.runner import NotPlantedError, find_file, main, mutated, read_package, try_mutant

HALVES = Mutant("halves", "the larger half comes first", "(count + 1) // 2", "count // 2", ())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of a package of one function, with a test that its rounding matters to and one that it does not."""
    begin = "from hfshard.halves import first_half\n\n\n"
    files = {
        "hfshard/__init__.py": "",
        "hfshard/halves.py": "def first_half(count: int) -> int:\n    return (count + 1) // 2\n",
        "tests/test_odd.py": f"{begin}def test_odd():\n    assert first_half(3) == 2\n",
        "tests/test_even.py": f"{begin}def test_even():\n    assert first_half(4) == 2\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def test_there_are_seventy_six_of_all_packages_and_each_has_a_name_of_its_own() -> None:
    package = read_package(REPOSITORY)
    names = Counter(one.name for one in MUTANTS)
    folders = Counter(find_file(package, one.old).split("/")[1] for one in MUTANTS)

    assert len(MUTANTS) == 76
    assert max(names.values()) == 1
    assert {name.split("/")[1] for name in package if name.count("/") > 1} == {
        folder for folder in folders if not folder.endswith(".py")
    }


def test_each_can_be_planted_once_wherever_its_text_is() -> None:
    package = read_package(REPOSITORY)
    for one in MUTANTS:
        source = package[find_file(package, one.old)]

        assert mutated(source, one) != source, one.name


def test_its_tests_exist() -> None:
    for one in MUTANTS:
        assert one.tests, one.name
        for test in one.tests:
            file, _, function = test.partition("::")

            assert f"def {function.partition('[')[0]}" in (REPOSITORY / file).read_text(encoding="utf-8"), test


def test_a_mutant_that_a_test_notices_is_killed(checkout: Path) -> None:
    outcome = try_mutant(HALVES, ["tests/test_odd.py"], checkout)

    assert (outcome.verdict, outcome.file, outcome.failed) == (
        "killed",
        "hfshard/halves.py",
        ("tests/test_odd.py::test_odd",),
    )
    assert "(count + 1) // 2" in (checkout / "hfshard/halves.py").read_text()  # only the copy has it


def test_a_mutant_that_no_test_notices_survives(checkout: Path) -> None:
    assert try_mutant(HALVES, ["tests/test_even.py"], checkout).verdict == "survived"


def test_a_module_that_cannot_be_imported_says_nothing_of_its_tests(checkout: Path) -> None:
    outcome = try_mutant(
        Mutant("no-import", "", "def first_half", "raise OSError\n\n\ndef first_half", ()),
        ["tests/test_odd.py"],
        checkout,
    )

    assert outcome.verdict == "invalid"
    assert "the module cannot be imported" in outcome.reason


def test_tests_that_do_not_exist_say_nothing(checkout: Path) -> None:
    assert try_mutant(HALVES, ["tests/test_moved.py"], checkout).verdict == "invalid"


def test_a_text_that_is_there_twice_or_not_at_all_is_not_planted() -> None:
    with pytest.raises(NotPlantedError, match=r"2 times, not once: a\.py, b\.py"):
        find_file({"a.py": "x = 1", "b.py": "x = 1"}, "x = 1")
    with pytest.raises(NotPlantedError, match="0 times, not once: nowhere"):
        find_file({"a.py": "x = 1"}, "x = 2")


def test_a_text_that_is_no_python_is_not_planted() -> None:
    with pytest.raises(NotPlantedError, match="not Python"):
        mutated("x = 1\n", Mutant("no-python", "", "x = 1", "x = ", ()))


def test_a_name_that_is_no_mutants_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-mutant"]) == 2
    assert "There is no mutant no-such-mutant." in capsys.readouterr().err
