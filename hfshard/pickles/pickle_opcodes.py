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
import os
import pickletools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, ClassVar, Final

from hfshard._util.threads import pause_gc
from hfshard.errors import DamagedCheckpointError, UnsafePickleError
from hfshard.pickles.pickle_zip import damaged_pickle, pickle_record

Action = Callable[[Any, Any], None]
"""What an opcode does: it gets the machine, and the argument that follows the opcode."""


class _Unreadable(ValueError):
    """Error for a pickle that does something that no torch.save file does."""


class _Machine(ABC):
    """The stack, the marks and the memo that opcodes work on; `_Scan` and `_Description` say what is built there."""

    empty: ClassVar[Mapping[str, Callable[[], Any]]]
    """EMPTY_LIST, EMPTY_DICT, EMPTY_SET -> the function that creates it."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        """The stacks below each mark."""
        self.memo: dict[int, Any] = {}
        self.keys = NameHashes()

    def run(self, opcodes: Iterable[tuple[str, Any]], actions: Mapping[str, Action]) -> None:
        """Do what opcodes say.

        Args:
            opcodes: Their names as in `pickletools`, and their arguments.
            actions: Name -> action. All others are rejected.
        """
        for name, argument in opcodes:
            action = actions.get(name)
            if action is None:
                raise _Unreadable(name)
            action(self, argument)

    @abstractmethod
    def tuple_of(self, items: list[Any]) -> Any:
        """Create a tuple."""

    @abstractmethod
    def extend(self, items: list[Any]) -> None:
        """Add items to the last value."""

    @abstractmethod
    def set_items(self, items: list[Any]) -> None:
        """Set items of the last value: keys and values in turn."""

    @abstractmethod
    def name(self, module: Any, name: Any) -> Any:
        """Look up a class or function."""

    @abstractmethod
    def call(self, function: Any, arguments: Any) -> Any:
        """Call a function, or create an object of a class."""

    @abstractmethod
    def build(self, state: Any) -> None:
        """Set the state of the last value."""

    @abstractmethod
    def storage(self, key: Any) -> Any:
        """Look up what the file has outside of the pickle."""

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def last(self, count: int) -> list[Any]:
        """Remove the last values and return them."""
        items = self.stack[-count:]
        if len(items) != count:
            raise _Unreadable("a tuple with too few items")
        del self.stack[-count:]
        return items

    def mark(self) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.marked.pop()
        return items

    def memoize(self, number: Any) -> None:
        self.memo[len(self.memo) if number is None else int(number)] = self.stack[-1]

    def recall(self, number: Any) -> None:
        self.stack.append(self.memo[int(number)])

    def set_item(self) -> None:
        value = self.stack.pop()
        self.set_items([self.stack.pop(), value])

    def reduce(self, _argument: Any) -> None:
        arguments = self.stack.pop()
        self.stack.append(self.call(self.stack.pop(), arguments))

    def name_of(self, argument: str) -> Any:
        """Look up what an opcode names: "module name"."""
        return self.name(*argument.split(" ", 1))


_READ_BY_TORCH: Final[dict[str, Action]] = {
    **dict.fromkeys(("PROTO", "STOP"), lambda machine, _: None),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _Machine.push),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINSTRING"), _Machine.push),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_TUPLE": lambda machine, _: machine.push(machine.tuple_of([])),
    "EMPTY_LIST": lambda machine, _: machine.push(machine.empty["EMPTY_LIST"]()),
    "EMPTY_DICT": lambda machine, _: machine.push(machine.empty["EMPTY_DICT"]()),
    "EMPTY_SET": lambda machine, _: machine.push(machine.empty["EMPTY_SET"]()),
    "MARK": lambda machine, _: machine.mark(),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.memoize),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.recall),
    "TUPLE": lambda machine, _: machine.push(machine.tuple_of(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.push(machine.tuple_of(machine.last(1))),
    "TUPLE2": lambda machine, _: machine.push(machine.tuple_of(machine.last(2))),
    "TUPLE3": lambda machine, _: machine.push(machine.tuple_of(machine.last(3))),
    "APPEND": lambda machine, _: machine.extend([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.set_item(),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "GLOBAL": lambda machine, argument: machine.push(machine.name_of(argument)),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine.reduce),
    "BUILD": lambda machine, _: machine.build(machine.stack.pop()),
    "BINPERSID": lambda machine, _: machine.push(machine.storage(machine.stack.pop())),
}
"""Opcodes that torch reads with weights_only=True, and what they do; it rejects all others."""

_OLD_MODULES: Final = {"__builtin__": "builtins", "copy_reg": "copyreg"} | dict.fromkeys(
    ("UserDict", "UserList", "UserString"), "collections"
)
"""Module names of Python 2, some of which protocol 2 writes, and all of which torch reads -> the current ones."""


# Scan of a pickle before torch reads it: placeholders are built, and harmful calls and keys rejected.


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
BEFORE_THE_OBJECT: Final = 3
"""Pickles before the object in torch's older format: a magic number, the version, the machine."""
_OLD_PICKLES: Final = BEFORE_THE_OBJECT + 2
"""All of its pickles: after these, the object and the list of storages."""
_AT_ONCE: Final = 1 << 20
"""Items, bytes and characters that the calls of any file can take, however small it is."""
_TAKEN_PER_BYTE: Final = 4
"""The same per byte of the pickle: data saved as text is encoded, and then converted to a bytearray or an array."""

LATIN: Final = ("latin1", "latin-1")
"""The codec by which pickle writes bytes as text: `pickle._Pickler.save_bytes`, `bytearray.__reduce__`."""
_LATIN_TEXT: Final = tuple(name.encode() for name in LATIN)
"""The same, not decoded."""
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


def most_taken(size: int) -> int:
    """Return how many items, bytes and characters the calls of a file can take together.

    Args:
        size: The file's bytes, or those of its pickle.
    """
    return _AT_ONCE + _TAKEN_PER_BYTE * size


def scan_zip(fd: int, path: str) -> None:
    """Scan the pickle of a zip that `check_archive` has accepted.

    Raises:
        DamagedCheckpointError: The pickle has what torch.save never writes and what could kill or hang the process.
    """
    raw = pickle_record(fd, path)
    with pause_gc():
        _Scan(io.BytesIO(raw), path, len(raw)).scan()


def scan_old_format(fd: int, path: str) -> None:
    """Scan the pickles of a file in the older format; raises DamagedCheckpointError as `scan_zip` does."""
    with os.fdopen(os.dup(fd), "rb") as file, pause_gc():
        file.seek(0)
        size = os.fstat(fd).st_size
        for number in range(_OLD_PICKLES):
            scan = _Scan(file, path, size)
            if not scan.scan():
                return
            scan.check_old(number)


class _Scan(_Machine):
    """Scan of one pickle. It ends without an error where torch itself will raise one."""

    empty = {"EMPTY_LIST": lambda: _Made(items=[]), "EMPTY_DICT": lambda: _Made(is_dict=True), "EMPTY_SET": _Made}

    def __init__(self, file: IO[bytes], path: str, size: int) -> None:
        super().__init__()
        self.file = file
        self.path = path
        self.left = most_taken(size)
        """Items, bytes and characters that calls may still take."""

    def scan(self) -> bool:
        """Scan to the end; return False if it cannot be reached."""
        try:
            self.run(_skim(self.file), _READ_BY_TORCH)
        except (IndexError, KeyError, OverflowError, _Unreadable):  # OverflowError: a complex number
            return False
        return True

    def check_old(self, number: int) -> None:
        """Check the result of one of the older format's pickles: two numbers, ..., the storages' names."""
        result = self.stack[-1] if self.stack else None
        is_number = number >= _NUMBERS_FIRST or isinstance(result, int)
        names = result.items if isinstance(result, _Made | _Tuple) and number == _OLD_PICKLES - 1 else None
        if not is_number or not all(map(_is_text, names or ())):
            raise damaged_pickle(self.path, "it does not begin, or end, as torch.save writes it")

    def tuple_of(self, items: list[Any]) -> Any:
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
        return _Tuple(items, 1 + depth, count)

    def extend(self, items: list[Any]) -> None:
        owner = self.stack[-1]
        if isinstance(owner, _Made):
            owner.size += len(items)
            if owner.items is not None:
                owner.items += items

    def set_items(self, items: list[Any]) -> None:
        for key in items[::2]:
            self._check_name(key)
        if isinstance(self.stack[-1], _Made):
            self.stack[-1].size += len(items) // 2

    def name(self, module: Any, name: Any) -> Any:
        return _Global(f"{_OLD_MODULES.get(module, module)}.{name}")

    def storage(self, key: Any) -> Any:
        """Look up a storage, whose key torch hashes."""
        if not isinstance(key, _Tuple) or not all(map(_is_plain, key.items)):
            raise self._strange("a storage")
        if key.items[0] != b"storage":
            raise KeyError  # torch reports that it accepts nothing else
        return _Made()

    def build(self, state: Any) -> None:
        """Copy the state's contents into the object."""
        for one in (state, *(state.items if isinstance(state, _Tuple) else ())):
            self._check_hashed("collections.OrderedDict", one)  # if it is a list, it is one of pairs
        size = self._take(state)
        if isinstance(self.stack[-1], _Made):
            self.stack[-1].size += size

    def call(self, function: Any, arguments: Any) -> Any:
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
        return _Text(size) if name == "_codecs.encode" else made

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
            is_written = len(items) == 2 and _is_text(items[0]) and items[1] in _LATIN_TEXT
        elif name == "builtins.bytearray":  # from bytes, or from text in files of old versions
            is_written = not items or (_is_text(items[0]) and (not items[1:] or items[1] in _LATIN_TEXT))
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
            self._charge_numbers(items if is_written else [])
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
        if name is _LARGE or (is_choosable and self.keys.is_one_of_many(name)):
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

    def _charge_numbers(self, shape: list[int]) -> None:
        """Charge for a tensor's numbers; multiplying all of its sizes, where some make too many, could take hours."""
        count = 1 if shape and min(shape) > 0 else 0
        for size in shape:
            count *= size
            if count > self.left:
                break
        self._charge(_NUMBER_BYTES * count)

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


def _skim(file: IO[bytes]) -> Iterator[tuple[str, Any]]:
    """Read the opcodes that torch reads, and their arguments; long texts are skipped, and none is decoded.

    Raises:
        KeyError, IndexError, _Unreadable: torch will raise an error here.
    """
    code = b""
    while code != b".":
        code = file.read(1)
        name, reader = _SKIMMED[code]
        try:
            argument = reader(file) if reader is not None else None
        except ValueError as error:
            raise _Unreadable(str(error)) from error
        yield name, argument


def _skim_text(file: IO[bytes]) -> Any:
    size = int.from_bytes(file.read(4), "little")
    if size <= _SHORT:
        return file.read(size)
    file.seek(size, os.SEEK_CUR)  # if the file claims more than it has, nothing follows, and no memory is allocated
    return _Text(size)


def _skim_short_text(file: IO[bytes]) -> bytes:
    return file.read(file.read(1)[0])


def _skim_name(file: IO[bytes]) -> str:
    module, name = (file.readline()[:-1].decode("utf-8", "replace") for _ in range(2))
    return f"{module} {name}"


_UNDECODED: Final[dict[str, Callable[[IO[bytes]], Any]]] = {
    "BINUNICODE": _skim_text,
    "SHORT_BINSTRING": _skim_short_text,
    "GLOBAL": _skim_name,
}
_SKIMMED: Final = {
    one.code.encode("latin-1"): (one.name, _UNDECODED.get(one.name) or (one.arg.reader if one.arg else None))
    for one in pickletools.opcodes
    if one.name in _READ_BY_TORCH
}
"""Byte of each opcode that torch reads -> its name, and the function that reads its argument."""


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
    machine = _Description()
    try:
        machine.run(((opcode.name, argument) for opcode, argument, _ in pickletools.genops(stream)), _DESCRIBED)
        return PickleDescription(machine.stack[-1], frozenset(machine.names), tuple(machine.storages))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, MemoryError) as error:
        raise UnsafePickleError(
            f"'{path}' was not loaded: its pickle does what no training state needs ({error!r:.200}). It may be "
            "malicious. Use another file, or copy it again if you know its origin.",
            path=path,
        ) from error


class _Description(_Machine):
    """Description of one pickle: real containers, numbers and text, and names in place of classes and calls."""

    empty = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.storages: list[DescribedObject] = []

    def tuple_of(self, items: list[Any]) -> Any:
        return tuple(items)

    def checked(self, keys: list[Any]) -> list[Any]:
        return [checked_key(key, self.keys) for key in keys]

    def dict_of(self, items: list[Any]) -> Any:
        return dict(zip(self.checked(items[::2]), items[1::2], strict=True))

    def extend(self, items: list[Any]) -> None:
        owner = self.stack[-1]
        if isinstance(owner, set):
            owner.update(self.checked(items))
        elif isinstance(owner, list):
            owner.extend(items)
        elif isinstance(owner, DescribedObject):
            owner.items.extend(items)
        else:
            raise _Unreadable(f"appends to a {type(owner).__name__}")

    def set_items(self, items: list[Any]) -> None:
        owner = self.stack[-1]
        pairs = list(zip(self.checked(items[::2]), items[1::2], strict=True))
        if isinstance(owner, dict):
            owner.update(pairs)
        elif isinstance(owner, DescribedObject):
            owner.pairs.extend(pairs)
        else:
            raise _Unreadable(f"sets items of a {type(owner).__name__}")

    def name(self, module: Any, name: Any) -> Any:
        if not isinstance(module, str) or not isinstance(name, str):
            raise _Unreadable("a name that is not text")
        found = f"{_OLD_MODULES.get(module, module)}.{name}"
        self.names.add(found)
        return GlobalReference(found)

    def call(self, function: Any, arguments: Any) -> Any:
        if isinstance(function, DescribedObject) and function.name == "builtins.getattr":  # a class in another
            owner, name = function.arguments
            if isinstance(owner, GlobalReference):
                function = self.name(owner.name, name)
        if not isinstance(function, GlobalReference):
            raise _Unreadable("a call of something without a name")
        return DescribedObject(function.name, arguments)

    def build(self, state: Any) -> None:
        owner = self.stack[-1]
        if not isinstance(owner, DescribedObject):
            raise _Unreadable(f"sets the state of a {type(owner).__name__}")
        owner.state = state

    def storage(self, key: Any) -> Any:
        described = DescribedObject("", key)
        self.storages.append(described)
        return described

    def pop(self) -> None:
        """Remove the last value, or the last mark if nothing is above it."""
        if self.stack:
            self.stack.pop()
        else:
            self.since_mark()

    def reduce_with_keywords(self) -> None:
        keywords = self.stack.pop()
        arguments = self.stack.pop()
        self.push(self.call(self.stack.pop(), (*arguments, keywords)))

    def instance(self, argument: str) -> None:
        arguments = tuple(self.since_mark())
        self.push(self.call(self.name_of(argument), arguments))

    def object(self) -> None:
        maker, *arguments = self.since_mark()
        self.push(self.call(maker, tuple(arguments)))

    def stack_name(self) -> None:
        name = self.stack.pop()
        self.push(self.name(self.stack.pop(), name))


_DESCRIBED: Final[dict[str, Action]] = {
    **_READ_BY_TORCH,
    "FRAME": lambda machine, _: None,
    **dict.fromkeys(("INT", "LONG", "LONG4", "FLOAT"), _Machine.push),
    **dict.fromkeys(("UNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING"), _Machine.push),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"), _Machine.push),
    "POP": lambda machine, _: machine.pop(),
    "POP_MARK": lambda machine, _: machine.since_mark(),
    "DUP": lambda machine, _: machine.push(machine.stack[-1]),
    **dict.fromkeys(("PUT", "MEMOIZE"), _Machine.memoize),
    "GET": _Machine.recall,
    "LIST": lambda machine, _: machine.push(machine.since_mark()),
    "DICT": lambda machine, _: machine.push(machine.dict_of(machine.since_mark())),
    "FROZENSET": lambda machine, _: machine.push(frozenset(machine.checked(machine.since_mark()))),
    "ADDITEMS": lambda machine, _: machine.extend(machine.since_mark()),
    "STACK_GLOBAL": lambda machine, _: machine.stack_name(),
    "NEWOBJ_EX": lambda machine, _: machine.reduce_with_keywords(),
    "INST": _Description.instance,
    "OBJ": lambda machine, _: machine.object(),
    "PERSID": lambda machine, key: machine.push(machine.storage(key)),
}
"""Opcodes that can be described, and what they do."""


# Keys: a dict or set with very many of one hash takes forever to fill, and so does hashing a nested tuple.


_LONGEST_KEY: Final = 100
"""The most items of a tuple or frozenset that is a key. Nested ones are rejected, except for frozensets in a tuple:
hashing or comparing every occurrence may never end."""
_KEY_BITS: Final = 64
"""The most bits of a number that is a key; larger numbers can all have the same hash."""

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


def checked_key(key: Any, others: NameHashes) -> Any:
    """Check that a dict key or set item hashes quickly, and return it.

    Args:
        key: The dict key or set item.
        others: The keys before it, at least those in the same container.
    """
    if isinstance(key, tuple | frozenset):
        nested = tuple if isinstance(key, tuple) else tuple | frozenset
        if len(key) > _LONGEST_KEY or any(isinstance(one, nested) for one in key):
            raise _Unreadable(f"a nested or long {type(key).__name__} as a name")
        for one in key:
            checked_key(one, others)
    elif isinstance(key, int) and key.bit_length() > _KEY_BITS:
        raise _Unreadable("too large a number as a name")
    if isinstance(key, tuple | frozenset) and others.is_one_of_many(key):
        raise _Unreadable("names that all have the same hash")
    return key


# The class of an object that was saved whole, for the message that refuses it.


_BEFORE_AN_OBJECT: Final = frozenset(
    ("PROTO", "MARK", "BINUNICODE", "NONE", "BINPUT", "LONG_BINPUT", "TUPLE", "BINPERSID", "EMPTY_TUPLE")
)
"""Opcodes that, along with its class, precede an object that was saved whole; the older format has its source there."""


def first_class(stream: IO[bytes], *, skip: int = 0) -> str | None:
    """Name the class of the object in a pickle; None if it is no object of a class, or another opcode comes first.

    Args:
        stream: The stream, at the first pickle.
        skip: The number of pickles before the object's.

    Raises:
        ValueError, EOFError: It is not a pickle.
    """
    for _ in range(skip):
        for _ in pickletools.genops(stream):
            pass
    found = None
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name == "GLOBAL" and found is None:
            found = str(argument).replace(" ", ".")
        elif opcode.name == "NEWOBJ":
            return found
        elif opcode.name not in _BEFORE_AN_OBJECT:
            break
    return None
