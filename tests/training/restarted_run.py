"""A run under torchrun of which a rank is killed: the agent starts all ranks again, and they go on where they saved."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from hfshard.training import CheckpointManager
from tests.training.models import Run

STEPS, KILLED_AT = 6, 4


def main(place: Path, *, is_killed: bool) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, attempt = torch.distributed.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    run = Run("fsdp")
    torch.manual_seed(100 * rank + attempt)
    with CheckpointManager(place / "run", max_to_keep=2) as manager:
        step = int(manager.restore_latest(run.state) or 0)
        if attempt:
            (place / f"resumed-{rank}").write_text(str(step))
        for done in range(step + 1, STEPS + 1):
            run.train(1)
            if is_killed and (done, rank, attempt) == (KILLED_AT, 1, 0):
                os.kill(os.getpid(), signal.SIGKILL)  # while the other rank saves, or waits for that
            manager.save(done, run.state)
    torch.save(run.local(), place / f"{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), is_killed=sys.argv[2] == "killed")
