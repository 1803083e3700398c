"""Runs one suite in a new process: stock, or under hfshard."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from upstream.comparison import Outcome, read_outcomes
from upstream.sources import SourceError
from upstream.suites import Suite

HERE: Final = Path(__file__).resolve().parent
REPOSITORY: Final = HERE.parent.parent

# What pytest returns where it ran all tests that it found: all passed, some failed.
_RAN: Final = (0, 1)
# Settings of the process that starts this, which tests must not see.
_FOREIGN: Final = ("HF_", "HUGGINGFACE", "HUGGING_FACE", "TRANSFORMERS_", "HFSHARD_", "PYTEST_")


def run_suite(
    suite: Suite, root: Path, *, is_under_hfshard: bool, select: str = "", hub: Mapping[str, str] | None = None
) -> dict[str, Outcome]:
    """Run the tests of a suite, and give what became of each.

    Args:
        suite: What to run.
        root: The unpacked sources, or an empty folder.
        is_under_hfshard: Whether `hfshard.install()` comes first.
        select: Regular expression: only tests whose id has it, too.
        hub: Environment variables that lead to a Hub; None: there is none.

    Raises:
        SourceError: pytest did not run, or ended with another error than that of a test.
    """
    with tempfile.TemporaryDirectory(prefix="hfshard-upstream-") as scratch:
        place = Path(scratch)
        # Ids are paths below the root, of which the name of the file is kept.
        (place / "pytest.ini").write_text("[pytest]\n")
        files = [str(HERE / name if name.startswith("own/") else root / name) for name in suite.files]
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
        command += ["-c", str(place / "pytest.ini"), "--rootdir", "/", "-p", "upstream.plugin"]
        command += ["--outcomes", str(place / "outcomes"), "--keep", _both(suite.keep, select), "--drop", suite.drop]
        command += ["--basetemp", str(place / "tmp"), *_switches(suite, is_under_hfshard), *files]
        done = subprocess.run(command, cwd=root, env=_environment(place, hub), capture_output=True, text=True)
        outcomes = read_outcomes(place / "outcomes") if (place / "outcomes").exists() else {}
        if not outcomes or (done.returncode not in _RAN and not _died(outcomes)):
            raise SourceError(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        return outcomes


def _switches(suite: Suite, is_under_hfshard: bool) -> list[str]:
    """What turns hfshard on."""
    if not is_under_hfshard:
        return []
    return ["--under-hfshard", *(["--our-mixin"] if suite.our_mixin else [])]


def _both(keep: str, select: str) -> str:
    """One expression for both."""
    return f"(?=.*(?:{keep}))(?=.*(?:{select}))" if select else keep


def _died(outcomes: Mapping[str, Outcome]) -> bool:
    return any(outcome.outcome == "died" for outcome in outcomes.values())


def _environment(place: Path, hub: Mapping[str, str] | None) -> dict[str, str]:
    """No network, no accelerator, and a home of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "scripts")]),
        "HF_HOME": str(place / "home"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_TEST_DEVICE": "cpu",
        "TMPDIR": str(place),
        **({"HF_HUB_OFFLINE": "1"} if hub is None else hub),
    }
