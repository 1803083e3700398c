"""The key that a commit puts into config.json for a while comes out without a trace."""

from __future__ import annotations

import json

import pytest

from hfshard.storage.format.config_pointer import as_saved, pointing_at, without_pointer

UNIQUE = "model-hfshard-0123456789abcdef.safetensors.index.json"
CONFIG = b'{\n  "a": 1,\n  "name": "\\u00e9 of json.dumps"\n}\n'


@pytest.mark.parametrize("name", [UNIQUE, "model.fp16-hfshard-0123456789abcdef.safetensors"])
def test_what_is_put_in_comes_out_byte_for_byte(name: str) -> None:
    pointing = pointing_at(CONFIG, name)
    assert pointing == b'{\n  "transformers_weights": "%s",' % name.encode() + CONFIG[1:]
    assert json.loads(pointing) == {**json.loads(CONFIG), "transformers_weights": name}
    assert without_pointer(pointing) == as_saved(pointing) == CONFIG


@pytest.mark.parametrize("config", [b"{}\n", b'{"a": 1}', b'{\n  "transformers_weights": "old.safetensors"\n}\n'])
def test_configs_in_other_forms_get_the_key_too(config: bytes) -> None:
    value = {key: item for key, item in json.loads(config).items() if key != "transformers_weights"}
    assert json.loads(pointing_at(config, UNIQUE)) == {**value, "transformers_weights": UNIQUE}
    assert json.loads(without_pointer(pointing_at(config, UNIQUE))) == value


def test_a_pointer_that_a_user_wrote_is_part_of_what_was_saved() -> None:
    config = b'{\n  "transformers_weights": "mine.safetensors",\n  "a": 1\n}\n'
    assert as_saved(config) == config
    assert json.loads(without_pointer(config)) == {"a": 1}
