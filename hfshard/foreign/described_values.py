"""Values of described pickles, checked one by one, the classes that a file may name, and errors of ranks' files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any, Final

import torch

from hfshard._util.text import shorten_list
from hfshard.errors import DamagedCheckpointError, MissingShardError, UnsafePickleError
from hfshard.pickles.described_file import MOST_DIMENSIONS, is_count, meaning
from hfshard.pickles.pickle_opcodes import DescribedObject, GlobalReference

MALFORMED: Final = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors of this module, and of reading a value that is not what it should be."""

_SHOWN: Final = 8
"""The most ranks in a message."""


def reject_other_names(names: Iterable[str], admitted: re.Pattern[str], path: str, needed_by: str) -> None:
    """Reject a pickle that names a class or function which it does not need; torch's dtypes are always admitted.

    Args:
        names: All that it names.
        admitted: Pattern of the others.
        path: The file.
        needed_by: For the message, such as "a DeepSpeed checkpoint".
    """
    for name in sorted(names):
        if not admitted.fullmatch(name) and not isinstance(meaning(GlobalReference(name)), torch.dtype):
            raise UnsafePickleError(
                f"'{path}' asks for '{name}', which is nothing {needed_by} needs. Nothing of it was run, and nothing "
                "was loaded. If it is an object of your own, save without it; otherwise do not use the file.",
                path=path,
                actual=name,
            )


def pattern_of(names: Iterable[str], patterns: str = "") -> re.Pattern[str]:
    """Return a pattern of these names, and of those that match one of the patterns, separated by "|"."""
    return re.compile("|".join([*map(re.escape, names), *filter(None, (patterns,))]))


def parse_dict(value: Any) -> dict[str, Any]:
    """Return a dict, or an OrderedDict that was described, whose keys are all text."""
    found = meaning(value) if isinstance(value, DescribedObject) else value
    if not isinstance(found, dict):
        raise TypeError(f"a {type(found).__name__} in place of a dict")
    if not all(isinstance(name, str) for name in found):
        raise TypeError("a name that is not text")
    return found


def parse_state(value: Any, *names: str) -> dict[str, Any]:
    """Return the attributes of an object of one of these classes."""
    if not isinstance(value, DescribedObject) or value.name not in names or not isinstance(value.state, dict):
        raise TypeError(f"no {names[0].rpartition('.')[2]}")
    return value.state


def parse_text(value: Any) -> str:
    """Return text."""
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} in place of text")
    return value


def parse_count(value: Any) -> int:
    """Return a number of bytes or elements."""
    if not is_count(value):
        raise TypeError("a number that is not an int, or negative, or too large")
    return int(value)


def parse_shape(value: Any) -> tuple[int, ...]:
    """Return a torch.Size, or another sequence of sizes."""
    numbers = value.arguments[0] if isinstance(value, DescribedObject) and value.name == "torch.Size" else value
    if not isinstance(numbers, tuple | list) or len(numbers) > MOST_DIMENSIONS:
        raise TypeError(f"a {type(numbers).__name__} in place of sizes, or too many")
    return tuple(map(parse_count, numbers))


def damaged(
    path: str, problem: str, fqn: str | None = None, *, hint: str = "Copy it again from where it was saved."
) -> DamagedCheckpointError:
    """Build the error for a file or directory that is not as its framework writes it."""
    return DamagedCheckpointError(f"'{path}' cannot be read: {problem}. Nothing was loaded. {hint}", path=path, fqn=fqn)


def missing_rank(folder: str, what: str, present: Iterable[int], count: int, rank: int, name: str) -> MissingShardError:
    """Build the error for the file of a rank that is missing.

    Args:
        folder: It has the others' files.
        what: Their kind, such as "model files".
        present: The ranks whose files are there.
        count: The number of ranks.
        rank, name: The missing file.
    """
    ranks = shorten_list([str(one) for one in sorted(present)], _SHOWN)
    return MissingShardError(
        f"'{folder}' has the {what} of ranks {ranks} of {count}: that of rank {rank} ('{name}') is missing. Copy it "
        "there: every rank's disk may have its own.",
        path=os.path.join(folder, name),
    )
