"""What the tests of pushes are given: a Hub with a client that pushes, and saved checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import pytest

from tests.hub.models import contents, saved
from tests.hub.server_fixture import HubServerFixture, Outcome, Task, hub_fixtures

SINGLE, FOUR, MANY = "10MB", "20KB", "9KB"
"""Limits: one file; 4 shards of 16.9 kB and less; 9 shards (the largest tensor has 8,448 bytes)."""


class PushHub(HubServerFixture):
    """A Hub server, and a client that pushes to it; larger files than 1 MB are uploaded in parts."""

    client_module = "tests.hub.push.client"
    server_options: ClassVar[dict[str, Any]] = {"multipart_bytes": 1_000_000}

    def push(self, directory: Path, repo_id: str, **options: Any) -> Outcome:
        """Push a directory, counted by the server's log from its beginning."""
        self.server.clear_log()
        return self.done("push", directory, repo_id, **options)

    def lands(self, directory: Path, repo_id: str, kept: Mapping[str, bytes] | None = None, **options: Any) -> Outcome:
        """Push a directory: its files, and what is kept of the repo, are all that the revision then has."""
        outcome = self.push(directory, repo_id, **options)
        revision = "refs/pr/1" if options.get("create_pr") else options.get("revision", "main")
        assert differences(self, repo_id, {**contents(directory), **(kept or {})}, revision) == {}
        return outcome

    @contextmanager
    def held(
        self, match: str, after_bytes: int, directory: Path, repo_id: str, skip: int = 0, **options: Any
    ) -> Iterator[Task]:
        """Begin a push, and do the block while the server holds a request of it."""
        gate = Event()
        fault = self.fail(match, "slow", after_bytes=after_bytes, skip=skip, gate=gate)
        task = self.start("push", directory, repo_id, **options)
        assert fault.reached.wait(60)
        yield task
        gate.set()

    def loads(self, repo_id: str, **options: Any) -> str:
        """The digest of what stock transformers loads with an empty cache."""
        digest: str = self.done("load_stock", repo_id, self.root / f"cache-{next(self._numbers)}", **options).result
        return digest

    def files(self, repo_id: str, revision: str = "main") -> set[str]:
        """The files of a repo, without the one that the Hub makes."""
        return set(self.view(repo_id).files(revision)) - {".gitattributes"}


def differences(hub: PushHub, repo_id: str, expected: Mapping[str, bytes], revision: str = "main") -> dict[str, str]:
    """Path -> what is wrong with it, of all files in a repo that are not as expected."""
    view = hub.view(repo_id)
    there = {path: view.read(path, revision) for path in hub.files(repo_id, revision)}
    problems = dict.fromkeys(expected.keys() - there.keys(), "missing")
    problems |= dict.fromkeys(there.keys() - expected.keys(), "unexpected")
    return problems | {path: "differs" for path in there.keys() & expected.keys() if there[path] != expected[path]}


def index_of(*files: str) -> bytes:
    """An index of a tensor in each of these files."""
    return json.dumps({"metadata": {}, "weight_map": {f"w{n}": file for n, file in enumerate(files)}}).encode()


hub, module_hub = hub_fixtures(PushHub)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model of 4 shards, of the seed 1."""
    return saved(tmp_path / "save", 1, FOUR)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A saved model of one file, of the seed 1."""
    return saved(tmp_path / "save", 1)
