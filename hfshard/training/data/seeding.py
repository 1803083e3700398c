"""RNG states that are a function of a seed and a place, and swapping them with the process's own."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Documented since numpy 1.24, and missing in its stubs.
_numpy_bits = np.random.get_bit_generator  # type: ignore[attr-defined,unused-ignore]
_set_numpy_bits = np.random.set_bit_generator  # type: ignore[attr-defined,unused-ignore]
_numpy_singleton: Any = np.random.get_state.__self__  # type: ignore[attr-defined]


class Seeds(NamedTuple):
    """Seeds for the three RNGs that Python code draws from."""

    python: int
    torch: int
    numpy: int
    """32 bits, the most that `numpy.random.seed` accepts as one number."""


class RngStates(NamedTuple):
    """The states of `random`, `numpy.random` and torch's CPU generator."""

    python: tuple[Any, ...]
    numpy_bits: Any
    """numpy's bit generator itself: swapping the objects costs 2 us, copying their states 60."""
    numpy_normal: dict[str, Any] | None
    """numpy's full state if it keeps a normal number for the next call, which swapping would drop; else None."""
    torch: Tensor


def seeds_for(*place: int | str) -> Seeds:
    """Return seeds that depend only on a place; those of neighboring places have nothing in common.

    Args:
        place: For example seed, epoch, batch.

    Returns:
        64, 64 and 32 bits of its BLAKE2b hash.
    """
    digest = hashlib.blake2b("/".join(map(str, place)).encode(), digest_size=20).digest()
    return Seeds(*struct.unpack("<QQI", digest))


def seed_generators(seeds: Seeds, numpy_bits: np.random.MT19937) -> None:
    """Seed the RNGs of the process, CPU only: what an accelerator draws belongs to the training loop.

    Args:
        seeds: From `seeds_for`.
        numpy_bits: Becomes numpy's bit generator: the current one may be of a kind that accepts no seed.
    """
    random.seed(seeds.python)
    _set_numpy_bits(numpy_bits)
    np.random.seed(seeds.numpy)
    torch.default_generator.manual_seed(seeds.torch)


def current_states() -> RngStates:
    """Return the states of the process; numpy's is its bit generator itself, so replace that before drawing."""
    numpy_state: Any = np.random.get_state(legacy=False) if _keeps_a_normal() else None
    return RngStates(random.getstate(), _numpy_bits(), numpy_state, torch.default_generator.get_state())


class _NoBits:
    """A replacement for a bit generator whose state is not needed."""

    @property
    def state(self) -> dict[str, Any]:
        return {"bit_generator": "MT19937"}


_NO_BITS = _NoBits()


def _keeps_a_normal() -> bool:
    """Return whether numpy keeps the second of a pair of normal numbers for the next call.

    Only get_state() reports it, and 29 of its 30 us go into 624 words that are not needed here. So it is called without
    them, through a private attribute of numpy.
    """
    bits = getattr(_numpy_singleton, "_bit_generator", None)
    if bits is None:
        return bool(np.random.get_state(legacy=False)["has_gauss"])
    _numpy_singleton._bit_generator = _NO_BITS
    try:
        return bool(_numpy_singleton.get_state(legacy=False)["has_gauss"])
    finally:
        _numpy_singleton._bit_generator = bits


def restore_states(states: RngStates) -> None:
    """Let the process draw from these states."""
    random.setstate(states.python)
    _set_numpy_bits(states.numpy_bits)
    if states.numpy_normal is not None:
        np.random.set_state(states.numpy_normal)
    torch.default_generator.set_state(states.torch)


class PrivateRng:
    """Private RNG states for code that draws from the global RNGs repeatedly: `with` swaps the two.

    Args:
        place: Determines the seeds, as in `seeds_for`.
        generators: More generators, of torch, numpy or Python, which are restored as well. They are seeded from the
            place and their number here; those of torch, from the place and their own seed.
    """

    def __init__(self, *place: int | str, generators: Sequence[Any] = ()) -> None:
        seeds = seeds_for(*place)
        self._states = RngStates(
            random.Random(seeds.python).getstate(),
            np.random.MT19937(seeds.numpy),
            None,
            torch.Generator().manual_seed(seeds.torch).get_state(),
        )
        self._generators = list(generators)
        self._generator_states = [_seeded_state(one, place, number) for number, one in enumerate(self._generators)]

    def __enter__(self) -> None:
        self._exchange()

    def __exit__(self, *error: object) -> None:
        self._exchange()

    def _exchange(self) -> None:
        current = current_states()
        restore_states(self._states)
        self._states = current
        for number, generator in enumerate(self._generators):
            current_state = generator_state(generator)
            set_generator_state(generator, self._generator_states[number])
            self._generator_states[number] = current_state


def is_generator(value: Any) -> bool:
    """Return whether a value is a generator of torch, numpy or Python that is not a global one."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return isinstance(value, kinds) and value is not torch.default_generator and value is not _numpy_singleton


def _seeded_state(generator: Any, place: Sequence[int | str], number: int) -> Any:
    """Return the state of a seeded generator of the same kind."""
    if isinstance(generator, torch.Generator):
        seed = seeds_for(*place, generator.initial_seed()).torch
        return torch.Generator(generator.device).manual_seed(seed).get_state()
    seeds = seeds_for(*place, "held", number)
    if isinstance(generator, random.Random):
        return random.Random(seeds.python).getstate()
    if isinstance(generator, np.random.Generator):
        return type(generator.bit_generator)(seeds.numpy).state
    kind: Any = getattr(np.random, generator.get_state(legacy=False)["bit_generator"])
    return np.random.RandomState(kind(seeds.numpy)).get_state(legacy=False)


def generator_state(generator: Any) -> Any:
    """Return the state of a generator for which `is_generator` is true, as plain data and tensors."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def set_generator_state(generator: Any, state: Any) -> None:
    """Let a generator continue from a state that `generator_state` returned."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
