"""The Hub's calls about the files of one bucket: listed, named, copied and deleted; the bytes go by Xet."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal
from urllib.parse import quote

from huggingface_hub import BucketFile, BucketFolder, constants
from huggingface_hub.errors import BucketBatchError, EntryNotFoundError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff, validate_repo_id

from hfshard._util.addresses import StoreAddress
from hfshard.stores.buckets.errors import translate_bucket_errors
from hfshard.stores.patience import stall_seconds

_PARTLY: Final = (200, 422)
"""The statuses of answers that list the operations which failed: some of them, or all."""
_AT_ONCE: Final = 1000
"""Files that the Hub describes or changes in one call."""


class BucketCalls:
    """One bucket. All paths are those in the bucket.

    What fails for a while is tried again by huggingface_hub's `http_backoff`. All calls may be made twice with no harm.
    The requests are those of its own bucket calls, which wait for an answer for ever; these don't.
    """

    def __init__(self, address: StoreAddress) -> None:
        """Ask nothing yet; the address is for error messages, too."""
        self._address = address
        self._bucket = address.bucket

    def files(self, folder: str, recursive: bool = True) -> list[BucketFile]:
        """The files of a folder, or all below it; "" for the bucket itself."""
        found = self._listed(folder, recursive=recursive)
        depth = folder.count("/") + 1 if folder else 0
        return [item for item in found if isinstance(item, BucketFile) and (recursive or item.path.count("/") == depth)]

    def folders(self, folder: str) -> list[str]:
        """The names of the folders directly in a folder."""
        start = f"{folder}/" if folder else ""
        found = self._listed(folder, recursive=False)
        below = (item.path[len(start) :] + "/" * isinstance(item, BucketFolder) for item in found)
        return sorted({name.partition("/")[0] for name in below if "/" in name})

    def find(self, paths: Collection[str]) -> list[BucketFile]:
        """Those files of these that there are."""
        found: list[BucketFile] = []
        with self._errors():
            for some in _portions(list(paths)):
                response = self._ask("POST", self._url("paths-info"), json={"paths": some})
                hf_raise_for_status(response)
                found += [item for item in map(_described, response.json()) if isinstance(item, BucketFile)]
        return found

    def name(self, path: str, xet_hash: str) -> None:
        """Give what was sent to the storage a name, in the place of what has it."""
        with self._errors():
            self._change([{"type": "addFile", "path": path, "xetHash": xet_hash, "mtime": _now()}])

    def copy(self, xet_hash: str, path: str) -> None:
        """Give a file of the bucket another name, too."""
        source = {"sourceRepoType": "bucket", "sourceRepoId": self._bucket, "xetHash": xet_hash}
        with self._errors():
            self._change([{"type": "copyFile", "path": path, "mtime": _now(), **source}])

    def delete(self, paths: Collection[str]) -> None:
        """Delete files; those that are missing already are no error."""
        for some in _portions(list(paths)):
            with self._errors():
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
        """What the Hub lists for a folder, without those beside it whose names only begin like it."""
        start = f"{folder}/" if folder else ""
        below = f"/{quote(folder, safe='')}" if folder else ""
        url: str | None = self._url(f"tree{below}?recursive={str(recursive).lower()}")
        found: list[BucketFile | BucketFolder] = []
        with self._errors():
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
        return http_backoff(method, url, headers=headers, timeout=stall_seconds() or 1, **body)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with translate_bucket_errors(self._address):
            yield


def _described(item: dict[str, Any]) -> BucketFile | BucketFolder:
    kind: Any = BucketFile if item["type"] == "file" else BucketFolder
    described: BucketFile | BucketFolder = kind(**item)
    return described


def _portions(paths: list[str]) -> Iterator[list[str]]:
    for begin in range(0, len(paths), _AT_ONCE):
        yield paths[begin : begin + _AT_ONCE]


def _now() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1000)
