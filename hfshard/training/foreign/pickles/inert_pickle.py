"""Reads a pickle as a description: what it would make is noted, and nothing in it is imported, made or called.

The opcodes are those that `pickletools` tells. A class or function is its name; a call is the name with its arguments.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any, Final

from hfshard.errors import UnsafePickleError
from hfshard.storage.weights.pickles.name_hashes import NameHashes


@dataclass(frozen=True, slots=True)
class Named:
    """A class or function that the pickle names."""

    name: str
    """With its module: "collections.OrderedDict"."""


@dataclass(slots=True, eq=False, repr=False)
class Described:
    """An object that was not made."""

    name: str
    """Of the class or function that would make it; "" for what `persistent_id` wrote, which torch does for storages."""
    arguments: Any
    state: Any = None
    items: list[Any] = field(default_factory=list)
    """What would be appended, or added."""
    pairs: list[tuple[Any, Any]] = field(default_factory=list)
    """What would be set by key."""


class _Unreadable(ValueError):
    """The pickle does something that no file of torch.save does."""


_LONGEST_KEY: Final = 100
"""Items of a tuple that is a name in a dict; nested ones are hashed as often as they occur, which may take forever."""
_KEY_BITS: Final = 64
"""Larger numbers all can have the same hash."""

_RENAMED: Final = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Modules that protocol 2 calls by their old names."""

_CONSTANTS: Final[dict[str, Callable[[], Any]]] = {
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
"""Opcodes with a value of their own."""


@dataclass(frozen=True, slots=True)
class PickleDescription:
    """What a pickle would make."""

    value: Any
    """Numbers, text, bytes, lists, tuples, dicts and sets; `Named` and `Described`."""
    names: frozenset[str]
    """All that it names."""
    storages: tuple[Described, ...]
    """What `persistent_id` wrote."""


def describe_pickle(stream: IO[bytes], path: str) -> PickleDescription:
    """Read one pickle, and leave the stream behind it.

    Args:
        stream: It may go on after the pickle.
        path: The file's, for messages.

    Raises:
        UnsafePickleError: It is no pickle, or does what no state of a run needs.
    """
    machine = _Machine()
    try:
        for opcode, argument, _position in pickletools.genops(stream):
            machine.do(opcode.name, argument)
        return PickleDescription(machine.stack[-1], frozenset(machine.names), tuple(machine.storages))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, MemoryError) as error:
        raise UnsafePickleError(
            f"'{path}' was not loaded: its pickle does what no state of a run needs ({error!r:.200}). It may have been "
            "made to do harm. Use another file.",
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
        self.storages: list[Described] = []
        self.keys = NameHashes()

    def checked(self, keys: list[Any]) -> list[Any]:
        return [checked_key(key, self.keys) for key in keys]

    def do(self, opcode: str, argument: Any) -> None:
        if opcode in _LITERALS:
            self.stack.append(argument)
        elif opcode in _CONSTANTS:
            self.stack.append(_CONSTANTS[opcode]())
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
            raise _Unreadable("a tuple of too few")
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
        elif isinstance(owner, Described):
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
        self.stack.append(Named(found))

    def call(self, maker: Any, arguments: Any) -> None:
        if not isinstance(maker, Named):
            raise _Unreadable("a call of what has no name")
        self.stack.append(Described(maker.name, arguments))

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
        if not isinstance(owner, Described):
            raise _Unreadable(f"gives a {type(owner).__name__} a state")
        owner.state = state

    def stack_name(self, _argument: Any) -> None:
        name = self.stack.pop()
        self.name(self.stack.pop(), name)

    def persistent(self, argument: Any) -> None:
        described = Described("", self.stack.pop() if argument is None else argument)
        self.storages.append(described)
        self.stack.append(described)


def checked_key(key: Any, others: NameHashes) -> Any:
    """A name in a dict, or an item of a set, that is hashed in no time.

    Args:
        key: The name.
        others: Those before it, in the same container at least.
    """
    if isinstance(key, tuple):
        if len(key) > _LONGEST_KEY or any(isinstance(one, tuple) for one in key):
            raise _Unreadable("a tuple in a tuple, or a long one, as a name")
        for one in key:
            checked_key(one, others)
    elif isinstance(key, int) and key.bit_length() > _KEY_BITS:
        raise _Unreadable("a number as a name that is larger than any")
    if isinstance(key, tuple | frozenset) and others.is_one_of_many(key):
        raise _Unreadable("names that all have one hash")
    return key


def _list_of(owner: Any) -> list[Any]:
    if isinstance(owner, Described):
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
    """Take the last value away; or the last mark, where nothing stands above it."""
    if machine.stack:
        machine.stack.pop()
    else:
        machine.since_mark()


def _ignore(_value: Any) -> None:
    """Do nothing."""
