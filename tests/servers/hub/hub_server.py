"""A Hub for tests: a real HTTP server on loopback that speaks the Hugging Face Hub's wire protocol, faults included."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests import REPOSITORY
from tests.hub import any_hub
from tests.servers.bucket.buckets import BucketView
from tests.servers.bucket.cas import CasCounts
from tests.servers.faults import Fault
from tests.servers.hub.hub import Hub
from tests.servers.hub.repos import Commit, Repo
from tests.servers.hub.routes.api import NO_HARNESSES
from tests.servers.hub.routing import find_route
from tests.servers.log import Request
from tests.servers.objects import Entry, lfs_entry, replace_file
from tests.servers.origin import Found, Origin, Server
from tests.servers.wire import Headers

__all__ = ["BucketView", "Commit", "Entry", "Fault", "HubServer", "RepoView", "Request"]

# Settings of the process that runs the tests, which its children must not see.
_FOREIGN = ("HF_", "HUGGINGFACE", "HUGGING_FACE", "TRANSFORMERS_")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")

# As many files as the Hub lists at once.
PAGE_SIZE = 1000
# The Hub's documented recommendation is about 100 files a commit, its limit 25,000 operations.
MAX_COMMIT_FILES = 25_000
# Somebody with a repository open in a browser, or on another machine.
SOMEBODY_ELSE = "mallory"


class RepoView:
    """One repository, seen and changed from inside the test process, past the wire."""

    def __init__(self, hub: Hub, repo: Repo) -> None:
        self._hub, self._repo = hub, repo

    @property
    def private(self) -> bool:
        """Whether only its owners see it; can be set."""
        return self._repo.private

    @private.setter
    def private(self, value: bool) -> None:
        self._repo.private = value

    @property
    def gated(self) -> bool:
        """Whether only its owners get files; can be set."""
        return self._repo.gated

    @gated.setter
    def gated(self, value: bool) -> None:
        self._repo.gated = value

    @property
    def branches(self) -> dict[str, str]:
        """Branch -> commit hash."""
        return self._repo.branches

    @property
    def tags(self) -> dict[str, str]:
        """Tag -> commit hash."""
        return self._repo.tags

    @property
    def pull_requests(self) -> dict[int, str]:
        """Number -> commit hash of its head."""
        return {one.num: one.head for one in self._repo.pull_requests}

    def files(self, revision: str = "main") -> dict[str, Entry]:
        """List the files of a revision, with .gitattributes, which the Hub puts into every new repository."""
        return self._repo.files(revision)

    def read(self, path: str, revision: str = "main") -> bytes:
        """Read a file."""
        return self._repo.read(path, revision)

    def commits(self, revision: str = "main") -> list[Commit]:
        """List the history, newest first; the last is the Hub's own "initial commit"."""
        return self._repo.commits(revision)

    def commit(self, files: Mapping[str, bytes | None], message: str, revision: str = "main") -> str:
        """Commit as somebody else: path -> contents, or None to delete; gives the commit hash."""
        changes = {path: None if content is None else self._store(path, content) for path, content in files.items()}
        return self._repo.add_commit(revision, changes, message, "", SOMEBODY_ELSE)[0]

    def _store(self, path: str, content: bytes) -> Entry:
        entry = self._repo.objects.add_regular(content)
        is_lfs = self._hub.upload_mode(path, len(content)) == "lfs"
        return lfs_entry(entry.sha256, entry.size) if is_lfs else entry

    def corrupt(self, path: str, revision: str = "main", *, at: int = 0) -> None:
        """Flip one bit of the stored byte at offset `at`; size, sha256 and ETag stay as they were."""
        entry = self._repo.files(revision)[path]
        content = bytearray(self._repo.read(path, revision))
        content[at] ^= 1
        replace_file(self._repo.objects.path(entry.sha256), bytes(content))

    def mend(self, path: str, content: bytes, revision: str = "main") -> None:
        """Put back the contents that `corrupt` changed."""
        replace_file(self._repo.objects.path(self._repo.files(revision)[path].sha256), content)


class HubServer(Server):
    """A Hub over two loopback origins, one for the API and one for LFS storage; contents are kept under `root`.

    Tokens: `hf_write` is alice's (member of org, may write), `hf_member` carol's (member of org, only reads),
    `hf_read` bob's (only reads, member of nothing); any other token is refused.

    Args:
        root: A directory of its own.
        page_size: Files (or commits) that one page of a listing has.
        lfs_threshold: Larger files go through LFS, in bytes; `.safetensors` and `.bin` do at any size.
        multipart_bytes: Larger LFS files go up in parts of this size; None: never.
        max_commit_files: Operations that one commit may have.
        has_xet: Whether repositories take files through Xet, too (buckets always do).
        has_one_origin: Whether all is served on the API origin's port, and the URLs in its answers have the port that
            the client asked for: so a proxy before it sees all requests.
        port: Of the API origin; 0: any that is free.
    """

    def __init__(
        self,
        root: Path,
        *,
        page_size: int = PAGE_SIZE,
        lfs_threshold: int = 10_000,
        multipart_bytes: int | None = None,
        max_commit_files: int = MAX_COMMIT_FILES,
        has_xet: bool = False,
        has_one_origin: bool = False,
        port: int = 0,
    ) -> None:
        self._hub = Hub(
            Path(root),
            page_size=page_size,
            lfs_threshold=lfs_threshold,
            multipart_bytes=multipart_bytes,
            max_commit_files=max_commit_files,
            has_xet=has_xet,
        )
        super().__init__(self._hub)
        self._port = port
        self._has_one_origin = has_one_origin

    def open_origins(self) -> list[Origin]:
        """Make both origins, or the one for both.

        They have host names of their own, too: huggingface_hub 1.x goes by the host alone when it asks whether a
        redirect leaves the Hub (and then stops there, and leaves the token out).
        """
        if self._has_one_origin:
            origins = [Origin(self._hub, self._find_on_one, port=self._port)]
        else:
            api, storage = partial(find_route, ("api",)), partial(find_route, ("storage",))
            origins = [Origin(self._hub, api, port=self._port), Origin(self._hub, storage, "localhost")]
        self._hub.origins = (origins[0].url, origins[-1].url)
        return origins

    def _find_on_one(self, method: str, target: str, headers: Headers) -> Found:
        self._hub.answers_to(headers.get("Host", ""))
        return find_route(("api", "storage"), method, target)

    @property
    def endpoint(self) -> str:
        """The API origin, for HF_ENDPOINT."""
        return self._hub.api_origin

    def environment(self, token: str | None = "hf_write", *, home: Path) -> dict[str, str]:
        """Make the environment of a child process that talks to this Hub, with its cache and settings in `home`.

        The list of agents that huggingface_hub asks for once a day and home directory is put there already, so that
        the log shows only what the child does.
        """
        replace_file(home / ".agent_harnesses.json", json.dumps(NO_HARNESSES).encode())
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_FOREIGN) and name.lower() not in _PROXIES
        }
        environment = inherited | {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            **any_hub.SETTINGS,
            "HF_XET_CLIENT_RETRY_BASE_DELAY": "10ms",
            "PYTHONPATH": str(REPOSITORY),
        }
        return environment if token is None else environment | {"HF_TOKEN": token}

    @property
    def log(self) -> list[Request]:
        """Every request since `clear_log`, in the order in which they came."""
        return self._hub.log.requests()

    def clear_log(self) -> None:
        """Forget the requests so far."""
        self._hub.log.clear()

    def count(self, kind: str | None = None) -> int:
        """Count requests, of one kind or of all."""
        return len(self._hub.log.requests(kind))

    def bytes_up(self, kind: str | None = None) -> int:
        """Count body bytes that the server read, in requests of one kind or of all."""
        return sum(request.bytes_up for request in self._hub.log.requests(kind))

    def bytes_down(self, kind: str | None = None) -> int:
        """Count body bytes that the server sent, in requests of one kind or of all."""
        return sum(request.bytes_down for request in self._hub.log.requests(kind))

    def fail(self, fault: Fault) -> Fault:
        """Let a fault happen, after those before it; gives it back, so that a test can await `reached`."""
        self._hub.faults.add(fault)
        return fault

    def clear_faults(self) -> None:
        """Forget the faults that have not happened; open the gates of all."""
        self._hub.faults.clear()

    @property
    def cas_counts(self) -> CasCounts:
        """What was uploaded to Xet's store so far."""
        return replace(self._hub.cas.counts)

    def create_bucket(self, bucket_id: str, *, private: bool = False) -> BucketView:
        """Make a bucket as its namespace's owner."""
        bucket = self._hub.buckets.create(bucket_id, private)
        if bucket is None:
            raise ValueError(f"{bucket_id} is there already")
        return BucketView(bucket, self._hub.cas)

    def bucket(self, bucket_id: str) -> BucketView:
        """Look at a bucket.

        Raises:
            KeyError: There is none.
        """
        bucket = self._hub.buckets.get(bucket_id)
        if bucket is None:
            raise KeyError(bucket_id)
        return BucketView(bucket, self._hub.cas)

    def create_repo(self, repo_id: str, *, private: bool = False, gated: bool = False) -> RepoView:
        """Make a repository as its namespace's owner."""
        repo = self._hub.store.create(repo_id, private=private, gated=gated, author="alice")
        if repo is None:
            raise ValueError(f"{repo_id} is there already")
        return RepoView(self._hub, repo)

    def repo(self, repo_id: str) -> RepoView:
        """Look at a repository.

        Raises:
            KeyError: There is none.
        """
        repo = self._hub.store.get(repo_id)
        if repo is None:
            raise KeyError(repo_id)
        return RepoView(self._hub, repo)


def main() -> None:
    """Serve a directory until interrupted; then print what was asked."""
    parser = argparse.ArgumentParser(prog="python -m tests.servers.hub.hub_server", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="directory that holds the repositories")
    parser.add_argument("--port", type=int, default=0, help="port of the API origin (default: any)")
    parser.add_argument("--client-home", type=Path, help="make a client's home there; print its environment as JSON")
    arguments = parser.parse_args()
    with HubServer(arguments.root, port=arguments.port) as hub:
        print(hub.endpoint, flush=True)
        if arguments.client_home is not None:
            print(json.dumps(hub.environment(home=arguments.client_home)), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
        print(_summary(hub), flush=True)


def _summary(hub: HubServer) -> str:
    """Requests by kind, and the bytes of their bodies."""
    counts = Counter(request.kind for request in hub.log)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    total = f"hub: {len(hub.log)} requests, {hub.bytes_up():,} bytes up, {hub.bytes_down():,} bytes down"
    return f"{total}\n     {kinds}"


if __name__ == "__main__":
    main()
