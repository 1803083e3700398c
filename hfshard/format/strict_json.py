"""Strict parsing of untrusted JSON, and writing of JSON in one form, padded if its size must not change."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final

from hfshard.constants import LFS_POINTER_MARK, MAX_JSON_DEPTH
from hfshard.errors import DamagedCheckpointError, HfshardError, repair_hint

PassOver = Callable[[HfshardError], object]
"""A function that gets the error for a harmless flaw of a checkpoint, and raises or records it."""


def json_object_or_none(raw: bytes) -> dict[str, Any] | None:
    """Parse a JSON object whose defects another reader reports; None if it is not one."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class _DoubledKey(ValueError):
    """An object has a key twice."""


def parse_json_object(
    raw: bytes,
    *,
    path: str,
    what: str,
    remedy: str | None = None,
    takes_constants: bool = False,
    pass_over: PassOver | None = None,
) -> dict[str, Any]:
    """Parse bytes as one JSON object: UTF-8, no duplicate keys, no NaN, no lone surrogates, bounded nesting.

    Args:
        raw: The bytes.
        path: The file that they come from, for the message.
        what: The subject of the message: "Index", "The header of shard".
        remedy: The last sentence of the message: what the user can do. None: that of any damaged file.
        takes_constants: Whether to accept NaN and Infinity, which transformers writes.
        pass_over: Gets the error for a key that occurs twice; if it does not raise it, the last one counts, as in
            Python's own decoder. None: the error is raised.

    Raises:
        DamagedCheckpointError: They are anything else; the message names the file.
    """
    if raw.startswith(LFS_POINTER_MARK):
        raise DamagedCheckpointError(
            f"{what} '{path}' is a git-lfs pointer, not the file itself. Run: git lfs pull", path=path
        )
    try:
        text = without_padding(str(raw, "utf-8"))  # each check would scan every blank of a header's page
        if is_too_deep(raw):
            raise RecursionError
        value, doubled = _decoded(text, takes_constants=takes_constants)
        _check_surrogates(text, value)
    except (ValueError, RecursionError) as error:
        raise _invalid(what, path, remedy, error) from error
    if doubled is not None:
        damaged = _invalid(what, path, remedy, doubled)
        damaged.__cause__ = doubled
        if pass_over is None:
            raise damaged
        pass_over(damaged)
    if not isinstance(value, dict):
        raise DamagedCheckpointError(
            f"{what} '{path}' must contain a JSON object, got a {type(value).__name__}. {remedy or repair_hint(path)}",
            path=path,
            expected="object",
            actual=type(value).__name__,
        )
    return value


def _decoded(text: str, *, takes_constants: bool) -> tuple[Any, _DoubledKey | None]:
    """Return the value, and the error for a key that occurs twice (the last one counts)."""
    try:
        return (_LENIENT_DECODER if takes_constants else _DECODER).decode(text), None
    except _DoubledKey as error:
        return json.loads(text, parse_constant=None if takes_constants else _no_constant), error


def _invalid(what: str, path: str, remedy: str | None, error: Exception) -> DamagedCheckpointError:
    advice = remedy or repair_hint(path)
    return DamagedCheckpointError(f"{what} '{path}' is not valid JSON: {_reason(error)}. {advice}", path=path)


def without_padding(text: str) -> str:
    """Remove the blanks after an object; `rstrip` inspects each of them, and takes ten times as long."""
    end = text.rfind("}") + 1
    return text[:end] if text[end:] == " " * (len(text) - end) else text


def dump_json(value: Any) -> bytes:
    """Encode JSON the way hfshard writes it: UTF-8, sorted keys, an indent of two blanks, a newline at the end."""
    return (_dumped(value) + "\n").encode("utf-8")


def _dumped(value: Any, indent: str = "") -> str:
    """Do what `json.dumps` does, faster: its indented form is pure Python, while compiled code encodes leaf values."""
    if not isinstance(value, dict | list | tuple | float):  # a float may be rejected, with another message
        return _encoded_plain(value)
    if not (isinstance(value, dict) and value and all(type(key) is str for key in value)):
        text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return text.replace("\n", "\n" + indent)
    begin = f"\n{indent}  "
    if all(type(member) is str for member in value.values()):  # a weight_map, which may have a million entries
        members = [f"{begin}{_encoded(key)}: {_encoded(value[key])}" for key in sorted(value)]
    else:
        members = [f"{begin}{_encoded(key)}: {_dumped(value[key], indent + '  ')}" for key in sorted(value)]
    return "{" + ",".join(members) + f"\n{indent}}}"


_encoded: Final = json.JSONEncoder(ensure_ascii=False).encode
_encoded_plain: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"it is nested deeper than {MAX_JSON_DEPTH} levels"
    return str(error).splitlines()[0][:200]


_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b'[]{}"'))
_ONE_KIND: Final = bytes.maketrans(b"{}", b"[]")


def is_too_deep(raw: bytes) -> bool:
    """Return whether JSON is nested deeper than `MAX_JSON_DEPTH`, whatever is between the brackets.

    Takes a fifteenth of the time of decoding a header: only compiled functions scan the text.
    """
    if raw.count(b"[") + raw.count(b"{") <= MAX_JSON_DEPTH:
        return False
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # then each quote begins or ends a string
    found = raw.translate(_ONE_KIND, _NOT_BRACKETS)
    brackets = found.replace(b'""', b"")
    if b'"' in brackets:  # a string has brackets
        brackets = b"".join(found.split(b'"')[::2])
    for _ in range(MAX_JSON_DEPTH):  # each time, the innermost level goes
        outer = brackets.replace(b"[]", b"")
        if len(outer) == len(brackets):
            break
        brackets = outer
    return b"[]" in brackets or brackets.count(b"[") > MAX_JSON_DEPTH


def _check_surrogates(text: str, value: Any) -> None:
    if "\\" in text and ("\\ud" in text or "\\uD" in text):  # the absence of one character is found fastest
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # UnicodeEncodeError is a ValueError


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _DoubledKey(f"the key {twice[:100]!r} occurs twice")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
_LENIENT_DECODER: Final = json.JSONDecoder(object_pairs_hook=_no_duplicates)


# JSON with a size that does not depend on its numbers: no file grows when a step or learning rate gets more digits.


_BLOCK_BYTES: Final = 4096
"""Files occupy multiples of this on disk."""

_STRING_OR_NUMBER: Final = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d[0-9.eE+-]*')

_NUMBER_WIDTH: Final = 24
"""Characters of the longest number: -1.2345678901234567e-308."""

_OPEN_LEVELS: Final = 4
"""Levels whose members have a line each; deeper values share one line, since there may be a million of them."""


def padded_json(value: Any) -> bytes:
    """Encode a value as UTF-8, in the order of its dicts, with blanks after each number and at the end.

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
