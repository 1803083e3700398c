"""PyTorch's own files written byte by byte: pickle opcodes, the zip around them, and the format before the zip."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping

from tests.attacks.files import raw

MAGIC = 0x1950A86A20F9469CFC6C
"""How a file of the format before the zip begins."""


def text(value: str) -> bytes:
    """BINUNICODE."""
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def integer(value: int) -> bytes:
    """LONG1."""
    size = (value.bit_length() + 8) // 8
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def several(*items: bytes) -> bytes:
    """TUPLE."""
    return b"(" + b"".join(items) + b"t"


def named(module: str, name: str) -> bytes:
    """GLOBAL."""
    return f"c{module}\n{name}\n".encode()


def call(module: str, name: str, *arguments: bytes) -> bytes:
    """REDUCE: calls anything with anything."""
    return named(module, name) + several(*arguments) + b"R"


def mapping(items: Mapping[str, bytes]) -> bytes:
    """A dict."""
    return b"}(" + b"".join(text(key) + value for key, value in items.items()) + b"u"


def pickled(body: bytes) -> bytes:
    """PROTO 2 ... STOP."""
    return b"\x80\x02" + body + b"."


def of_one_hash(count: int) -> list[tuple[int, int]]:
    """Pairs of numbers whose hashes are all the same: CPython mixes the second into a state that the first has left."""
    prime_1, prime_2, prime_5 = 11400714785074694791, 14029467366897019727, 2870177450012600261
    all_bits = (1 << 64) - 1
    target = 12345
    pairs: list[tuple[int, int]] = []
    first = 0
    while len(pairs) < count:
        first += 1
        state = (prime_5 + first * prime_2) & all_bits
        state = ((state << 31 | state >> 33) & all_bits) * prime_1 & all_bits
        second = (target - state) * pow(prime_2, -1, 1 << 64) & all_bits
        if second < (1 << 61) - 1:  # the hash of a number is the rest of a division by this
            pairs.append((first, second))
    return pairs


def colliding(count: int) -> list[bytes]:
    """Tuples of one hash."""
    return [integer(one) + integer(other) + b"\x86" for one, other in of_one_hash(count)]


def complex_of_one_hash(count: int) -> bytes:
    """Entries of a dict whose names are complex numbers of one hash."""
    pairs = ((integer(at * 1000003), integer(-at)) for at in range(2, 2 + count))
    return b"".join(call("builtins", "complex", *pair) + b"N" for pair in pairs)


def numbers_of_one_hash() -> bytes:
    """Entries of a dict whose names are multiples of the prime by which Python hashes numbers."""
    return b"".join(b"\x8a\x0a" + (at * (2**61 - 1)).to_bytes(10, "little") + b"N" for at in range(9, 999))


DOUBLED = b")" + b"".join(b"q%ch%c\x86" % (number, number) for number in range(60))
"""A tuple of two tuples, which are one, of two, 60 deep: torch would hash 2**60."""


def tensor(
    key: str,
    shape: tuple[int, ...],
    *,
    numel: int | None = None,
    stride: tuple[int, ...] | None = None,
    offset: int = 0,
    kind: str = "FloatStorage",
    legacy: bool = False,
) -> bytes:
    """What torch.save pickles for a tensor over storage `key`; each argument can lie."""
    strides: list[int] = []
    count = 1
    for size in reversed(shape):
        strides.insert(0, count)
        count *= size
    parts = [text("storage"), named("torch", kind), text(key), text("cpu"), integer(count if numel is None else numel)]
    storage = several(*parts, *([b"N"] if legacy else [])) + b"Q"
    sizes = several(*map(integer, shape))
    steps = several(*map(integer, strides if stride is None else stride))
    hooks = named("collections", "OrderedDict") + b")R"
    return call("torch._utils", "_rebuild_tensor_v2", storage, integer(offset), sizes, steps, b"\x89", hooks)


def state(*, legacy: bool = False) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The attacked model's state dict: name -> opcodes, and storage -> bytes."""
    blobs = raw.tensors()
    keys = dict(zip(blobs, map(str, range(len(blobs))), strict=True))
    opcodes = {name: tensor(keys[name], blob.shape, legacy=legacy) for name, blob in blobs.items()}
    return opcodes, {keys[name]: blob.data for name, blob in blobs.items()}


def zipped(
    body: bytes,
    storages: Mapping[str, bytes],
    extra: Mapping[str, bytes] | None = None,
    *,
    byteorder: bytes | None = b"little",
) -> bytes:
    """A zip as torch.save writes it, around the opcodes of one object; before torch 2.1 it had no byte order."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled(body))
        if byteorder is not None:
            archive.writestr("archive/byteorder", byteorder)
        for key, content in storages.items():
            archive.writestr(f"archive/data/{key}", content)
        for name, content in (extra or {}).items():
            archive.writestr(f"archive/{name}", content)
        archive.writestr("archive/version", b"3\n")
    return buffer.getvalue()


def legacy(body: bytes, storages: Mapping[str, bytes], *, counts: Mapping[str, int] | None = None) -> bytes:
    """The format before the zip, around the opcodes of one object; `counts` lies about the elements of storages."""
    info = mapping({"protocol_version": integer(1001), "little_endian": b"\x88"})
    keys = b"](" + b"".join(map(text, storages)) + b"e"
    head = b"".join(map(pickled, (integer(MAGIC), integer(1001), info, body, keys)))
    rest = b""
    for key, content in storages.items():
        rest += struct.pack("<q", (counts or {}).get(key, len(content) // 4)) + content
    return head + rest


def wrapped(body: bytes, storages: Mapping[str, bytes], form: str) -> bytes:
    """One of the two."""
    return zipped(body, storages) if form == "zip" else legacy(body, storages)
