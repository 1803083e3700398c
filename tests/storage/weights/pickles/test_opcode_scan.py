"""What would end the process, or fill its memory, is refused before torch looks at it; all else is left to torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hfshard.errors import DamagedCheckpointError
from hfshard.storage.weights.pickles.opcode_scan import scan_zip
from hfshard.storage.weights.pickles.reading import read_pickle
from tests.attacks.files.torchfile import call, integer, legacy, mapping, named, several, text, zipped

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
    with pytest.raises(DamagedCheckpointError, match="it makes a bytearray from a number"):
        read_pickle(str(tmp_path / "huge.pt"), str(tmp_path))


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "older"])
def test_what_torch_saves_passes(tmp_path: Path, is_zip: bool) -> None:
    value: dict[str, Any] = {
        "bytes": [bytearray(b"abc"), bytearray(), b"abc"],
        "numbers": [1, 300, 70_000, 1 << 70, -1, 0.5, 1j, True, False, None],
        "sets": {1, (2, ("a", ()))},
        "tensors": {f"layer.{number}.weight": torch.ones(1) for number in range(1200)},
    }
    torch.save(value, tmp_path / "run.pt", _use_new_zipfile_serialization=is_zip)

    found = read_pickle(str(tmp_path / "run.pt"), str(tmp_path)).value
    assert found["tensors"].keys() == value["tensors"].keys()
    assert {key: found[key] for key in ("bytes", "numbers", "sets")} == {
        key: value[key] for key in ("bytes", "numbers", "sets")
    }


def test_what_torch_finds_fault_with_is_left_to_torch(tmp_path: Path) -> None:
    for number, body in enumerate([b"\xff", b"u", b"h\x05", text("a" * 10)[:4]]):
        path = tmp_path / f"{number}.pt"
        path.write_bytes(zipped(body + b"\x85" * 10_001, {}))
        with path.open("rb") as file:
            scan_zip(file.fileno(), str(path))


DOUBLED = b")" + b"".join(b"q%ch%c\x86" % (number, number) for number in range(60))
"""A tuple of two tuples, which are one, of two, 60 deep: torch would hash 2**60."""


@FORMATS
@pytest.mark.parametrize(
    "body",
    [
        b"}" + DOUBLED + b"Ns",
        b"}(" + DOUBLED + b"Nu",
        call("builtins", "set", b"]" + DOUBLED + b"a"),
        b"}(" + b"".join(b"\x8a\x0a" + (at * (2**61 - 1)).to_bytes(10, "little") + b"N" for at in range(9, 99)) + b"u",
    ],
    ids=["a name", "one of several", "in a set", "numbers of one hash"],
)
def test_names_that_are_hashed_forever_are_refused(tmp_path: Path, body: bytes, wrap: Wrap) -> None:
    (tmp_path / "endless.pt").write_bytes(wrap(body, {}))
    with pytest.raises(DamagedCheckpointError, match="names that take forever to be hashed"):
        read_pickle(str(tmp_path / "endless.pt"), str(tmp_path))
