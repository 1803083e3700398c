"""The places in services that tests of stores have."""

from __future__ import annotations

from tests.stores.conftest import bucket as bucket
from tests.stores.conftest import scheme as scheme
from tests.stores.conftest import store_address as store_address
from tests.stores.conftest import store_prefix as store_prefix
