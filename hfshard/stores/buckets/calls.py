"""The Hub's calls about the files of one bucket: listed, named, copied and deleted; the bytes go by Xet."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final

import huggingface_hub
from huggingface_hub import BucketFile, BucketFolder, HfApi
from huggingface_hub.errors import BucketBatchError, EntryNotFoundError, HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

from hfshard._util.addresses import StoreAddress
from hfshard.stores.buckets.errors import translate_bucket_errors
from hfshard.stores.buckets.hub_calls import ATTEMPTS, is_passing, transport_errors, wait_before

_LISTS_ONCE: Final = int(huggingface_hub.__version__.partition(".")[0]) < 2
"""Whether huggingface_hub asks for the first page of a list only once; later versions try again."""
_PARTLY: Final = (200, 422)
"""The statuses of answers that list the operations which failed: some of them, or all."""


class BucketCalls:
    """One bucket. All paths are those in the bucket.

    What fails for a while is tried again by huggingface_hub. All calls may be made twice with no harm.
    """

    def __init__(self, address: StoreAddress) -> None:
        """Ask nothing yet; the address is for error messages, too."""
        self._address = address
        self._bucket = address.bucket
        self._api = HfApi()

    def files(self, folder: str) -> list[BucketFile]:
        """All files below a folder; "" for all of the bucket."""
        found = self._listed(folder, recursive=True)
        return [item for item in found if isinstance(item, BucketFile)]

    def children(self, folder: str) -> list[str]:
        """The paths of what lies directly in a folder: files, and folders with "/" behind."""
        start = f"{folder}/" if folder else ""
        found = self._listed(folder, recursive=False)
        names = {item.path[len(start) :] + ("/" if isinstance(item, BucketFolder) else "") for item in found}
        return sorted({start + name.partition("/")[0] + ("/" if "/" in name else "") for name in names if name})

    def find(self, paths: Collection[str]) -> list[BucketFile]:
        """Those files of these that there are."""
        with self._errors():
            return list(self._api.get_bucket_paths_info(self._bucket, list(paths)))

    def name(self, path: str, xet_hash: str) -> None:
        """Give what was sent to the storage a name, in the place of what has it.

        huggingface_hub's own `batch_bucket_files` can't be told of bytes that are in the storage already, so the
        request behind it is made here.
        """
        operation = {"type": "addFile", "path": path, "xetHash": xet_hash, "mtime": int(time.time() * 1000)}
        with self._errors():
            response = http_backoff(
                "POST",
                f"{self._api.endpoint}/api/buckets/{self._bucket}/batch",
                headers={**build_hf_headers(), "Content-Type": "application/x-ndjson"},
                content=json.dumps(operation).encode() + b"\n",
            )
            if response.status_code in _PARTLY and (failures := response.json().get("failed")):
                error = BucketBatchError("not named", response=response)
                error.failures = failures
                raise error
            hf_raise_for_status(response)

    def copy(self, xet_hash: str, path: str) -> None:
        """Give a file of the bucket another name, too."""
        with self._errors():
            self._api.batch_bucket_files(self._bucket, copy=[("bucket", self._bucket, xet_hash, path)])

    def delete(self, paths: Collection[str]) -> None:
        """Delete files; those that are missing already are no error."""
        with self._errors():
            try:
                self._api.batch_bucket_files(self._bucket, delete=list(paths))
            except BucketBatchError:
                if list(self._api.get_bucket_paths_info(self._bucket, list(paths))):
                    raise

    def _listed(self, folder: str, *, recursive: bool) -> list[BucketFile | BucketFolder]:
        """What the Hub lists for a folder, without those beside it whose names only begin like it."""
        start = f"{folder}/" if folder else ""
        with self._errors():
            found = self._ask_for_list(folder, recursive)
        return [item for item in found if item.path.startswith(start)]

    def _ask_for_list(self, folder: str, recursive: bool) -> list[BucketFile | BucketFolder]:
        attempts = ATTEMPTS if _LISTS_ONCE else 1
        failures: tuple[type[Exception], ...] = (HfHubHTTPError, *transport_errors())
        for attempt in range(1, attempts + 1):
            try:
                return list(self._api.list_bucket_tree(self._bucket, prefix=folder or None, recursive=recursive))
            except EntryNotFoundError:
                return []
            except failures as error:
                if attempt == attempts or not is_passing(error):
                    raise
                wait_before(attempt + 1, error, f"'{self._address}' could not be listed")
        raise AssertionError("unreachable")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with translate_bucket_errors(self._address):
            yield
