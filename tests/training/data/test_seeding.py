"""Seeds are a function of a place alone, and private RNGs leave those of the process as they were."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hfshard.training.data.seeding import PrivateRng, Seeds, is_generator, seed_generators, seeds_for

Draw = Callable[[Any], float]


@pytest.fixture(autouse=True)
def process_rngs() -> Iterator[None]:
    """The RNGs of the process are those from before the test, after it too."""
    bits = vars(np.random)["get_bit_generator"]()
    python, numpy, of_torch = random.getstate(), bits.state, torch.get_rng_state()
    yield
    vars(np.random)["set_bit_generator"](bits)
    bits.state = numpy
    random.setstate(python)
    torch.set_rng_state(of_torch)


def draw_all() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), torch.rand(()).item()


GENERATORS: dict[str, tuple[Callable[[], Any], Draw]] = {
    "torch": (lambda: torch.Generator().manual_seed(9), lambda one: torch.rand((), generator=one).item()),
    "Random": (lambda: random.Random(9), lambda one: one.gauss(0, 1)),
    "Generator": (lambda: np.random.Generator(np.random.PCG64(9)), lambda one: one.random()),
    "RandomState": (lambda: np.random.RandomState(9), lambda one: one.standard_normal()),
    "RandomState of Philox": (lambda: np.random.RandomState(np.random.Philox(9)), lambda one: one.standard_normal()),
}


def test_seeds_are_the_words_of_the_digest_of_a_place() -> None:
    """As b2sum -l 160 prints it for "epoch/5/2" and "7", the lowest byte of each number first."""
    assert seeds_for("epoch", 5, 2) == Seeds(python=0x4D10CAA433A95FDF, torch=0xCD4CE05152C49EA8, numpy=0x62469404)
    assert seeds_for(7).numpy == 0x1675FCE4


def test_each_rng_of_the_process_gets_its_own_seed() -> None:
    vars(np.random)["set_bit_generator"](np.random.PCG64(5))  # which np.random.seed refuses

    seed_generators(Seeds(python=1, torch=2, numpy=3), np.random.MT19937())

    assert draw_all() == (0.13436424411240122, 0.5507979025745755, 0.6146950721740723)


def test_a_private_rng_goes_on_where_it_was_and_so_does_the_process() -> None:
    seed_generators(Seeds(1, 2, 3), np.random.MT19937())
    python = random.Random(0x670564D9CB897006)  # of "p/0"
    numpy = np.random.Generator(np.random.MT19937(0xF25C7AF1))
    of_torch = torch.Generator().manual_seed(0x47F481A9FD75EE28)
    rng = PrivateRng("p", 0)

    with rng:
        drawn = [draw_all()]
    outside = [draw_all()]
    with pytest.raises(KeyError), rng:
        drawn.append(draw_all())
        raise KeyError
    outside.append(draw_all())

    assert drawn == [(python.random(), numpy.random(), torch.rand((), generator=of_torch).item()) for _ in range(2)]
    seed_generators(Seeds(1, 2, 3), np.random.MT19937())
    assert outside == [draw_all(), draw_all()]


def test_held_generators_are_seeded_by_number_and_torchs_by_its_own_seed() -> None:
    of_torch = torch.Generator().manual_seed(9)
    used = random.Random(1)
    used.random()  # where it was does not matter
    numpys = np.random.Generator(np.random.PCG64(1))
    of_9 = torch.Generator().manual_seed(0x3F1AC7CAA8E1A31E)  # of "p/9"

    with PrivateRng("p", generators=[of_torch, used]):
        assert torch.equal(torch.rand((), generator=of_torch), torch.rand((), generator=of_9))
        assert used.random() == random.Random(0xA57A301E0BB331A9).random()  # of "p/held/1"
    with PrivateRng("p", generators=[of_torch, numpys]):
        assert numpys.random() == np.random.Generator(np.random.PCG64(0x2493BB54)).random()

    assert used.random() == 0.8474337369372327  # the second number of seed 1


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_held_generator_of_any_kind_has_its_own_numbers_inside_and_outside(kind: str) -> None:
    make, draw = GENERATORS[kind]
    untouched, held = make(), make()
    expected = [draw(untouched) for _ in range(3)]
    rng = PrivateRng("p", generators=[held])

    outside = [draw(held)]  # the first of a pair, whose second a RandomState and a Random keep
    with rng:
        inside = [draw(held)]
    outside.append(draw(held))
    with rng:
        inside.append(draw(held))
    outside.append(draw(held))

    assert is_generator(held)
    assert outside == expected
    assert len({*inside, *outside}) == 5


def test_global_generators_are_not_held_ones() -> None:
    values = [torch.default_generator, vars(np.random.mtrand)["_rand"], random, np.random.PCG64(1), 5]

    assert [is_generator(one) for one in values] == [False] * 5
