"""What the tests of pushes are given: a Hub with a client that pushes."""

from __future__ import annotations

from tests.hub.push.push_hub import PushHub
from tests.hub.server_fixture import hub_fixtures

hub, module_hub = hub_fixtures(PushHub)
