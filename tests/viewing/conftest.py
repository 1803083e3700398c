"""What the tests of pages and comparisons are given: a Hub with a client that reads from it, and places in a store."""

from __future__ import annotations

from tests.hub.pull.pull_hub import PullHub
from tests.hub.server_fixture import hub_fixtures
from tests.stores.conftest import bucket as bucket
from tests.stores.conftest import store_address as store_address

hub, module_hub = hub_fixtures(PullHub)
"""The Hub server and the client process of the tests of pulls."""
