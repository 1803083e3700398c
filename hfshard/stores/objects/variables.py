"""Settings and credentials of the environment, without the newline in which a mounted secret ends."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from hfshard.errors import StoreAccessError


def read_variable(name: str) -> str:
    """Read an environment variable without blanks and newlines at its ends; empty where it is not set.

    Raises:
        StoreAccessError: It has a control character, on which the client panics.
    """
    text = os.environ.get(name, "").strip()
    check_text(text, f"The environment variable {name}")
    return text


def check_text(text: str, source: str) -> None:
    """Refuse text that no header of a request can have.

    Args:
        text: Perhaps a secret, which the message does not show.
        source: What it is or where it is from, as the beginning of a sentence.

    Raises:
        StoreAccessError: It has a control character.
    """
    at = next((at for at, sign in enumerate(text) if not sign.isprintable()), None)
    if at is not None:
        raise StoreAccessError(
            f"{source} has the control character {text[at]!r} (character {at + 1} of {len(text)}), which no request "
            "can have. Set it to the plain value, without newlines."
        )


def client_settings(variables: Mapping[str, str]) -> dict[str, str]:
    """Give obstore those variables that it would read with the blanks at their ends.

    Args:
        variables: That obstore reads by itself -> its name for the setting.

    Returns:
        Settings -> their values.

    Raises:
        StoreAccessError: One has a control character, or nothing but blanks.
    """
    settings = {}
    for name, setting in variables.items():
        text = read_variable(name)
        if text != os.environ.get(name, ""):
            if not text:
                raise StoreAccessError(f"The environment variable {name} has nothing but blanks. Set it, or unset it.")
            settings[setting] = text
    return settings


class PlainVariables(Mapping[str, str]):
    """The environment as `read_variable` reads it, for libraries that take one; read when it is asked."""

    def __getitem__(self, name: str) -> str:
        """Read a variable."""
        if name not in os.environ:
            raise KeyError(name)
        return read_variable(name)

    def __iter__(self) -> Iterator[str]:
        """All names."""
        return iter(os.environ)

    def __len__(self) -> int:
        """How many there are."""
        return len(os.environ)
