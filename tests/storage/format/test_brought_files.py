"""What an index brings along is read as it was put, and refused where hfshard did not write it."""

from __future__ import annotations

import json

import pytest

from hfshard.errors import DamagedCheckpointError
from hfshard.storage.format.brought_files import BroughtFile, brings_of, brought_by, without_brings


def test_texts_come_out_byte_for_byte_and_what_is_none_is_left_out() -> None:
    raw = b'{"a": "\xc3\xa9"}\r\n'
    files = {"generation_config.json": BroughtFile(raw, "etag"), "code.py": BroughtFile(b"1", None)}
    value = {"weight_map": {}, **brings_of({**files, "tokenizer.model": BroughtFile(b"\xff\x00", None)})}
    assert brought_by(json.dumps(value).encode(), "index") == files
    assert without_brings(value) == {"weight_map": {}}
    assert brings_of({"tokenizer.model": BroughtFile(b"\xff\x00", None)}) == {}


@pytest.mark.parametrize("brings", [[], {"a": 1}, {"a": {"text": 1, "replaces": ""}}, {"a": {"text": "b"}}, None])
def test_other_forms_are_refused(brings: object) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"Index 's3://b/i' is damaged: its 'hfshard_brings' is not"):
        brought_by(json.dumps({"hfshard_brings": brings}).encode(), "s3://b/i")
