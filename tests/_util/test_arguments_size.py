"""The grammar of max_shard_size, value by value."""

from __future__ import annotations

import enum
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy
import pytest

from hfshard._util.arguments import parse_size
from hfshard.errors import HfshardError, InvalidSizeError, InvalidSizeTypeError


class Limit(enum.IntEnum):
    SMALL = 4096


class Text(str):
    pass


GOOD: list[tuple[int | str, int]] = [
    # an int is bytes
    (1, 1),
    (4096, 4096),
    (5_000_000_000, 5000000000),
    (2**63, 9223372036854775808),
    (Limit.SMALL, 4096),
    # powers of 1000
    ("1B", 1),
    ("200B", 200),
    ("1KB", 1000),
    ("1MB", 1000000),
    ("1GB", 1000000000),
    ("5GB", 5000000000),
    ("50GB", 50000000000),
    ("1TB", 1000000000000),
    ("1PB", 1000000000000000),
    # powers of 1024
    ("1KiB", 1024),
    ("1MiB", 1048576),
    ("20MiB", 20971520),
    ("1GiB", 1073741824),
    ("5GiB", 5368709120),
    ("1TiB", 1099511627776),
    ("1PiB", 1125899906842624),
    # any case; the lower-case b is a byte
    ("1b", 1),
    ("200kb", 200000),
    ("200Kb", 200000),
    ("200kB", 200000),
    ("5gb", 5000000000),
    ("5Gb", 5000000000),
    ("5gib", 5368709120),
    ("5GIB", 5368709120),
    ("5gIb", 5368709120),
    # blanks between digits and unit
    ("5 GB", 5000000000),
    ("5 gib", 5368709120),
    ("5   MB", 5000000),
    ("5\tMB", 5000000),
    # fractions, exactly
    ("1.5GB", 1500000000),
    ("0.5GB", 500000000),
    ("1.5 GiB", 1610612736),
    ("2.01GB", 2010000000),  # 2009999999 by way of a float
    ("8.20KB", 8200),
    ("0.001KB", 1),
    ("1.0B", 1),
    ("1.9B", 1),
    ("0.0009765625KiB", 1),
    ("0.1KiB", 102),
    # zeros in front, many digits
    ("005GB", 5000000000),
    ("00.5KB", 500),
    ("9223372036854775808B", 9223372036854775808),
    ("99999999PB", 99999999000000000000000),
    (Text("5GB"), 5000000000),
]

BAD_VALUES: list[int | str] = [
    # nothing, or less
    0,
    -1,
    -5_000_000_000,
    "0GB",
    "0.0GB",
    "0B",
    "0.5B",
    "0.0001KB",
    "-1GB",
    "-0GB",
    "+5GB",
    # no unit, no digits, no such unit
    "",
    " ",
    "GB",
    "5",
    "5000000000",
    "5.0",
    "5G",
    "5M",
    "5k",
    "5Gi",
    "5BB",
    "5iB",
    "5EB",
    "5XB",
    "5Gbit",
    "5 bytes",
    "5GBs",
    "5GB/s",
    "auto",
    "None",
    # other ways to write a number
    "nanGB",
    "infGB",
    "-infGB",
    "1e3MB",
    "1E3MB",
    "0x10MB",
    "1_000MB",
    "1,5GB",
    "1,000MB",
    ".5GB",
    "5.GB",
    "1.2.3GB",
    "1 .5GB",
    "1/2GB",
    # other scripts: Arabic, full-width, superscript digits; the Kelvin sign; a Cyrillic letter
    "\u0665GB",
    "\uff15GB",
    "5\u00b2GB",
    "5\u212aB",
    "5G\u0412",
    # blanks that are none, or in the wrong place
    "5\u00a0GB",
    "5\nGB",
    "5GB\n",
    " 5GB",
    "5GB ",
    "5G B",
    "5 0GB",
    "5GB\x00",
    # too long to be meant
    "9" * 5000 + "GB",
    "1" + "0" * 5000,
    -(10**5000),
]

BAD_TYPES: list[object] = [
    None,
    True,
    False,
    5.0,
    1.5,
    float("nan"),
    float("inf"),
    Decimal(5),
    Fraction(5, 2),
    5 + 0j,
    b"5GB",
    bytearray(b"5GB"),
    ["5GB"],
    ("5GB",),
    {"max_shard_size": "5GB"},
    pytest.param(object(), id="object"),
    Path("5GB"),
    numpy.float64(5e9),
    numpy.bool_(True),
]


def _short(value: object) -> str:
    try:
        return ascii(value)[:24]
    except ValueError:
        return "an int that Python does not print"


@pytest.mark.parametrize(("size", "expected_bytes"), GOOD, ids=[_short(size) for size, _ in GOOD])
def test_good_size_is_bytes(size: int | str, expected_bytes: int) -> None:
    size_bytes = parse_size(size)
    assert size_bytes == expected_bytes
    assert type(size_bytes) is int


@pytest.mark.parametrize("size", BAD_VALUES, ids=_short)
def test_bad_value_is_a_value_error_that_shows_it_and_the_grammar(size: int | str) -> None:
    with pytest.raises(InvalidSizeError) as caught:
        parse_size(size)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, HfshardError)
    _assert_helpful(str(caught.value), size)


@pytest.mark.parametrize("size", BAD_TYPES, ids=_short)
def test_bad_type_is_a_type_error_that_shows_it_and_the_grammar(size: object) -> None:
    with pytest.raises(InvalidSizeTypeError) as caught:
        parse_size(size)  # type: ignore[arg-type]
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, HfshardError)
    assert f"of type {type(size).__name__}" in str(caught.value)
    _assert_helpful(str(caught.value), size)


def _assert_helpful(message: str, size: object) -> None:
    assert message.startswith("Invalid size ")
    assert "KiB, MiB, GiB" in message
    assert '"5GB"' in message
    assert len(message) < 500
    if len(_short(size)) < 24:
        assert repr(size) in message


def test_table_is_as_long_as_promised() -> None:
    assert len(GOOD) + len(BAD_VALUES) + len(BAD_TYPES) >= 120


@pytest.mark.parametrize("size", ["5GiBs", "", "0GB", -1, 0, True, 1.5, None, b"5GB"], ids=_short)
@pytest.mark.parametrize("directory", ["fresh", "existing"])
def test_bad_size_touches_nothing_on_disk(directory: str, size: object, tmp_path: Path) -> None:
    import torch

    import hfshard

    target = tmp_path / directory
    if directory == "existing":
        target.mkdir()
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(b"old")
    before = _snapshot(tmp_path)
    with pytest.raises((InvalidSizeError, InvalidSizeTypeError)):
        hfshard.save_state_dict({"weight": torch.ones(4)}, target, max_shard_size=size)  # type: ignore[arg-type]
    assert _snapshot(tmp_path) == before


def _snapshot(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Path -> inode, time of change in nanoseconds, bytes: of the directories too."""
    return {
        str(path): (path.stat().st_ino, path.stat().st_ctime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [root, *sorted(root.rglob("*"))]
    }
