"""Insert and remove the extra key of config.json by which one rename switches config and weights together.

It is inserted as a line of its own after the opening brace, so that removing it restores the bytes that were saved, and
their checksum holds during a commit and after one that was killed.
"""

from __future__ import annotations

import json
import re

from hfshard.constants import WEIGHTS_OVERRIDE_KEY
from hfshard.storage.format.strict_json import dump_json

_LINE = re.compile(
    rb'\{\n  "' + WEIGHTS_OVERRIDE_KEY.encode() + rb'": "[^"\\/]+-hfshard-[0-9a-f]{16}\.safetensors(?:\.index\.json)?",'
)

_MARK = re.compile(rb"[ \t]{64}\n\Z")
"""The line of `with_mark`."""


def with_weights_override(config: bytes, weights: str) -> bytes:
    """Insert the key: transformers then loads the file `weights` before all others."""
    key = WEIGHTS_OVERRIDE_KEY.encode()
    if config.startswith(b"{") and key not in config and json.loads(config):
        return b'{\n  "%s": %s,' % (key, json.dumps(weights).encode()) + config[1:]
    return dump_json({**json.loads(config), WEIGHTS_OVERRIDE_KEY: weights})


def without_weights_override(config: bytes) -> bytes:
    """Remove the key: gives the bytes that were saved if a commit of hfshard inserted it."""
    if (line := _LINE.match(config)) is not None:
        return b"{" + config[line.end() :]
    value = json.loads(config)
    return dump_json({key: value[key] for key in value if key != WEIGHTS_OVERRIDE_KEY})


def as_saved(config: bytes) -> bytes:
    """The bytes of a config.json as they were saved: without a key or a mark that a commit of hfshard inserted."""
    config = without_mark(config)
    return without_weights_override(config) if _LINE.match(config) is not None else config


def without_mark(config: bytes) -> bytes:
    """Remove the line of `with_mark`, if there is one."""
    return _MARK.sub(b"", config)


def mark_of(config: bytes) -> str | None:
    """The 16 hex digits of the line of `with_mark`; None where there is none."""
    match = _MARK.search(config)
    if match is None:
        return None
    bits = match[0].rstrip(b"\n").replace(b" ", b"0").replace(b"\t", b"1")
    return f"{int(bits, 2):016x}"


def with_mark(config: bytes, digits: str) -> bytes:
    """Append a line of blanks and tabs that stand for 16 hex digits: JSON that says the same, in other bytes."""
    bits = f"{int(digits, 16):064b}"
    return without_mark(config) + bits.replace("0", " ").replace("1", "\t").encode() + b"\n"
