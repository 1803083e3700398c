"""A run in a directory does what every storage of a run does."""

from __future__ import annotations

import os
from pathlib import Path

from tests.training.run import storage_contract


def test_saves_and_removals_are_listed(tmp_path: Path) -> None:
    storage_contract.check_listings_and_removals(str(tmp_path / "run"))


def test_a_checkpoint_opens_its_folder_and_notices_that_it_is_replaced(tmp_path: Path) -> None:
    storage_contract.check_folders(str(tmp_path / "run"))


def test_a_refused_save_leaves_all_as_it_was(tmp_path: Path) -> None:
    storage_contract.check_refused_save(str(tmp_path / "run"))


def test_a_save_keeps_no_metrics_of_a_copy(tmp_path: Path) -> None:
    root = tmp_path / "run"
    storage_contract.check_metrics_of_a_copy(str(root), lambda old, new: os.rename(root / old, root / new))
