"""Each run of `scripts/test` takes all of its tests."""

from __future__ import annotations

import re
from pathlib import Path

from tests import REPOSITORY
from tests.helpers import processes


def _collect(environment: dict[str, str], *arguments: object) -> tuple[set[str], str]:
    """The tests that pytest would run, and all that it says."""
    options = ("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    done = processes.run([*options, *arguments], env=environment, cwd=REPOSITORY)
    return set(re.findall(r"^tests/\S+::.*$", done.stdout, re.MULTILINE)), done.stdout + done.stderr


def test_the_run_for_the_oldest_versions_finds_all_of_its_tests(child_environment: dict[str, str]) -> None:
    folders = ("tests/training/interop", "tests/servers/bucket")
    marks = "compat and not slow"

    found, _ = _collect(child_environment, "-m", marks, *folders)
    slowly, _ = _collect(child_environment, "-m", f"({marks})", *folders)

    assert found == slowly
    assert "tests/servers/bucket/test_faults.py" in {name.partition("::")[0] for name in found}


def test_a_test_that_is_marked_by_hand_is_refused(tmp_path: Path, child_environment: dict[str, str]) -> None:
    path = tmp_path / "test_by_hand.py"
    path.write_text("import pytest\n@pytest.mark.stores\ndef test_it() -> None: ...\n")

    _, words = _collect(child_environment, "-p", "tests.conftest", "-c", REPOSITORY / "setup.cfg", path)

    assert "::test_it is marked stores by hand: name its file in tests/conftest.py." in words
