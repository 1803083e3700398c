"""Walks through the opcodes of a pickle before torch does: what would end the process, or fill its memory, is refused.

`torch.load(weights_only=True)` runs no code of a stranger, but builds what the opcodes say. Three things that it builds
can't be caught as errors: tuples in tuples, a hundred thousand deep, overflow the stack of the processor when one is
hashed as a name; two that are one, in two that are one, 60 deep, are hashed forever; and a bytearray of any length is
filled with zeros. Nothing is built here: of each value on the stack, only its depth in
tuples is known.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import IO, Final

from hfshard.errors import DamagedCheckpointError
from hfshard.storage.weights.pickles.zip_check import damaged_pickle, pickle_record

_DEEPEST: Final = 1000
"""Tuples in tuples: torch.save's own are three deep. A processor's stack of 8 MB takes some 50,000."""
_DEEPEST_NAME: Final = 3
"""Tuples in tuples that are a name: 60 of two that are one are 2**60, and each is hashed."""
_DEEPEST_ITEM: Final = 10
"""The same for all tuples in a file that makes sets, or other containers that hash, of lists."""
_LONG_NAME: Final = 8
"""Bytes of a number that is a name: longer ones all can have the same hash."""
_SHORT: Final = 4096
"""Bytes that are read faster than they are passed over."""
_OLD_PICKLES: Final = 5
"""In torch's older format: a magic number, the version, the machine, the object, the list of storages."""

_TEXT: Final = -1
_TEXTS: Final = -2
"""A tuple that is empty or begins with text: what a bytearray is made from, unless it is made from a number."""
_BYTEARRAY: Final = -3
"""The class."""
_ENCODE: Final = -4
"""The function that makes bytes of text."""
_HASHING: Final = -5
"""A class that hashes what it is made from."""
_LARGE: Final = -6
"""A number of many bytes. These six are beside the depths on the stack."""
_GLOBALS: Final = {b"bytearray": _BYTEARRAY, b"encode": _ENCODE} | dict.fromkeys(
    (b"set", b"frozenset", b"OrderedDict", b"Counter"), _HASHING
)

_SKIPPED: Final = {  # opcodes that push a plain value -> bytes of their argument
    b"N": 0, b"\x88": 0, b"\x89": 0, b"]": 0, b"}": 0, b"\x8f": 0, b"J": 4, b"K": 1, b"M": 2, b"G": 8,
}  # fmt: skip
_MEMO: Final = {b"q": 1, b"r": 4, b"h": 1, b"j": 4}
"""BINPUT, LONG_BINPUT, BINGET, LONG_BINGET -> bytes of their number."""
_TUPLES: Final = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
_POPS: Final = {b"b": 1, b"a": 1}
"""BUILD, APPEND: what they take from the stack; what they change stays."""


def scan_zip(fd: int, path: str) -> None:
    """Walk through the pickle of a zip that `check_archive` has passed.

    Raises:
        DamagedCheckpointError: It has what no file of torch.save has, and what would end the process.
    """
    raw = pickle_record(fd, path)
    _Scan(io.BytesIO(raw), path).run()


def scan_old_format(fd: int, path: str) -> None:
    """Walk through the pickles of a file of the older format; see `scan_zip`."""
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        for _ in range(_OLD_PICKLES):
            if not _Scan(file, path).run():
                return


class _Scan:
    """One pickle. Where torch will find fault with it, the scan ends without a word."""

    def __init__(self, file: IO[bytes], path: str) -> None:
        self.file = file
        self.path = path
        self.stack: list[int] = []
        self.marked: list[list[int]] = []
        self.memo: dict[int, int] = {}
        self.deepest = 0
        self.others: dict[bytes, Callable[[], object]] = {
            b"(": self._mark, b"t": self._tuple, b"u": self._set_items, b"s": self._set_item,
            b"e": self._close, b")": self._empty_tuple,
            b"c": self._global, b"R": self._call, b"\x81": self._call, b"X": self._text, b"U": self._short_text,
            b"Q": self._persistent, b"\x8a": self._long, b"\x80": self._protocol,
        }  # fmt: skip

    def run(self) -> bool:
        """Walk to the end; False where it has none."""
        read = self.file.read
        try:
            while (opcode := read(1)) != b".":
                if (count := _SKIPPED.get(opcode)) is not None:
                    if count:
                        self._skip(count)
                    self.stack.append(0)
                elif (count := _MEMO.get(opcode)) is not None:
                    self._remember(opcode, int.from_bytes(read(count), "little"))
                elif (count := _TUPLES.get(opcode)) is not None:
                    items = self.stack[-count:]
                    del self.stack[-count:]
                    self._push_tuple(items)
                elif (count := _POPS.get(opcode)) is not None:
                    del self.stack[-count:]
                else:
                    self.others[opcode]()
        except (IndexError, KeyError):
            return False
        return True

    def _remember(self, opcode: bytes, number: int) -> None:
        if opcode in (b"q", b"r"):
            self.memo[number] = self.stack[-1]
        else:
            self.stack.append(self.memo[number])

    def _push_tuple(self, items: list[int]) -> None:
        depth = 1 + max(map(_depth, items), default=0)
        if depth > _DEEPEST:
            raise damaged_pickle(self.path, f"it has tuples in tuples, more than {_DEEPEST} deep")
        self.deepest = max(self.deepest, depth)
        self.stack.append(_TEXTS if depth == 1 and items and items[0] == _TEXT else depth)

    def _call(self) -> None:
        arguments = self.stack.pop()
        function = self.stack.pop()
        if function == _BYTEARRAY and arguments != _TEXTS:
            raise damaged_pickle(self.path, "it makes a bytearray from a number, which may fill the memory")
        if function == _HASHING and arguments != _TEXTS and self.deepest > _DEEPEST_ITEM:
            raise self._endless()
        self.stack.append(_TEXT if function == _ENCODE else _depth(arguments))

    def _set_item(self) -> None:
        key, _value = self.stack[-2:]
        del self.stack[-2:]
        self._check_name(key)

    def _set_items(self) -> None:
        for key in self._close()[::2]:
            self._check_name(key)

    def _check_name(self, key: int) -> None:
        if key > _DEEPEST_NAME or key == _LARGE:
            raise self._endless()

    def _endless(self) -> DamagedCheckpointError:
        return damaged_pickle(self.path, "it has names that take forever to be hashed")

    def _mark(self) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def _close(self) -> list[int]:
        items = self.stack
        self.stack = self.marked.pop()
        return items

    def _tuple(self) -> None:
        self._push_tuple(self._close())

    def _empty_tuple(self) -> None:
        self.stack.append(_TEXTS)

    def _global(self) -> None:
        self.file.readline()
        self.stack.append(_GLOBALS.get(self.file.readline().strip(), 0))

    def _text(self) -> None:
        self._skip(int.from_bytes(self.file.read(4), "little"))
        self.stack.append(_TEXT)

    def _short_text(self) -> None:
        self._skip(self.file.read(1)[0])
        self.stack.append(_TEXT)

    def _long(self) -> None:
        count = self.file.read(1)[0]
        self._skip(count)
        self.stack.append(_LARGE if count > _LONG_NAME else 0)

    def _persistent(self) -> None:
        self.stack[-1] = 0

    def _protocol(self) -> None:
        self._skip(1)

    def _skip(self, count: int) -> None:
        """Go on; where the file says that it has more than it has, nothing comes after it, and no room is made."""
        self.file.seek(count, os.SEEK_CUR) if count > _SHORT else self.file.read(count)


def _depth(value: int) -> int:
    return 1 if value == _TEXTS else max(value, 0)
