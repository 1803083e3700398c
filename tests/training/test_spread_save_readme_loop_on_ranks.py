"""The loop under torchrun that the README shows."""

from __future__ import annotations

from pathlib import Path

from tests import REPOSITORY
from tests.helpers import processes
from tests.helpers.examples import blocks_of

README = REPOSITORY / "hfshard" / "training" / "GUIDE.md"


def test_the_loop_of_the_readme_goes_on_to_the_bit(tmp_path: Path, child_environment: dict[str, str]) -> None:
    [loop] = blocks_of(README, "py")
    (tmp_path / "train.py").write_text(loop)
    torchrun = "torch.distributed.run --standalone --nproc-per-node 2 --redirects 1 --log-dir"

    forked = processes.environment_of(tmp_path, child_environment)

    said = []
    # New interpreters begin it, and forks resume it, from step 15, the last one that was saved.
    for start, run, env in (("begun", processes.run_fresh, child_environment), ("resumed", processes.run, forked)):
        command = ["-m", *torchrun.split(), start, "train.py"]
        done = run(command, cwd=tmp_path, env=env, timeout=300)
        assert done.returncode == 0, done.stderr
        # a file for each rank: on one output, what two ranks print may run together in one line
        said.append([next((tmp_path / start).rglob(f"{rank}/stdout.log")).read_text() for rank in range(2)])

    assert said[0] == said[1]
    assert [text.partition(" steps, ")[0] for text in said[0]] == ["rank 0: 16", "rank 1: 16"]
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == [
        "checkpoint-00000010",
        "checkpoint-00000015",
    ]
