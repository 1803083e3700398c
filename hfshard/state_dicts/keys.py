"""Names of tensors: which ones are asked for, and how those of a checkpoint and of a model differ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

import torch

from hfshard._util.text import list_some
from hfshard.errors import InvalidArgumentError, StateDictMismatchError

KeySelection = Collection[str] | Callable[[str], bool] | str
"""Which tensors to load: names or globs, or a function of the name."""

_SHOWN_KEYS: Final = 20


def select_keys(names: Iterable[str], keys: KeySelection | None) -> list[str]:
    """Select names, in their own order.

    Args:
        names: All of them.
        keys: Which; None: all.

    Raises:
        InvalidArgumentError: `keys` is something else.
        StateDictMismatchError: A name or glob that matches nothing.
    """
    names = list(names)
    if keys is None:
        return names
    if callable(keys):
        return [name for name in names if keys(name)]
    given: Any = keys
    if isinstance(given, bytes) or not isinstance(given, Iterable) or not all(isinstance(one, str) for one in given):
        raise InvalidArgumentError(f"keys must be names, globs, or a function of the name, got {keys!r:.200}.")
    known = set(names)
    patterns = [keys] if isinstance(keys, str) else list(keys)
    found = {pattern: {pattern} if pattern in known else set(_matching(names, pattern)) for pattern in patterns}
    selected = set[str]().union(*found.values())
    empty = tuple(pattern for pattern in patterns if not found[pattern])
    if empty:
        raise StateDictMismatchError(
            f"The checkpoint has no tensor that matches {list_some(empty, _SHOWN_KEYS)}. "
            "To see the names, run: hfshard inspect --tensors DIR",
            missing_keys=empty,
        )
    return [name for name in names if name in selected]


def _matching(names: Iterable[str], glob: str) -> Iterator[str]:
    is_glob = any(
        sign in glob for sign in "*?["
    )  # thousands of exact names may be missing: they are not compared one by one
    return (name for name in names if fnmatchcase(name, glob)) if is_glob else iter(())


@dataclass(frozen=True, slots=True)
class KeyMismatch:
    """The names and shapes in which a checkpoint and a model differ."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """(name, shape in the checkpoint, shape in the model)."""

    def raise_unless_allowed(self, *, strict: bool, path: str, matched: int) -> None:
        """Refuse differences that are not allowed.

        Raises:
            StateDictMismatchError: A shape differs, no name matches, or `strict` and any name differs.
        """
        nothing = matched == 0 and bool(self.missing)
        if not (nothing or self.mismatched or (strict and (self.missing or self.unexpected))):
            return
        raise StateDictMismatchError(
            f"The checkpoint '{path}' does not fit the model, and nothing was loaded: {self.summary()}. "
            + ("Pass strict=False to load what fits, or " if strict and not (nothing or self.mismatched) else "Please ")
            + f"compare the names with: hfshard inspect --tensors {path}",
            path=path,
            missing_keys=self.missing,
            unexpected_keys=self.unexpected,
            mismatched_keys=self.mismatched,
        )

    def summary(self) -> str:
        """All differences in words."""
        parts = []
        if self.missing:
            parts.append(f"{len(self.missing)} missing: {list_some(self.missing, _SHOWN_KEYS)}")
        if self.unexpected:
            parts.append(f"{len(self.unexpected)} unexpected: {list_some(self.unexpected, _SHOWN_KEYS)}")
        if self.mismatched:
            shown = [
                f"{name} {list(theirs)} in the checkpoint, {list(mine)} in the model"
                for name, theirs, mine in self.mismatched
            ]
            parts.append(f"{len(self.mismatched)} of another shape: {list_some(shown, _SHOWN_KEYS)}")
        return "; ".join(parts)


def compare(state_dict: Mapping[str, torch.Tensor], model_state: Mapping[str, torch.Tensor]) -> KeyMismatch:
    """Compare the names and shapes of a checkpoint with those of a model."""
    return KeyMismatch(
        missing=tuple(name for name in model_state if name not in state_dict),
        unexpected=tuple(name for name in state_dict if name not in model_state),
        mismatched=tuple(
            (name, tuple(tensor.shape), tuple(model_state[name].shape))
            for name, tensor in state_dict.items()
            if isinstance(model_state.get(name), torch.Tensor) and tensor.shape != model_state[name].shape
        ),
    )
