"""Untrusted JSON is refused with its reason, and JSON is written in one form."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfshard.errors import DamagedCheckpointError, HfshardError
from hfshard.format.strict_json import (
    PassOver,
    dump_json,
    is_too_deep,
    json_object_or_none,
    padded_json,
    parse_json_object,
    without_padding,
)


def lists(levels: int) -> bytes:
    return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


def objects(levels: int) -> bytes:
    return b'{"a": ' * levels + b"1" + b', "b": 2}' * levels


def lists_and_objects(levels: int) -> bytes:
    return b'{"a":[1, ' * (levels // 2) + b"{}" * (levels % 2) + b"2" * (1 - levels % 2) + b", 3]}" * (levels // 2)


def keys_with_brackets(levels: int) -> bytes:
    return b'{"]":' * levels + b"1" + b"}" * levels


def keys_with_quotes(levels: int) -> bytes:
    return rb'{"\\\"]\n\\":' * levels + b'"["' + b"}" * levels


SHAPES = (lists, objects, lists_and_objects, keys_with_brackets, keys_with_quotes)


def parse(raw: bytes, *, takes_constants: bool = False, pass_over: PassOver | None = None) -> dict[str, Any]:
    return parse_json_object(
        raw,
        path="/c/x.json",
        what="Index",
        remedy="Save it.",
        takes_constants=takes_constants,
        pass_over=pass_over,
    )


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "is not valid JSON: Expecting value: line 1 column 1 (char 0)."),
        (b"\xff{}", "is not valid JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte."),
        (b'{"a":1} x', "is not valid JSON: Extra data: line 1 column 9 (char 8)."),
        (b'{"a":1,"b":{"c":1,"c":1}}', "is not valid JSON: the key 'c' occurs twice."),
        (b'{"a":-Infinity}', "is not valid JSON: -Infinity is not a JSON number."),
        (lists(129), "is not valid JSON: it is nested deeper than 128 levels."),
        (b"[]", "must contain a JSON object, got a list."),
        (b"null", "must contain a JSON object, got a NoneType."),
    ],
    ids=["empty", "not utf-8", "more behind it", "twice", "infinity", "deep", "list", "null"],
)
def test_what_is_no_plain_object_is_refused_with_file_reason_and_remedy(raw: bytes, reason: str) -> None:
    with pytest.raises(DamagedCheckpointError) as raised:
        parse(raw)

    assert str(raised.value) == f"Index '/c/x.json' {reason} Save it."
    assert raised.value.path == "/c/x.json"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_nesting_is_bounded_whatever_is_between_the_brackets(shape: Callable[[int], bytes]) -> None:
    assert parse(shape(128)) == json.loads(shape(128))

    for levels in (129, 130, 500, 100_000):
        with pytest.raises(DamagedCheckpointError, match="is nested deeper than 128 levels"):
            parse(shape(levels))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.text('[]{}"\\\\ab,: é', max_size=6)), min_size=120, max_size=136),
    st.booleans(),
)
def test_depth_is_counted_in_any_mixture(levels: list[tuple[bool, str]], is_ascii: bool) -> None:
    value: Any = 0
    for is_list, text in levels:
        value = [text, value, {}] if is_list else {text: value, f"{text}]": [text]}
    raw = json.dumps({"a": value}, ensure_ascii=is_ascii).encode()

    assert is_too_deep(raw) is (len(levels) + 2 > 128)  # with the outermost object, and the empty one in the innermost


def test_brackets_in_text_are_not_nesting() -> None:
    text = json.dumps({"a": "[" * 1000, "b": ['"[{' * 500, "]" * 300, "\\" * 9 + "[" * 200]})
    flat = json.dumps({f"w{number}]": {"shape": [number, 1], "text": "[PAD]"} for number in range(1000)})

    assert parse(text.encode()) == json.loads(text)
    assert parse(flat.encode()) == json.loads(flat)


@pytest.mark.parametrize("raw", [b"[" * 100_000, b"]" * 100_000, b"[" * 100 + b'"', b'{"a' + b"[" * 1000, b'"' * 999])
def test_brackets_without_their_other_half_are_refused(raw: bytes) -> None:
    with pytest.raises(DamagedCheckpointError, match="is not valid JSON"):
        parse(raw)


def test_half_a_surrogate_is_refused_and_a_pair_is_a_character() -> None:
    assert parse(rb'{"a":"\uD83D\uDE00","b":"\\ud800"}') == {"a": "\U0001f600", "b": "\\ud800"}

    for raw in (rb'{"a":"\ud800"}', rb'{"\uDFFF":1}'):
        with pytest.raises(DamagedCheckpointError, match="surrogates not allowed"):
            parse(raw)


def test_a_pointer_of_git_lfs_says_how_to_get_the_file() -> None:
    with pytest.raises(DamagedCheckpointError, match=r"git-lfs pointer, not the file itself\. Run: git lfs pull$"):
        parse(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")


def test_a_key_that_occurs_twice_can_be_passed_over_and_the_last_one_counts() -> None:
    flaws: list[HfshardError] = []

    assert parse(b'{"a":1,"b":2,"a":3}', pass_over=flaws.append) == {"a": 3, "b": 2}
    assert [str(flaw) for flaw in flaws] == ["Index '/c/x.json' is not valid JSON: the key 'a' occurs twice. Save it."]

    with pytest.raises(DamagedCheckpointError, match="NaN is not a JSON number"):
        parse(b'{"a":1,"a":NaN}', pass_over=flaws.append)


def test_numbers_that_only_python_writes_are_taken_where_allowed() -> None:
    found = parse(b'{"a":NaN,"b":-Infinity}', takes_constants=True)

    assert math.isnan(found["a"]) and found["b"] == -math.inf
    with pytest.raises(DamagedCheckpointError, match="occurs twice"):
        parse(b'{"a":NaN,"a":NaN}', takes_constants=True)


def test_only_blanks_behind_an_object_are_padding() -> None:
    assert without_padding('{"a":{}}   ') == '{"a":{}}'
    assert without_padding('{"a":1} \n') == '{"a":1} \n'
    assert without_padding("[1]  ") == "[1]  "


def test_json_is_written_sorted_and_indented_as_python_would() -> None:
    value = {"b": {"y": "é", "x": "1"}, "a": [1, {"d": None, "c": 2.5}], "c": {}, "é": {"deep": {"er": True}}}

    assert (
        dump_json({"b": {"y": "é"}, "a": [1]}).decode() == '{\n  "a": [\n    1\n  ],\n  "b": {\n    "y": "é"\n  }\n}\n'
    )
    assert dump_json(value).decode() == json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    for number in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not JSON compliant"):
            dump_json({"a": {"b": number}})


def test_padded_json_has_the_same_size_whatever_its_numbers_are() -> None:
    raw = padded_json({"b": 1, "a": {"rate": -1.5e-7, "name": '7 "x" 8'}})

    assert raw.rstrip() == b'{\n "b": 1' + b" " * 23 + b',\n "a": {\n  "rate": -1.5e-07' + b" " * 16 + (
        b',\n  "name": "7 \\"x\\" 8"\n }\n}'
    )
    assert len(raw) == 4096 and raw.endswith(b" \n")
    longest = {"b": 123456789, "a": {"rate": -1.2345678901234567e-308, "name": '7 "x" 8'}}
    assert len(padded_json(longest).rstrip()) == len(raw.rstrip())
    assert json.loads(padded_json(longest)) == longest
    assert len(padded_json({"text": "x" * 4096})) == 8192


def test_where_another_reader_reports_defects_they_give_none() -> None:
    for raw in (b"", b"{", b"[1]", b"\xff{}", b"[" * 100_000):
        assert json_object_or_none(raw) is None
    assert json_object_or_none(b'{"a": 1}') == {"a": 1}
