"""Ctrl-C ends what waits for a service that is silent, long before the service counts as failed."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

import hfshard
from tests.servers.stores.fault_proxy import FaultProxy

SILENT_SECONDS = 100
"""After which the service counts as failed."""

pytestmark = pytest.mark.parametrize("scheme", ["s3"])


@pytest.mark.parametrize("kind", ["list", "get"])
def test_a_request_that_is_not_answered_is_left(
    kind: str, proxy: FaultProxy, store_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hfshard.save_state_dict({"a": torch.ones(100_000)}, store_address)
    fault = proxy.fail("drop", match=f" {kind} ", how="silence", skip=2 if kind == "get" else 0, times=99)  # a range
    monkeypatch.setenv("HFSHARD_STORE_TIMEOUT", str(SILENT_SECONDS))

    def press() -> None:
        if fault.reached.wait(60):
            os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        hfshard.load_state_dict(store_address)
    assert time.monotonic() - begin < SILENT_SECONDS
    presser.join()
