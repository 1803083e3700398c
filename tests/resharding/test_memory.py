"""A re-shard takes a few buffers, and reads and writes each byte once (`pytest -s` shows the figures)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MIB = 1024 * 1024
TOTAL_MIB = 128
"""More than the limit, so that a re-shard which held them all would be found."""
LIMIT_MIB = 80
"""What a re-shard may take, whatever the sizes."""

KINDS = ("elsewhere", "in_place", "low_disk", "cast", "bin")


def test_a_reshard_takes_at_most_80_mib_and_one_pass(tmp_path: Path, child_environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "tests.resharding.memory_child", str(TOTAL_MIB), str(tmp_path), *KINDS]

    run = subprocess.run(command, env=child_environment, capture_output=True, text=True, check=False)

    assert run.returncode == 0, run.stderr
    print(f"\n{TOTAL_MIB} MiB:\n{run.stdout}")
    measured = [json.loads(line) for line in run.stdout.splitlines()]
    assert [found["kind"] for found in measured] == list(KINDS)
    for found in measured:
        kind = found["kind"]
        assert found["extra"] <= LIMIT_MIB * MIB, kind
        passes = 2 if kind == "bin" else 1  # a pickle is compared with its checksums before anything is written
        assert 0.99 * passes * TOTAL_MIB * MIB <= found["read"] <= 1.02 * passes * TOTAL_MIB * MIB, kind
        assert found["written"] <= 1.02 * TOTAL_MIB * MIB / (2 if kind == "cast" else 1), kind
