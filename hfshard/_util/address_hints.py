"""Suggestions in place of an address that hfshard does not accept: other tools' schemes, web pages, a lost slash."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote, urlsplit

from hfshard._util.text import without_url_secrets

BUCKETS: Final = "buckets"
"""The first part of the address of a bucket of the Hub, after its scheme."""

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
    if parts[:1] == [BUCKETS]:
        below = parts[3:] if parts[3:4] != ["tree"] else parts[4:]
        return _written("hf", "/".join([BUCKETS, *parts[1:3], *below])) if len(parts) > 2 else None
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
