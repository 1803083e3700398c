"""Checks of public functions' arguments: keywords, paths, addresses, sizes; and system errors that name their file."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, Final, ParamSpec, TypeVar

from hfshard._util.address_hints import BUCKETS, suggest_address
from hfshard._util.text import did_you_mean, without_url_secrets
from hfshard.constants import HUB_MARKER
from hfshard.errors import (
    AccessDeniedError,
    FileError,
    HfshardError,
    InvalidArgumentError,
    InvalidPathError,
    InvalidSizeError,
    InvalidSizeTypeError,
    UnknownArgumentError,
)


def reject_unknown_arguments(names: Iterable[str], known: Collection[str], function: str) -> None:
    """Reject unknown keyword arguments.

    Args:
        names: The passed ones.
        known: The function's own ones.
        function: Its name, for the message.

    Raises:
        UnknownArgumentError: There is one; the message names the nearest known one.
    """
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or f" It accepts: {', '.join(sorted(known))}."
            raise UnknownArgumentError(f"{function}() got an unexpected keyword argument '{name}'.{hint}")


def reject_pickle_request(kwargs: MutableMapping[str, Any]) -> None:
    """Remove `safe_serialization` of older code from keyword arguments; reject False, which asks for a pickle.

    Raises:
        InvalidArgumentError: It is False.
    """
    if kwargs.pop("safe_serialization", True) is False:
        raise InvalidArgumentError("hfshard does not write pickles: leave out safe_serialization=False.")


def check_text_arguments(**values: object) -> None:
    """Reject arguments that are neither None nor text that can be sent and can be part of a path.

    Raises:
        InvalidArgumentError: There is one; the message names it.
    """
    for name, value in values.items():
        if value is not None and not (isinstance(value, str) and "\0" not in value and _is_unicode(value)):
            raise InvalidArgumentError(f"{name} must be text without NUL characters, got {value!r:.200}.")


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


# Users' paths: checked, and made absolute at the beginning of a call.


FILE_SCHEME: Final = "file://"


def absolute_path(path: str | os.PathLike[str], argument: str = "path") -> str:
    """Make a path absolute, so that a later `os.chdir`, by any thread, does not change where it leads.

    "~" is a name as any other, as in transformers; a shell has expanded it. The path is not normalized, because ".."
    after a symbolic link does not lead to the part before it. Only relative paths need the working directory, so that
    others work if it was removed.

    Args:
        path: It need not exist.
        argument: Its name, for the message.

    Raises:
        InvalidPathError: It is not a path, or it is relative and the working directory is gone; or it is an address of
            an unknown kind, without a bucket, or that has lost a slash.

    Example:
        >>> absolute_path("/srv//models/./bert/")
        '/srv/models/bert'
    """
    text = checked_path_text(path, argument)
    if is_store_address(text):
        return str(parse_address(text, argument))
    if text.lower().startswith(FILE_SCHEME):
        raise InvalidPathError(
            f"{argument}={text!r} is a file URL. Write the path alone: {text[len(FILE_SCHEME) :]!r}.", path=text
        )
    if not os.path.isabs(text):
        try:
            text = os.path.join(os.getcwd(), text)
        except FileNotFoundError as error:
            raise InvalidPathError(
                f"{argument}={text!r} is a relative path, but the working directory no longer exists. "
                "Pass an absolute path, or change to another directory.",
                path=text,
            ) from error
    parts = [part for part in text.split(os.sep) if part not in ("", os.curdir)]
    return os.sep + os.sep.join(parts)


def absolute_directory(path: str | os.PathLike[str], argument: str) -> str:
    """Make a directory's path absolute. Raise `InvalidPathError` for an address too: it cannot be in a store.

    Example:
        >>> absolute_directory("/srv/cache/", "cache_dir")
        '/srv/cache'
    """
    text = absolute_path(path, argument)
    if is_store_address(text):
        raise InvalidPathError(f"{argument}={text!r} is a store address. Pass a directory on a local disk.", path=text)
    return text


def checked_path_text(path: str | os.PathLike[str], argument: str = "path") -> str:
    """Check a path, or a name that may be one, and return it as text.

    Raises:
        InvalidPathError: It is empty, bytes or not a path, or no file can have such a name; or it is an address that
            has lost a slash.
    """
    text = ""
    problem: Exception | None = None
    try:
        given = os.fspath(path)
        if isinstance(given, str) and b"\0" not in os.fsencode(given):
            text = given
    except (TypeError, UnicodeEncodeError) as error:
        problem = error
    if not text:
        raise InvalidPathError(
            f"{argument} must be a str or os.PathLike path without NUL characters, got {path!r:.200}. "
            f"For the working directory, pass '{os.curdir}'."
        ) from problem
    check_slashes(text, argument)
    return text


# Store addresses, such as "s3://bucket/prefix": recognized, checked and split.


_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

_FORMS: Final = {
    "s3": "s3://bucket/prefix",
    "gs": "gs://bucket/prefix",
    "az": "az://container/prefix",
    "hf": "hf://buckets/org/name/prefix",
}
"""Scheme -> form of an address."""

SCHEMES: Final = frozenset(_FORMS)
""""s3", "gs", "az" and "hf"."""

_WEB: Final = frozenset({"http", "https"})

_SECRETS: Final = re.compile(r"(?<=://)[^/]*@|\?.*", re.DOTALL)
"""Credentials and signed queries in a URL."""

_LOST_SLASH: Final = re.compile(r"(?i)(s3|s3a|s3n|gs|gcs|az|azure|abfss?|wasbs?|hf|https?|file):/(?!/)")
"""The result of `str(Path("s3://bucket"))`, which is the name of a folder."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A place in a store: a bucket, and the prefix of the object names in it."""

    scheme: str
    """"s3", "gs", "az" or "hf"."""
    bucket: str
    """For "hf" with its owner: "org/name"."""
    prefix: str
    """Without slashes at its ends; empty for the bucket itself."""

    def __str__(self) -> str:
        """Return the address as users write it."""
        owner = f"{BUCKETS}/" if self.scheme == "hf" else ""
        below = f"/{self.prefix}" if self.prefix else ""
        return f"{self.scheme}://{owner}{self.bucket}{below}"

    def joined(self, name: str) -> StoreAddress:
        """Return the address of a name below this one."""
        return replace(self, prefix=f"{self.prefix}/{name}" if self.prefix else name)


def is_store_address(place: Any) -> bool:
    """Return whether something is text in the form of a store address, valid or not, and not a path or repo_id."""
    return isinstance(place, str) and _URL.match(place) is not None and not place.lower().startswith("file:")


def has_hub_marker(directory: str) -> bool:
    """Return whether a directory is a hub, so that a path into it names a repo."""
    return os.path.isfile(os.path.join(directory, HUB_MARKER))


def is_store_url(place: Any) -> bool:
    """Return whether something is an address with the scheme of a store; another URL may be a wrong repo_id."""
    return is_store_address(place) and place.partition("://")[0].lower() in SCHEMES


def parse_address(text: str, argument: str = "path") -> StoreAddress:
    """Check and split an address.

    Args:
        text: The address, such as "s3://bucket/prefix".
        argument: Its name, for the message.

    Raises:
        InvalidPathError: It has an unknown scheme, no bucket, or a prefix that could lead elsewhere.

    Example:
        >>> parse_address("s3://models//bert/")
        StoreAddress(scheme='s3', bucket='models', prefix='bert')
    """
    shown = _SECRETS.sub("***", text)
    scheme, _, rest = text.partition("://")
    scheme = scheme.lower()
    if scheme not in _FORMS:
        advice = suggest_address(text)
        if advice is None:
            service = " For an S3-compatible service, set AWS_ENDPOINT_URL_S3 to its URL." if scheme in _WEB else ""
            advice = f"Pass a directory, or one of {', '.join(_FORMS.values())}.{service}"
        raise InvalidPathError(
            f"{argument}={shown!r} has an unsupported scheme. {advice}",
            path=shown,
        )
    parts = [part for part in rest.split("/") if part]
    if scheme == "hf":
        if parts[:1] != [BUCKETS]:
            advice = suggest_address(text) or "For a repo, write org/name."
            raise InvalidPathError(
                f"{argument}={shown!r} is not a bucket address ({_FORMS['hf']}). {advice}",
                path=shown,
            )
        parts = ["/".join(parts[1:3]), *parts[3:]] if len(parts) > 2 else []
    if not parts or not rest[:1].strip("/"):
        raise InvalidPathError(
            f"{argument}={shown!r} has no {'container' if scheme == 'az' else 'bucket'} name. Write {_FORMS[scheme]}.",
            path=shown,
        )
    odd = next((part for part in parts if part in (os.curdir, os.pardir) or not part.isprintable()), None)
    if odd is not None or "?" in rest or "\\" in rest or "@" in parts[0]:
        raise InvalidPathError(
            f"{argument}={shown!r} is not a valid address. Write {_FORMS[scheme]}, without '.', '..', backslashes, "
            "credentials, queries or control characters.",
            path=shown,
        )
    return StoreAddress(scheme, parts[0], "/".join(parts[1:]))


def reject_hub_arguments(address: str, *, revision: str | None = None, token: str | bool | None = None) -> None:
    """Reject arguments for a hub's repo together with a store address, which would ignore them.

    Args:
        address: The address of a place in a store.
        revision: The call's revision; "main", the default of transformers' functions, counts as none.
        token: The call's token. True (the saved one) is what the Hub's buckets use; False (none) is what others use.

    Raises:
        InvalidArgumentError: There is one; the message names it, and says what to do.
    """
    if revision not in (None, "", "main"):
        raise InvalidArgumentError(
            f"revision={revision!r} is for a hub: '{address}' is in a store, which has no revisions. Leave it out; "
            "save each version into its own folder.",
            path=address,
        )
    is_of_hub = address.startswith("hf:")
    if token not in (None, "", is_of_hub):
        login = "the saved token: run 'hf auth login', or set HF_TOKEN" if is_of_hub else "its service's own settings"
        raise InvalidArgumentError(
            f"token is for a hub: '{address}' is in a store, which is accessed with {login}. Leave it out.",
            path=address,
        )


def is_meant_as_address(path: object) -> bool:
    """Return whether a path is an address, or was one before it lost a slash as a path, such as "s3:/bucket"."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    return isinstance(text, str) and (is_store_address(text) or _LOST_SLASH.match(text) is not None)


def check_slashes(text: str, argument: str) -> None:
    """Reject an address that lost a slash when it became a path: it would name a folder called "s3:".

    Args:
        text: A path, as the user passes it.
        argument: Its name, for the message.

    Raises:
        InvalidPathError: It is one; the message says what to write.

    Example:
        >>> check_slashes("s3:/models/bert", "save_directory")
        Traceback (most recent call last):
            ...
        hfshard.errors.InvalidPathError: save_directory='s3:/models/bert' is an address that has lost a slash, ...
    """
    match = _LOST_SLASH.match(text)
    if match is None:
        return
    shown = without_url_secrets(text)
    scheme, rest = match[1].lower(), shown[match.end() :]
    if scheme == "file":
        advice = f"Write the path alone: {'/' + rest!r}."
    else:
        whole = f"{match[1]}://{rest}"
        advice = suggest_address(whole) or f"Pass the address as a string: {whole!r}."
    folder = f" For the folder '{match[1]}:' here, write './{match[1]}:'." if os.path.exists(text) else ""
    raise InvalidPathError(
        f"{argument}={shown!r} is an address that lost a slash, as in pathlib.Path(address). {advice}{folder}",
        path=shown,
    )


# Sizes as people write them, such as "5GB" and "5GiB", in bytes.


_UNIT_BYTES: Final = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "PIB": 2**50,
}
"""Upper-case unit -> bytes. A lower-case b is a byte too: files are not measured in bits."""

_SIZE: Final = re.compile(r"([0-9]+)(?:\.([0-9]+))?[ \t]*([KMGTP]?B|[KMGTP]IB)", re.IGNORECASE | re.ASCII)

_MAX_TEXT: Final = 64
"""The most characters of a size; Python refuses to convert more than 4,300 digits."""

_GRAMMAR: Final = (
    "A size is a positive int (in bytes), or digits with an optional fraction and a unit: "
    "B, KB, MB, GB, TB, PB (powers of 1000) or KiB, MiB, GiB, TiB, PiB (powers of 1024), "
    'for example "5GB" or "1.5 GiB".'
)


def parse_size(size: int | str) -> int:
    """Convert a size to bytes.

    Args:
        size: Bytes, or digits with an optional fraction, optional blanks and a unit: B, KB, MB, GB, TB, PB (powers of
            1000), KiB, MiB, GiB, TiB, PiB (powers of 1024), in upper or lower case: `"5GB"`, `"5 gib"`, `"1.5GB"`.

    Returns:
        Bytes, at least 1; a fraction of a byte is cut off.

    Raises:
        InvalidSizeError: A value that is zero, negative, or not in the grammar (a `ValueError`).
        InvalidSizeTypeError: Neither an int nor a str; a bool counts as neither (a `TypeError`).

    Example:
        assert hfshard.parse_size("1.5 GiB") == 1_610_612_736
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise InvalidSizeTypeError(
            f"Invalid size {_shown(size)} of type {type(size).__name__}. {_GRAMMAR}",
            expected="int or str",
            actual=size,
        )
    size_bytes = int(size) if isinstance(size, int) else _text_to_bytes(size)
    if size_bytes <= 0:
        raise InvalidSizeError(f"Invalid size {_shown(size)}: it must be at least one byte. {_GRAMMAR}", actual=size)
    return size_bytes


def _text_to_bytes(text: str) -> int:
    match = _SIZE.fullmatch(text) if len(text) <= _MAX_TEXT else None
    if match is None:
        raise InvalidSizeError(f"Invalid size {_shown(text)}. {_GRAMMAR}", actual=text)
    whole, fraction, unit = match.groups(default="")
    # In integers: through a float, "2.01 GB" would be 2,009,999,999 bytes.
    scale: int = 10 ** len(fraction)
    return int(whole + fraction) * _UNIT_BYTES[unit.upper()] // scale


def _shown(value: object) -> str:
    try:
        shown = repr(value)
    except ValueError:  # an int of more digits than Python prints
        shown = f"<{type(value).__name__}>"
    return shown if len(shown) <= _MAX_TEXT else f"{shown[:_MAX_TEXT]}…"


# Errors of the operating system, converted to hfshard's own, which name the file and keep the errno.


_P = ParamSpec("_P")
_R = TypeVar("_R")

_TODO = {
    PermissionError: "Check the permissions of the file and of the directories above it.",
    FileNotFoundError: "It should exist: check the path, and whether another process deletes files.",
}


def wraps_os_errors(argument: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a public function raise a `FileError` if the operating system refuses a file.

    Args:
        argument: The parameter whose path, or place, is named if the system names none; or an attribute of `self`.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        names = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return function(*args, **kwargs)
            except OSError as error:
                if isinstance(error, HfshardError):
                    raise
                given = dict(zip(names, args), **kwargs)
                place = given[argument] if argument in given else getattr(given.get("self"), argument, None)
                raise as_file_error(error, getattr(place, "address", place)) from error

        return wrapped

    return decorate


def as_file_error(error: OSError, place: Any) -> FileError:
    """Create the error that names the file of a system error, or else `place`."""
    named = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    path = named[0] if named else os.fsdecode(os.fspath(place)) if isinstance(place, str | os.PathLike) else None
    kind = AccessDeniedError if isinstance(error, PermissionError) else FileError
    todo = next((text for known, text in _TODO.items() if isinstance(error, known)), "")
    what = " -> ".join(f"'{name}'" for name in named) or f"'{path}'"
    made = kind(f"{what}: {error.strerror or error}. {todo}".rstrip(), path=path)
    made.errno = error.errno
    made.strerror = error.strerror
    return made
