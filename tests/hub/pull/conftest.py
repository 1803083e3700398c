"""What the tests of pulls are given: a Hub with a client that pulls."""

from __future__ import annotations

from tests.hub.pull.pull_hub import PullHub
from tests.hub.server_fixture import hub_fixtures

hub, module_hub = hub_fixtures(PullHub)
