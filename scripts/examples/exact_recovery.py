#!/usr/bin/env python3
"""Train, die by SIGKILL in the middle, resume in a new process, and compare each loss with an undisturbed run's."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 30
KILLED_AT = 17
"""The step that is computed and never saved: the run dies before it."""
SAVE_EVERY = 5
SAMPLES = 80
BATCH_SIZE = 8


def train(run: Path, killed_at: int | None) -> None:
    """Train a small model from its last checkpoint, or from the beginning; write each step's loss to a file."""
    import torch
    from torch import nn

    from hfshard.training import CheckpointManager, ResumableDataLoader, TrainingState

    class Noisy(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
        """Points and their product, with noise that is drawn again whenever a point is read."""

        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            point = torch.tensor([index / SAMPLES, (index % 7) / 7])
            return point + 0.05 * torch.randn(2), point.prod()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS)
    loader = ResumableDataLoader(Noisy(), batch_size=BATCH_SIZE, shuffle=True, seed=0)
    manager = CheckpointManager(run, max_to_keep=2)
    state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

    step = manager.restore_latest(state) or 0
    if step:
        print(f"resumed at step {step}, epoch {loader.epoch}, batch {loader.batch}", flush=True)
    with open(run.with_suffix(".losses"), "a", encoding="ascii") as losses:
        while step < STEPS:
            for points, products in loader:
                if step == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(points).squeeze(1), products)
                loss.backward()
                optimizer.step()
                scheduler.step()
                step += 1
                print(step, float(loss.item()).hex(), file=losses, flush=True)  # every bit of it
                if step % SAVE_EVERY == 0:
                    manager.save(step, state)
                if step == STEPS:
                    break
    manager.close()


def losses_of(run: Path) -> dict[int, str]:
    """Step -> loss in hexadecimal; a step that was done twice counts as it was done last."""
    lines = run.with_suffix(".losses").read_text(encoding="ascii").splitlines()
    return {int(step): loss for step, loss in map(str.split, lines)}


def start(run: Path, killed_at: int | None = None) -> subprocess.Popen[bytes]:
    """Train in a new process."""
    arguments = [] if killed_at is None else ["--killed-at", str(killed_at)]
    return subprocess.Popen([sys.executable, __file__, "--run", str(run), *arguments])


def main() -> int:
    """Run three processes and print both losses of each step; 0 if all bits are equal, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--killed-at", type=int, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        train(arguments.run, arguments.killed_at)
        return 0
    with tempfile.TemporaryDirectory(prefix="hfshard-example-") as work:
        straight, broken = Path(work, "straight"), Path(work, "broken")
        undisturbed, killed = start(straight), start(broken, KILLED_AT)
        if killed.wait() != -signal.SIGKILL:
            print(f"The run that should have been killed ended by itself, with code {killed.returncode}.")
            undisturbed.wait()
            return 1
        print(f"killed by SIGKILL after step {max(losses_of(broken))}", flush=True)
        codes = start(broken).wait(), undisturbed.wait()
        if any(codes):
            print(f"The resumed run ended with code {codes[0]}, the undisturbed one with {codes[1]}.")
            return 1
        ours, theirs = losses_of(broken), losses_of(straight)
        last = f"checkpoint-{STEPS:08d}/model.safetensors"
        are_weights_equal = Path(straight, last).read_bytes() == Path(broken, last).read_bytes()

    print(f"\n{'step':>4}  {'straight':<22}{'killed and resumed':<22}")
    for step in range(1, STEPS + 1):
        pair = [float.fromhex(losses.get(step, "nan")) for losses in (theirs, ours)]
        mark = "equal" if theirs.get(step) == ours.get(step) else "DIFFERENT"
        print(f"{step:>4}  {pair[0]!r:<22}{pair[1]!r:<22}{mark}")
    is_equal = ours == theirs and len(ours) == STEPS and are_weights_equal
    print(f"\nlosses and final weights are equal, bit for bit: {'yes' if is_equal else 'NO'}")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
