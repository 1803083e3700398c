"""Some cases of the fuzzer of readers; `scripts/fuzz_readers --cases 1000000` runs many."""

from __future__ import annotations

from tests import REPOSITORY
from tests.helpers import processes


def test_files_changed_at_random_are_refused_or_read_rightly(child_environment: dict[str, str]) -> None:
    command = [REPOSITORY / "scripts" / "fuzz_readers", "--cases", "500"]

    done = processes.run(command, env={**child_environment, "PYTHONWARNINGS": "ignore"})

    assert done.stdout.startswith("500 cases (seed 1)"), done.stderr
    assert done.returncode == 0, done.stdout
