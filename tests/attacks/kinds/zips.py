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
from tests.attacks.registry import Expected, Place, attack

BIN = Expected(raw.BIN)
BOMB_BYTES = 1 << 30


def _put(place: Place, content: bytes) -> Expected:
    place.write({raw.CONFIG: raw.config(), raw.BIN: content})
    return BIN


def _valid() -> bytes:
    opcodes, storages = state()
    return zipped(mapping(opcodes), storages)


def _entry(name: str, packed: bytes, size: int, crc: int, method: int) -> tuple[bytes, bytes]:
    """A local header with its data, and its central record without the offset's bytes filled in."""
    common = struct.pack("<HHHHHIIIHH", 20, 0, method, 0, 33, crc, len(packed), size, len(name), 0)
    local = b"PK\x03\x04" + common + name.encode() + packed
    central = b"PK\x01\x02" + struct.pack("<H", 20) + common + struct.pack("<HHHI", 0, 0, 0, 0)
    return local, central + b"%OFF" + name.encode()


def _archive(entries: list[tuple[bytes, bytes]]) -> bytes:
    body, directory = b"", b""
    for local, central in entries:
        directory += central.replace(b"%OFF", struct.pack("<I", len(body)))
        body += local
    end = struct.pack("<HHHHIIH", 0, 0, len(entries), len(entries), len(directory), len(body), 0)
    return body + directory + b"PK\x05\x06" + end


def _stored(name: str, content: bytes) -> tuple[bytes, bytes]:
    return _entry(name, content, len(content), zlib.crc32(content), 0)


def _bomb(prefix: bytes, size: int) -> tuple[bytes, int]:
    """Deflated `prefix` and zeros, `size` bytes in all, made without deflating them one by one; and its CRC."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    head = packer.compress(prefix) + packer.flush(zlib.Z_FULL_FLUSH)
    block = bytes(1 << 22)
    piece = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    count = (size - len(prefix)) // len(block)
    rest = bytes(size - len(prefix) - count * len(block))
    tail = packer.compress(rest) + packer.flush(zlib.Z_FINISH)
    return head + piece * count + tail, 0


@attack("zip")
def bomb_of_a_gigabyte_in_the_pickle(place: Place) -> Expected:
    """A megabyte that inflates to a gigabyte before a byte of it is looked at."""
    packed, crc = _bomb(pickled(b"}"), BOMB_BYTES)
    bomb = _entry("archive/data.pkl", packed, BOMB_BYTES, crc, 8)
    return _put(place, _archive([bomb, _stored("archive/version", b"3\n")]))


@attack("zip")
def bomb_of_a_gigabyte_in_a_storage(place: Place) -> Expected:
    """The same in a tensor's bytes."""
    packed, crc = _bomb(b"", BOMB_BYTES)
    body = pickled(mapping({"embed.weight": tensor("0", (BOMB_BYTES // 4,))}))
    bomb = _entry("archive/data/0", packed, BOMB_BYTES, crc, 8)
    return _put(place, _archive([_stored("archive/data.pkl", body), bomb, _stored("archive/version", b"3\n")]))


@attack("zip")
def bomb_in_the_version(place: Place) -> Expected:
    """The same in a record that is read before all others."""
    packed, crc = _bomb(b"3\n", BOMB_BYTES)
    bomb = _entry("archive/version", packed, BOMB_BYTES, crc, 8)
    return _put(place, _archive([_stored("archive/data.pkl", pickled(b"}")), bomb]))


@attack("zip")
def stored_size_of_three_gigabytes(place: Place) -> Expected:
    """A record that claims more bytes than the file has."""
    local, central = _stored("archive/data.pkl", pickled(b"}"))
    lie = struct.pack("<II", 3 << 30, 3 << 30)
    central = central[:20] + lie + central[28:]
    return _put(place, _archive([(local, central), _stored("archive/version", b"3\n")]))


@attack("zip")
def deflated_size_of_three_gigabytes(place: Place) -> Expected:
    """Few bytes, deflated, that claim to become three gigabytes."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(pickled(b"}")) + packer.flush()
    lie = _entry("archive/data.pkl", packed, 3 << 30, 0, 8)
    return _put(place, _archive([lie, _stored("archive/version", b"3\n")]))


@attack("zip")
def storages_that_overlap(place: Place) -> Expected:
    """Two hundred records over the same megabyte: a small file with much in it."""
    names = [f"archive/data/{number:03d}" for number in range(200)]
    tensors = {f"t{number}": tensor(f"{number:03d}", (1 << 18,)) for number in range(200)}
    head = [_stored("archive/data.pkl", pickled(mapping(tensors))), _stored("archive/version", b"3\n")]
    local, central = _stored(names[0], bytes(1 << 20))
    body, directory = b"", b""
    for content, record in head:
        directory += record.replace(b"%OFF", struct.pack("<I", len(body)))
        body += content
    for name in names:
        record = central.replace(b"%OFF", struct.pack("<I", len(body)))
        directory += record.replace(names[0].encode(), name.encode())
    count = len(names) + len(head)
    end = struct.pack("<HHHHIIH", 0, 0, count, count, len(directory), len(body + local), 0)
    return _put(place, body + local + directory + b"PK\x05\x06" + end)


@attack("zip")
def two_pickles(place: Place) -> Expected:
    """Two records of one name: which is read depends on the reader."""
    opcodes, storages = state()
    first = _stored("archive/data.pkl", pickled(mapping(opcodes)))
    second = _stored("archive/data.pkl", pickled(mapping(dict(list(opcodes.items())[1:]))))
    rest = [_stored(f"archive/data/{key}", content) for key, content in storages.items()]
    return _put(place, _archive([first, second, *rest, _stored("archive/version", b"3\n")]))


@attack("zip")
def no_pickle(place: Place) -> Expected:
    """A zip of something else."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("README.md", "weights are elsewhere")
    return _put(place, buffer.getvalue())


@attack("zip")
def empty_archive(place: Place) -> Expected:
    """A zip of nothing."""
    return _put(place, _archive([]) + bytes(64))


@attack("zip", full=True)
def wrong_checksum_of_a_storage(place: Place) -> Expected:
    """A bit flipped in a tensor: the zip's own CRC says so, which torch does not ask."""
    content = _valid()
    at = content.index(raw.tensors()["embed.weight"].data)
    return _put(place, raw.flip(content, at + 6))


@attack("zip")
def wrong_checksum_of_the_pickle(place: Place) -> Expected:
    """A bit flipped in the name of a tensor."""
    return _put(place, _valid().replace(b"block.bias", b"block.bhas", 1))


@attack("zip")
def directory_flipped(place: Place) -> Expected:
    """A bit flipped in the central directory."""
    content = _valid()
    return _put(place, raw.flip(content, content.rindex(b"PK\x01\x02") + 42, 6))


@attack("zip")
def torchscript(place: Place) -> Expected:
    """A TorchScript archive, which carries code."""
    opcodes, storages = state()
    extra = {"constants.pkl": pickled(b")"), "code/__torch__.py": b"def forward(self): pass\n"}
    return _put(place, zipped(mapping(opcodes), storages, extra))


@attack("zip")
def big_endian(place: Place) -> Expected:
    """A byte order that is none."""
    return _put(place, _valid().replace(b"little", b"middle"))


@attack("zip")
def tar_of_the_oldest_format(place: Place) -> Expected:
    """What torch 0.1 wrote: three pickles in a tar, read without any check by old code."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("storages", "tensors", "pickle"):
            content = pickled(b"K\x00") + pickled(b"}")
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return _put(place, buffer.getvalue())


@attack("zip")
def no_record_in_the_directory(place: Place) -> Expected:
    """The records are there, and the directory at the end lists none."""
    local, _ = _stored("archive/data.pkl", pickled(b"}"))
    return _put(place, local + b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 0, 0, 0, len(local), 0))


def _with_storage(place: Place, change: Callable[[bytes], bytes]) -> Expected:
    opcodes, storages = state()
    storages["0"] = change(storages["0"])
    return _put(place, zipped(mapping(opcodes), storages))


@attack("zip")
def storage_longer_than_its_tensor(place: Place) -> Expected:
    """The checksums are right, and the tensor is the first part of what its record holds."""
    return _with_storage(place, lambda content: content + b"more")


@attack("zip")
def storage_shorter_than_its_tensor(place: Place) -> Expected:
    """The last elements would be the bytes of what follows in the file."""
    return _with_storage(place, lambda content: content[:-4])
