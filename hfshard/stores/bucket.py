"""A bucket of the Hugging Face Hub as a `Store`: names by the Hub's calls, bytes by Xet streams."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, Literal
from urllib.parse import quote

from huggingface_hub import BucketFile, BucketFolder, constants
from huggingface_hub.errors import (
    BucketBatchError,
    BucketNotFoundError,
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff, validate_repo_id

from hfshard._util.arguments import StoreAddress
from hfshard._util.text import shorten_list
from hfshard.errors import (
    CheckpointChangedError,
    HfshardError,
    InvalidPathError,
    StoreAccessError,
    StoreConnectionError,
    StoreError,
    StoreNotFoundError,
)
from hfshard.stores.hub_calls import (
    XetTokens,
    bucket_token_url,
    check_settings,
    describe_token,
    hide_secrets,
    http_library,
    is_transient_error,
    offline_variable,
    shown_endpoint,
    status_of,
    without_secrets,
)
from hfshard.stores.retry import idle_timeout
from hfshard.stores.store import StoredObject, neighbors_of
from hfshard.stores.xet import XetCommit, XetFailedError, XetReader


class BucketStore:
    """The objects below a prefix of a bucket; see `Store`.

    An ETag is Xet's hash of the contents. Listed contents can be read as long as the storage has them, even if their
    name has other contents by then.
    """

    def __init__(self, address: StoreAddress) -> None:
        """Open the store without sending a request."""
        self.address = address
        self._start = f"{address.prefix}/" if address.prefix else ""
        self._calls = BucketCalls(address)
        self._write_tokens = XetTokens(bucket_token_url(address.bucket, "write"))
        self._reader = XetReader(XetTokens(bucket_token_url(address.bucket, "read")))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.address)!r})"

    def list_objects(self, folder: str = "", *, recursive: bool = False) -> dict[str, StoredObject]:
        """List the objects of a folder; see `Store`."""
        found = [self._object(file) for file in self._calls.files((self._start + folder).rstrip("/"), recursive)]
        return {one.name: one for one in sorted(found, key=lambda one: one.name)}

    def folders(self, folder: str = "") -> list[str]:
        """Name the folders directly in a folder; see `Store`."""
        return self._calls.folders((self._start + folder).rstrip("/"))

    def neighbors(self) -> list[str]:
        """Name the folders next to the place; see `Store`."""
        return neighbors_of(self.address, BucketStore)

    def find(self, name: str) -> StoredObject | None:
        """Look up one object; None if it does not exist."""
        found = [file for file in self._calls.find([self._start + name]) if file.path == self._start + name]
        return self._object(found[0]) if found else None

    def read_into(self, found: StoredObject, begin: int, target: memoryview) -> None:
        """Fill memory with an object's bytes from `begin` on.

        Raises:
            CheckpointChangedError: The storage no longer has these contents.
        """
        raw = target.cast("B")
        with translate_bucket_errors(self.address):
            try:
                self._reader.read_into(found.etag, found.size, begin, raw)
            except XetFailedError as error:
                if error.kind != "missing":
                    raise
                raise self._changed(found) from error

    def read(self, found: StoredObject) -> bytes:
        """Return the bytes of a small object; raises CheckpointChangedError as `read_into` does."""
        raw = bytearray(found.size)
        self.read_into(found, 0, memoryview(raw))
        return bytes(raw)

    def put(self, name: str, raw: bytes) -> StoredObject:
        """Put a small object completely or not at all; see `Store`."""
        writer = self.open_writer(name, len(raw))
        try:
            writer.write(memoryview(raw))
            return writer.finish()
        except BaseException:
            writer.abort()
            raise

    def open_writer(self, name: str, size: int, replaced: StoredObject | None = None) -> BucketWriter:
        """Begin a large object of `size` bytes; its hash identifies it, whatever it replaces."""
        with translate_bucket_errors(self.address):
            return BucketWriter(self, name, size, self._write_tokens)

    def copy(self, source: StoredObject, target: str) -> StoredObject:
        """Give an object's contents a second name; see `Store`."""
        try:
            self._calls.copy(source.etag, self._start + target)
        except StoreError as error:
            if not isinstance(error, StoreConnectionError) and self.find(source.name) != source:
                raise self._changed(source) from error
            raise
        return replace(source, name=target)

    def delete(self, names: Collection[str]) -> None:
        """Delete objects; a missing one is not an error."""
        if names:
            self._calls.delete([self._start + name for name in names])

    def sweep_uploads(self, is_left: Callable[[str], bool]) -> int:
        """Do nothing: the Hub removes what was sent and got no name, and no call lists it."""
        return 0

    def _name(self, sent: StoredObject) -> StoredObject:
        """Make what was sent visible; if that fails, check whether it is."""
        try:
            self._calls.name(self._start + sent.name, sent.etag)
        except StoreError as error:
            error.may_be_done = True  # huggingface_hub does not report the attempts before the last one
            try:
                is_visible = self.find(sent.name) == sent
            except StoreError:
                raise error from None  # the first error is more informative
            if not is_visible:
                raise
        return sent

    def _object(self, file: BucketFile) -> StoredObject:
        return StoredObject(file.path[len(self._start) :], file.size, file.xet_hash, file.uploaded_at)

    def _changed(self, found: StoredObject) -> CheckpointChangedError:
        return CheckpointChangedError(
            f"'{self.address.joined(found.name)}' was replaced or deleted after it was listed. Load it again.",
            path=str(self.address.joined(found.name)),
            expected=found.etag,
        )


class BucketWriter:
    """A large object that is sent as a stream, in a commit of its own; see `ObjectWriter`."""

    def __init__(self, store: BucketStore, name: str, size: int, tokens: XetTokens) -> None:
        """Wait until the upload's memory is free, and begin it."""
        self._store, self._name, self._size = store, name, size
        self._written = 0
        self._commit = XetCommit(tokens, size)
        try:
            self._stream = self._commit.open()
        except BaseException:
            self._commit.abort()
            raise

    def write(self, block: memoryview) -> None:
        """Send the next bytes; the caller can reuse their memory on return. Wait while too much is in flight."""
        raw = block.cast("B")
        with translate_bucket_errors(self._store.address):
            self._stream.write(raw)
        self._written += len(raw)

    def finish(self) -> StoredObject:
        """Create the object from the bytes that were written, replacing one of the same name."""
        if self._written != self._size:
            raise StoreError(
                f"'{self._store.address.joined(self._name)}' was declared with {self._size} bytes, got "
                f"{self._written}. Retry the save; if it happens again, report a bug.",
                expected=self._size,
                actual=self._written,
            )
        with translate_bucket_errors(self._store.address):
            sent = self._stream.finish()
            self._commit.finish()
        return self._store._name(StoredObject(self._name, sent.size, sent.hash))

    def abort(self) -> None:
        """Give up. The Hub removes what was sent in its own time, since it has no name."""
        self._commit.abort()


# The Hub's calls for one bucket's files: listing, naming, copying and deleting; the bytes go over Xet.


_PARTLY: Final = (200, 422)
"""Statuses of responses that list the operations that failed: some of them, or all."""
_AT_ONCE: Final = 1000
"""The most files that the Hub describes or changes in one call."""


class BucketCalls:
    """Calls of one bucket. All paths are paths in the bucket.

    huggingface_hub's `http_backoff` retries transient failures. Every call can be made twice without harm. The requests
    are the same as in huggingface_hub's own bucket calls, which have no timeout; these have one.
    """

    def __init__(self, address: StoreAddress) -> None:
        self._address = address
        self._bucket = address.bucket

    def files(self, folder: str, recursive: bool = True) -> list[BucketFile]:
        """List the files of a folder, or all files below it; "" is the bucket itself."""
        found = self._listed(folder, recursive=recursive)
        depth = folder.count("/") + 1 if folder else 0
        return [item for item in found if isinstance(item, BucketFile) and (recursive or item.path.count("/") == depth)]

    def folders(self, folder: str) -> list[str]:
        """Name the folders directly in a folder, sorted."""
        start = f"{folder}/" if folder else ""
        found = self._listed(folder, recursive=False)
        below = (item.path[len(start) :] + "/" * isinstance(item, BucketFolder) for item in found)
        return sorted({name.partition("/")[0] for name in below if "/" in name})

    def find(self, paths: Collection[str]) -> list[BucketFile]:
        """Find the files that exist among these paths."""
        found: list[BucketFile] = []
        with translate_bucket_errors(self._address):
            for some in _portions(list(paths)):
                response = self._ask("POST", self._url("paths-info"), json={"paths": some})
                hf_raise_for_status(response)
                found += [item for item in map(_described, response.json()) if isinstance(item, BucketFile)]
        return found

    def name(self, path: str, xet_hash: str) -> None:
        """Give a name to contents that were sent to the storage, replacing a file of that name."""
        with translate_bucket_errors(self._address):
            self._change([{"type": "addFile", "path": path, "xetHash": xet_hash, "mtime": _now()}])

    def copy(self, xet_hash: str, path: str) -> None:
        """Give a file of the bucket a second name."""
        source = {"sourceRepoType": "bucket", "sourceRepoId": self._bucket, "xetHash": xet_hash}
        with translate_bucket_errors(self._address):
            self._change([{"type": "copyFile", "path": path, "mtime": _now(), **source}])

    def delete(self, paths: Collection[str]) -> None:
        """Delete files; a missing one is not an error."""
        for some in _portions(list(paths)):
            with translate_bucket_errors(self._address):
                try:
                    self._change([{"type": "deleteFile", "path": path} for path in some])
                except BucketBatchError:
                    if self.find(some):
                        raise

    def _change(self, operations: list[dict[str, Any]]) -> None:
        lines = b"".join(json.dumps(operation).encode() + b"\n" for operation in operations)
        response = self._ask("POST", self._url("batch"), content=lines)
        if response.status_code in _PARTLY and (failures := response.json().get("failed")):
            error = BucketBatchError("not done", response=response)
            error.failures = failures
            raise error
        hf_raise_for_status(response)

    def _listed(self, folder: str, *, recursive: bool) -> list[BucketFile | BucketFolder]:
        """List a folder through the Hub, without siblings whose names only start with the folder's name."""
        start = f"{folder}/" if folder else ""
        below = f"/{quote(folder, safe='')}" if folder else ""
        url: str | None = self._url(f"tree{below}?recursive={str(recursive).lower()}")
        found: list[BucketFile | BucketFolder] = []
        with translate_bucket_errors(self._address):
            try:
                while url is not None:
                    response = self._ask("GET", url)
                    hf_raise_for_status(response)
                    found += map(_described, response.json())
                    url = response.links.get("next", {}).get("url")
            except EntryNotFoundError:
                return []
        return [item for item in found if item.path.startswith(start)]

    def _url(self, call: str) -> str:
        return f"{constants.ENDPOINT}/api/buckets/{self._bucket}/{call}"

    def _ask(self, method: Literal["GET", "POST"], url: str, **body: Any) -> Any:
        validate_repo_id(self._bucket)
        headers = build_hf_headers()
        if "content" in body:
            headers["Content-Type"] = "application/x-ndjson"
        return http_backoff(method, url, headers=headers, timeout=idle_timeout() or 1, **body)


def _described(item: dict[str, Any]) -> BucketFile | BucketFolder:
    kind: Any = BucketFile if item["type"] == "file" else BucketFolder
    described: BucketFile | BucketFolder = kind(**item)
    return described


def _portions(paths: list[str]) -> Iterator[list[str]]:
    for begin in range(0, len(paths), _AT_ONCE):
        yield paths[begin : begin + _AT_ONCE]


def _now() -> int:
    """Return the milliseconds since 1970."""
    return int(time.time() * 1000)


# Translation of the Hub's and Xet storage's responses about a bucket into hfshard's errors, with advice.


_LOGIN: Final = "To use another token, run: hf auth login, or set HF_TOKEN."
_NO_RIGHT: Final = (401, 403)
_SHOWN: Final = 3
"""The most failed files that an error lists."""


@contextmanager
def translate_bucket_errors(address: StoreAddress) -> Iterator[None]:
    """Translate exceptions of huggingface_hub and hf_xet into hfshard's errors.

    Raises:
        StoreAccessError, StoreNotFoundError, StoreConnectionError, StoreError: See `Store`.
        InvalidPathError: No bucket can have that name.
    """
    check_settings(None, StoreAccessError)
    failed = http_library().RequestError
    try:
        yield
    except HfshardError:
        raise
    except HFValidationError as error:
        raise InvalidPathError(f"'{address}' is not a valid bucket address: {error}", path=str(address)) from error
    except OfflineModeIsEnabled as error:
        hide_secrets(error)
        raise StoreConnectionError(
            f"Cannot reach '{address}': offline mode is on. Unset {offline_variable()} to use the network.",
            path=str(address),
        ) from error
    except HfHubHTTPError as error:
        hide_secrets(error)
        raise _of_answer(error, address) from error
    except failed as error:
        hide_secrets(error)
        raise _unreachable(address, str(error) or type(error).__name__) from error
    except XetFailedError as error:
        raise _of_storage(error, address) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        hide_secrets(error)
        raise StoreConnectionError(
            f"The response of {shown_endpoint()} is not that of a Hub with buckets ({type(error).__name__}): it may "
            "come from a login page of the network or a proxy, or HF_ENDPOINT is wrong. Open the address in a "
            "browser.",
            path=str(address),
        ) from error


def _of_answer(error: HfHubHTTPError, address: StoreAddress) -> StoreError:
    status, used = status_of(error), describe_token(None)
    about: dict[str, Any] = {"path": str(address), "actual": status}
    said = _masked(error.server_message or "")
    said = f" The response was: {said}." if said else ""
    if isinstance(error, BucketBatchError) and error.failures:
        reasons = [f"'{failure.get('path')}': {_masked(str(failure.get('error')))}" for failure in error.failures]
        return StoreError(f"The Hub did not make all changes to '{address}': {shorten_list(reasons, _SHOWN)}.", **about)
    if isinstance(error, BucketNotFoundError):
        kind = StoreAccessError if status == _NO_RIGHT[0] else StoreNotFoundError
        return kind(
            f"There is no bucket '{address.bucket}' on {shown_endpoint()}, or it is private and not visible with "
            f"{used}. Check the address '{address}'; to create the bucket, run: hf buckets create {address.bucket}; "
            f"to see whose token it is: hf auth whoami.{said}",
            **about,
        )
    if status in _NO_RIGHT:
        what = "did not authenticate the request with" if status == _NO_RIGHT[0] else "denied the request with"
        return StoreAccessError(
            f"{shown_endpoint()} {what} {used} (HTTP {status}, for '{address}').{said} {_LOGIN}", **about
        )
    if is_transient_error(error):
        return StoreConnectionError(
            f"{shown_endpoint()} could not handle the request for '{address}' (HTTP {status}).{said} Try again later.",
            **about,
        )
    return StoreError(
        f"{shown_endpoint()} returned HTTP {status} for '{address}'.{said or f' {_masked(str(error))}.'}", **about
    )


def _of_storage(error: XetFailedError, address: StoreAddress) -> StoreError:
    message = _masked(str(error))
    if error.kind == "access":
        return StoreAccessError(
            f"The Xet storage of '{address}' denied the request with {describe_token(None)}: {message}. {_LOGIN}",
            path=str(address),
        )
    if error.kind == "connection":
        return _unreachable(address, message)
    return StoreError(f"The Xet storage of '{address}' failed: {message}. Try again.", path=str(address))


def _unreachable(address: StoreAddress, problem: str) -> StoreConnectionError:
    return StoreConnectionError(
        f"The connection to {shown_endpoint()} or its storage failed for '{address}': {_masked(problem)}. Check the "
        "network and try again.",
        path=str(address),
    )


def _masked(text: str) -> str:
    """Prepare another program's text for the middle of a message: without secrets or a final period."""
    return without_secrets(text, None).rstrip(". \n")
