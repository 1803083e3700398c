"""Addresses of stores, such as "s3://bucket/prefix": told apart from paths, checked and split; nothing is asked."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Any, Final

from hfshard._util.address_hints import suggest_address
from hfshard.errors import InvalidArgumentError, InvalidPathError

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

_FORMS: Final = {
    "s3": "s3://bucket/prefix",
    "gs": "gs://bucket/prefix",
    "az": "az://container/prefix",
    "hf": "hf://buckets/org/name/prefix",
}
"""Scheme -> what an address looks like."""

SCHEMES: Final = frozenset(_FORMS)
""""s3", "gs", "az" and "hf"."""

_BUCKETS: Final = "buckets"
_WEB: Final = frozenset({"http", "https"})

_SECRETS: Final = re.compile(r"(?<=://)[^/]*@|\?.*", re.DOTALL)
"""Where credentials and signed queries stand in a URL."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where in a store: a bucket, and the beginning of the names of the objects in it."""

    scheme: str
    """"s3", "gs", "az" or "hf"."""
    bucket: str
    """For "hf" with its owner: "org/name"."""
    prefix: str
    """Without slashes at its ends; empty for the bucket itself."""

    def __str__(self) -> str:
        """The address as users write it."""
        owner = f"{_BUCKETS}/" if self.scheme == "hf" else ""
        below = f"/{self.prefix}" if self.prefix else ""
        return f"{self.scheme}://{owner}{self.bucket}{below}"

    def joined(self, name: str) -> StoreAddress:
        """The address of what is below this one."""
        return replace(self, prefix=f"{self.prefix}/{name}" if self.prefix else name)


def is_address(place: Any) -> bool:
    """Whether something is the text of an address of a store, valid or not, and no path or repo_id."""
    return isinstance(place, str) and _URL.match(place) is not None and not place.lower().startswith("file:")


def names_store(place: Any) -> bool:
    """Whether something is an address whose scheme is that of a store; a URL of another kind may be a wrong repo_id."""
    return is_address(place) and place.partition("://")[0].lower() in SCHEMES


def parse_address(text: str, argument: str = "path") -> StoreAddress:
    """Check and split an address.

    Args:
        text: Such as "s3://bucket/prefix".
        argument: Its name, for the message.

    Raises:
        InvalidPathError: An unknown scheme, no bucket, or a prefix that could lead elsewhere.

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
            service = " For a service that speaks S3, set AWS_ENDPOINT_URL_S3 to its URL." if scheme in _WEB else ""
            advice = f"Give a directory, or one of {', '.join(_FORMS.values())}.{service}"
        raise InvalidPathError(
            f"{argument}={shown!r} begins with a scheme that hfshard does not know. {advice}",
            path=shown,
        )
    parts = [part for part in rest.split("/") if part]
    if scheme == "hf":
        if parts[:1] != [_BUCKETS]:
            advice = suggest_address(text) or "For a repo, write org/name."
            raise InvalidPathError(
                f"{argument}={shown!r} is not the address of a bucket, which is {_FORMS['hf']}. {advice}",
                path=shown,
            )
        parts = ["/".join(parts[1:3]), *parts[3:]] if len(parts) > 2 else []
    if not parts or not rest[:1].strip("/"):
        raise InvalidPathError(
            f"{argument}={shown!r} names no {'container' if scheme == 'az' else 'bucket'}: write {_FORMS[scheme]}.",
            path=shown,
        )
    odd = next((part for part in parts if part in (os.curdir, os.pardir) or not part.isprintable()), None)
    if odd is not None or "?" in rest or "@" in parts[0]:
        raise InvalidPathError(
            f"{argument}={shown!r} is no plain address: write {_FORMS[scheme]}, without '.', '..', credentials, "
            "queries and control characters.",
            path=shown,
        )
    return StoreAddress(scheme, parts[0], "/".join(parts[1:]))


def refuse_hub_arguments(address: str, *, revision: str | None = None, token: str | bool | None = None) -> None:
    """Refuse what only a repo of a hub has, where an address was given: it would be ignored.

    Args:
        address: Of a place in a store.
        revision: That of the call; "main", the default of transformers' functions, is none.
        token: That of the call. True, the saved one, is what buckets of the Hub use; False, none, what others do.

    Raises:
        InvalidArgumentError: It names the argument, and what to do.
    """
    if revision not in (None, "", "main"):
        raise InvalidArgumentError(
            f"revision={revision!r} is for a hub: '{address}' is in a store, which has no revisions. Leave it out; "
            "what is to be kept has a folder of its own.",
            path=address,
        )
    is_of_hub = address.startswith("hf:")
    if token not in (None, "", is_of_hub):
        login = "the saved token: run 'hf auth login', or set HF_TOKEN" if is_of_hub else "its service's own settings"
        raise InvalidArgumentError(
            f"token is for a hub: '{address}' is in a store, which is accessed with {login}. Leave it out.",
            path=address,
        )
