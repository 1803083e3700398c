"""The Hub server and the client process that all tests of pushes share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from tests.hub.server_fixture import HubServerFixture, Outcome

MULTIPART_BYTES = 1_000_000
"""Larger files are uploaded in parts."""


class PushHub(HubServerFixture):
    """A Hub server, and a client that pushes to it."""

    client_module = "tests.hub.push.client"
    server_options: ClassVar[dict[str, Any]] = {"multipart_bytes": MULTIPART_BYTES}

    def call(self, task: str, *args: object, **options: Any) -> Outcome:
        """Do a task that succeeds."""
        return self.done(task, *args, **options)

    def push(self, directory: Path, repo_id: str, **options: Any) -> Outcome:
        """Push a directory, counted by the server's log from its beginning."""
        self.server.clear_log()
        return self.call("push", directory, repo_id, **options)

    def loads(self, repo_id: str, **options: Any) -> str:
        """The digest of what stock transformers loads with an empty cache."""
        cache = self.root / f"cache-{next(self._numbers)}"
        digest: str = self.call("load_stock", repo_id, cache, **options).result
        return digest

    def files(self, repo_id: str, revision: str = "main") -> set[str]:
        """The names in a repo, without the Hub's own .gitattributes."""
        return set(self.view(repo_id).files(revision)) - {".gitattributes"}


def differences(hub: PushHub, repo_id: str, expected: dict[str, bytes], revision: str = "main") -> dict[str, str]:
    """Path -> what is wrong with it, of all files in a repo that are not as expected."""
    view = hub.view(repo_id)
    there = {path: view.read(path, revision) for path in hub.files(repo_id, revision)}
    problems = dict.fromkeys(expected.keys() - there.keys(), "missing")
    problems |= dict.fromkeys(there.keys() - expected.keys(), "unexpected")
    return problems | {path: "differs" for path in there.keys() & expected.keys() if there[path] != expected[path]}
