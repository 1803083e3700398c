"""Attacks on the zip around a pickle: bombs, lies about sizes, overlaps, and other kinds of archive."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable

from tests.attacks.files import raw
from tests.attacks.files.torchfile import mapping, pickled, state, tensor, zipped
from tests.attacks.registry import Build, register, register_all

BOMB_BYTES = 1 << 30
OPCODES, STORAGES = state()
Record = tuple[bytes, bytes]


def _entry(name: str, packed: bytes, size: int, crc: int, method: int) -> tuple[bytes, bytes]:
    """A local header with its data, and its central record without the offset's bytes filled in."""
    common = struct.pack("<HHHHHIIIHH", 20, 0, method, 0, 33, crc, len(packed), size, len(name), 0)
    local = b"PK\x03\x04" + common + name.encode() + packed
    central = b"PK\x01\x02" + struct.pack("<H", 20) + common + struct.pack("<HHHI", 0, 0, 0, 0)
    return local, central + b"%OFF" + name.encode()


def _archive(records: list[Record]) -> bytes:
    body, directory = b"", b""
    for local, central in records:
        directory += central.replace(b"%OFF", struct.pack("<I", len(body)))
        body += local
    return body + directory + _end(len(records), directory, body)


def _end(count: int, directory: bytes, body: bytes) -> bytes:
    return b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, count, count, len(directory), len(body), 0)


def _stored(name: str, content: bytes) -> Record:
    return _entry(name, content, len(content), zlib.crc32(content), 0)


def _bomb(name: str, prefix: bytes) -> Record:
    """Deflated `prefix` and zeros, a gigabyte in all, made without deflating them one by one."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    head = packer.compress(prefix) + packer.flush(zlib.Z_FULL_FLUSH)
    block = bytes(1 << 22)
    piece = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    count = (BOMB_BYTES - len(prefix)) // len(block)
    rest = bytes(BOMB_BYTES - len(prefix) - count * len(block))
    tail = packer.compress(rest) + packer.flush(zlib.Z_FINISH)
    return _entry(name, head + piece * count + tail, BOMB_BYTES, 0, 8)


PICKLE = _stored("archive/data.pkl", pickled(b"}"))
VERSION = _stored("archive/version", b"3\n")


def _stored_lie() -> bytes:
    local, central = PICKLE
    return _archive([(local, central[:20] + struct.pack("<II", 3 << 30, 3 << 30) + central[28:]), VERSION])


def _deflated_lie() -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(pickled(b"}")) + packer.flush()
    return _archive([_entry("archive/data.pkl", packed, 3 << 30, 0, 8), VERSION])


def _overlap() -> bytes:
    """Two hundred records over the same megabyte: a small file with much in it."""
    names = [f"archive/data/{number:03d}" for number in range(200)]
    tensors = {f"t{number}": tensor(f"{number:03d}", (1 << 18,)) for number in range(200)}
    head = [_stored("archive/data.pkl", pickled(mapping(tensors))), VERSION]
    local, central = _stored(names[0], bytes(1 << 20))
    body, directory = b"", b""
    for content, record in head:
        directory += record.replace(b"%OFF", struct.pack("<I", len(body)))
        body += content
    record = central.replace(b"%OFF", struct.pack("<I", len(body)))
    directory += b"".join(record.replace(names[0].encode(), name.encode()) for name in names)
    return body + local + directory + _end(len(names) + len(head), directory, body + local)


def _two_pickles() -> bytes:
    first = _stored("archive/data.pkl", pickled(mapping(OPCODES)))
    second = _stored("archive/data.pkl", pickled(mapping(dict(list(OPCODES.items())[1:]))))
    rest = [_stored(f"archive/data/{key}", content) for key, content in STORAGES.items()]
    return _archive([first, second, *rest, VERSION])


def _another_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("README.md", "weights are elsewhere")
    return buffer.getvalue()


def _tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("storages", "tensors", "pickle"):
            content = pickled(b"K\x00") + pickled(b"}")
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _torch_script() -> bytes:
    extra = {"constants.pkl": pickled(b")"), "code/__torch__.py": b"def forward(self): pass\n"}
    return zipped(mapping(OPCODES), STORAGES, extra)


def _valid(storage: Callable[[bytes], bytes] = bytes) -> bytes:
    """A whole file, or one whose first storage was changed."""
    return zipped(mapping(OPCODES), {**STORAGES, "0": storage(STORAGES["0"])})


def _flipped(find: Callable[[bytes], int], bit: int = 0) -> bytes:
    return raw.flip(_valid(), find(_valid()), bit)


def _bin(make: Callable[[], bytes]) -> Build:
    return lambda place: place.write({raw.CONFIG: raw.config(), raw.BIN: make()}).expects(raw.BIN)


LARGE = _stored("archive/data.pkl", pickled(mapping({"embed.weight": tensor("0", (BOMB_BYTES // 4,))})))
ZIPS: dict[str, Callable[[], bytes]] = {
    # A megabyte that inflates to a gigabyte before a byte of it is looked at.
    "bomb-of-a-gigabyte-in-the-pickle": lambda: _archive([_bomb("archive/data.pkl", pickled(b"}")), VERSION]),
    # The same in a tensor's bytes.
    "bomb-of-a-gigabyte-in-a-storage": lambda: _archive([LARGE, _bomb("archive/data/0", b""), VERSION]),
    # The same in a record that is read before all others.
    "bomb-in-the-version": lambda: _archive([PICKLE, _bomb("archive/version", b"3\n")]),
    # A record that claims more bytes than the file has.
    "stored-size-of-three-gigabytes": _stored_lie,
    # Few bytes, deflated, that claim to become three gigabytes.
    "deflated-size-of-three-gigabytes": _deflated_lie,
    "storages-that-overlap": _overlap,
    # Two records of one name: which is read depends on the reader.
    "two-pickles": _two_pickles,
    "no-pickle": _another_zip,
    "empty-archive": lambda: _archive([]) + bytes(64),
    # A bit flipped in the name of a tensor.
    "wrong-checksum-of-the-pickle": lambda: _valid().replace(b"block.bias", b"block.bhas", 1),
    "directory-flipped": lambda: _flipped(lambda content: content.rindex(b"PK\x01\x02") + 42, bit=6),
    # It carries code.
    "torchscript": _torch_script,
    # A byte order that is none.
    "big-endian": lambda: _valid().replace(b"little", b"middle"),
    # What torch 0.1 wrote: three pickles in a tar, read without any check by old code.
    "tar-of-the-oldest-format": _tar,
    # The records are there, and the directory at the end lists none.
    "no-record-in-the-directory": lambda: PICKLE[0] + _end(0, b"", PICKLE[0]),
    # The checksums are right, and the tensor is the first part of what its record holds.
    "storage-longer-than-its-tensor": lambda: _valid(lambda content: content + b"more"),
    # The last elements would be the bytes of what follows in the file.
    "storage-shorter-than-its-tensor": lambda: _valid(lambda content: content[:-4]),
}
register_all("zip", {name: _bin(make) for name, make in ZIPS.items()})
# A bit flipped in a tensor: the zip's own CRC says so, which torch does not ask.
EMBED = raw.tensors()["embed.weight"].data
register("zip-wrong-checksum-of-a-storage", _bin(lambda: _flipped(lambda content: content.index(EMBED) + 6)), full=True)
