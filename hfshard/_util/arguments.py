"""Refuses keyword arguments: unknown ones, with the one that was probably meant, and those that can't be done."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, MutableMapping
from typing import Any

from hfshard.errors import InvalidArgumentError, UnknownArgumentError


def refuse_unknown(names: Iterable[str], known: Collection[str], function: str) -> None:
    """Refuse unknown keyword arguments.

    Args:
        names: Those that were passed.
        known: Those that the function takes.
        function: Its name, for the message.

    Raises:
        UnknownArgumentError: The message names the nearest one that is known.
    """
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean '{nearest[0]}'?" if nearest else f" It takes: {', '.join(sorted(known))}."
            raise UnknownArgumentError(f"{function}() got an unexpected keyword argument '{name}'.{hint}")


def refuse_pickles(kwargs: MutableMapping[str, Any]) -> None:
    """Take `safe_serialization` of older code out of keyword arguments; False asks for a pickle, and is refused.

    Raises:
        InvalidArgumentError: It is False.
    """
    if kwargs.pop("safe_serialization", True) is False:
        raise InvalidArgumentError("hfshard does not write pickles: leave out safe_serialization=False.")


def check_texts(**values: object) -> None:
    """Refuse arguments that are neither None nor text that can be sent and can be part of a path.

    Raises:
        InvalidArgumentError: It names the argument.
    """
    for name, value in values.items():
        if value is not None and not (isinstance(value, str) and "\0" not in value and _is_unicode(value)):
            raise InvalidArgumentError(f"{name} must be text without NUL characters, got {value!r:.200}.")


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
