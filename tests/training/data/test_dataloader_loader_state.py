"""The state of a loader: one of another loader, or a damaged one, is refused and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import RandomSampler, SubsetRandomSampler

from hfshard.errors import StateDictMismatchError
from hfshard.training import ResumableDataLoader
from tests.training.data.samples import Numbers

MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "batch size": ({"batch_size": 2, "shuffle": True}, r"batch_size 4, but this loader has 2\. .*set_epoch\(0\)"),
    "length": ({"dataset": Numbers(9), "batch_size": 4, "shuffle": True}, "length of the dataset 10, .* has 9"),
    "seed": ({"batch_size": 4, "shuffle": True, "seed": 1}, "seed 0, but this loader has 1"),
    "order": ({"batch_size": 4}, "sampler 'EpochSampler', but this loader has 'SequentialSampler'"),
    "sampler": ({"batch_size": 4, "sampler": RandomSampler(Numbers())}, "this loader has 'RandomSampler'"),
    "drop_last": ({"batch_size": 4, "shuffle": True, "drop_last": True}, "drop_last False, but this loader has True"),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_another_loader_is_refused_and_stays_as_it_is(what: str) -> None:
    arguments, message = MISMATCHES[what]
    loader = ResumableDataLoader(Numbers(), 4, True)
    next(iter(loader))
    other = ResumableDataLoader(**{"dataset": Numbers(), **arguments})
    next(iter(other))
    before = other.state_dict()
    for refuse in (other.check_state_dict, other.load_state_dict):
        with pytest.raises(StateDictMismatchError, match=message):
            refuse(loader.state_dict())
    assert other.state_dict() == before


def test_a_sampler_of_another_length_is_refused() -> None:
    loader = ResumableDataLoader(Numbers(), 2, sampler=SubsetRandomSampler([1, 2, 3, 4]))
    other = ResumableDataLoader(Numbers(), 2, sampler=SubsetRandomSampler([1, 2]))
    with pytest.raises(StateDictMismatchError, match="number of batches in an epoch 2, but this loader has 1"):
        other.check_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, r"not a ResumableDataLoader's state of format 1 \(found: 2\)"),
        ({"batch": 4}, "at batch 4 of 3"),
        ({"batch": -1}, "batch -1, which is not a valid position"),
        ({"epoch": 1.0}, "epoch 1.0, which is not a valid position"),
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, Any], message: str) -> None:
    loader = ResumableDataLoader(Numbers(), 4)
    with pytest.raises(StateDictMismatchError, match=message):
        loader.check_state_dict({**loader.state_dict(), **change})


def test_a_state_without_its_fields_is_refused() -> None:
    loader = ResumableDataLoader(Numbers(), 4)
    state = loader.state_dict()
    del state["epoch"], state["seed"]
    with pytest.raises(StateDictMismatchError, match="state has no epoch, seed"):
        loader.load_state_dict(state)
    with pytest.raises(StateDictMismatchError, match="found: 'list'"):
        loader.load_state_dict([])  # type: ignore[arg-type]
