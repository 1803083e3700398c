"""Runs that other programs have saved with torch.save are resumed as by each part's own load_state_dict, and better."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hfshard.training import CheckpointManager, TrainingState
from tests.training.fingerprint import flatten
from tests.training.interop.programs import PROGRAMS, built, result, train


def save(value: Any, path: Path, **options: Any) -> str:
    torch.save(value, path, **options)
    return str(path)


@pytest.mark.parametrize("name", PROGRAMS)
def test_runs_of_programs_go_on_as_by_their_own_resume(name: str, tmp_path: Path, manager: CheckpointManager) -> None:
    program = PROGRAMS[name]
    saved = built(program, seed=1)
    train(saved, 0, 4)
    path = save(program.save(saved), tmp_path / "checkpoint.pth.tar", **program.options)
    theirs, ours = built(program, seed=2), built(program, seed=2)
    program.load(theirs, torch.load(path, weights_only=False))

    restored = manager.restore(TrainingState(**ours.named), path, strict=not program.differs, keys=program.keys)
    Path(path).unlink()
    rates = [[group["lr"] for group in parts.optimizer.param_groups] for parts in (theirs, ours)]
    train(theirs, 4, 6)
    train(ours, 4, 6)

    assert rates[0] == rates[1]
    assert result(ours) == result(theirs)
    assert (restored, restored.path, restored.metrics) == (program.step, path, {})
    assert [*flatten({key: restored.extra.get(key) for key in program.extra}, "")] == [*flatten(program.extra, "")]
    assert all(any(one.startswith(words) for one in restored.lacking) for words in program.lacks), restored.lacking
    assert [one[: len(words)] for one, words in zip(restored.differences, program.differs, strict=True)] == list(
        program.differs
    )
