"""A re-shard takes a few buffers, and reads and writes each byte once (`pytest -s` shows the figures)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1024 * 1024
TOTAL_MIB = 256
LIMIT_MIB = 80
"""What a re-shard may take, whatever the sizes."""

KINDS = ("elsewhere", "in_place", "low_disk", "cast", "bin")


@pytest.mark.parametrize("kind", KINDS)
def test_a_reshard_takes_at_most_80_mib_and_one_pass(
    kind: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "tests.resharding.memory_child", kind, str(TOTAL_MIB), str(tmp_path)]
    run = subprocess.run(command, env=child_environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    print(f"\n{kind}, {TOTAL_MIB} MiB: " + ", ".join(f"{name} {value / MIB:.1f} MiB" for name, value in found.items()))
    assert found["extra"] <= LIMIT_MIB * MIB
    passes = 2 if kind == "bin" else 1  # a pickle is compared with its checksums before anything is written
    assert 0.99 * passes * TOTAL_MIB * MIB <= found["read"] <= 1.02 * passes * TOTAL_MIB * MIB
    assert found["written"] <= 1.02 * TOTAL_MIB * MIB / (2 if kind == "cast" else 1)
