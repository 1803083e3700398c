"""The key that a commit puts into config.json for a while comes out without a trace."""

from __future__ import annotations

import json

import pytest

from hfshard.format.index import (
    with_commit_marker,
    with_weights_override,
    without_commit_keys,
    without_weights_override,
)

UNIQUE = "model-hfshard-0123456789abcdef.safetensors.index.json"
CONFIG = b'{\n  "a": 1,\n  "name": "\\u00e9 of json.dumps"\n}\n'


@pytest.mark.parametrize("name", [UNIQUE, "model.fp16-hfshard-0123456789abcdef.safetensors"])
def test_what_is_put_in_comes_out_byte_for_byte(name: str) -> None:
    pointing = with_weights_override(CONFIG, name)
    assert pointing == b'{\n  "transformers_weights": "%s",' % name.encode() + CONFIG[1:]
    assert json.loads(pointing) == {**json.loads(CONFIG), "transformers_weights": name}
    assert without_weights_override(pointing) == without_commit_keys(pointing) == CONFIG


@pytest.mark.parametrize("config", [b"{}\n", b'{"a": 1}', b'{\n  "transformers_weights": "old.safetensors"\n}\n'])
def test_configs_in_other_forms_get_the_key_too(config: bytes) -> None:
    value = {key: item for key, item in json.loads(config).items() if key != "transformers_weights"}
    assert json.loads(with_weights_override(config, UNIQUE)) == {**value, "transformers_weights": UNIQUE}
    assert json.loads(without_weights_override(with_weights_override(config, UNIQUE))) == value


def test_a_pointer_that_a_user_wrote_is_part_of_what_was_saved() -> None:
    config = b'{\n  "transformers_weights": "mine.safetensors",\n  "a": 1\n}\n'
    assert without_commit_keys(config) == config
    assert json.loads(without_weights_override(config)) == {"a": 1}


@pytest.mark.parametrize("config", [b'{"a": 1}\n', b'{"a": 1}'])
def test_a_mark_goes_byte_for_byte_and_is_replaced_by_the_next(config: bytes) -> None:
    marked = with_commit_marker(config, "00000000000000ff")
    assert json.loads(marked) == {"a": 1}
    assert without_commit_keys(marked) == config
    other = with_commit_marker(marked, "0000000000000001")
    assert without_commit_keys(other) == config
    assert len(other) == len(marked)
    assert other != marked
