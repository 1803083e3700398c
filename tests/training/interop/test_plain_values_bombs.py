"""Small files whose objects would fill the memory, take forever or end the process: refused in no time."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import pytest
import torch

from hfshard.errors import HfshardError
from hfshard.training.interop.plain_values import read_plain_file
from tests.attacks.files.torchfile import integer, of_one_hash

UNKNOWN = b"\x80\x02cnot\nknown\n0}"
"""torch refuses what follows, which then is described; an empty dict is on the stack."""
LAUGHING_LIST = b"K\x01" + b"".join(b"q%c0](h%ch%ce" % ((number,) * 3) for number in range(60))
"""A list of two lists, which are one, of two lists, 60 deep."""
LAUGHING_TUPLE = b")" + b"".join(b"q%ch%c\x86" % (number, number) for number in range(60))
NUMPY = b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R(K\x01"
DTYPE = b"cnumpy\ndtype\n\x8c\x02u1\x89\x88\x87R(K\x03\x8c\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
BIG = struct.pack("<i", 1 << 20)

BOMBS = {
    "deep tuples as a name": (b")" + b"\x85" * 200_000 + b"Ns.", "does what no state"),
    "a laugh as a name": (LAUGHING_TUPLE + b"Ns.", "does what no state"),
    "a laugh as text": (
        b"Nc_codecs\nencode\n" + LAUGHING_LIST + b"\x8c\x06latin1\x86Rs.",
        "is not what _codecs.encode is saved as",
    ),
    "a laugh as a dtype": (b"Ncnumpy\ndtype\n" + LAUGHING_LIST + b"\x85Rs.", "a dtype of more than numbers"),
    "a laugh as a shape": (
        b"N" + NUMPY + b"J\x00\x00\x00\x7f](K\x01e\x86" + DTYPE + b"\x89C\x01atbs.",
        "a shape of more than numbers",
    ),
    "one array, many times": (
        b"N](B" + BIG + b"z" * (1 << 20) + b"q\x00" + DTYPE + b"q\x010"
        + (NUMPY + b"J" + BIG + b"\x85h\x01\x89h\x00tb") * 3000
        + b"es.",
        "more in all its objects than the file",
    ),
    "one list, many times": (
        b"N]((" + b"K\x01" * (1 << 16) + b"lq\x000" + b"cbuiltins\nlist\nh\x00\x85R" * 3000 + b"es.",
        "more in all its objects than the file",
    ),
    "tuples of one hash": (
        b"N}(" + b"".join(integer(one) + integer(other) + b"\x86N" for one, other in of_one_hash(300)) + b"us.",
        "names that all have one hash",
    ),
    "a set of tuples of one hash": (
        b"Ncbuiltins\nset\n]("
        + b"".join(integer(one) + integer(other) + b"\x86" for one, other in of_one_hash(300))
        + b"e\x85Rs.",
        "is not what builtins.set is saved as",
    ),
    "complex numbers of one hash": (
        b"N}("
        + b"".join(
            b"cbuiltins\ncomplex\n" + integer(at * 1000003) + integer(-at) + b"\x86RN" for at in range(2, 302)
        )
        + b"us.",
        "names that take forever to be hashed",
    ),
    "names of one hash": (
        b"N}("
        + b"".join(b"\x8a\x0a" + (number * (2**61 - 1)).to_bytes(10, "little") + b"N" for number in range(9, 999))
        + b"us.",
        "a number as a name that is larger than any",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(name: str, tmp_path: Path) -> None:
    pickled, match = BOMBS[name]
    path = tmp_path / "old.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", UNKNOWN + pickled)
        archive.writestr("archive/version", "3\n")
    with pytest.raises(HfshardError, match=match):
        read_plain_file(str(path), str(tmp_path), strict=False, verify="full")


def test_views_of_one_memory_are_not_copied_one_by_one(tmp_path: Path) -> None:
    whole = torch.arange(1 << 18)
    path = tmp_path / "old.pt"
    torch.save({"views": [whole[number:] for number in range(50)], "turned": whole.reshape(2, -1).T}, path)
    file = read_plain_file(str(path), str(tmp_path), strict=True, verify="full")
    copied = file.copied(file.value, "")
    assert len({one.untyped_storage().data_ptr() for one in [*copied["views"], copied["turned"]]}) == 1
    assert copied["views"][49][0] == 49
    assert copied["turned"].tolist()[1] == [1, (1 << 17) + 1]
