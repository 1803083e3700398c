"""The extra key of config.json by which one rename switches config and weights together, put in and taken out.

It goes in as a line of its own after the opening brace, so that taking it out gives the very bytes that were saved,
and their recorded checksum holds while a commit is under way, and after one that was killed.
"""

from __future__ import annotations

import json
import re

from hfshard.constants import WEIGHTS_OVERRIDE_KEY
from hfshard.storage.format.strict_json import dump_json

_LINE = re.compile(
    rb'\{\n  "' + WEIGHTS_OVERRIDE_KEY.encode() + rb'": "[^"\\/]+-hfshard-[0-9a-f]{16}\.safetensors(?:\.index\.json)?",'
)


def with_weights_override(config: bytes, weights: str) -> bytes:
    """A config that tells transformers to load the weights file `weights` before all others."""
    key = WEIGHTS_OVERRIDE_KEY.encode()
    if config.startswith(b'{\n  "') and key not in config:
        return b'{\n  "%s": %s,' % (key, json.dumps(weights).encode()) + config[1:]
    return dump_json({**json.loads(config), WEIGHTS_OVERRIDE_KEY: weights})


def without_weights_override(config: bytes) -> bytes:
    """The same config without that key: the bytes that were saved, where a commit of ours put it in."""
    if (line := _LINE.match(config)) is not None:
        return b"{" + config[line.end() :]
    value = json.loads(config)
    return dump_json({key: value[key] for key in value if key != WEIGHTS_OVERRIDE_KEY})


def as_saved(config: bytes) -> bytes:
    """The bytes of a config.json as its checksum was recorded: without the key that a commit of ours put in."""
    return without_weights_override(config) if _LINE.match(config) is not None else config
