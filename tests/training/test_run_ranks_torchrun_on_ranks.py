"""Runs under torchrun: a rank is killed, the agent starts all of them again, and `restore_latest` goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import REPOSITORY
from tests.helpers import processes
from tests.training.restarted_run import KILLED_AT
from tests.training.test_spread_save_runs_on_ranks import assert_same


@pytest.mark.slow
def test_torchrun_starts_a_run_again_that_goes_on_to_the_bit(tmp_path: Path, child_environment: dict[str, str]) -> None:
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
        torchrun = "torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1"
        script = ("-m", "tests.training.restarted_run", str(tmp_path / name), name)
        done = processes.run_fresh(
            ["-m", *torchrun.split(), *script],
            cwd=REPOSITORY,
            # Or gloo itself may connect to the addresses of ranks that have ended, which torchrun's store still has.
            env={**child_environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            timeout=300,
        )
        assert done.returncode == 0, done.stderr

    assert [path.name for path in sorted((tmp_path / "straight").glob("resumed-*"))] == []
    for rank in range(2):
        assert (tmp_path / "killed" / f"resumed-{rank}").read_text() == str(KILLED_AT - 1)
        assert_same(torch.load(tmp_path / "killed" / f"{rank}.pt"), torch.load(tmp_path / "straight" / f"{rank}.pt"))
