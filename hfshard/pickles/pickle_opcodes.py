"""Scan a pickle's opcodes to reject harmful ones before torch reads it, or to describe it without running it.

`torch.load(weights_only=True)` runs no foreign code, but builds what the opcodes say. Some of that cannot be caught as
an error, or ends only after hours:

- Tuples nested a hundred thousand deep overflow the processor's stack when one is hashed as a key. A pair of one and
  the same pair, nested 60 deep, is hashed forever; so is a dict whose keys all have one hash.
- A bytearray of any length is filled with zeros. Text is encoded by any codec, and "punycode" takes the square of its
  length. A list with one and the same list twice, nested 30 deep, is converted to a tensor.
- Data that is in the file once is copied by each call that gets it, and a call that rejects it prints all of it in the
  error.

So a call passes only if its arguments are ones that pickle itself writes, and all calls of a file together can take
only as much as the file has. The scan builds only numbers, short texts, and the keys that are hashed.
"""

from __future__ import annotations

import io
import math
import os
import pickletools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from struct import Struct, error
from typing import IO, Any, Final

from hfshard._util.threads import pause_gc
from hfshard.errors import DamagedCheckpointError, UnsafePickleError
from hfshard.pickles.pickle_zip import damaged_pickle, pickle_record

_DEEPEST: Final = 1000
"""The deepest nesting of tuples: torch.save's are three deep. A processor's stack of 8 MB fits about 50,000."""
_SHORT_KEY: Final = 16
"""Limit of items in a storage's key: torch.save's have six, of which one can be a tuple of three."""
_LARGEST_NAME: Final = 1000
"""The most items of a tuple that is a key, including those of nested tuples, which are hashed at each occurrence."""
_DEEPEST_NAME: Final = 100
"""The deepest nesting of tuples in a key."""
_HASHED_AS_THEY_ARE: Final = 2**61 - 1
"""Numbers below it, and above its negative, have their own hashes."""
_SHORT: Final = 4096
"""The most bytes that are faster to read than to skip."""
_NUMBERS_FIRST: Final = 2
"""The number of leading pickles of the older format that are a number."""
_OLD_PICKLES: Final = 5
"""Pickles in torch's older format: a magic number, the version, the machine, the object, the list of storages."""
_AT_ONCE: Final = 1 << 20
"""Items, bytes and characters that the calls of any file can take, however small it is."""
_TAKEN_PER_BYTE: Final = 4
"""The same per byte of the pickle: data saved as text is encoded, and then converted to a bytearray or an array."""

_LATIN: Final = (b"latin1", b"latin-1")
"""The codec by which pickle writes bytes as text: `pickle._Pickler.save_bytes`, `bytearray.__reduce__`."""
_OLD_MODULES: Final = {b"__builtin__": "builtins"} | dict.fromkeys(
    (b"UserDict", b"UserList", b"UserString"), "collections"
)
"""Module names of Python 2, which torch reads too, -> the current ones."""
_HASHING: Final = ("builtins.set", "builtins.frozenset", "collections.OrderedDict", "collections.Counter")
"""Classes that hash the values they are built from."""
_REBUILDING: Final = "torch._utils._rebuild"
"""Prefix of the names of functions that build tensors."""
_WITH_DICTS: Final = {
    "torch._utils._rebuild_parameter_with_state": 3,
    "torch._utils._rebuild_tensor_v2": 6,
    "torch._utils._rebuild_tensor_v3": 7,
}
"""Such functions that get a dict or a pair of dicts -> the number of arguments before it. The dicts are a user's
attributes, or a tensor's properties in addition to its numbers, such as conjugation."""
_NESTED_CALL: Final = "torch._tensor._rebuild_from_type_v2"
"""A function that calls its first argument with the third."""
_OF_EXTENSIONS: Final = (
    "torch._utils._rebuild_device_tensor_from_numpy",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor",
)
"""Functions that copy a tensor of any shape to a device that torch has only through an extension."""

_NUMBER_BYTES: Final = 8
"""Bytes charged per number; most numbers in tensors have fewer."""

_CONSTANTS: Final = {b"N": None, b"\x88": True, b"\x89": False}
_NUMBERS: Final = {b"J": Struct("<i"), b"K": Struct("<B"), b"M": Struct("<H"), b"G": Struct(">d")}
"""BININT, BININT1, BININT2, BINFLOAT."""
_MEMO: Final = {b"q": 1, b"r": 4, b"h": 1, b"j": 4}
"""BINPUT, LONG_BINPUT, BINGET, LONG_BINGET -> bytes of their number."""
_TUPLES: Final = {b"\x85": 1, b"\x86": 2, b"\x87": 3}


@dataclass(slots=True, eq=False)
class _Tuple:
    """A tuple that is never compared or hashed as one."""

    items: list[Any]
    depth: int
    """Nesting depth of tuples."""
    count: int
    """Items, including those of nested tuples."""


@dataclass(slots=True, eq=False)
class _Made:
    """A list, dict, set or object."""

    size: int = 0
    """Entries or bytes."""
    items: list[Any] | None = None
    """A list's items."""
    is_dict: bool = False
    is_foreign: bool = False
    """True if a function created it that torch does not call, but that `hfshard.training` may describe."""
    name: Hashable = None
    """The value that is hashed in its place, if a file can choose the hash."""


@dataclass(slots=True, eq=False)
class _Text:
    """Text that is too long to read, or bytes made from text."""

    size: int


@dataclass(frozen=True, slots=True)
class _Global:
    """A class or function."""

    name: str


_LARGE: Final = _Made()
"""Replacement for a tuple that is too large to be a key."""


def scan_zip(fd: int, path: str) -> None:
    """Scan the pickle of a zip that `check_archive` has accepted.

    Raises:
        DamagedCheckpointError: The pickle has what torch.save never writes and what could kill or hang the process.
    """
    raw = pickle_record(fd, path)
    with pause_gc():
        _Scan(io.BytesIO(raw), path, len(raw)).run()


def scan_old_format(fd: int, path: str) -> None:
    """Scan the pickles of a file in the older format; raises DamagedCheckpointError as `scan_zip` does."""
    with os.fdopen(os.dup(fd), "rb") as file, pause_gc():
        file.seek(0)
        size = os.fstat(fd).st_size
        for number in range(_OLD_PICKLES):
            scan = _Scan(file, path, size)
            if not scan.run():
                return
            scan.check_old(number)


class _Scan:
    """Scan of one pickle. It ends without an error where torch itself will raise one."""

    def __init__(self, file: IO[bytes], path: str, size: int) -> None:
        self.file = file
        self.path = path
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.names = NameHashes()
        self.left = _AT_ONCE + _TAKEN_PER_BYTE * size
        """Items, bytes and characters that calls may still take."""
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
        """Scan to the end; return False if it cannot be reached."""
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
        """Check the result of one of the older format's pickles: two numbers, ..., the storages' names."""
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
            raise damaged_pickle(self.path, f"its tuples are nested more than {_DEEPEST} deep")
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
        """Handle BINPERSID: a storage, whose key is hashed."""
        key = self.stack[-1]
        if not isinstance(key, _Tuple) or not all(map(_is_plain, key.items)):
            raise self._strange("a storage")
        if key.items[0] != b"storage":
            raise KeyError  # torch reports that it accepts nothing else
        self.stack[-1] = _Made()

    def _skip(self, count: int) -> None:
        """Skip bytes. If the file claims more than it has, nothing follows, and no memory is allocated."""
        self.file.seek(count, os.SEEK_CUR) if count > _SHORT else self.file.read(count)

    def _build(self) -> None:
        """Handle BUILD, which copies the state's contents into the object."""
        state = self.stack.pop()
        for one in (state, *(state.items if isinstance(state, _Tuple) else ())):
            self._check_hashed("collections.OrderedDict", one)  # if it is a list, it is one of pairs
        size = self._take(state)
        if isinstance(self.stack[-1], _Made):
            self.stack[-1].size += size

    def _call(self) -> None:
        """Handle REDUCE and NEWOBJ."""
        arguments = self.stack.pop()
        function = self.stack.pop()
        if isinstance(function, _Made) and function.is_foreign:
            function = _Global("")
        if not isinstance(function, _Global):
            raise self._strange("something that is not a function")
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
        """Reject a call of a function that torch allows, if torch.save never writes it in this form."""
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
        elif name == "builtins.bytearray":  # from bytes, or from text in files of old versions
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
            raise damaged_pickle(self.path, "it has a tensor on a device of a torch extension. Save it from the CPU")
        elif name.startswith("torch.") and name.endswith(("Tensor", "Storage")):
            is_written = all(type(one) is int for one in items)
            self._charge(_NUMBER_BYTES * math.prod(max(0, one) for one in items) if is_written and items else 0)
        if not is_written:
            raise self._strange(name)

    def _strange(self, what: str) -> DamagedCheckpointError:
        return damaged_pickle(
            self.path, f"it calls {what} as pickle never does, which may run forever or fill the memory"
        )

    def _check_hashed(self, name: str, argument: Any) -> None:
        is_list = isinstance(argument, _Made) and argument.items is not None
        for one in argument.items if is_list or isinstance(argument, _Tuple) else ():
            if name == "collections.OrderedDict":  # of pairs
                pair = one.items if isinstance(one, _Tuple | _Made) else None
                one = pair[0] if pair else None
            self._check_name(one)

    def _check_name(self, key: Any) -> None:
        """Reject a key that takes forever to hash, or whose hash many others share."""
        name = self._name(key)
        is_choosable = isinstance(key, _Tuple) or name is not key or _is_large(key)
        if name is _LARGE or (is_choosable and self.names.is_one_of_many(name)):
            raise self._endless()

    def _name(self, value: Any) -> Any:
        """Return a value that hashes and compares like the real one; `_LARGE` for one that is never a key."""
        if isinstance(value, _Tuple):
            if value.count > _LARGEST_NAME or value.depth > _DEEPEST_NAME:
                return _LARGE
            names = tuple(map(self._name, value.items))
            return _LARGE if any(one is _LARGE for one in names) else names
        return value if not isinstance(value, _Made) or value.name is None else value.name

    def _endless(self) -> DamagedCheckpointError:
        return damaged_pickle(self.path, "hashing its names may take forever")

    def _take(self, value: Any) -> int:
        """Charge for the contents of a value that a call copies, including nested tuples and lists; return the sum."""
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
            raise damaged_pickle(self.path, "its calls create more than the file contains, which may fill the memory")


def _is_plain(value: Any) -> bool:
    """Return whether a value can be part of a storage's key; the last part can be a tuple of such values."""
    if isinstance(value, _Tuple):
        return value.count < _SHORT_KEY and all(map(_is_plain, value.items))
    return value is None or isinstance(value, int | bytes | _Text | _Global)


def _is_large(key: Any) -> bool:
    """Return whether a key is a number whose hash a file can choose."""
    return isinstance(key, int) and abs(key) >= _HASHED_AS_THEY_ARE


def _is_state(rest: list[Any]) -> bool:
    """Return whether the rest is one argument with attributes, in a form that torch accepts."""
    [state] = rest if len(rest) == 1 else [None]
    parts = state.items if isinstance(state, _Tuple) else [state, None]
    return len(parts) == 2 and all(one is None or (isinstance(one, _Made) and one.is_dict) for one in parts)


def _holds_entries(values: list[Any]) -> bool:
    """Return whether a nonempty list or dict is among values or in their tuples."""
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


# Description of a pickle: what it would create is recorded, and nothing in it is imported, created or called.
#
# `pickletools` reads the opcodes. A class or function is its name; a call is the name with its arguments.


@dataclass(frozen=True, slots=True)
class GlobalReference:
    """A class or function that the pickle names."""

    name: str
    """Name including the module: "collections.OrderedDict"."""


@dataclass(slots=True, eq=False, repr=False)
class DescribedObject:
    """An object that was described instead of created."""

    name: str
    """Class or function that would create it; "" for entries of `persistent_id`, which torch writes for storages."""
    arguments: Any
    state: Any = None
    items: list[Any] = field(default_factory=list)
    """Items that would be appended or added."""
    pairs: list[tuple[Any, Any]] = field(default_factory=list)
    """Items that would be set by key."""


class _Unreadable(ValueError):
    """Error for a pickle that does something that no torch.save file does."""


_LONGEST_KEY: Final = 100
"""The most items of a tuple that is a dict key. Nested tuples are rejected: hashing every occurrence may never end."""
_KEY_BITS: Final = 64
"""The most bits of a number that is a key; larger numbers can all have the same hash."""

_RENAMED: Final = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Module names that protocol 2 writes in their old form -> the current ones."""

_INERT_CONSTANTS: Final[dict[str, Callable[[], Any]]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}

_LITERALS: Final = frozenset(
    ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
    + ("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING")
    + ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8")
)
"""Opcodes that carry their own value."""


@dataclass(frozen=True, slots=True)
class PickleDescription:
    """Description of what a pickle would create."""

    value: Any
    """Numbers, text, bytes, lists, tuples, dicts and sets; `GlobalReference` and `DescribedObject`."""
    names: frozenset[str]
    """All classes and functions that it names."""
    storages: tuple[DescribedObject, ...]
    """Entries that `persistent_id` wrote."""


def describe_pickle(stream: IO[bytes], path: str) -> PickleDescription:
    """Describe one pickle, and leave the stream positioned after it.

    Args:
        stream: The stream, which can continue after the pickle.
        path: The file's path, for messages.

    Raises:
        UnsafePickleError: It is not a pickle, or does what no run state needs.
    """
    machine = _Machine()
    try:
        for opcode, argument, _position in pickletools.genops(stream):
            machine.do(opcode.name, argument)
        return PickleDescription(machine.stack[-1], frozenset(machine.names), tuple(machine.storages))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, MemoryError) as error:
        raise UnsafePickleError(
            f"'{path}' was not loaded: its pickle does what no training state needs ({error!r:.200}). It may be "
            "malicious. Use another file.",
            path=path,
        ) from error


class _Machine:
    """The stack and the memo that the opcodes work on."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        """The stacks below each mark."""
        self.memo: dict[int, Any] = {}
        self.names: set[str] = set()
        self.storages: list[DescribedObject] = []
        self.keys = NameHashes()

    def checked(self, keys: list[Any]) -> list[Any]:
        return [checked_key(key, self.keys) for key in keys]

    def do(self, opcode: str, argument: Any) -> None:
        if opcode in _LITERALS:
            self.stack.append(argument)
        elif opcode in _INERT_CONSTANTS:
            self.stack.append(_INERT_CONSTANTS[opcode]())
        elif opcode not in ("PROTO", "FRAME", "STOP"):
            method = _OPCODES.get(opcode)
            if method is None:
                raise _Unreadable(opcode)
            method(self, argument)

    def mark(self, _argument: Any) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.marked.pop()
        return items

    def memoize(self, argument: Any) -> None:
        self.memo[len(self.memo) if argument is None else int(argument)] = self.stack[-1]

    def recall(self, argument: Any) -> None:
        self.stack.append(self.memo[int(argument)])

    def tuple_of(self, count: int) -> None:
        items = tuple(self.stack[-count:])
        if len(items) != count:
            raise _Unreadable("a tuple with too few items")
        self.stack[-count:] = [items]

    def dict_of(self, _argument: Any) -> None:
        items = self.since_mark()
        self.stack.append(dict(zip(self.checked(items[::2]), items[1::2], strict=True)))

    def extend(self, items: list[Any]) -> None:
        owner = self.stack[-1]
        if isinstance(owner, set):
            owner.update(self.checked(items))
        else:
            _list_of(owner).extend(items)

    def append(self, _argument: Any) -> None:
        self.extend([self.stack.pop()])

    def set_items(self, items: list[Any]) -> None:
        owner = self.stack[-1]
        pairs = list(zip(self.checked(items[::2]), items[1::2], strict=True))
        if isinstance(owner, dict):
            owner.update(pairs)
        elif isinstance(owner, DescribedObject):
            owner.pairs.extend(pairs)
        else:
            raise _Unreadable(f"sets items of a {type(owner).__name__}")

    def set_item(self, _argument: Any) -> None:
        value = self.stack.pop()
        self.set_items([self.stack.pop(), value])

    def name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise _Unreadable("a name that is not text")
        found = f"{_RENAMED.get(module, module)}.{name}"
        self.names.add(found)
        self.stack.append(GlobalReference(found))

    def call(self, maker: Any, arguments: Any) -> None:
        if not isinstance(maker, GlobalReference):
            raise _Unreadable("a call of something without a name")
        self.stack.append(DescribedObject(maker.name, arguments))

    def reduce(self, _argument: Any) -> None:
        arguments = self.stack.pop()
        self.call(self.stack.pop(), arguments)

    def reduce_with_keywords(self, _argument: Any) -> None:
        keywords = self.stack.pop()
        arguments = self.stack.pop()
        self.call(self.stack.pop(), (*arguments, keywords))

    def instance(self, argument: Any) -> None:
        arguments = tuple(self.since_mark())
        self.name(*argument.split(" ", 1))
        self.call(self.stack.pop(), arguments)

    def object(self, _argument: Any) -> None:
        maker, *arguments = self.since_mark()
        self.call(maker, tuple(arguments))

    def build(self, _argument: Any) -> None:
        state = self.stack.pop()
        owner = self.stack[-1]
        if not isinstance(owner, DescribedObject):
            raise _Unreadable(f"sets the state of a {type(owner).__name__}")
        owner.state = state

    def stack_name(self, _argument: Any) -> None:
        name = self.stack.pop()
        self.name(self.stack.pop(), name)

    def persistent(self, argument: Any) -> None:
        described = DescribedObject("", self.stack.pop() if argument is None else argument)
        self.storages.append(described)
        self.stack.append(described)


def checked_key(key: Any, others: NameHashes) -> Any:
    """Check that a dict key or set item hashes quickly, and return it.

    Args:
        key: The dict key or set item.
        others: The keys before it, at least those in the same container.
    """
    if isinstance(key, tuple):
        if len(key) > _LONGEST_KEY or any(isinstance(one, tuple) for one in key):
            raise _Unreadable("a nested or long tuple as a name")
        for one in key:
            checked_key(one, others)
    elif isinstance(key, int) and key.bit_length() > _KEY_BITS:
        raise _Unreadable("too large a number as a name")
    if isinstance(key, tuple | frozenset) and others.is_one_of_many(key):
        raise _Unreadable("names that all have the same hash")
    return key


def _list_of(owner: Any) -> list[Any]:
    if isinstance(owner, DescribedObject):
        return owner.items
    if isinstance(owner, list):
        return owner
    raise _Unreadable(f"appends to a {type(owner).__name__}")


_OPCODES: Final[dict[str, Callable[[_Machine, Any], None]]] = {
    "MARK": _Machine.mark,
    "POP": lambda machine, _: _pop(machine),
    "POP_MARK": lambda machine, _: _ignore(machine.since_mark()),
    "DUP": lambda machine, _: machine.stack.append(machine.stack[-1]),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.memoize),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.recall),
    "TUPLE": lambda machine, _: _push(machine, tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "LIST": lambda machine, _: _push(machine, machine.since_mark()),
    "FROZENSET": lambda machine, _: _push(machine, frozenset(machine.checked(machine.since_mark()))),
    "DICT": _Machine.dict_of,
    "APPEND": _Machine.append,
    "APPENDS": lambda machine, _: machine.extend(machine.since_mark()),
    "ADDITEMS": lambda machine, _: machine.extend(machine.since_mark()),
    "SETITEM": _Machine.set_item,
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "GLOBAL": lambda machine, argument: machine.name(*argument.split(" ", 1)),
    "STACK_GLOBAL": _Machine.stack_name,
    "REDUCE": _Machine.reduce,
    "NEWOBJ": _Machine.reduce,
    "NEWOBJ_EX": _Machine.reduce_with_keywords,
    "INST": _Machine.instance,
    "OBJ": _Machine.object,
    "BUILD": _Machine.build,
    "PERSID": _Machine.persistent,
    "BINPERSID": _Machine.persistent,
}


def _push(machine: _Machine, value: Any) -> None:
    machine.stack.append(value)


def _pop(machine: _Machine) -> None:
    """Remove the last value, or the last mark if nothing is above it."""
    if machine.stack:
        machine.stack.pop()
    else:
        machine.since_mark()


def _ignore(_value: Any) -> None:
    """Do nothing."""


# Count of keys with the same hash in a pickle: a dict or set with very many of them takes forever to fill.


_MOST: Final = 100
"""The most keys with one hash: real ones have one each, except for such as -1 and -2, or (-1, -2) and (-2, -1)."""


class NameHashes:
    """Tuples and other keys that are not text, whose hashes a file can choose; Python randomizes those of text."""

    def __init__(self) -> None:
        """Begin without keys."""
        self._names: set[Hashable] = set()
        self._counts: dict[int, int] = {}

    def is_one_of_many(self, name: Hashable) -> bool:
        """Record a key, and return whether too many others have its hash."""
        if name in self._names:
            return False
        number = hash(name)
        count = self._counts.get(number, 0) + 1
        if count > _MOST:
            return True
        self._counts[number] = count
        self._names.add(name)
        return False
