"""A save takes a few buffers beside the model, however its tensors lie in memory (`pytest -s` shows the figures)."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

LIMIT_MIB = 64
"""What a save may take beyond the model."""

KINDS = ("contiguous", "transposed", "flat", "module")


def extra_mib(kind: str, total_mib: int, folder: Path, environment: dict[str, str]) -> float:
    command = [sys.executable, "-m", "tests.helpers.memory_child", kind, str(total_mib), str(folder)]
    begin = time.monotonic()
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    extra = int(run.stdout) / 1024**2
    print(f"\nsave of {total_mib} MiB, {kind}: +{extra:.1f} MiB, {time.monotonic() - begin:.1f} s in all")
    return extra


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_of_256_mib_takes_at_most_64_mib_more(
    kind: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    assert extra_mib(kind, 256, tmp_path, child_environment) <= LIMIT_MIB


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_of_1_gib_takes_at_most_64_mib_more(
    kind: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    assert extra_mib(kind, 1024, tmp_path, child_environment) <= LIMIT_MIB
