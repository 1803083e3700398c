"""Keyword arguments that nobody takes are refused, with the name that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from hfshard.errors import UnknownArgumentError


def refuse_unknown(given: Iterable[str], known: Collection[str], function: str) -> None:
    """Refuse keyword arguments that nobody takes.

    Raises:
        UnknownArgumentError: There is one; the message names the nearest that is known.
    """
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean '{nearest[0]}'?" if nearest else f" It takes: {', '.join(sorted(known))}."
            raise UnknownArgumentError(f"{function}() got an unexpected keyword argument '{name}'.{hint}")
