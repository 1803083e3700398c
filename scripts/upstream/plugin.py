"""The pytest plugin that runs inside: turns hfshard on if it is asked for, chooses tests, writes down each outcome."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

OUTPUT = "--outcomes"
KEEP = "--keep"
DROP = "--drop"
UNDER_HFSHARD = "--under-hfshard"
OUR_MIXIN = "--our-mixin"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options by which the runner talks to this plugin."""
    parser.addoption(OUTPUT, type=Path, required=True, help="file of a JSON line per report")
    parser.addoption(KEEP, default="", help="regular expression: only tests whose id has it")
    parser.addoption(DROP, default="", help="regular expression: no tests whose id has it")
    parser.addoption(UNDER_HFSHARD, action="store_true", help="call hfshard.install() first")
    parser.addoption(OUR_MIXIN, action="store_true", help="put our mixin in the place of huggingface_hub's")


def pytest_configure(config: pytest.Config) -> None:
    """Turn hfshard on, before any test is imported."""
    config.pluginmanager.register(_Writer(config.getoption(OUTPUT)))
    if config.getoption(UNDER_HFSHARD):
        import hfshard

        hfshard.install()
    if config.getoption(OUR_MIXIN):
        import huggingface_hub.hub_mixin

        import hfshard

        huggingface_hub.hub_mixin.PyTorchModelHubMixin = hfshard.ShardedModelMixin  # type: ignore[misc]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests that are chosen."""
    keep: str = config.getoption(KEEP)
    drop: str = config.getoption(DROP)
    chosen = [item for item in items if re.search(keep, item.nodeid) and not (drop and re.search(drop, item.nodeid))]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


class _Writer:
    """Writes a line when a test starts, and one for each report of it, so that a crash leaves a trace."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def _write(self, node_id: str, outcome: str, message: str = "") -> None:
        self._file.write(json.dumps({"id": short_id(node_id), "outcome": outcome, "message": message}) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid, "started")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome != "passed" or report.when == "call":
            self._write(report.nodeid, report.outcome, _message(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", _message(report))


def short_id(node_id: str) -> str:
    """A test's id with the name of its file alone, which is the same wherever the sources lie."""
    file, colons, rest = node_id.partition("::")
    return Path(file).name + colons + rest


def _message(report: Any) -> str:
    """The first line of the error."""
    if report.outcome != "failed":
        return ""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:300]
