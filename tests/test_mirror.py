"""Tests mirror the modules: `hfshard/a/b.py` is tested by `tests/a/test_b.py`, or by `tests/a/test_b_<topic>.py`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import REPOSITORY

PACKAGE = REPOSITORY / "hfshard"
TESTS = REPOSITORY / "tests"

# Folders of tests that belong to no single module; the table of the READMEs among them says to which they do.
SUITES = [
    *("attacks", "flows", "golden", "helpers", "programs", "scripts", "servers", "sweeps", "upstream", "zoo"),
    "foreign/producers",
    *("hub/pull", "hub/push", "viewing/browser"),
    *("stores/reading", "stores/runs", "stores/saving", "stores/suite"),
]

# Suites of the whole package, or of its pages.
SINGLE = {
    "foreign/test_matrix",
    "test_examples",
    "test_face",
    "test_imports",
    "test_mirror",
    "test_readme",
    "test_written_once",
}

# Modules without a test file of their own -> the file or folder whose tests hold them.
COVERED = {
    "__main__": "cli/test_main.py",
    "constants": "golden",
    "foreign/deepspeed_partitions": "foreign/test_deepspeed.py",
    "hub/hub_repo": "hub/push",
    "hub/repo_folder": "hub/pull/test_pull.py",
    "models/diffusers_models": "programs/test_diffusers.py",
    "models/small_saves": "stores/suite/test_small_saves.py",
    "saving/signed_store": "stores/suite/test_signatures.py",
    "training/integrations/lightning": "programs/test_lightning.py",
    "training/run/run_store": "stores/runs",
}


def _modules() -> set[str]:
    """Paths of all modules within the package, without ".py"."""
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    return {path.as_posix() for path in paths if path.name != "__init__"}


def _test_files() -> list[Path]:
    return sorted(path.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))


def _modules_of(test_file: Path) -> list[str]:
    """Paths of the modules that a test file may be named after: for test_a_b.py, "a" and "a_b"."""
    words = test_file.stem.removeprefix("test_").split("_")
    return [(test_file.parent / "_".join(words[:count])).as_posix() for count in range(1, len(words) + 1)]


def _tests_something_of_the_package(test_file: Path) -> bool:
    source = (TESTS / test_file).read_text(encoding="utf-8")
    return "def test_" in source and "hfshard" in source


def test_every_module_has_tests_under_its_own_name_but_the_named_ones() -> None:
    named = {module for file in _test_files() if _tests_something_of_the_package(file) for module in _modules_of(file)}
    assert _modules() - named == COVERED.keys()


def test_what_covers_the_others_is_there() -> None:
    missing = [path for path in COVERED.values() if not (TESTS / path).exists()]
    assert missing == []


def test_every_test_file_is_named_after_a_module_or_belongs_to_a_suite() -> None:
    modules = _modules()
    stray = [
        file.as_posix()
        for file in _test_files()
        if not any(file.is_relative_to(suite) for suite in SUITES)
        if modules.isdisjoint(_modules_of(file)) and file.with_suffix("").as_posix() not in SINGLE
    ]
    assert stray == []


@pytest.mark.parametrize("suite", ["attacks", "flows", "sweeps"])
def test_tables_of_suites_name_modules_and_files_that_are_there(suite: str) -> None:
    rows = [line for line in (TESTS / suite / "README.md").read_text("utf-8").splitlines() if line.startswith("|")][2:]
    for row in rows:
        of_modules, of_suites = row.strip("|").split("|")[:2]
        for name in re.findall(r"`([^`]+)`", of_modules):
            assert list(PACKAGE.glob(name)), f"{suite}/README.md names the module {name}"
        for name in re.findall(r"`([^`]+\.py|tests/[^`]+)`", of_suites):
            folder = REPOSITORY if name.startswith("tests/") else TESTS / suite
            assert list(folder.rglob(name)), f"{suite}/README.md names the suite {name}"
    assert len(rows) >= 3
