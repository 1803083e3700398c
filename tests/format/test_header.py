"""The head of a file, in literal bytes."""

from __future__ import annotations

import json

import pytest
import torch

import hfshard
from hfshard.errors import DamagedCheckpointError, UnstorableTensorError
from hfshard.format.header import (
    Header,
    TensorInfo,
    _compact_contents,
    _contents,
    build_header,
    entry_bytes,
    parse_header,
    read_header_length,
)
from hfshard.format.strict_json import without_padding

TWO = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},' + (
    '"é":{"dtype":"BOOL","shape":[],"data_offsets":[8,9]}}'.encode()
)

NAMES = ("a", "layers.0.weight", "größe", "漢字", 'quo"te', "back\\slash", "tab\t", "\x01", "🙂")


def test_a_header_is_its_length_compact_json_and_blanks_to_a_page() -> None:
    raw = build_header([("a", "F32", [2], 8), ("é", "BOOL", [], 1)], {"format": "pt"})
    assert raw == b"\xf8\x0f\0\0\0\0\0\0" + TWO + b" " * (4096 - 8 - len(TWO))


def test_a_header_without_tensors_is_a_page_too() -> None:
    assert build_header([], {}) == b"\xf8\x0f\0\0\0\0\0\0" + b'{"__metadata__":{}}'.ljust(4088)


def test_names_and_metadata_are_escaped_as_json_wants_it_and_no_more() -> None:
    raw = build_header([('a"\\\t\x01é🙂', "F32", [2, 3], 24), ("", "U8", [0], 0)], {'k"': "é\n"})
    text = (
        r'{"__metadata__":{"k\"":"é\n"},'
        r'"a\"\\\t\u0001é🙂":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
        r'"":{"dtype":"U8","shape":[0],"data_offsets":[24,24]}}'
    )
    assert raw[8:].rstrip(b" ") == text.encode()


def test_a_shape_whose_sizes_overflow_is_refused_even_where_one_of_them_is_zero() -> None:
    raw = _one(shape=[0, 2**62, 2**62], offsets=[0, 0])
    with pytest.raises(DamagedCheckpointError, match="impossible shape: its size overflows"):
        parse_header(raw, 8 + len(raw), "x")


@pytest.mark.parametrize(("name_bytes", "pages"), [(4019, 1), (4020, 2)])
def test_a_header_takes_the_pages_that_it_needs(name_bytes: int, pages: int) -> None:
    # 8 bytes of length and 69 of JSON around the name: 4,019 are left.
    assert len('{"__metadata__":{},"":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}') == 69
    assert len(build_header([("n" * name_bytes, "U8", [], 1)], {})) == 4096 * pages


def test_a_header_is_read_back() -> None:
    header = parse_header(TWO, 8 + len(TWO) + 9, "x.safetensors")
    assert header.metadata == {"format": "pt"}
    assert header.data_start == 8 + len(TWO)
    assert list(header.tensors.values()) == [TensorInfo("a", "F32", (2,), 0, 8), TensorInfo("é", "BOOL", (), 8, 9)]


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_never_takes_an_entry_for_smaller_than_it_is(name: str) -> None:
    entry = json.dumps({name: {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}}, ensure_ascii=False)
    written = len(entry.replace(" ", "").encode()) - 2 + 1  # without the braces, with a comma
    assert entry_bytes(name, "F32", [3, 4], 48) in (written, written + 1)


def test_a_tensor_can_not_have_the_name_of_the_metadata() -> None:
    with pytest.raises(UnstorableTensorError, match="__metadata__"):
        hfshard.plan_shards({"__metadata__": torch.zeros(1)})


def _one(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> bytes:
    return json.dumps({"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


@pytest.mark.parametrize(
    ("raw", "data_bytes", "problem"),
    [
        (_one(dtype="F33"), 8, "unknown dtype"),
        (_one(shape=[3]), 8, "data_offsets span 8"),
        (_one(shape=[-2]), 8, "impossible shape"),
        (_one(shape=[True, 2]), 8, "impossible shape"),
        (_one(offsets=[8, 0]), 8, "impossible shape"),
        (_one(offsets=[4, 12]), 12, "leaves a gap"),
        (_one(), 7, "is truncated"),
        (_one(), 9, "has bytes after its last tensor"),
        (b"[]", 0, "object"),
        (b"{", 0, "JSON"),
        (b'{"t": {"dtype": "F32"}}', 0, "must have dtype, shape and data_offsets"),
        (b'{"__metadata__": {"a": 1}}', 0, "strings to strings"),
        (_one("F4", [3], [0, 2]), 2, "data_offsets span 2"),
        (_one("F4", [3], [0, 1]), 1, "data_offsets span 1"),
    ],
)
def test_a_wrong_header_is_refused_with_its_reason(raw: bytes, data_bytes: int, problem: str) -> None:
    with pytest.raises(DamagedCheckpointError, match=problem) as caught:
        parse_header(raw, 8 + len(raw) + data_bytes, "dir/x.safetensors")
    assert "dir/x.safetensors" in str(caught.value)


def test_tensors_that_overlap_are_refused() -> None:
    raw = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}'
    with pytest.raises(DamagedCheckpointError, match="overlaps"):
        parse_header(raw, 8 + len(raw) + 6, "x")


@pytest.mark.parametrize(
    ("first", "file_bytes", "problem"),
    [
        (b"", 0, "fewer than the 8"),
        (b"\0\0\0", 3, "fewer than the 8"),
        (b"\x09\0\0\0\0\0\0\0", 16, "declares 9 bytes, but the file has 16"),
        (b"\xff" * 8, 100, "declares 18446744073709551615"),
        (b"version ", 130, "git lfs pull"),
    ],
)
def test_a_length_that_the_file_can_not_have_is_refused(first: bytes, file_bytes: int, problem: str) -> None:
    with pytest.raises(DamagedCheckpointError, match=problem):
        read_header_length(first, file_bytes, "x.safetensors")


COMPACT = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},' + (
    b'"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}'
)
"""As nearly all writers write it: what follows is that, one step off."""


def _read(raw: bytes) -> Header | str:
    try:
        return parse_header(raw, 8 + len(raw) + 8, "x")
    except DamagedCheckpointError as error:
        return str(error)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"", b""),
        (b'{"__metadata__":{"format":"pt"},', b"{"),
        (b'"pt"', rb'"\"a\":{\"dtype\":\"U8\""'),
        (b'"b"', '"größe 漢字 🙂\x7f"'.encode()),
        (b'"b"', b'""'),
        (b"}}", b"}}   "),
    ],
)
def test_a_compact_header_is_read_in_one_go(old: bytes, new: bytes) -> None:
    raw = COMPACT.replace(old, new, 1)
    header = _read(raw)
    assert isinstance(header, Header)
    assert _compact_contents(raw, "x") == _contents(raw, "x") == (header.tensors, header.metadata)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b'{"__metadata__":{"format":"pt"},', b"{,", "JSON"),
        (b'{"__metadata__":{"format":"pt"},', b"{ ,", "JSON"),
        (b'{"__metadata__":{"format":"pt"},', b"", "JSON"),
        (b'{"__metadata__":{"format":"pt"},', b'{"__metadata__":{"format":1},', "strings to strings"),
        (b'{"__metadata__":{"format":"pt"},', b'{"__metadata__":{"format":"pt","format":"pt"},', "occurs twice"),
        (b'{"__metadata__":{"format":"pt"},', b'{"__metadata__":{},"__metadata__":{},', "occurs twice"),
        (b'"b"', b'"a"', "occurs twice"),
        (b'"b"', b'"__metadata__"', "occurs twice"),
        (b'{"__metadata__":{"format":"pt"},"a"', b'{"__metadata__"', "strings to strings"),
        (b'"b"', b'"\t"', "JSON"),
        (b'"b"', b'"\xff"', "JSON"),
        (b'"b"', rb'"\ud800"', "JSON"),
        (b",", b",,", "JSON"),
        (b"}}", b"}},", "JSON"),
        (b"}}", b"},}", "JSON"),
        (b"}}", b"}", "JSON"),
        (b"}}", b"}}}", "JSON"),
        (b"[4,8]", b"[04,8]", "JSON"),
        (b"[4,8]", b"[3,7]", "overlaps"),
        (b"[4,8]", b"[5,9]", "leaves a gap"),
        (b"[4,8]", b"[4,9]", "data_offsets span 5"),
        (b"[4,8]", b"[8,4]", "impossible shape"),
        (b"[4,8]", b"[4,9223372036854775808]", "impossible shape"),
        (b"[4]", b"[4,]", "JSON"),
        (b"[4]", b"[04]", "JSON"),
        (b"[4]", b"[5]", "data_offsets span 4"),
        (b"[4]", b"[4,0,4611686018427387904,8]", "overflows"),
        (b'"U8"', b'"U9"', "unknown dtype"),
    ],
)
def test_a_nearly_compact_header_is_refused_with_its_reason(old: bytes, new: bytes, problem: str) -> None:
    for raw in (COMPACT.replace(old, new, 1), new.join(COMPACT.rsplit(old, 1))):
        assert _compact_contents(raw, "x") is None
        assert problem in str(_read(raw))


@pytest.mark.parametrize("text", ["b", r"\u0062", r"\\", r"\""])
def test_blanks_escapes_and_another_order_are_read_the_careful_way(text: str) -> None:
    spaced = COMPACT.replace(b'"b":', f'"{text}": '.encode())
    turned = b'{"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]},' + COMPACT[1:].split(b',"b"')[0] + b"}"
    for raw, names in ((spaced, ["a", json.loads(f'"{text}"')]), (turned, ["a", "b"])):
        assert _compact_contents(raw, "x") is None
        header = _read(raw)
        assert isinstance(header, Header)
        assert [(info.name, info.begin) for info in header.tensors.values()] == list(zip(names, (0, 4), strict=True))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('{"a":{}}' + 4096 * " ", '{"a":{}}'), ("{}", "{}"), ("{} \n", "{} \n"), ("{}x ", "{}x "), ("[1] ", "[1] "),
        ("  ", ""), ("", ""),
    ],
)  # fmt: skip
def test_only_blanks_after_an_object_are_padding(text: str, left: str) -> None:
    assert without_padding(text) == left
