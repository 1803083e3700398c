"""A save takes a few buffers beside the model, however its tensors lie in memory (`pytest -s` shows the figures)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_MIB = 64
"""What a save may take beyond the model."""

KINDS = ("contiguous", "transposed", "flat", "module")


@pytest.mark.parametrize("total_mib", [160, pytest.param(1024, marks=pytest.mark.slow)])
def test_a_save_takes_at_most_64_mib_more(total_mib: int, tmp_path: Path, child_environment: dict[str, str]) -> None:
    """Of either size, each of the two files is larger than that."""
    command = [sys.executable, "-m", "tests.helpers.memory_child", ",".join(KINDS), str(total_mib), str(tmp_path)]
    run = subprocess.run(command, env=child_environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    extra = {kind: int(count) / 1024**2 for kind, count in (line.split() for line in run.stdout.splitlines())}
    print("".join(f"\nsave of {total_mib} MiB, {kind}: +{mib:.1f} MiB" for kind, mib in extra.items()))
    assert tuple(extra) == KINDS
    assert max(extra.values()) <= LIMIT_MIB, extra
