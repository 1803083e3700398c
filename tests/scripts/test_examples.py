"""The examples run, and what they print is so."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.helpers import processes

SECONDS = 300


def run(script: str, *arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return processes.run([REPOSITORY / "scripts" / script, *arguments], env=environment, timeout=SECONDS)


def test_checkpoints_of_a_cyclic_schedule_keep_their_size(child_environment: dict[str, str]) -> None:
    done = run("examples/cyclic_lr_size.py", environment=child_environment)
    assert done.returncode == 0, done.stderr
    assert "hfshard's sizes are constant, to the byte: yes" in done.stdout
    ours, theirs = done.stdout.split("torch.save(scheduler.state_dict())")
    saves = [line.split() for line in ours.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    assert [int(save[0]) for save in saves] == list(range(1, 11))
    assert len({size for save in saves for size in save[1:]}) == 1
    # What the peer does: says when it changes.
    last = next(line.split() for line in theirs.splitlines() if line.startswith("  10"))
    sizes = [int(size.replace(",", "")) for size in last[1:]]
    assert all(size < 3000 for size in sizes[:4])
    assert all(size > 30_000 for size in sizes[4:])
    assert "self.fn=self._cos: torch.save wrote model, optimizer and momentum once more" in theirs


def test_losses_after_a_kill_are_those_of_an_undisturbed_run(forking_environment: dict[str, str]) -> None:
    done = run("examples/exact_recovery.py", environment=forking_environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed by SIGKILL after step 17" in done.stdout
    assert "resumed at step 15, epoch 1, batch 5" in done.stdout
    assert sum(line.endswith(" equal") for line in done.stdout.splitlines()) == 30
    assert done.stdout.endswith("losses and final weights are equal, bit for bit: yes\n")


@pytest.mark.slow
def test_losses_of_a_spread_model_after_a_kill_are_equal_on_other_layouts(child_environment: dict[str, str]) -> None:
    done = run("examples/fsdp_resume.py", environment=child_environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 2 of 4 was killed by SIGKILL in step 8\n" in done.stdout
    for layout in ("4 ranks (2 x 2)", "2 ranks (1 x 2)"):
        assert f"{layout}: resumed at step 6, epoch 0, batch 6\n" in done.stdout
        assert f"{layout}: losses and final weights are equal, bit for bit: yes\n" in done.stdout
    assert "2 ranks (2 x 1): losses are off by at most " in done.stdout
    assert done.stdout.endswith(" of 1e-05 that are allowed: yes\n")


@pytest.mark.slow
def test_torchrun_shows_the_same(child_environment: dict[str, str]) -> None:
    arguments = ("--nproc-per-node", "4", REPOSITORY / "scripts/examples/fsdp_resume.py")
    done = processes.run(["-m", "torch.distributed.run", *arguments], env=child_environment, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" equal, bit for bit: yes\n") == 2


@pytest.mark.slow
def test_curves_of_a_killed_fine_tuning_are_equal(child_environment: dict[str, str], minilm: Path) -> None:
    assert minilm.is_dir()
    done = run("train_resume.py", "--steps", "12", "--save-every", "3", environment=child_environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal: yes   12 losses and the final weights, bit for bit" in done.stdout


@pytest.mark.skipif(find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_plot_without_matplotlib_says_what_to_install(child_environment: dict[str, str], tmp_path: Path) -> None:
    done = run("train_resume.py", "--plot", str(tmp_path / "curves.png"), environment=child_environment)
    assert done.returncode == 1
    assert done.stderr == "--plot draws with matplotlib, which is not installed. Run: pip install matplotlib\n"
    assert not list(tmp_path.iterdir())
