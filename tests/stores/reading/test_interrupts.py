"""Ctrl-C while a load waits for an object store: it ends soon, and leaves no thread behind."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

import hfshard
from tests.servers.stores.fault_proxy import FaultProxy


@pytest.mark.parametrize("skip", [0, 1, 6])
def test_ctrl_c_ends_a_load_that_waits_for_answers(
    store_address: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, skip: int
) -> None:
    state = {f"layer.{number}": torch.full((100_000,), float(number)) for number in range(4)}
    hfshard.save_state_dict(state, store_address, max_shard_size="500KB", progress=False)
    gate = threading.Event()
    fault = proxy.fail("slow", "GET get ", direction="down", gate=gate, times=100, skip=skip)

    def interrupt() -> None:
        if fault.reached.wait(60):
            os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=interrupt)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        hfshard.load_state_dict(store_address, progress=False)
    assert proxy.errors == []  # what waits for its answer still does: the gate has not given up

    gate.set()
    proxy.clear()
    presser.join()
    for thread in [one for one in threading.enumerate() if one.name.startswith("hfshard")]:
        thread.join(60)  # what was left behind ends with the answer
        assert not thread.is_alive()
    assert len(hfshard.load_state_dict(store_address, verify="full")) == 4
