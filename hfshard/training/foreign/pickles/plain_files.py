"""Reads any file of torch.save as plain values: with weights_only=True, or by description where that refuses it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from hfshard._util.text import list_some
from hfshard.disk.safe_open import Identity
from hfshard.errors import UnsafePickleError
from hfshard.pickles.read_pickle import read_pickle
from hfshard.training.foreign.pickles.described_tensors import described_file, refuse_code
from hfshard.training.foreign.pickles.plain_values import PlainValues
from hfshard.training.run.finding import Level

_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class PlainFile:
    """What a file of torch.save holds, as plain values."""

    path: str
    identity: Identity
    """Which file it was."""
    value: Any
    """Containers, numbers, text, tensors and numpy's arrays; `NOT_STORED` for what is more than data."""
    is_mapped: bool
    """Whether tensors are mapped files, to be copied before the training goes on with them: see `copied`."""
    unread: dict[str, str] = field(default_factory=dict)
    """Where an object was that is more than data -> its class or function. Always empty with strict."""

    def copied(self, value: Any, at: str) -> Any:
        """A part of the value with memory of its own.

        Raises:
            DamagedCheckpointError: It contains itself, or is larger than any real state.
        """
        return PlainValues(self.path).of(value, at) if self.is_mapped else value

    def left_out(self) -> tuple[str, ...]:
        """What was not read, in sentences."""
        return tuple(
            f"'{at}' in '{self.path}' is of '{name}', which can't be read without running code, and was left out."
            for at, name in self.unread.items()
        )


def read_plain_file(path: str, root: str, *, strict: bool, verify: Level) -> PlainFile:
    """Read a file of torch.save without running anything in it.

    Args:
        path: The file.
        root: The directory in which it, and what it links to, must lie.
        strict: Refuse a file with objects that are more than data; else they are left out.
        verify: "full": compare every byte with the checksums that torch.save writes.

    Raises:
        UnsafePickleError: It asks for what runs code; or strict, and it has objects that are more than data.
        DamagedCheckpointError: It is not whole, or no file of torch.save.
    """
    try:
        contents = read_pickle(path, root)
    except UnsafePickleError as error:
        return _read_described(path, root, error, strict=strict)
    if verify == "full":
        contents.check_every_byte()
    return PlainFile(path, contents.identity, contents.value, is_mapped=True)


def _read_described(path: str, root: str, error: UnsafePickleError, *, strict: bool) -> PlainFile:
    """Read what `weights_only=True` refuses. Whatever is read of a zip is compared with its checksum, in any case."""
    with described_file(path, root) as file:
        refuse_code(path, file.names)
        values = PlainValues(path, file)
        value = values.of(file.value)
        if strict and values.unread:
            names = list_some(list(dict.fromkeys(values.unread.values())), _SHOWN, quote=True)
            raise UnsafePickleError(
                f"'{path}' has objects of {names}, which can't be read without running code "
                f"({list_some(list(values.unread), _SHOWN)}). With strict=False they are left out, without running "
                "anything, and the rest is read. Or load it in the program that made it, and save tensors, numbers, "
                "text, lists and dicts.",
                path=path,
                actual=next(iter(values.unread.values())),
            ) from error
        return PlainFile(path, file.identity, value, is_mapped=False, unread=values.unread)
