"""A run in a store does what every storage of a run does."""

from __future__ import annotations

from tests.stores.runs.bucket_run import BucketRun
from tests.training.run import storage_contract


def test_saves_and_removals_are_listed(run: BucketRun) -> None:
    storage_contract.check_listings_and_removals(run.root)


def test_a_checkpoint_opens_its_folder_and_notices_that_it_is_replaced(run: BucketRun) -> None:
    storage_contract.check_folders(run.root)


def test_a_refused_save_leaves_all_as_it_was(run: BucketRun) -> None:
    storage_contract.check_refused_save(run.root)


def test_a_save_keeps_no_metrics_of_other_weights(run: BucketRun) -> None:
    storage_contract.check_metrics_of_other_weights(run.root)


def test_a_save_keeps_no_metrics_of_a_copy(run: BucketRun) -> None:
    def rename(old: str, new: str) -> None:
        for name in run.names(f"{old}/"):
            run.put(name.replace(old, new), run.read(name))
            run.delete(name)

    storage_contract.check_metrics_of_a_copy(run.root, rename)
