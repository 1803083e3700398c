"""The error for a pickle that asks for more than tensors: what it asks for, and how its owner takes the weights out."""

from __future__ import annotations

import io
import os
import pickletools
import shlex
from typing import IO, Final

from hfshard.errors import UnsafePickleError
from hfshard.storage.weights.pickles.zip_check import pickle_record

_BEFORE_THE_OBJECT: Final = 3
"""Pickles before the object in torch's older format: a magic number, the version, the machine."""
_BEFORE_AN_OBJECT: Final = frozenset(
    ("PROTO", "MARK", "BINUNICODE", "NONE", "BINPUT", "LONG_BINPUT", "TUPLE", "BINPERSID", "EMPTY_TUPLE")
)
"""Opcodes that come, beside its class, before an object that was saved whole; the older format has its source there."""


def unsafe_pickle(fd: int, path: str, asked: str | None, *, is_zip: bool) -> UnsafePickleError:
    """Make the error.

    Args:
        fd: The file, open.
        path: For the message.
        asked: What it asks for: a class or a function; None: it is not known.
        is_zip: Which format it has.
    """
    what = f"'{asked}'" if asked else "something"
    if asked is not None and _root_global(fd, path, is_zip=is_zip) == asked:
        kind = f"it is an object of {what} that was saved whole, and a checkpoint needs only tensors"
        taken, where = ".state_dict()", f", where {what} can be imported"
    else:
        kind = f"its pickle asks for {what}, but a checkpoint needs only tensors"
        taken, where = "['state_dict']", ", with the key that they have in it"
    command = f"import torch; torch.save(torch.load({path!r}, weights_only=False){taken}, 'weights.pt')"
    return UnsafePickleError(
        f"'{path}' was not loaded: {kind}. It may run code on your machine. Do not load it, unless you made it; in "
        f"that case save its weights alone{where}: python -c {shlex.quote(command)}",
        path=path,
        actual=asked,
    )


def other_tensors(path: str, kind: str) -> UnsafePickleError:
    """The error for tensors that are not plain, such as DTensors of a model that is spread over ranks.

    Args:
        path: The file.
        kind: Their class, or what they are called.
    """
    todo = "Load it with torch.load(path, weights_only=True) in the program that made it, and save plain tensors"
    if kind == "DTensor":
        todo = (
            "Each rank saved only its part: load it there, make the tensors whole on every rank (full_tensor), and "
            "save them again, or save the model with hfshard.save_model"
        )
    return UnsafePickleError(
        f"'{path}' was not loaded: it holds a {kind}, and a checkpoint needs plain tensors. {todo}.",
        path=path,
        actual=kind,
    )


def _root_global(fd: int, path: str, *, is_zip: bool) -> str | None:
    """The class of the object that was saved; None for a dict, or where it can't be told. Nothing is unpickled."""
    try:
        if is_zip:
            return _first_global(io.BytesIO(pickle_record(fd, path)))
        with os.fdopen(os.dup(fd), "rb") as file:
            file.seek(0)
            for _ in range(_BEFORE_THE_OBJECT):
                for _ in pickletools.genops(file):
                    pass
            return _first_global(file)
    except (ValueError, EOFError, OSError):  # torch has found fault with it, too
        return None


def _first_global(file: IO[bytes]) -> str | None:
    found = None
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name == "GLOBAL" and found is None:
            found = str(argument).replace(" ", ".")
        elif opcode.name == "NEWOBJ":
            return found
        elif opcode.name not in _BEFORE_AN_OBJECT:
            break
    return None
