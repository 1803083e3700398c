"""Store addresses, such as "s3://bucket/prefix": recognized, checked and split, with hints for wrong ones."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from hfshard._util.text import without_url_secrets
from hfshard.errors import InvalidArgumentError, InvalidPathError

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

_BUCKETS: Final = "buckets"
_WEB: Final = frozenset({"http", "https"})

_SECRETS: Final = re.compile(r"(?<=://)[^/]*@|\?.*", re.DOTALL)
"""Credentials and signed queries in a URL."""


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
        owner = f"{_BUCKETS}/" if self.scheme == "hf" else ""
        below = f"/{self.prefix}" if self.prefix else ""
        return f"{self.scheme}://{owner}{self.bucket}{below}"

    def joined(self, name: str) -> StoreAddress:
        """Return the address of a name below this one."""
        return replace(self, prefix=f"{self.prefix}/{name}" if self.prefix else name)


def is_store_address(place: Any) -> bool:
    """Return whether something is text in the form of a store address, valid or not, and not a path or repo_id."""
    return isinstance(place, str) and _URL.match(place) is not None and not place.lower().startswith("file:")


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
        if parts[:1] != [_BUCKETS]:
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
    if odd is not None or "?" in rest or "@" in parts[0]:
        raise InvalidPathError(
            f"{argument}={shown!r} is not a valid address. Write {_FORMS[scheme]}, without '.', '..', credentials, "
            "queries or control characters.",
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


# Suggestions in place of an address that hfshard does not accept: other tools' schemes, web pages, a lost slash.


_LOST_SLASH: Final = re.compile(r"(?i)(s3|s3a|s3n|gs|gcs|az|azure|abfss?|wasbs?|hf|https?|file):/(?!/)")
"""The result of `str(Path("s3://bucket"))`, which is the name of a folder."""

_SAME: Final = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}
"""Schemes of Hadoop and fsspec -> schemes of the services' own tools."""
_AZURE: Final = frozenset({"abfs", "abfss", "wasb", "wasbs", "azure"})

_S3_BUCKET: Final = re.compile(r"(?:(.+)\.)?s3(?:[.-](?:dualstack\.)?[a-z0-9-]+)?\.amazonaws\.com(?:\.cn)?")
"""A bucket in front of an S3 host; the group is empty if the path begins with the bucket."""
_GCS_BUCKET: Final = re.compile(r"(?:(.+)\.)?storage\.(?:googleapis|cloud\.google)\.com")
_AZURE_ACCOUNT: Final = re.compile(r"([a-z0-9-]+)\.(?:blob|dfs)\.core\.[a-z.]+")
_HUB_HOSTS: Final = frozenset({"huggingface.co", "www.huggingface.co", "hf.co"})
_GCS_CONSOLE: Final = "console.cloud.google.com"
_CONSOLE_FOLDER: Final = "/storage/browser/"

_NO_MODELS: Final = frozenset({"datasets", "spaces", "kernels"})
_IN_REPO: Final = frozenset({"tree", "blob", "resolve", "raw"})
"""Words after a repo's name in the addresses of its files; a revision and a path follow."""


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


def suggest_address(text: str) -> str | None:
    """Suggest what to write for another tool's address, or for a web page; None if it cannot be inferred.

    Args:
        text: An address with a scheme; secrets in it are not repeated.

    Example:
        >>> suggest_address("s3a://models/bert"), suggest_address("https://bert.s3.amazonaws.com/x")
        ("Write 's3://models/bert'.", "Write 's3://bert/x'.")
    """
    scheme, _, rest = text.partition("://")
    scheme, rest = scheme.lower(), rest.partition("?")[0].partition("#")[0]
    if scheme in _AZURE:
        return _azure(rest)
    rest = without_url_secrets(f"{scheme}://{rest}").partition("://")[2]
    if scheme in _SAME:
        return _written(_SAME[scheme], rest)
    if scheme == "hf":
        return _repo([part for part in rest.split("/") if part], is_page=False)
    if scheme in ("http", "https"):
        return _web_page(text)
    return None


def _web_page(text: str) -> str | None:
    try:
        parts = urlsplit(text)
        host, path = parts.hostname or "", unquote(parts.path)
    except ValueError:
        return None
    if host in _HUB_HOSTS:
        return _repo([part for part in path.split("/") if part], is_page=True)
    if host == _GCS_CONSOLE and path.startswith(_CONSOLE_FOLDER):
        return _written("gs", path.removeprefix(_CONSOLE_FOLDER).partition(";")[0])
    for pattern, scheme in ((_S3_BUCKET, "s3"), (_GCS_BUCKET, "gs")):
        if match := pattern.fullmatch(host):
            return _written(scheme, f"{match[1]}{path}" if match[1] else path)
    if match := _AZURE_ACCOUNT.fullmatch(host):
        return _written("az", path, match[1])
    return None


def _azure(rest: str) -> str | None:
    """Convert `container@account.dfs.core.windows.net/path`, or fsspec's `container/path`."""
    place, _, path = rest.partition("/")
    container, at, host = place.partition("@")
    if ":" in container:
        return None
    match = _AZURE_ACCOUNT.fullmatch(host)
    return _written("az", f"{container}/{path}", match[1] if match else "") if not at or match else None


def _repo(parts: list[str], *, is_page: bool) -> str | None:
    """Find the repo or bucket of a Hub page, or of an address of huggingface_hub's file system."""
    if parts[:1] == [_BUCKETS]:
        below = parts[3:] if parts[3:4] != ["tree"] else parts[4:]
        return _written("hf", "/".join([_BUCKETS, *parts[1:3], *below])) if len(parts) > 2 else None
    if parts[:1] and parts[0] in _NO_MODELS:
        return f"{parts[0].capitalize()} on the Hub contain no checkpoints that hfshard reads."
    if parts[:1] == ["models"]:
        parts = parts[1:]
    if len(parts) < 2:
        return None
    owner, (name, _, revision), below = parts[0], parts[1].partition("@"), parts[2:]
    if is_page and below[:1] and below[0] in _IN_REPO:
        revision, below = (below[1] if len(below) > 1 else ""), below[2:]
    if revision == "refs" and len(below) > 1:  # refs/pr/1
        revision, below = "/".join([revision, *below[:2]]), below[2:]
    words = [f"revision={revision!r}"] if revision and revision != "main" else []
    words += [f"subfolder={'/'.join(below)!r}"] if below and "." not in below[-1] else []
    which = f", with {' and '.join(words)}" if words else ""
    return f"To load from or push to the Hub repo, write {f'{owner}/{name}'!r}{which}."


def _written(scheme: str, rest: str, account: str = "") -> str | None:
    address = "/".join(part for part in rest.split("/") if part)
    if not address or not address.isprintable():
        return None
    setting = f", and set AZURE_STORAGE_ACCOUNT={account}" if account else ""
    return f"Write {f'{scheme}://{address}'!r}{setting}."
