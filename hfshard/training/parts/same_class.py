"""Checks that a state is restored into an object of the class that it was taken from."""

from __future__ import annotations

from hfshard.errors import StateDictMismatchError


def check_class(saved: str, part: object, kind: str, name: str, path: str) -> None:
    """Refuse an object of another class; its module may have moved since.

    Args:
        saved: The qualified name of the class that was saved.
        part: What was built.
        kind: "optimizer" or "scheduler", for messages.
        name: Its name in the training state.
        path: The checkpoint's.

    Raises:
        StateDictMismatchError: The classes differ.
    """
    found = type(part).__qualname__
    if saved != found:
        raise StateDictMismatchError(
            f"'{name}' is {_a(found)}, and the checkpoint '{path}' has the state of {_a(saved)}. "
            f"Build the {kind} as in the run that was saved, or pass strict=False to let this one start afresh.",
            path=path,
            expected=saved,
            actual=found,
        )


def _a(name: str) -> str:
    return f"an {name}" if name[:1] in "AEIOU" else f"a {name}"
