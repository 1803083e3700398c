"""The Hub server, the client process and the run that all tests of pushed runs share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.hub.models import contents
from tests.hub.server_fixture import HubServerFixture, Outcome

HUBS_OWN = ".gitattributes"


class RunHub(HubServerFixture):
    """A Hub server, a client that trains, pushes and resumes, and a run of three checkpoints."""

    client_module = "tests.training.run.client"

    def __init__(self, root: Path) -> None:
        """Start both, and train."""
        super().__init__(root)
        self.run = root / "run"
        trained = self.done("train", self.run).result
        self.digests: dict[str, str] = trained["digests"]
        """Step -> of everything after it."""
        self.models: dict[str, str] = trained["models"]

    def push(self, repo_id: str, step: object = None, *, run: Path | None = None, **options: Any) -> Any:
        """Push; the server's log has only its requests."""
        self.server.clear_log()
        return self.done("push", run or self.run, repo_id, step, **options).result

    def resume(self, place: object, home: Path, **options: Any) -> Any:
        """Resume in a new process with an empty cache and without a run directory."""
        self.server.clear_log()
        settings = {"HF_HUB_CACHE": str(home)}
        return self.done("restore", home / "no run", place, settings=settings, **options).result

    def refused_resume(self, place: object, home: Path, **options: Any) -> Outcome:
        """Resume, and be refused."""
        self.server.clear_log()
        settings = {"HF_HUB_CACHE": str(home), **options.pop("settings", {})}
        return self.refused("restore", home / "no run", place, settings=settings, **options)

    def checkpoint(self, step: int) -> dict[str, bytes]:
        """The files of a checkpoint."""
        return contents(self.run / f"checkpoint-{step:08d}")

    def held(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """What the Hub holds, without what it puts there itself."""
        view = self.view(repo_id)
        return {path: view.read(path, revision) for path in view.files(revision) if path != HUBS_OWN}

    def titles(self, repo_id: str, revision: str = "main") -> list[str]:
        """Of the commits, the oldest first."""
        return [commit.title for commit in reversed(self.view(repo_id).commits(revision))]
