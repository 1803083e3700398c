"""The Hub server and the client process that all tests of pulls share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.hub.models import files_of
from tests.hub.server_fixture import HubServerFixture, Outcome
from tests.servers.hub.hub_server import Request


class PullHub(HubServerFixture):
    """A Hub server, and a client that pulls from it."""

    client_module = "tests.hub.pull.client"

    def call(self, task: str, *args: object, **options: Any) -> Any:
        """The result of a task that succeeds; the server's log has only its requests."""
        self.server.clear_log()
        return self.done(task, *args, **options).result

    def refused(self, task: str, *args: object, **options: Any) -> Outcome:
        """What came of a task that ends with an error of hfshard; the server's log has only its requests."""
        self.server.clear_log()
        return super().refused(task, *args, **options)

    def requests_of(self, repo_id: str) -> list[Request]:
        """The requests about one repo."""
        return [request for request in self.server.log if repo_id in request.path]

    def weights_down(self, repo_id: str) -> int:
        """Bytes of a repo's weights that went over since the log was cleared."""
        return sum(request.bytes_down for request in self.requests_of(repo_id) if request.kind == "storage_get")

    def publish(self, repo_id: str, folder: Path, revision: str = "main", **settings: Any) -> str:
        """Make a repo with the files of a directory, or a commit to it; gives the commit."""
        try:
            view = self.server.repo(repo_id)
        except KeyError:
            view = self.server.create_repo(repo_id, **settings)
        return view.commit(files_of(folder), "Files", revision)


def cached(cache: Path, repo_id: str, kind: str = "blobs") -> list[Path]:
    """The files that a cache has of a repo: its blobs, or what lies below another folder."""
    folder = cache / ("models--" + repo_id.replace("/", "--")) / kind
    return sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
