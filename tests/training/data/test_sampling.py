"""Samplers of the user's: each resumes, and is given another order in each epoch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hfshard.errors import StateDictMismatchError
from hfshard.training import ResumableDataLoader, plain_loader
from hfshard.training.data.sampling import own_order
from hfshard.training.data.seeding import generator_state
from tests.training.data.loader_child import SAMPLES, Augmented
from tests.training.data.samples import Numbers, are_equal


class Lengths(Sampler[list[int]]):
    """A batch sampler of another number of batches in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        generator = random.Random(self.epoch)
        return iter([[generator.randrange(SAMPLES) for _ in range(3)] for _ in range(4 + self.epoch)])


class Endless(Sampler[int]):
    """Never ends, and draws as it goes from two RNGs."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield (random.randrange(SAMPLES) + int(torch.randint(SAMPLES, ()))) % SAMPLES


class Once(Sampler[Iterator[int]]):
    """Its batches can be read once only."""

    def __iter__(self) -> Iterator[Iterator[int]]:
        return (iter(random.sample(range(SAMPLES), 3)) for _ in range(4))


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "SequentialSampler": lambda: {"batch_size": 4, "sampler": SequentialSampler(range(SAMPLES))},
    "RandomSampler": lambda: {"batch_size": 4, "sampler": RandomSampler(range(SAMPLES))},
    "RandomSampler with a generator": lambda: {
        "batch_size": 4,
        "sampler": RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(7)),
    },
    "RandomSampler with replacement": lambda: {
        "batch_size": 4,
        "sampler": RandomSampler(range(SAMPLES), replacement=True, num_samples=70),
    },
    "WeightedRandomSampler": lambda: {
        "batch_size": 4,
        "sampler": WeightedRandomSampler([1.0 + index for index in range(SAMPLES)], 40),
    },
    "SubsetRandomSampler": lambda: {"batch_size": 2, "sampler": SubsetRandomSampler([1, 3, 5, 7, 9, 11, 13, 15])},
    "DistributedSampler": lambda: {
        "batch_size": 2,
        "sampler": DistributedSampler(Augmented(), num_replicas=2, rank=1, seed=5),
    },
    "BatchSampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(SAMPLES)), 4, True)},
    "a batch sampler of changing length": lambda: {"batch_sampler": Lengths()},
    "a list": lambda: {"batch_size": 2, "sampler": [3, 1, 4, 1, 5, 9, 2, 6]},
    "batches that can be read once": lambda: {"batch_sampler": Once()},
    "no batches": lambda: {"batch_size": None, "sampler": RandomSampler(range(SAMPLES))},
    "no batches, own order": lambda: {"batch_size": None, "shuffle": True},
    "drop_last": lambda: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "in order": lambda: {"batch_size": 4},
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_every_sampler_resumes_and_has_another_order_in_each_epoch(kind: str) -> None:
    loader = ResumableDataLoader(Augmented(), **SAMPLERS[kind]())
    epochs: list[list[Tensor]] = []
    states: list[dict[str, Any]] = []
    for _ in range(3):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(batch)
            states.append(loader.state_dict())
    if kind not in ("SequentialSampler", "a list", "in order"):
        assert not all(torch.equal(one[..., 0], two[..., 0]) for one, two in zip(*epochs[:2]))
    rest = [batch for epoch in epochs for batch in epoch]
    for handed, state in enumerate(states, 1):
        if handed % 5 == 2:
            torch.manual_seed(handed)
            random.seed(handed)
            resumed = ResumableDataLoader(Augmented(), **SAMPLERS[kind]())
            resumed.load_state_dict(state)
            again = [batch for _ in range(resumed.epoch, 3) for batch in resumed]
            assert are_equal(again, rest[handed:])


class Holding(Sampler[int]):
    """Draws its order from a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        self.generator.shuffle(order)
        return iter(order)


@pytest.mark.parametrize(
    "make",
    [
        lambda: random.Random(3),
        lambda: np.random.default_rng(3),
        lambda: np.random.Generator(np.random.MT19937(3)),
        lambda: np.random.RandomState(3),
        lambda: np.random.RandomState(np.random.PCG64(3)),
    ],
    ids=["random.Random", "default_rng", "Generator of MT19937", "RandomState", "RandomState of PCG64"],
)
def test_a_sampler_with_a_generator_of_its_own_goes_on_after_an_epoch(make: Callable[[], Any]) -> None:
    loader = ResumableDataLoader(Numbers(SAMPLES), 4, sampler=Holding(make()))
    first = list(loader)
    state = loader.state_dict()
    second = list(loader)
    assert not are_equal(first, second)

    generator = make()
    before = repr(generator_state(generator))
    resumed = ResumableDataLoader(Numbers(SAMPLES), 4, sampler=Holding(generator))
    resumed.load_state_dict(state)

    assert are_equal(list(resumed), second)
    assert repr(generator_state(generator)) == before


def test_each_rank_of_a_distributed_sampler_augments_in_its_own_way() -> None:
    def noise(**arguments: Any) -> Tensor:
        batch: Tensor = next(iter(ResumableDataLoader(Augmented(), 4, seed=3, **arguments)))
        return batch[..., 1:]

    def sampler(rank: int) -> Sampler[Any]:
        return DistributedSampler(Augmented(), num_replicas=2, rank=rank)

    of_ranks = [noise(sampler=sampler(rank)) for rank in (0, 1)]
    assert not torch.equal(*of_ranks)
    assert torch.equal(of_ranks[0], noise(shuffle=True))
    batches = ResumableDataLoader(Augmented(), seed=3, batch_sampler=BatchSampler(sampler(1), 4, True))
    assert torch.equal(of_ranks[1], next(iter(batches))[..., 1:])
    plain = plain_loader(ResumableDataLoader(Augmented(), 4, seed=3, sampler=sampler(1)))
    assert torch.equal(of_ranks[1], next(iter(plain))[..., 1:])


def test_a_generator_that_a_sampler_holds_is_put_back() -> None:
    generator = torch.Generator().manual_seed(7)
    loader = ResumableDataLoader(Numbers(), sampler=RandomSampler(Numbers(), generator=generator))
    before = generator.get_state()
    list(loader)
    assert torch.equal(generator.get_state(), before)
    assert generator.initial_seed() == 7


def test_an_endless_sampler_resumes_far_in() -> None:
    loader = ResumableDataLoader(Numbers(SAMPLES), 3, sampler=Endless())
    iterator = iter(loader)
    for _ in range(150):
        next(iterator)
    resumed = ResumableDataLoader(Numbers(SAMPLES), 3, sampler=Endless())
    resumed.load_state_dict(loader.state_dict())
    assert are_equal(list(itertools.islice(resumed, 100)), list(itertools.islice(iterator, 100)))


class Own(Sampler[int]):
    """Its order depends on what nobody else can know."""

    def __init__(self, seed: int) -> None:
        self.generators = [random.Random(seed)]

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(self.generators[0].sample(range(10), 10))


def test_an_order_that_is_not_the_same_again_is_found_out() -> None:
    loader = ResumableDataLoader(Numbers(), 4, sampler=Own(1))
    next(iter(loader))
    resumed = ResumableDataLoader(Numbers(), 4, sampler=Own(2))
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(StateDictMismatchError, match="the 1 batches before the checkpoint had other samples than Own"):
        iter(resumed)
    resumed.set_epoch(1)
    assert len(list(resumed)) == 3


def test_a_sampler_that_ends_early_is_found_out() -> None:
    loader = ResumableDataLoader(Augmented(), batch_sampler=Lengths())
    loader.set_epoch(3)
    list(itertools.islice(loader, 6))
    state = loader.state_dict()
    state["epoch"] = 1
    resumed = ResumableDataLoader(Augmented(), batch_sampler=Lengths())
    resumed.load_state_dict(state)
    with pytest.raises(StateDictMismatchError, match=r"Lengths returned 5 batches in epoch 1, .* saved after 6\."):
        iter(resumed)


def test_only_a_batch_that_is_not_full_is_dropped() -> None:
    assert [list(own_order(range(count), 2, True, 0, 0)) for count in (3, 4, 5)] == [
        [[0, 1]],
        [[0, 1], [2, 3]],
        [[0, 1], [2, 3]],
    ]
    assert list(own_order(range(3), 2, False, 0, 0)) == [[0, 1], [2]]
