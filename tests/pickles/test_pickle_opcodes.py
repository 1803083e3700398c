"""What would end the process, or fill its memory, is refused before torch looks at it; all else is left to torch."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hfshard.errors import DamagedCheckpointError, UnsafePickleError
from hfshard.pickles.pickle_opcodes import DescribedObject, GlobalReference, describe_pickle, scan_zip
from hfshard.pickles.read_pickle import read_pickle
from tests.attacks.files.torchfile import (
    DOUBLED,
    MAGIC,
    call,
    colliding,
    complex_of_one_hash,
    integer,
    legacy,
    mapping,
    named,
    numbers_of_one_hash,
    of_one_hash,
    pickled,
    several,
    text,
    zipped,
)


def refused(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "odd.pt").write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=problem):
        read_pickle(str(tmp_path / "odd.pt"), str(tmp_path))


def deep(opcodes: bytes, depth: int = 100_000) -> bytes:
    """A dict of which a tuple in tuples is a name: torch would hash it, and the process would end."""
    return b"}(" + b")" + opcodes * depth + b"K\x01u"


BYTEARRAY = named("builtins", "bytearray") + b"q\x01"
COLLIDING = colliding(2000)
ENCODE = named("_codecs", "encode")
PUNY = text("\u00e4" * 100_000)
MANY = 700
TEXT = text("a" * (1 << 20)) + b"q\x01"
NUMBERS = b"(" + b"".join(b"J" + number.to_bytes(4, "little") for number in range(1 << 18)) + b"lq\x01"
FLAT = NUMBERS.replace(b"lq\x01", b"tq\x01")
ENTRIES = b"}(" + b"".join(b"J" + number.to_bytes(4, "little") + b"N" for number in range(1 << 18)) + b"uq\x01"
LAUGHING = b"](" * 25 + b"K\x01" + b"".join(b"q%ch%ce" % (number, number) for number in range(25))
"""A list of two lists, which are one, 25 deep."""

DEEP = {
    "one": deep(b"\x85"),
    "two": deep(b"K\x01\x86"),
    "three": deep(b"K\x01K\x02\x87"),
    "by way of the memo": deep(b"q\x01(h\x01t"),
    "text first": deep(b"q\x01X\x01\x00\x00\x00ah\x01\x86"),
    "in a set": call("builtins", "set", b"](" + b")" + b"\x85" * 100_000 + b"e"),
}
HUGE = {
    "tuple": mapping({"weight": BYTEARRAY + several(integer(1 << 40)) + b"R"}),
    "list": mapping({"weight": BYTEARRAY + b"]" + integer(1 << 40) + b"aR"}),
    "dict": mapping({"weight": BYTEARRAY + b"}" + integer(1 << 40) + b"K\x01sR"}),
}
ENCODED = {
    "punycode": call("_codecs", "encode", PUNY, text("punycode")),
    "idna": call("_codecs", "encode", PUNY, text("idna")),
    "no codec": call("_codecs", "encode", PUNY),
    "errors": call("_codecs", "encode", PUNY, text("latin1"), text("replace")),
    "in a list": ENCODE + b"]" + PUNY + b"a" + text("punycode") + b"aR",
    "by another call": call("torch._tensor", "_rebuild_from_type_v2", ENCODE, b"N", several(PUNY, text("punycode"))),
    "a bytearray": call("builtins", "bytearray", PUNY, text("punycode")),
    "of a dict": call("builtins", "bytearray", mapping({})),
}
LARGE = {
    "one text": b"](" + TEXT + call("_codecs", "encode", b"h\x01", text("latin1")) * MANY + b"e",
    "one dict": b"](" + ENTRIES + call("collections", "OrderedDict", b"h\x01") * MANY + b"e",
    "one state": b"](" + ENTRIES + (call("collections", "OrderedDict") + b"h\x01b") * MANY + b"e",
    "one size": b"](" + FLAT + call("torch", "Size", b"h\x01") * MANY + b"e",
    "a tensor of a number": call("torch", "FloatTensor", integer(1 << 40)),
}
HASHED = {
    "a name": b"}" + DOUBLED + b"Ns",
    "one of several": b"}(" + DOUBLED + b"Nu",
    "in a set": call("builtins", "set", b"]" + DOUBLED + b"a"),
    "numbers of one hash": b"}(" + numbers_of_one_hash() + b"u",
    "pairs of a state": call("collections", "OrderedDict")
    + b"]("
    + b"".join(pair + b"N\x86" for pair in COLLIDING)
    + b"eb",
    "tuples of one hash": b"}(" + b"".join(pair + b"N" for pair in COLLIDING) + b"u",
    "in a set, of one hash": call("builtins", "set", b"](" + b"".join(COLLIDING) + b"e"),
    "in a Counter, of one hash": call("collections", "Counter", b"(" + b"".join(COLLIDING) + b"t"),
    "sizes of one hash": b"}("
    + b"".join(call("torch", "Size", several(integer(a), integer(b))) + b"N" for a, b in of_one_hash(2000))
    + b"u",
    "complex numbers of one hash": b"}(" + complex_of_one_hash(2000) + b"u",
    "a name of 990 tuples in tuples": b"})" + b"\x85" * 989 + b"Ns",
    "a wide tuple of sizes": b"}"
    + b"("
    + (call("torch", "Size", b"(" + b"K\x01" * 500 + b"t") + b"q\x01N" + several(b"h\x01", b"h\x01") + b"Nu"),
    "a wide tuple of wide ones": b"}((" + b"N" * 999 + b"tq\x01N(" + b"h\x01" * 999 + b"tNu",
}
PROBLEMS = {
    "its tuples are nested more than 1000 deep": DEEP,
    r"it calls builtins\.bytearray as pickle never does": HUGE,
    r"it calls [\w.]+ as pickle never does": ENCODED,
    "its calls create more than the file contains": LARGE,
    "hashing its names may take forever": HASHED,
}


@pytest.mark.parametrize("wrap", [zipped, legacy], ids=["zip", "older"])
@pytest.mark.parametrize(
    ("problem", "body"),
    [pytest.param(problem, bodies[name], id=name) for problem, bodies in PROBLEMS.items() for name in bodies],
)
def test_what_takes_all_memory_or_time_is_refused(
    tmp_path: Path, problem: str, body: bytes, wrap: Callable[[bytes, Mapping[str, bytes]], bytes]
) -> None:
    refused(tmp_path, wrap(body, {}), problem)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "older"])
def test_what_torch_saves_passes(tmp_path: Path, is_zip: bool) -> None:
    value: dict[str, Any] = {
        "bytes": [bytearray(b"abc"), bytearray(), b"abc"],
        "numbers": [1, 300, 70_000, 1 << 70, -1, 0.5, 1j, True, False, None],
        "sets": {1, (2, ("a", ())), (1 << 63) + 5},
        "hashes": {(1 << 63) + number: number for number in range(300)},
        "tensors": {f"layer.{number}.weight": torch.ones(1) for number in range(1200)},
    }
    torch.save(value, tmp_path / "run.pt", _use_new_zipfile_serialization=is_zip)

    found = read_pickle(str(tmp_path / "run.pt"), str(tmp_path)).value
    assert found["tensors"].keys() == value["tensors"].keys()
    assert {key: found[key] for key in ("bytes", "numbers", "sets")} == {
        key: value[key] for key in ("bytes", "numbers", "sets")
    }


def test_classes_of_other_packages_are_left_to_torch(tmp_path: Path) -> None:
    for name in ("Size", "Counter", "encode", "Tensor"):
        (tmp_path / "own.pt").write_bytes(zipped(call("package", name, integer(3), b"]"), {}))
        with pytest.raises(UnsafePickleError, match=f"asks for 'package.{name}'"):
            read_pickle(str(tmp_path / "own.pt"), str(tmp_path))


def test_what_torch_finds_fault_with_is_left_to_torch(tmp_path: Path) -> None:
    for number, body in enumerate([b"\xff", b"u", b"h\x05", text("a" * 10)[:4]]):
        path = tmp_path / f"{number}.pt"
        path.write_bytes(zipped(body + b"\x85" * 10_001, {}))
        with path.open("rb") as file:
            scan_zip(file.fileno(), str(path))


def test_numbers_of_one_hash_are_that() -> None:
    assert len({hash(pair) for pair in of_one_hash(50)}) == 1


@pytest.mark.parametrize("number", [1, 4], ids=["version", "storages"])
def test_what_the_older_format_begins_and_ends_with_is_plain(tmp_path: Path, number: int) -> None:
    """torch writes the version into its errors, and hashes the names of the storages."""
    pickles = [integer(MAGIC), integer(1001), mapping({}), b"N", b"]"]
    pickles[number] = b"](" + DOUBLED + b"e" if number == 4 else LAUGHING
    refused(tmp_path, b"".join(map(pickled, pickles)), "does not begin, or end, as torch")


def test_sizes_of_a_tensor_are_not_multiplied_without_end(tmp_path: Path) -> None:
    sizes = [integer((1 << 2000) + 1)] * 100_000
    for numbers, problem in (
        (sizes, "its calls create more than the file contains"),
        ([*sizes, integer(0)], "is not a valid PyTorch"),
    ):
        refused(tmp_path, zipped(call("torch", "FloatTensor", *numbers), {}), problem)


def test_a_complex_number_that_is_too_large_is_left_to_torch(tmp_path: Path) -> None:
    for wrap in (zipped, legacy):
        refused(tmp_path, wrap(call("builtins", "complex", integer(1 << 2000), integer(1)), {}), "OverflowError")


def nested_calls(depth: int) -> bytes:
    """A call of a function that calls itself, by its arguments."""
    function = named("torch._tensor", "_rebuild_from_type_v2")
    return function + (b"(" + function + b"N") * depth + b")" + b"t" * depth


def test_calls_that_torch_save_does_not_write_are_refused(tmp_path: Path) -> None:
    bodies = {
        "it calls torch.FloatTensor as pickle never does": call("torch", "FloatTensor", LAUGHING),
        "it calls torch._utils._rebuild_qtensor as": call("torch._utils", "_rebuild_qtensor", LAUGHING),
        "it calls torch._utils._rebuild_qtensor as pickle": call(
            "torch._utils", "_rebuild_qtensor", b"}K\x01" + LAUGHING + b"s"
        ),
        "it calls torch._utils._rebuild_parameter_with_state as pickle never does": call(
            "torch._utils", "_rebuild_parameter_with_state", b"N\x89N", several(b"}K\x01" + LAUGHING + b"s", b"NN")
        ),
        "it calls something that is not a function as pickle never does": LAUGHING + b")R",
        "it calls something that is not a function as": LAUGHING + b")\x81",
        "it calls a storage as pickle never does": several(text("storage"), DOUBLED) + b"Q",
        "it calls builtins.complex as pickle never does": call("builtins", "complex", text("1000003-1j")),
        "it calls torch.Size as pickle never does": call("torch", "Size", b"](K\x01K\x02e"),
        "it calls torch._tensor._rebuild_from_type_v2 as": nested_calls(900) + b"R",
        "it has a tensor on a device of a torch extension": call(
            "torch._utils", "_rebuild_device_tensor_from_cpu_tensor"
        ),
        "it calls torch._tensor._rebuild_from_type_v2 as pickle never does": call(
            "torch._tensor", "_rebuild_from_type_v2", b"N", b"N", b")"
        ),
    }
    for match, body in bodies.items():
        refused(tmp_path, zipped(body, {}), match)


# Description


def run(*_: Any) -> None:
    raise AssertionError("it ran")


class Reduced:
    """Is pickled as a call of a function."""

    def __reduce__(self) -> Any:
        return run, (1,)


@pytest.mark.parametrize(
    ("opcodes", "why"),
    [
        (b"cbuiltins\ngetattr\n}\x85b.", "state"),
        (b"]Kab.", "state"),
        (b"X\x01\x00\x00\x00a)R.", "without a name"),
        (b"K\x01K\x02\x86)\x81.", "without a name"),
        (b"cbuiltins\ngetattr\ncm\nf\n)RX\x01\x00\x00\x00a\x86R)R.", "without a name"),
        (b"\x82\x01.", "EXT1"),
        (b"h\x07.", "KeyError"),
        (b"0.", "IndexError"),
        (b"]", "ValueError"),
        (b"r\xff\xff\xff\xff.", "IndexError"),
        (b"X\xff\xff\xff\xffa.", "ValueError"),
    ],
)
def test_pickles_that_no_torch_save_writes_are_refused(opcodes: bytes, why: str) -> None:
    with pytest.raises(UnsafePickleError, match=why):
        describe_pickle(io.BytesIO(b"\x80\x02" + opcodes), "a.pt")


def test_a_call_is_only_described() -> None:
    described = describe_pickle(io.BytesIO(pickle.dumps([Reduced(), run], 2)), "a.pt")

    call, name = described.value
    assert isinstance(call, DescribedObject) and (call.name, call.arguments) == (f"{__name__}.run", (1,))
    assert name == GlobalReference(f"{__name__}.run")
    assert described.names == {f"{__name__}.run"}


def test_a_call_of_a_class_in_another_is_named_after_both() -> None:
    opcodes = b"\x80\x02cbuiltins\ngetattr\ncm\nOuter\nX\x05\x00\x00\x00Inner\x86R)\x81."

    described = describe_pickle(io.BytesIO(opcodes), "a.pt")

    assert (described.value.name, described.value.arguments) == ("m.Outer.Inner", ())
    assert described.names == {"builtins.getattr", "m.Outer", "m.Outer.Inner"}


def test_modules_of_python_2_are_known_to_scan_and_description(tmp_path: Path) -> None:
    for module in ("UserDict", "UserList", "UserString"):
        pairs = b"](" + b"".join(pair + b"N\x86" for pair in COLLIDING) + b"e"
        refused(tmp_path, zipped(call(module, "OrderedDict", pairs), {}), "hashing its names may take forever")
    names = b"".join(named(module, "x") for module in ("UserDict", "__builtin__", "copy_reg"))

    described = describe_pickle(io.BytesIO(names + b"."), "a.pt")

    assert described.names == {"collections.x", "builtins.x", "copyreg.x"}


def nested_frozensets(depth: int, first: int) -> bytes:
    """A frozenset of a pair of one and the same frozenset, and so on; `first` is the place of the innermost."""
    pairs = (b"q%c0(h%ch%c\x86\x91" % ((first + at,) * 3) for at in range(depth))
    return b"(K\x01\x91" + b"".join(pairs)


def test_frozensets_as_keys_are_short_and_not_nested() -> None:
    short = b"}((K\x01K\x02\x91N(K\x01\x91\x85Nu."
    assert describe_pickle(io.BytesIO(short), "a.pt").value == {
        frozenset({1, 2}): None,
        (frozenset({1}),): None,
    }
    nested = nested_frozensets(60, 0) + b"N" + nested_frozensets(60, 100) + b"N"
    long = b"(" + b"".join(b"K%c" % number for number in range(101)) + b"\x91N"
    for keys in (nested, long):
        with pytest.raises(UnsafePickleError, match="a nested or long frozenset as a name"):
            describe_pickle(io.BytesIO(b"}(" + keys + b"u."), "a.pt")
