"""A run in a directory does what every storage of a run does."""

from __future__ import annotations

from pathlib import Path

from tests.training.run import storage_contract


def test_saves_and_removals_are_listed(tmp_path: Path) -> None:
    storage_contract.check_listings_and_removals(str(tmp_path / "run"))


def test_a_checkpoint_opens_its_folder_and_notices_that_it_is_replaced(tmp_path: Path) -> None:
    storage_contract.check_folders(str(tmp_path / "run"))


def test_a_refused_save_leaves_all_as_it_was(tmp_path: Path) -> None:
    storage_contract.check_refused_save(str(tmp_path / "run"))
