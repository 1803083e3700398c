"""What all routes of the test Hub server share: repositories, settings, log, faults and signed URLs."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from tests.servers.bucket.buckets import BucketStore
from tests.servers.bucket.cas import Cas
from tests.servers.bucket.shards import FileRecipe
from tests.servers.hub.repos import RepoStore
from tests.servers.hub.urls import Signer
from tests.servers.objects import Entry
from tests.servers.origin import Served
from tests.servers.wire import Exchange, HubError

# The Hub's tokens for Xet's store live for about so long.
XET_TOKEN_SECONDS = 900
# What the Hub sends through LFS whatever its size.
LFS_SUFFIXES = (".bin", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors")


class Hub(Served):
    """The state of one server; see `HubServer` for what the settings mean."""

    def __init__(
        self,
        root: Path,
        *,
        page_size: int,
        lfs_threshold: int,
        multipart_bytes: int | None,
        max_commit_files: int,
        has_xet: bool = False,
    ) -> None:
        super().__init__()
        root.mkdir(parents=True, exist_ok=True)
        self.page_size = page_size
        self.lfs_threshold = lfs_threshold
        self.multipart_bytes = multipart_bytes
        self.max_commit_files = max_commit_files
        self.store = RepoStore(root)
        self.uploads = root / "uploads"
        self.cas = Cas(root / "xet")
        self.buckets = BucketStore()
        self.has_xet = has_xet
        self.signer = Signer()
        self.origins = ("", "")
        """URLs of the API origin and of the storage origin."""
        self._request = threading.local()

    def answers_to(self, host: str) -> None:
        """Note by which name a client that this thread answers has found the only origin: maybe that of a proxy."""
        port = host.rpartition(":")[2]
        self._request.origins = (f"http://127.0.0.1:{port}", f"http://localhost:{port}")

    @property
    def api_origin(self) -> str:
        """The API origin's URL, as the client that this thread answers knows it."""
        origin: str = getattr(self._request, "origins", self.origins)[0]
        return origin

    @property
    def storage_origin(self) -> str:
        """The storage origin's URL, as the client that this thread answers knows it."""
        origin: str = getattr(self._request, "origins", self.origins)[1]
        return origin

    def sign(self, path: str, method: str, **values: str) -> str:
        """Make a URL of the storage origin."""
        return self.signer.sign(self.storage_origin, path, method, **values)

    def revoke(self, exchange: Exchange) -> None:
        """Let a signed URL be expired from now on."""
        self.signer.revoke(exchange)

    def recipe_of(self, entry: Entry) -> FileRecipe | None:
        """How Xet makes a file of a repository; None: it was not uploaded through Xet."""
        return self.cas.by_sha256(entry.sha256) if self.has_xet and entry.is_lfs else None

    def upload_mode(self, path: str, size: int) -> str:
        """Say how a file of this name and size goes up: `"lfs"` or `"regular"`."""
        is_lfs = size > 0 and (path.endswith(LFS_SUFFIXES) or size > self.lfs_threshold)
        return "lfs" if is_lfs else "regular"

    def reply_xet_token(self, exchange: Exchange, scope: str) -> None:
        """Answer with a token for Xet's store, in the headers and in the body: clients read either."""
        expires = int(time.time()) + XET_TOKEN_SECONDS
        token = self.signer.token(scope, expires)
        headers = {
            "X-Xet-Cas-Url": self.storage_origin,
            "X-Xet-Access-Token": token,
            "X-Xet-Token-Expiration": str(expires),
        }
        answer = {"casUrl": self.storage_origin, "exp": expires, "accessToken": token}
        exchange.reply_json(answer, headers=headers)

    def check_xet_token(self, exchange: Exchange, scope: str) -> None:
        """Refuse a request to Xet's store without a token that permits it; one to write permits to read, too.

        Raises:
            HubError: 401: no token, or an expired one; 403: it only reads.
        """
        found = self.signer.scope_of(exchange.record.token or "")
        if found is None:
            raise HubError(401, "The token for Xet's store is missing, wrong or expired.")
        if found not in (scope, "write"):
            raise HubError(403, f"The token for Xet's store does not permit to {scope}.")
