"""JSON whose size does not depend on its numbers: no file grows when a step or a learning rate gets more digits."""

from __future__ import annotations

import json
import re
from typing import Any, Final

_BLOCK_BYTES: Final = 4096
"""Files take multiples of this on a disk."""

_STRING_OR_NUMBER: Final = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d[0-9.eE+-]*')

_NUMBER_WIDTH: Final = 24
"""Characters of the longest number: -1.2345678901234567e-308."""

_OPEN_LEVELS: Final = 4
"""Levels whose members have a line each; deeper values share one line, as there may be a million of them."""


def padded_json(value: Any) -> bytes:
    """Write a value as UTF-8, in the order of its dicts, with blanks after each number and at the end.

    Example:
        assert len(padded_json({"step": 1})) == len(padded_json({"step": 1000}))
    """
    raw = _STRING_OR_NUMBER.sub(_padded, _text(value, 0)).encode()
    return raw + b" " * (-(len(raw) + 1) % _BLOCK_BYTES) + b"\n"


def _padded(match: re.Match[str]) -> str:
    token = match[0]
    return token if token.startswith('"') else token.ljust(_NUMBER_WIDTH)


def _text(value: Any, level: int) -> str:
    if not (isinstance(value, dict) and value and level < _OPEN_LEVELS):
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    indent = " " * level
    members = [
        f"{indent} {json.dumps(key, ensure_ascii=False)}: {_text(item, level + 1)}" for key, item in value.items()
    ]
    return "{\n" + ",\n".join(members) + f"\n{indent}}}"
