"""Walks through the opcodes of a pickle before torch does: what would end the process, or fill its memory, is refused.

`torch.load(weights_only=True)` runs no code of a stranger, but builds what the opcodes say, and some of that can't be
caught as an error, or ends after hours:

- Tuples in tuples, a hundred thousand deep, overflow the stack of the processor when one is hashed as a name; two that
  are one, in two that are one, 60 deep, are hashed forever; so is a dict whose names all have one hash.
- A bytearray of any length is filled with zeros; text is encoded by any codec, and "punycode" takes the square of its
  length; a list of two lists, which are one, 30 deep, is made a tensor.
- What is in the file once is copied by each call that is given it, and written out, with all that is in it, by the
  error of one that does not take it.

So a call is let pass where its arguments are those that pickle itself writes, and all calls of a file together may take
as much as the file has. Nothing is built here but numbers, short texts, and the names that are hashed.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from struct import Struct, error
from typing import IO, Any, Final

from hfshard._util.threads import no_collection
from hfshard.errors import DamagedCheckpointError
from hfshard.storage.weights.pickles.name_hashes import NameHashes
from hfshard.storage.weights.pickles.zip_check import damaged_pickle, pickle_record

_DEEPEST: Final = 1000
"""Tuples in tuples: torch.save's own are three deep. A processor's stack of 8 MB takes some 50,000."""
_SHORT_KEY: Final = 16
"""Items of the key of a storage: torch.save's have six, of which one may be a tuple of three."""
_LARGEST_NAME: Final = 1000
"""Items of a tuple that is a name, with those of the tuples in it, which are hashed as often as they occur."""
_DEEPEST_NAME: Final = 100
"""Tuples in tuples that are a name."""
_HASHED_AS_THEY_ARE: Final = 2**61 - 1
"""Numbers below it, and above its negative, have hashes of their own."""
_SHORT: Final = 4096
"""Bytes that are read faster than they are passed over."""
_NUMBERS_FIRST: Final = 2
"""Of the pickles of the older format, those that are a number."""
_OLD_PICKLES: Final = 5
"""In torch's older format: a magic number, the version, the machine, the object, the list of storages."""
_AT_ONCE: Final = 1 << 20
"""Items, bytes and characters that the calls of any small file may take."""
_TAKEN_PER_BYTE: Final = 4
"""The same for each byte of the pickle: what is saved as text is encoded, and made a bytearray or an array of that."""

_LATIN: Final = (b"latin1", b"latin-1")
"""The codec by which pickle writes bytes as text: `pickle._Pickler.save_bytes`, `bytearray.__reduce__`."""
_OLD_MODULES: Final = {b"__builtin__": "builtins"} | dict.fromkeys(
    (b"UserDict", b"UserList", b"UserString"), "collections"
)
"""Names of Python 2, which torch reads, too."""
_HASHING: Final = ("builtins.set", "builtins.frozenset", "collections.OrderedDict", "collections.Counter")
"""Classes that hash what they are made from."""
_REBUILDING: Final = "torch._utils._rebuild"
"""Begins the names of the functions that make tensors."""
_WITH_DICTS: Final = {
    "torch._utils._rebuild_parameter_with_state": 3,
    "torch._utils._rebuild_tensor_v2": 6,
    "torch._utils._rebuild_tensor_v3": 7,
}
"""Those of them that get a dict, or a pair of them, and how many arguments come before: attributes of a user's, or
what a tensor is beside its numbers, such as conjugated."""
_NESTED_CALL: Final = "torch._tensor._rebuild_from_type_v2"
"""A function that calls its first argument with the third."""
_OF_EXTENSIONS: Final = (
    "torch._utils._rebuild_device_tensor_from_numpy",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor",
)
"""Functions that copy a tensor to a device, of any shape, and of one that torch has by an extension only."""

_NUMBER_BYTES: Final = 8
"""Most numbers in tensors have fewer."""

_CONSTANTS: Final = {b"N": None, b"\x88": True, b"\x89": False}
_NUMBERS: Final = {b"J": Struct("<i"), b"K": Struct("<B"), b"M": Struct("<H"), b"G": Struct(">d")}
"""BININT, BININT1, BININT2, BINFLOAT."""
_MEMO: Final = {b"q": 1, b"r": 4, b"h": 1, b"j": 4}
"""BINPUT, LONG_BINPUT, BINGET, LONG_BINGET -> bytes of their number."""
_TUPLES: Final = {b"\x85": 1, b"\x86": 2, b"\x87": 3}


@dataclass(slots=True, eq=False)
class _Tuple:
    """A tuple, never compared or hashed as one."""

    items: list[Any]
    depth: int
    """Tuples in tuples."""
    count: int
    """Items, with those of the tuples in it."""


@dataclass(slots=True, eq=False)
class _Made:
    """A list, dict, set or object."""

    size: int = 0
    """Entries or bytes."""
    items: list[Any] | None = None
    """Of a list, what is in it."""
    is_dict: bool = False
    is_foreign: bool = False
    """Whether a function made it that torch does not call, but may be what `hfshard.training` describes."""
    name: Hashable = None
    """What is hashed in its place, where a file can choose the hash."""


@dataclass(slots=True, eq=False)
class _Text:
    """Text that is too long to be read, or bytes made of text."""

    size: int


@dataclass(frozen=True, slots=True)
class _Global:
    """A class or function."""

    name: str


_LARGE: Final = _Made()
"""In place of a tuple that is too large to be a name."""


def scan_zip(fd: int, path: str) -> None:
    """Walk through the pickle of a zip that `check_archive` has passed.

    Raises:
        DamagedCheckpointError: It has what no file of torch.save has, and what would end the process.
    """
    raw = pickle_record(fd, path)
    with no_collection():
        _Scan(io.BytesIO(raw), path, len(raw)).run()


def scan_old_format(fd: int, path: str) -> None:
    """Walk through the pickles of a file of the older format; see `scan_zip`."""
    with os.fdopen(os.dup(fd), "rb") as file, no_collection():
        file.seek(0)
        size = os.fstat(fd).st_size
        for number in range(_OLD_PICKLES):
            scan = _Scan(file, path, size)
            if not scan.run():
                return
            scan.check_old(number)


class _Scan:
    """One pickle. Where torch will find fault with it, the scan ends without a word."""

    def __init__(self, file: IO[bytes], path: str, size: int) -> None:
        self.file = file
        self.path = path
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.names = NameHashes()
        self.left = _AT_ONCE + _TAKEN_PER_BYTE * size
        """What calls may still take."""
        self.others: dict[bytes, Callable[[], object]] = {
            b"(": self._mark, b"t": lambda: self._push_tuple(self._close()), b")": lambda: self._push_tuple([]),
            b"]": lambda: self.stack.append(_Made(items=[])), b"a": lambda: self._extend([self.stack.pop()]),
            b"e": lambda: self._extend(self._close()),
            b"}": lambda: self.stack.append(_Made(is_dict=True)), b"\x8f": lambda: self.stack.append(_Made()),
            b"s": self._set_item, b"u": lambda: self._set_items(self._close()),
            b"c": self._global, b"R": self._call, b"\x81": self._call, b"b": self._build,
            b"X": self._text, b"U": self._short_text, b"\x8a": self._long,
            b"Q": self._persistent, b"\x80": lambda: self._skip(1),
        }  # fmt: skip

    def run(self) -> bool:
        """Walk to the end; False where it has none."""
        read = self.file.read
        try:
            while (opcode := read(1)) != b".":
                if (count := _MEMO.get(opcode)) is not None:
                    self._remember(opcode, int.from_bytes(read(count), "little"))
                elif (form := _NUMBERS.get(opcode)) is not None:
                    self.stack.append(form.unpack(read(form.size))[0])
                elif opcode in _CONSTANTS:
                    self.stack.append(_CONSTANTS[opcode])
                elif (count := _TUPLES.get(opcode)) is not None:
                    items = self.stack[-count:]
                    del self.stack[-count:]
                    self._push_tuple(items)
                else:
                    self.others[opcode]()
        except (IndexError, KeyError, error):
            return False
        return True

    def check_old(self, number: int) -> None:
        """Check what came of one of the pickles of the older format: two numbers, ..., the names of the storages."""
        result = self.stack[-1] if self.stack else None
        is_number = number >= _NUMBERS_FIRST or isinstance(result, int)
        names = result.items if isinstance(result, _Made | _Tuple) and number == _OLD_PICKLES - 1 else None
        if not is_number or not all(map(_is_text, names or ())):
            raise damaged_pickle(self.path, "it does not begin, or end, as torch.save writes it")

    def _remember(self, opcode: bytes, number: int) -> None:
        if opcode in (b"q", b"r"):
            self.memo[number] = self.stack[-1]
        else:
            self.stack.append(self.memo[number])

    def _mark(self) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def _close(self) -> list[Any]:
        items = self.stack
        self.stack = self.marked.pop()
        return items

    def _push_tuple(self, items: list[Any]) -> None:
        depth = 0
        count = len(items)
        for one in items:
            if type(one) is _Tuple:
                depth = max(depth, one.depth)
                count += one.count
            elif type(one) is _Made and one.name is not None:
                count += one.size
        if depth >= _DEEPEST:
            raise damaged_pickle(self.path, f"it has tuples in tuples, more than {_DEEPEST} deep")
        self.stack.append(_Tuple(items, 1 + depth, count))

    def _extend(self, items: list[Any]) -> None:
        owner = self.stack[-1]
        if isinstance(owner, _Made):
            owner.size += len(items)
            if owner.items is not None:
                owner.items += items

    def _set_item(self) -> None:
        pair = self.stack[-2:]
        del self.stack[-2:]
        self._set_items(pair)

    def _set_items(self, items: list[Any]) -> None:
        for key in items[::2]:
            self._check_name(key)
        if isinstance(self.stack[-1], _Made):
            self.stack[-1].size += len(items) // 2

    def _global(self) -> None:
        module = self.file.readline()[:-1]
        name = self.file.readline()[:-1].decode("utf-8", "replace")
        self.stack.append(_Global(f"{_OLD_MODULES.get(module) or module.decode('utf-8', 'replace')}.{name}"))

    def _text(self) -> None:
        size = int.from_bytes(self.file.read(4), "little")
        if size > _SHORT:
            self._skip(size)
        self.stack.append(_Text(size) if size > _SHORT else self.file.read(size))

    def _short_text(self) -> None:
        self.stack.append(self.file.read(self.file.read(1)[0]))

    def _long(self) -> None:
        raw = self.file.read(self.file.read(1)[0])
        self.stack.append(int.from_bytes(raw, "little", signed=True))

    def _persistent(self) -> None:
        """BINPERSID: a storage, whose key is a name."""
        key = self.stack[-1]
        if not isinstance(key, _Tuple) or not all(map(_is_plain, key.items)):
            raise self._strange("a storage")
        if key.items[0] != b"storage":
            raise KeyError  # torch says that it takes nothing else
        self.stack[-1] = _Made()

    def _skip(self, count: int) -> None:
        """Go on; where the file says that it has more than it has, nothing comes after it, and no room is made."""
        self.file.seek(count, os.SEEK_CUR) if count > _SHORT else self.file.read(count)

    def _build(self) -> None:
        """BUILD: what the state holds is copied into the object."""
        state = self.stack.pop()
        for one in (state, *(state.items if isinstance(state, _Tuple) else ())):
            self._check_hashed("collections.OrderedDict", one)  # where it is a list, of pairs
        size = self._take(state)
        if isinstance(self.stack[-1], _Made):
            self.stack[-1].size += size

    def _call(self) -> None:
        """REDUCE and NEWOBJ."""
        arguments = self.stack.pop()
        function = self.stack.pop()
        if isinstance(function, _Made) and function.is_foreign:
            function = _Global("")
        if not isinstance(function, _Global):
            raise self._strange("what is no function")
        self._check_call(function, arguments)
        size = self._take(arguments)
        name = function.name
        hashed: Any = self._name(arguments) if name in ("builtins.complex", "torch.Size") else None
        if name == "builtins.complex" and hashed is not _LARGE:
            hashed = complex(*hashed)
        is_foreign = not name.startswith("torch.") and name not in _HASHING
        made = _Made(size, name=hashed, is_foreign=is_foreign)
        self.stack.append(_Text(size) if name == "_codecs.encode" else made)

    def _check_call(self, function: _Global, arguments: Any) -> None:
        """Refuse a call of a function that torch allows, as no file of torch.save has it."""
        name = function.name
        items: list[Any] = arguments.items if isinstance(arguments, _Tuple) else [None]
        is_written = True
        if name == _NESTED_CALL:
            is_written = len(items) > 2 and isinstance(items[0], _Global) and items[0].name != _NESTED_CALL
            if is_written and isinstance(items[1], _Global) and items[1].name.startswith("torch."):
                is_written = _is_state(items[3:])
            if is_written:
                self._check_call(items[0], items[2])
        elif name == "_codecs.encode":
            is_written = len(items) == 2 and _is_text(items[0]) and items[1] in _LATIN
        elif name == "builtins.bytearray":  # of bytes, in files of old versions of text
            is_written = not items or (_is_text(items[0]) and (not items[1:] or items[1] in _LATIN))
        elif name == "builtins.complex":
            is_written = len(items) == 2 and all(isinstance(one, int | float) for one in items)
        elif name == "torch.Size":
            is_written = len(items) == 1 and isinstance(items[0], _Tuple)
        elif name in _HASHING:
            is_written = isinstance(arguments, _Tuple)
            self._check_hashed(name, items[0] if items else None)
        elif name.startswith(_REBUILDING) and name not in _OF_EXTENSIONS:
            count = _WITH_DICTS.get(name, len(items))
            is_written = isinstance(arguments, _Tuple) and not _holds_entries(
                items[:count] if _is_state(items[count:]) else items
            )
        elif name in _OF_EXTENSIONS:
            raise damaged_pickle(
                self.path, "it has a tensor of a device that torch has by an extension. Save it from the CPU"
            )
        elif name.startswith("torch.") and name.endswith(("Tensor", "Storage")):
            is_written = all(type(one) is int for one in items)
            self._charge(_NUMBER_BYTES * math.prod(max(0, one) for one in items) if is_written and items else 0)
        if not is_written:
            raise self._strange(name)

    def _strange(self, what: str) -> DamagedCheckpointError:
        return damaged_pickle(
            self.path, f"it calls {what} as pickle never does, which may take forever or fill the memory"
        )

    def _check_hashed(self, name: str, argument: Any) -> None:
        is_list = isinstance(argument, _Made) and argument.items is not None
        for one in argument.items if is_list or isinstance(argument, _Tuple) else ():
            if name == "collections.OrderedDict":  # of pairs
                pair = one.items if isinstance(one, _Tuple | _Made) else None
                one = pair[0] if pair else None
            self._check_name(one)

    def _check_name(self, key: Any) -> None:
        """Refuse a name that is hashed forever, or that has the hash of many others."""
        name = self._name(key)
        is_choosable = isinstance(key, _Tuple) or name is not key or _is_large(key)
        if name is _LARGE or (is_choosable and self.names.is_one_of_many(name)):
            raise self._endless()

    def _name(self, value: Any) -> Any:
        """What is hashed and compared as the value will be; `_LARGE` for what is never a name."""
        if isinstance(value, _Tuple):
            if value.count > _LARGEST_NAME or value.depth > _DEEPEST_NAME:
                return _LARGE
            names = tuple(map(self._name, value.items))
            return _LARGE if any(one is _LARGE for one in names) else names
        return value if not isinstance(value, _Made) or value.name is None else value.name

    def _endless(self) -> DamagedCheckpointError:
        return damaged_pickle(self.path, "it has names that take forever to be hashed")

    def _take(self, value: Any) -> int:
        """Count what is in a value that a call copies, and what is in its tuples and lists."""
        before = self.left
        waiting = [value]
        while waiting:
            one = waiting.pop()
            items = one.items if isinstance(one, _Tuple | _Made) else None
            if items is not None:
                self._charge(len(items))
                waiting += items
            elif isinstance(one, bytes | _Made | _Text):
                self._charge(len(one) if isinstance(one, bytes) else one.size)
        return before - self.left

    def _charge(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise damaged_pickle(self.path, "its calls make more than the file has, which may fill the memory")


def _is_plain(value: Any) -> bool:
    """Whether it is a part of the key of a storage; the last one may be a tuple of them."""
    if isinstance(value, _Tuple):
        return value.count < _SHORT_KEY and all(map(_is_plain, value.items))
    return value is None or isinstance(value, int | bytes | _Text | _Global)


def _is_large(key: Any) -> bool:
    """Whether it is a number whose hash a file can choose."""
    return isinstance(key, int) and abs(key) >= _HASHED_AS_THEY_ARE


def _is_state(rest: list[Any]) -> bool:
    """Whether there is one argument, of attributes, as torch takes them."""
    [state] = rest if len(rest) == 1 else [None]
    parts = state.items if isinstance(state, _Tuple) else [state, None]
    return len(parts) == 2 and all(one is None or (isinstance(one, _Made) and one.is_dict) for one in parts)


def _holds_entries(values: list[Any]) -> bool:
    """Whether a list or a dict with something in it is among values, or in a tuple there."""
    waiting = list(values)
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if isinstance(one, _Tuple):
            waiting += one.items if id(one) not in seen else ()
            seen.add(id(one))
        elif isinstance(one, _Made) and (one.items or (one.is_dict and one.size)):
            return True
    return False


def _is_text(value: Any) -> bool:
    return isinstance(value, bytes | _Text)
