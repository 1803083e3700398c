"""What would end the process, or fill its memory, is refused before torch looks at it; all else is left to torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hfshard.errors import DamagedCheckpointError, UnsafePickleError
from hfshard.pickles.pickle_opcodes import scan_zip
from hfshard.pickles.read_pickle import read_pickle
from tests.attacks.files.torchfile import (
    MAGIC,
    call,
    integer,
    legacy,
    mapping,
    named,
    of_one_hash,
    pickled,
    several,
    text,
    zipped,
)

Wrap = Callable[[bytes, Mapping[str, bytes]], bytes]

FORMATS = pytest.mark.parametrize("wrap", [zipped, legacy], ids=["zip", "older"])


def deep(opcodes: bytes, depth: int = 100_000) -> bytes:
    """A dict of which a tuple in tuples is a name: torch would hash it, and the process would end."""
    return b"}(" + b")" + opcodes * depth + b"K\x01u"


@FORMATS
@pytest.mark.parametrize(
    "body",
    [
        deep(b"\x85"),
        deep(b"K\x01\x86"),
        deep(b"K\x01K\x02\x87"),
        deep(b"q\x01(h\x01t"),
        deep(b"q\x01X\x01\x00\x00\x00ah\x01\x86"),
        call("builtins", "set", b"](" + b")" + b"\x85" * 100_000 + b"e"),
    ],
    ids=["one", "two", "three", "by way of the memo", "text first", "in a set"],
)
def test_names_that_overflow_the_stack_are_refused(tmp_path: Path, body: bytes, wrap: Wrap) -> None:
    (tmp_path / "deep.pt").write_bytes(wrap(body, {}))
    with pytest.raises(DamagedCheckpointError, match="tuples in tuples, more than 1000 deep"):
        read_pickle(str(tmp_path / "deep.pt"), str(tmp_path))


@FORMATS
@pytest.mark.parametrize(
    "arguments",
    [several(integer(1 << 40)), b"]" + integer(1 << 40) + b"a", b"}" + integer(1 << 40) + b"K\x01s"],
    ids=["tuple", "list", "dict"],
)
def test_memory_that_a_number_asks_for_is_refused(tmp_path: Path, arguments: bytes, wrap: Wrap) -> None:
    body = mapping({"weight": named("builtins", "bytearray") + b"q\x01" + arguments + b"R"})
    (tmp_path / "huge.pt").write_bytes(wrap(body, {}))
    with pytest.raises(DamagedCheckpointError, match=r"it calls builtins\.bytearray as pickle never does"):
        read_pickle(str(tmp_path / "huge.pt"), str(tmp_path))


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


DOUBLED = b")" + b"".join(b"q%ch%c\x86" % (number, number) for number in range(60))
"""A tuple of two tuples, which are one, of two, 60 deep: torch would hash 2**60."""


COLLIDING = [integer(one) + integer(other) + b"\x86" for one, other in of_one_hash(2000)]
"""Two thousand tuples of one hash."""
ENCODE = named("_codecs", "encode")
PUNY = text("\u00e4" * 100_000)


def test_numbers_of_one_hash_are_that() -> None:
    assert len({hash(pair) for pair in of_one_hash(50)}) == 1


@FORMATS
@pytest.mark.parametrize(
    "body",
    [
        call("_codecs", "encode", PUNY, text("punycode")),
        call("_codecs", "encode", PUNY, text("idna")),
        call("_codecs", "encode", PUNY),
        call("_codecs", "encode", PUNY, text("latin1"), text("replace")),
        ENCODE + b"]" + PUNY + b"a" + text("punycode") + b"aR",
        call(
            "torch._tensor", "_rebuild_from_type_v2", named("_codecs", "encode"), b"N", several(PUNY, text("punycode"))
        ),
        call("builtins", "bytearray", PUNY, text("punycode")),
        call("builtins", "bytearray", mapping({})),
    ],
    ids=["punycode", "idna", "no codec", "errors", "in a list", "by another call", "a bytearray", "of a dict"],
)
def test_text_that_pickle_does_not_encode_like_this_is_refused(tmp_path: Path, body: bytes, wrap: Wrap) -> None:
    (tmp_path / "slow.pt").write_bytes(wrap(body, {}))
    with pytest.raises(DamagedCheckpointError, match=r"it calls [\w.]+ as pickle never does"):
        read_pickle(str(tmp_path / "slow.pt"), str(tmp_path))


HASHED = {
    "tuples of one hash": b"}(" + b"".join(pair + b"N" for pair in COLLIDING) + b"u",
    "in a set, of one hash": call("builtins", "set", b"](" + b"".join(COLLIDING) + b"e"),
    "in a Counter, of one hash": call("collections", "Counter", b"(" + b"".join(COLLIDING) + b"t"),
    "sizes of one hash": b"}("
    + b"".join(call("torch", "Size", several(integer(a), integer(b))) + b"N" for a, b in of_one_hash(2000))
    + b"u",
    "complex numbers of one hash": b"}("
    + b"".join(call("builtins", "complex", integer(at * 1000003), integer(-at)) + b"N" for at in range(2, 2002))
    + b"u",
    "a name of 990 tuples in tuples": b"})" + b"\x85" * 989 + b"Ns",
    "a wide tuple of sizes": b"}"
    + b"("
    + (call("torch", "Size", b"(" + b"K\x01" * 500 + b"t") + b"q\x01N" + several(b"h\x01", b"h\x01") + b"Nu"),
    "a wide tuple of wide ones": b"}((" + b"N" * 999 + b"tq\x01N(" + b"h\x01" * 999 + b"tNu",
}
MANY = 700
TEXT = text("a" * (1 << 20)) + b"q\x01"
NUMBERS = b"(" + b"".join(b"J" + number.to_bytes(4, "little") for number in range(1 << 18)) + b"lq\x01"
FLAT = NUMBERS.replace(b"lq\x01", b"tq\x01")
ENTRIES = b"}(" + b"".join(b"J" + number.to_bytes(4, "little") + b"N" for number in range(1 << 18)) + b"uq\x01"
LAUGHING = b"](" * 25 + b"K\x01" + b"".join(b"q%ch%ce" % (number, number) for number in range(25))
"""A list of two lists, which are one, 25 deep."""


@FORMATS
@pytest.mark.parametrize(
    "body",
    [
        b"](" + TEXT + call("_codecs", "encode", b"h\x01", text("latin1")) * MANY + b"e",
        b"](" + ENTRIES + call("collections", "OrderedDict", b"h\x01") * MANY + b"e",
        b"](" + ENTRIES + (call("collections", "OrderedDict") + b"h\x01b") * MANY + b"e",
        b"](" + FLAT + call("torch", "Size", b"h\x01") * MANY + b"e",
        call("torch", "FloatTensor", integer(1 << 40)),
    ],
    ids=["one text", "one dict", "one state", "one size", "a tensor of a number"],
)
def test_calls_make_no_more_than_the_file_has(tmp_path: Path, body: bytes, wrap: Wrap) -> None:
    (tmp_path / "large.pt").write_bytes(wrap(body, {}))
    with pytest.raises(DamagedCheckpointError, match="its calls make more than the file has"):
        read_pickle(str(tmp_path / "large.pt"), str(tmp_path))


@pytest.mark.parametrize("number", [1, 4], ids=["version", "storages"])
def test_what_the_older_format_begins_and_ends_with_is_plain(tmp_path: Path, number: int) -> None:
    """torch writes the version into its errors, and hashes the names of the storages."""
    pickles = [integer(MAGIC), integer(1001), mapping({}), b"N", b"]"]
    pickles[number] = b"](" + DOUBLED + b"e" if number == 4 else LAUGHING
    (tmp_path / "odd.pt").write_bytes(b"".join(map(pickled, pickles)))
    with pytest.raises(DamagedCheckpointError, match="does not begin, or end, as torch"):
        read_pickle(str(tmp_path / "odd.pt"), str(tmp_path))


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
            "torch._utils",
            "_rebuild_parameter_with_state",
            b"N",
            b"\x89",
            b"N",
            several(b"}K\x01" + LAUGHING + b"s", b"NN"),
        ),
        "it calls what is no function as pickle never does": LAUGHING + b")R",
        "it calls what is no function as": LAUGHING + b")\x81",
        "it calls a storage as pickle never does": several(text("storage"), DOUBLED) + b"Q",
        "it calls builtins.complex as pickle never does": call("builtins", "complex", text("1000003-1j")),
        "it calls torch.Size as pickle never does": call("torch", "Size", b"](K\x01K\x02e"),
        "it calls torch._tensor._rebuild_from_type_v2 as": nested_calls(900) + b"R",
        "of a device that torch has by an extension": call("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"),
        "it calls torch._tensor._rebuild_from_type_v2 as pickle never does": call(
            "torch._tensor", "_rebuild_from_type_v2", b"N", b"N", b")"
        ),
    }
    for match, body in bodies.items():
        (tmp_path / "odd.pt").write_bytes(zipped(body, {}))
        with pytest.raises(DamagedCheckpointError, match=match):
            read_pickle(str(tmp_path / "odd.pt"), str(tmp_path))


@FORMATS
@pytest.mark.parametrize(
    "body",
    [
        b"}" + DOUBLED + b"Ns",
        b"}(" + DOUBLED + b"Nu",
        call("builtins", "set", b"]" + DOUBLED + b"a"),
        b"}(" + b"".join(b"\x8a\x0a" + (at * (2**61 - 1)).to_bytes(10, "little") + b"N" for at in range(9, 999)) + b"u",
        call("collections", "OrderedDict") + b"](" + b"".join(pair + b"N\x86" for pair in COLLIDING) + b"eb",
        *HASHED.values(),
    ],
    ids=["a name", "one of several", "in a set", "numbers of one hash", "pairs of a state", *HASHED],
)
def test_names_that_are_hashed_forever_are_refused(tmp_path: Path, body: bytes, wrap: Wrap) -> None:
    (tmp_path / "endless.pt").write_bytes(wrap(body, {}))
    with pytest.raises(DamagedCheckpointError, match="names that take forever to be hashed"):
        read_pickle(str(tmp_path / "endless.pt"), str(tmp_path))
