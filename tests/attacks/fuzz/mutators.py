"""Changes to the bytes of a file, drawn from a seeded generator: bits, slices, JSON values, records of a zip."""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

INTERESTING = (
    "0", "-1", "1", "2", "7", "8", "127", "128", "255", "4095", "4096", "65535", "2147483647", "2147483648",
    "4294967296", "9223372036854775807", "9223372036854775808", "18446744073709551615", "1" * 40, "1" * 5000,
    "-9223372036854775809", "1.0", "1e400", "-0.0", "NaN", "Infinity", "true", "null", '""', "[]", "{}", '"F32"',
)  # fmt: skip
"""Tokens of JSON that programs have stumbled over."""

WORDS = (
    "", ".", "..", "/", "../x", "/etc/passwd", "config.json", "model.safetensors", "checkpoint.json", "a" * 300,
    "\0", "\x1b[2J", "\ud800", "\u202e", "F32", "F64", "BF16", "F8_E4M3", "F4", "F6_E2M3", "BOOL", "C64", "I8", "U64",
    "__metadata__", "hfshard", "sha256", "xxh3", "format", "files", "tied_names", "weight_map", "dtype", "shape",
    "$tensor", "$tuple", "embed.weight", "head.bias", "0" * 64, "0" * 16, "1", "1e999", "é", "model\n",
)  # fmt: skip
"""Strings that mean something to one of the readers, or are odd."""

_NUMBER = re.compile(rb"-?\d+")
_STRING = re.compile(rb'"(?:[^"\\]|\\.){0,200}"')


def mutated(random: Random, raw: bytes, others: list[bytes]) -> bytes:
    """A changed copy of a file.

    Args:
        random: Decides everything.
        raw: The file.
        others: Other files, from which pieces are taken.
    """
    kinds: list[Callable[[Random, bytes, list[bytes]], bytes]] = [_bytes, _tokens]
    if raw[:1] == b"{":
        kinds += [_json, _json, _json]
    elif raw[8:9] == b"{":
        kinds += [_header, _header, _header]
    elif raw[:2] == b"PK":
        kinds += [_zip, _zip]
    for _ in range(1 if random.random() < 0.8 else random.randint(2, 4)):
        raw = random.choice(kinds)(random, raw, others)
    return raw


def _position(random: Random, raw: bytes) -> int:
    """Somewhere in a file: its head, its tail and whatever is not zero or blank more often than the padding."""
    if not raw:
        return 0
    kind = random.random()
    if kind < 0.4:
        return min(len(raw) - 1, int(random.expovariate(1 / 200)))
    if kind < 0.6:
        return max(0, len(raw) - 1 - int(random.expovariate(1 / 100)))
    return random.randrange(len(raw))


def _bytes(random: Random, raw: bytes, others: list[bytes]) -> bytes:
    at = _position(random, raw)
    count = 1 + int(random.expovariate(1 / 8))
    kind = random.randrange(9)
    if kind == 0 and raw:
        return raw[:at] + bytes([raw[at] ^ 1 << random.randrange(8)]) + raw[at + 1 :]
    if kind == 1:
        return raw[:at] + bytes([random.choice((0, 1, 0x20, 0x22, 0x7F, 0x80, 0xFF))]) + raw[at + 1 :]
    if kind == 2:
        return raw[:at] + raw[at + count :]
    if kind == 3:
        return raw[:at] + raw[at : at + count] + raw[at:]
    if kind == 4:
        return raw[:at] + random.randbytes(count) + raw[at:]
    if kind == 5:
        return raw[:at] if random.random() < 0.5 else raw + random.randbytes(count)
    if kind == 6:
        other = random.choice(others)
        start = _position(random, other)
        return raw[:at] + other[start : start + 8 * count] + raw[at + 8 * count * random.randrange(2) :]
    if kind == 7:
        size = random.choice((1, 2, 4, 8))
        value = random.choice((0, 1, 2**7, 2**8 - 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1))
        return raw[:at] + (value & (1 << 8 * size) - 1).to_bytes(size, "little") + raw[at + size :]
    other_at = _position(random, raw)
    low = min(at, other_at)
    high = max(at, other_at)
    return raw[:low] + raw[high : high + count] + raw[low + count : high] + raw[low : low + count] + raw[high + count :]


def _tokens(random: Random, raw: bytes, others: list[bytes]) -> bytes:
    """Replace a number or a string where text stands, whatever it belongs to."""
    found = list((_NUMBER if random.random() < 0.5 else _STRING).finditer(raw[:20_000]))
    if not found:
        return _bytes(random, raw, others)
    match = random.choice(found)
    kind = random.random()
    if kind < 0.4:
        token = random.choice(INTERESTING).encode()
    elif kind < 0.7:
        token = json.dumps(random.choice(WORDS)).encode()
    else:
        token = random.choice(found).group()
    return raw[: match.start()] + token + raw[match.end() :]


def _json(random: Random, raw: bytes, others: list[bytes]) -> bytes:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return _bytes(random, raw, others)
    return _dumped(random, _changed(random, value))


def _header(random: Random, raw: bytes, others: list[bytes]) -> bytes:
    """Change the JSON of a safetensors file, and mostly its length with it."""
    length = int.from_bytes(raw[:8], "little")
    head, body = raw[8 : 8 + length], raw[8 + length :]
    try:
        value = json.loads(head)
    except (ValueError, RecursionError):
        return _bytes(random, raw, others)
    if isinstance(value, dict) and random.random() < 0.2:  # what hfshard says of a file lies in a string of its own
        metadata = value.get("__metadata__")
        if isinstance(metadata, dict) and isinstance(metadata.get("hfshard"), str):
            try:
                metadata["hfshard"] = json.dumps(_changed(random, json.loads(metadata["hfshard"])))
                new = json.dumps(value).encode()
            except (ValueError, RecursionError):
                return _bytes(random, raw, others)
            return struct.pack("<Q", len(new)) + new + body
    new = _dumped(random, _changed(random, value))
    if random.random() < 0.5:
        new += b" " * (-(8 + len(new)) % 4096)
    size = len(new) if random.random() < 0.95 else random.randrange(2 * len(new) + 2)
    return struct.pack("<Q", size) + new + body


def _zip(random: Random, raw: bytes, others: list[bytes]) -> bytes:
    """Change a record of a zip, and write the zip again with the right checksum."""
    buffer = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            records = [(record.filename, archive.read(record)) for record in archive.infolist()]
    except Exception:  # a zip that was changed before
        return _bytes(random, raw, others)
    if not records:
        return _bytes(random, raw, others)
    at = random.randrange(len(records)) if random.random() < 0.4 else 0
    name, content = records[at]
    if random.random() < 0.15:
        name = random.choice((name.rsplit("/", 1)[0] + "/" + random.choice(WORDS[:10]), records[-1][0], "x"))
    else:
        content = _bytes(random, content, [*others, records[-1][1]])
    records[at] = (name, content)
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED if random.random() < 0.9 else zipfile.ZIP_DEFLATED) as made:
        for name, content in records:
            try:
                made.writestr(zipfile.ZipInfo(name or "x"), content)
            except (ValueError, UnicodeError):
                made.writestr("y", content)
    return buffer.getvalue()


def _dumped(random: Random, value: Any) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=random.random() < 0.5)
    except (ValueError, RecursionError):
        return b"{"
    if random.random() < 0.05:  # a key twice
        text = text.replace("{", '{"format": 1, "format": 1, ', 1)
    return text.encode("utf-8", "surrogatepass")


def _changed(random: Random, value: Any) -> Any:
    """A value of JSON with one of its nodes changed, found by walking down."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = random.choice(list(value))
        kind = random.random()
        if kind < 0.7:
            return {**value, key: _changed(random, value[key])}
        if kind < 0.8:
            return {name: one for name, one in value.items() if name != key}
        if kind < 0.9:
            new = random.choice([*value, *WORDS])
            return {new if name == key else name: one for name, one in value.items()}
        return {**value, random.choice(WORDS): random.choice([value[key], _scalar(random)])}
    if isinstance(value, list) and value and random.random() < 0.85:
        at = random.randrange(len(value))
        kind = random.random()
        if kind < 0.6:
            return [*value[:at], _changed(random, value[at]), *value[at + 1 :]]
        if kind < 0.75:
            return value[:at] + value[at + 1 :]
        return [*value, random.choice([value[at], _scalar(random)])]
    kind = random.random()
    if kind < 0.35 and isinstance(value, int):
        return value + random.choice((-4096, -8, -4, -1, 1, 4, 8, 4096))
    if kind < 0.5 and isinstance(value, str) and value:
        at = random.randrange(len(value))
        return value[:at] + random.choice(("", "x", "0", "/", "..", "\0", "é", "*")) + value[at + random.randrange(2) :]
    if kind < 0.6:
        for _ in range(random.choice((1, 2, 70, 500))):
            value = [value]
        return value
    return _scalar(random)


def _scalar(random: Random) -> Any:
    numbers = (0, -1, 1, 3, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**40, 0.5, -0.0, 1e300, float("nan"))
    return random.choice([None, True, False, [], {}, [[]], {"": {}}, random.choice(numbers), random.choice(WORDS)])
