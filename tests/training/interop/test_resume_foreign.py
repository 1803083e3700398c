"""Positions of data loaders that other programs have counted in epochs, or that the loader itself has saved there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from hfshard.training import ResumableDataLoader, TrainingState
from hfshard.training.interop.resume_foreign import position_after

DATA: Any = torch.arange(26.0)


@pytest.mark.parametrize(
    ("epochs", "place"),
    [(0.0, (0, 0)), (2 / 7, (0, 2)), (1 + 6 / 7, (1, 6)), (1.0, (1, 0)), (1 - 1e-12, (1, 0)), (41 + 1 / 7, (41, 1))],
)
def test_epochs_are_a_place(epochs: float, place: tuple[int, int]) -> None:
    loader = ResumableDataLoader(DATA, batch_size=4)

    state, lacking = position_after(loader, epochs)

    assert state is not None and lacking == ""
    assert (state["epoch"], state["batch"]) == place
    loader.load_state_dict(state)
    assert next(iter(loader))[0] == 4 * place[1]


def test_a_batch_sampler_of_the_users_has_no_length_to_count_by() -> None:
    loader = ResumableDataLoader(DATA, batch_sampler=[[0, 1], [2]])

    assert position_after(loader, 0.5) == (
        None,
        "batches like this loader's, of which 0.5 epochs are no whole number",
    )


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("seen", [3, 7])
def test_the_state_of_a_loader_of_torchdata_is_taken_from_a_file(seen: int, tmp_path: Path) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    old = torchdata.StatefulDataLoader(DATA, batch_size=4)
    batches = iter(old)
    for _ in range(seen):
        next(batches)
    assert seen < 7 or next(batches, None) is None
    torch.save({"loader": old.state_dict(), "step": seen}, tmp_path / "old.pt")
    expected = [batch.tolist() for batch in (batches if seen < 7 else old)]

    loader = torchdata.StatefulDataLoader(DATA, batch_size=4)
    restored = hfshard.CheckpointManager(tmp_path / "run").restore(TrainingState(loader=loader), tmp_path / "old.pt")

    assert restored == seen and len(restored.lacking) == 1
    assert [batch.tolist() for batch in loader] == expected
