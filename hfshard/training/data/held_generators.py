"""The random number generators that a loader, its samplers and its dataset hold: found by name, stored and set back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from hfshard.errors import DamagedCheckpointError
from hfshard.training.data.seeding import generator_state, is_generator, set_generator_state


class HeldGenerators:
    """Those of a loader, as it is now.

    Args:
        loader: Its own attributes are looked at, those of its samplers, and of its dataset where it has no workers:
            these draw from copies.
    """

    def __init__(self, loader: Any) -> None:
        self._found: dict[str, Any] = {}
        known: set[int] = set()
        for name, value in _attributes(loader):
            if id(value) not in known:
                known.add(id(value))
                self._found[name] = value

    def states(self) -> dict[str, Any]:
        """Name -> state; without those that have none."""
        found = {}
        for name, generator in self._found.items():
            try:
                found[name] = generator_state(generator)
            except NotImplementedError:  # random.SystemRandom
                continue
        return found

    def drawn_since(self, states: Mapping[str, Any]) -> list[str]:
        """Name those of samplers, and not of the loader itself, that are in another state now."""
        now = self.states()
        return [name for name in now if "sampler." in name and repr(now[name]) != repr(states.get(name))]

    def stateless(self) -> list[str]:
        """Name those that have no state to store."""
        return sorted(self._found.keys() - self.states().keys())

    def check(self, states: Mapping[str, Any]) -> None:
        """Refuse states that do not fit, and warn of generators that are not there; nothing is changed.

        Raises:
            DamagedCheckpointError: One is no state of its generator.
        """
        missing = sorted(states.keys() - self._found.keys())
        if missing:
            warnings.warn(
                f"The data loader held a random number generator '{missing[0]}' when the checkpoint was saved, and "
                "does not now. If it is not made in `__iter__`, build the loader as in the run that was saved.",
                stacklevel=2,
            )
        before = self.states()
        try:
            for name, state in states.items():
                if name in self._found:
                    set_generator_state(self._found[name], state)
        except (LookupError, ValueError, TypeError, RuntimeError, AttributeError, OverflowError) as error:
            raise DamagedCheckpointError(
                f"The state of the random number generator '{name}' of the data loader is not valid ({error!r:.200}), "
                "or that of another kind of generator. Build the loader as in the run that was saved, or restore "
                "another checkpoint."
            ) from error
        finally:
            self.set(before)

    def set(self, states: Mapping[str, Any]) -> None:
        """Let the generators go on from these states; one that is not there yet is made, and seeded, in `__iter__`."""
        for name, state in states.items():
            if name in self._found:
                set_generator_state(self._found[name], state)


def _attributes(loader: Any) -> Iterator[tuple[str, Any]]:
    """Every generator in the attributes of a loader and its parts, or in a list or dict there."""
    names = ["batch_sampler", "sampler", *([] if getattr(loader, "num_workers", 0) else ["dataset"])]
    waiting = [("", loader)]
    seen: set[int] = set()
    while waiting:
        place, part = waiting.pop(0)
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        for name, value in (vars(part) if hasattr(part, "__dict__") else {}).items():
            entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            yield from ((f"{place}{name}[{key!r}]", one) for key, one in entries if is_generator(one))
            if is_generator(value):
                yield f"{place}{name}", value
        waiting += [(f"{place}{name}.", getattr(part, name, None)) for name in names]
