"""What the tests of runs are given: places in a store."""

from __future__ import annotations

from tests.stores.conftest import bucket as bucket
from tests.stores.conftest import store_address as store_address
