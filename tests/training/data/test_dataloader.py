"""A ResumableDataLoader gives the same batches, killed and resumed or not, and draws from nobody else's RNG."""

from __future__ import annotations

import inspect
import itertools
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    get_worker_info,
)

from hfshard.errors import HfshardError, InvalidArgumentError, StaleIteratorError, StateDictMismatchError
from hfshard.training import ResumableDataLoader
from hfshard.training.data.sampling import EpochSampler
from hfshard.training.data.seeding import current_states, restore_states, seed_generators, seeds_for
from tests.helpers import processes
from tests.training.data.loader_child import BATCHES, EPOCHS, SAMPLES, Augmented, collate, make, run
from tests.training.data.samples import FORK, PERSISTENT, Numbers, are_equal, as_lists, rng_states

ORDER_3_0 = [6, 1, 0, 7, 3, 2, 9, 8, 4, 5]
ORDER_3_1 = [4, 6, 5, 1, 9, 2, 0, 3, 7, 8]
SEEDS_3_0_0 = (3993345867895641443, 17049808036295242024, 2650945910)
"""They may never change: a checkpoint would resume with other batches."""
SPAWN = {"num_workers": 1, "multiprocessing_context": "spawn", "prefetch_factor": 3, "persistent_workers": True}


@pytest.fixture(scope="module")
def straight() -> list[list[Tensor]]:
    loader = make()
    return [list(loader) for _ in range(EPOCHS)]


@pytest.mark.parametrize(
    ("first", "second", "stop"),
    [
        pytest.param({}, {}, (1, 2), id="no workers"),
        pytest.param(FORK, FORK, (1, 3), id="2 workers"),
        pytest.param(PERSISTENT, PERSISTENT, (1, 4), id="persistent workers"),
        pytest.param(FORK, SPAWN, (0, 5), id="2 workers, then a spawned one"),
        pytest.param({}, FORK, (0, 1), id="none, then 2"),
        pytest.param(PERSISTENT, {}, (1, 1), id="2, then none"),
        pytest.param(FORK, {**FORK, "prefetch_factor": 5}, (2, 6), id="the last batch of all"),
    ],
)
def test_killed_and_resumed_in_another_process_gives_the_same_batches(
    straight: list[list[Tensor]], tmp_path: Path, first: dict[str, Any], second: dict[str, Any], stop: tuple[int, int]
) -> None:
    end = processes.end_of(tmp_path / "words", run, tmp_path, first, stop)
    assert end.status == -signal.SIGKILL, end.words
    end = processes.end_of(tmp_path / "words", run, tmp_path, second, None)
    assert end.status == 0, end.words
    before, after = (torch.load(tmp_path / name) for name in ("before.pt", "after.pt"))
    assert len(before) == stop[0] * BATCHES + stop[1]
    assert are_equal([*before, *after], [batch for epoch in straight for batch in epoch])


@pytest.mark.parametrize("arguments", [FORK, PERSISTENT], ids=["2 workers", "persistent workers"])
def test_workers_give_what_none_give(straight: list[list[Tensor]], arguments: dict[str, Any]) -> None:
    loader = make(**arguments)
    for epoch in straight:
        assert are_equal(list(loader), epoch)


def test_order_and_seeds_are_those_of_format_1() -> None:
    assert list(EpochSampler(range(10), seed=3)) == ORDER_3_0
    loader = ResumableDataLoader(Numbers(), batch_size=None, shuffle=True, seed=3)
    assert [int(index) for index in loader] == ORDER_3_0
    assert [int(index) for index in loader] == ORDER_3_1
    assert seeds_for("batch", 3, 0, 0) == SEEDS_3_0_0


def test_epochs_seeds_and_batches_draw_other_numbers(straight: list[list[Tensor]]) -> None:
    numbers = torch.cat([batch[:, 1:].flatten() for epoch in straight for batch in epoch])
    assert len(numbers.unique()) == EPOCHS * (SAMPLES + BATCHES) * 4
    other = ResumableDataLoader(Augmented(), 4, True, collate_fn=collate, seed=4)
    assert not any(torch.equal(one, two) for one, two in zip(straight[0], other))


@pytest.mark.parametrize("arguments", [{}, FORK], ids=["no workers", "2 workers"])
@pytest.mark.parametrize("sampler", [None, RandomSampler(range(SAMPLES))], ids=["own order", "a sampler"])
def test_iterating_changes_no_rng_of_the_process(arguments: dict[str, Any], sampler: Sampler[int] | None) -> None:
    random.seed(1)
    np.random.seed(1)
    np.random.randn()  # numpy keeps the other one of the pair
    torch.manual_seed(1)
    before = rng_states()
    loader = ResumableDataLoader(Augmented(), 4, sampler is None, sampler, **arguments)
    for _ in loader:
        assert rng_states() == before
    assert rng_states() == before


def test_the_normal_number_that_numpy_keeps_is_seen() -> None:
    assert hasattr(np.random.get_state.__self__, "_bit_generator")  # type: ignore[attr-defined,unused-ignore]
    np.random.seed(1)
    for kept in (True, False, True):
        np.random.randn()
        before = rng_states()
        states = current_states()
        assert (states.numpy_normal is not None) is kept
        assert rng_states() == before
        seed_generators(seeds_for(2), np.random.MT19937())
        restore_states(states)
        assert rng_states() == before


def test_rng_is_put_back_after_an_error_of_the_dataset() -> None:
    before = rng_states()
    loader = ResumableDataLoader(Numbers(3), sampler=[0, 7, 1], collate_fn=lambda items: [0, 1, 2][items[0]])
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(IndexError):
        next(iterator)
    assert rng_states() == before
    assert loader.batch == 1


def test_another_generator_of_numpy_stays() -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined,unused-ignore]
    try:
        np.random.set_bit_generator(np.random.PCG64(5))  # type: ignore[attr-defined,unused-ignore]
        loader = make()
        first = next(iter(loader))
        np.random.set_bit_generator(np.random.PCG64(6))  # type: ignore[attr-defined,unused-ignore]
        loader.set_epoch(0)
        assert torch.equal(next(iter(loader)), first)
        assert type(np.random.get_bit_generator()) is np.random.PCG64  # type: ignore[attr-defined,unused-ignore]
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined,unused-ignore]


def test_position_counts_what_was_handed_out_and_not_what_was_fetched() -> None:
    loader = make(**FORK)
    assert (loader.epoch, loader.batch) == (0, 0)
    for number, _ in enumerate(loader, 1):
        assert (loader.epoch, loader.batch) == (0, number)
    assert (loader.epoch, loader.batch) == (1, 0)


def test_a_checkpoint_of_the_last_batch_resumes_at_the_end_of_its_epoch() -> None:
    loader = ResumableDataLoader(Numbers(), 4)
    *_, state = [loader.state_dict() for _ in loader]
    assert (state["epoch"], state["batch"]) == (0, 3)
    resumed = ResumableDataLoader(Numbers(), 4)
    resumed.load_state_dict(state)
    epochs = [(epoch, as_lists(resumed)) for epoch in range(resumed.epoch, 2)]
    assert epochs == [(0, []), (1, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]])]
    assert (resumed.epoch, resumed.batch) == (2, 0)


def test_a_loop_that_is_left_keeps_its_position_and_the_next_loop_is_the_next_epoch() -> None:
    loader = ResumableDataLoader(Numbers(), 2, True)
    whole = [as_lists(loader) for _ in range(2)]
    loader.set_epoch(0)
    for _ in loader:
        if loader.batch == 2:
            break
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (0, 2)
    assert as_lists(loader) == whole[1]
    loader.load_state_dict(state)
    assert as_lists(loader) == whole[0][2:]
    assert as_lists(loader) == whole[1]


def test_a_state_is_unchanged_by_a_restore() -> None:
    loader = make()
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    resumed_iterator = iter(resumed)
    assert resumed.state_dict() == state
    next(resumed_iterator), next(iterator)
    assert resumed.state_dict() == loader.state_dict() != state


def test_set_epoch_of_the_same_epoch_keeps_a_restored_position() -> None:
    loader = ResumableDataLoader(Numbers(), 4)
    next(iter(loader))
    resumed = ResumableDataLoader(Numbers(), 4)
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(0)
    assert as_lists(resumed) == [[4, 5, 6, 7], [8, 9]]


def test_set_epoch_goes_to_the_beginning_of_an_epoch() -> None:
    loader = ResumableDataLoader(Numbers(), 4, True)
    whole = [as_lists(loader) for _ in range(3)]
    next(iter(loader))
    loader.set_epoch(1)
    assert (loader.epoch, loader.batch) == (1, 0)
    assert as_lists(loader) == whole[1]
    next(iter(loader))
    loader.set_epoch(2)  # the one that was left: from its beginning, but a checkpoint before is where it was left
    assert (loader.epoch, loader.batch) == (2, 1)
    assert as_lists(loader) == whole[2]
    with pytest.raises(InvalidArgumentError, match="epoch of a ResumableDataLoader must be 0 or more, got -1"):
        loader.set_epoch(-1)
    with pytest.raises(InvalidArgumentError, match=r"epoch of a ResumableDataLoader must be an int, got 1\.0"):
        loader.set_epoch(1.0)  # type: ignore[arg-type]
    loader.set_epoch(np.int64(7))  # type: ignore[arg-type]
    assert type(loader.state_dict()["epoch"]) is int


def test_an_iterator_that_was_not_used_costs_no_epoch() -> None:
    loader = ResumableDataLoader(Numbers(), 4, True)
    iter(loader)
    assert as_lists(loader) == as_lists(ResumableDataLoader(Numbers(), 4, True))


@pytest.mark.parametrize("arguments", [{}, PERSISTENT], ids=["no workers", "persistent workers"])
@pytest.mark.parametrize(
    "move",
    [
        lambda loader: next(iter(loader)),
        lambda loader: loader.set_epoch(5),
        lambda loader: loader.load_state_dict(make().state_dict()),
    ],
    ids=["iter", "set_epoch", "load_state_dict"],
)
def test_an_older_iterator_is_refused(move: Callable[[Any], Any], arguments: dict[str, Any]) -> None:
    loader = make(**arguments)
    older = iter(loader)
    next(older)
    move(loader)
    position = (loader.epoch, loader.batch)
    with pytest.raises(
        StaleIteratorError, match=r"no longer the newest: iter\(\), set_epoch\(\) or load_state_dict\(\)"
    ):
        next(older)
    assert (loader.epoch, loader.batch) == position


def test_an_iterator_at_its_end_stays_there() -> None:
    loader = ResumableDataLoader(Numbers(), 4)
    iterator = iter(loader)
    assert len(list(iterator)) == 3
    iter(loader)
    assert list(iterator) == []
    assert (loader.epoch, loader.batch) == (1, 0)


def test_skipping_loads_nothing() -> None:
    loader = make()
    list(itertools.islice(loader, 4))
    dataset = Augmented()
    resumed = ResumableDataLoader(dataset, 4, True, collate_fn=collate, seed=3)
    resumed.load_state_dict(loader.state_dict())
    assert [len(batch) for batch in resumed] == [5, 3]
    assert len(dataset.loaded) == 6


def test_it_is_a_dataloader_of_the_users_things() -> None:
    theirs = list(inspect.signature(DataLoader.__init__).parameters.values())
    ours = list(inspect.signature(ResumableDataLoader.__init__).parameters.values())
    assert [(one.name, one.kind, one.default) for one in ours if one.name != "seed"] == [
        (one.name, one.kind, one.default) for one in theirs
    ]
    dataset = Numbers()
    loader = ResumableDataLoader(dataset, 4, True, drop_last=True)
    assert isinstance(loader, DataLoader)
    assert loader.dataset is dataset
    assert (loader.batch_size, loader.drop_last, len(loader), len(iter(loader))) == (4, True, 2, 2)


def test_the_seed_of_a_generator_is_the_seed() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = ResumableDataLoader(Numbers(), None, True, generator=generator)
    assert [int(index) for index in loader] == ORDER_3_0
    with pytest.raises(InvalidArgumentError, match=r"cannot combine seed=4 with a generator \(seed 3\)"):
        ResumableDataLoader(Numbers(), generator=generator, seed=4)
    with pytest.raises(InvalidArgumentError, match="seed of a ResumableDataLoader must be an int, got '1'"):
        ResumableDataLoader(Numbers(), seed="1")  # type: ignore[arg-type]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_what_has_no_positions_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"Stream is an IterableDataset.*StatefulDataLoader"):
        ResumableDataLoader(Stream())
    with pytest.raises(InvalidArgumentError, match="in_order=True"):
        ResumableDataLoader(Numbers(), num_workers=1, in_order=False)
    with pytest.raises(ValueError, match="mutually exclusive with shuffle"):
        ResumableDataLoader(Numbers(), shuffle=True, sampler=[1])


class InPieces(Dataset[int]):
    """Loads many at once, as those of the datasets library do; and is opened in each worker."""

    handle = ""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise AssertionError("one by one")

    def __getitems__(self, indexes: list[int]) -> list[str]:
        return [f"{self.handle}{index}" for index in indexes]


def open_it(worker: int) -> None:
    information = get_worker_info()
    assert information is not None
    dataset: Any = information.dataset
    dataset.handle = f"{dataset.handle}opened in {worker}: "


def test_a_worker_init_function_reaches_the_dataset() -> None:
    loader = ResumableDataLoader(InPieces(), 2, num_workers=2, worker_init_fn=open_it)
    assert list(loader) == [["opened in 0: 0", "opened in 0: 1"], ["opened in 1: 2", "opened in 1: 3"]]


class Broken(Dataset[int]):
    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise self.error("no such file")
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_dataset_comes_through_and_moves_nothing(workers: int) -> None:
    loader = ResumableDataLoader(Broken(OSError), num_workers=workers)
    iterator = iter(loader)
    next(iterator), next(iterator)
    with pytest.raises(OSError, match="no such file"):
        next(iterator)
    assert (loader.epoch, loader.batch) == (0, 2)
    # The one that failed is tried again by who resumes here; a loop that goes on has left it out, as torch's would.
    assert next(iterator).tolist() == [3]
    assert (loader.epoch, loader.batch) == (0, 4)
    state = loader.state_dict()
    assert [batch.tolist() for batch in iterator] == [[4], [5]]
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == [[4], [5]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_stops_by_itself_does_not_end_the_epoch(workers: int) -> None:
    loader = ResumableDataLoader(Broken(StopIteration), num_workers=workers)
    iterator = iter(loader)
    next(iterator), next(iterator)
    with pytest.raises(HfshardError, match="raised StopIteration in batch 2 of epoch 0"):
        next(iterator)
    assert (loader.epoch, loader.batch) == (0, 2)
    assert len(list(iterator)) == 3  # a worker with work left takes 5 s to end


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", [{}, FORK], ids=["no workers", "2 workers"])
def test_batches_are_pinned_and_the_random_state_of_a_gpu_stays(
    straight: list[list[Tensor]], arguments: dict[str, Any]
) -> None:
    before = torch.cuda.get_rng_state()
    batches = list(make(pin_memory=True, **arguments))
    assert all(batch.is_pinned() for batch in batches)
    assert are_equal(batches, straight[0])
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_an_empty_loader_counts_its_epochs() -> None:
    loader = ResumableDataLoader(Numbers(3), 4, True, drop_last=True)
    assert [list(loader) for _ in range(2)] == [[], []]
    assert (loader.epoch, loader.batch) == (2, 0)


def test_attributes_that_torch_allows_to_change_are_used() -> None:
    loader = ResumableDataLoader(Numbers(), 4)
    list(loader)
    loader.collate_fn = tuple
    loader.num_workers, loader.prefetch_factor = 1, 2
    assert list(loader) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]


def test_its_sampler_gives_another_loader_the_same_order() -> None:
    loader = ResumableDataLoader(Numbers(), 4, True, seed=3)
    plain = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, num_workers=1)
    for _ in range(2):
        assert [batch.tolist() for batch in plain] == as_lists(loader)


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
