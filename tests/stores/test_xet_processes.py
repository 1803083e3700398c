"""Ctrl-C, threads and forked processes over hf_xet's sessions."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import hfshard
from hfshard.stores.bucket import BucketStore
from hfshard.stores.xet import SESSIONS
from tests.helpers import processes
from tests.servers.faults import Fault
from tests.servers.hub.hub_server import HubServer

pytestmark = pytest.mark.compat

RAW = random.Random(9).randbytes(1_000_000)


def interrupt_at(fault: Fault) -> None:
    """Send Ctrl-C to this process when the server waits at a gate.

    The gate stays closed until Ctrl-C has come out: where it does not, the server gives up, and says so.
    """

    def send() -> None:
        fault.reached.wait()
        time.sleep(0.05)  # mostly, this process has begun to wait for the server
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.parametrize("kind", ["chunk_query", "xorb_put", "shard_put", "reconstruction", "xorb_get"])
def test_ctrl_c_ends_a_transfer_that_waits_for_the_network(store: BucketStore, hub: HubServer, kind: str) -> None:
    raw = random.Random(kind).randbytes(200_000)
    put = store.put("old", raw) if kind in ("reconstruction", "xorb_get") else None
    gate = threading.Event()
    fault = hub.fail(Fault(match=f" {kind} ", kind="slow", direction="down", gate=gate, times=100))
    interrupt_at(fault)
    before = SESSIONS.get()

    with pytest.raises(KeyboardInterrupt):
        if put is None:
            store.put("new", raw)
        else:
            store.read(put)

    gate.set()
    hub.clear_faults()
    assert store.find("new") is None
    assert SESSIONS.get() is not before  # that one may refuse all that comes next
    assert store.read(store.put("after", b"works")) == b"works"


@pytest.mark.parametrize("kind", ["chunk_query", "xorb_put", "shard_put"])
def test_ctrl_c_ends_a_save_of_several_files_that_waits_for_the_network(
    store: BucketStore, hub: HubServer, kind: str
) -> None:
    address = str(store.address)
    old = {f"layer.{number}": torch.full((100_000,), float(number)) for number in range(4)}
    hfshard.save_state_dict(old, address, max_shard_size="500KB")
    before = store.list_objects()
    generator = torch.Generator().manual_seed(len(kind))
    new = {name: torch.rand(100_000, generator=generator) for name in old}
    gate = threading.Event()
    fault = hub.fail(Fault(match=f" {kind} ", kind="slow", direction="down", gate=gate, times=100))
    interrupt_at(fault)

    with pytest.raises(KeyboardInterrupt):
        hfshard.save_state_dict(new, address, max_shard_size="500KB")

    gate.set()
    hub.clear_faults()
    assert store.list_objects() == before
    hfshard.save_state_dict(new, address, max_shard_size="500KB")
    loaded = hfshard.load_state_dict(address, verify="full")
    assert all(torch.equal(tensor, new[name]) for name, tensor in loaded.items())
    assert len(store.list_objects()) == 6  # four shards, their index, and its plain copy


def test_ctrl_c_ends_a_load_of_several_files_that_waits_for_the_network(store: BucketStore, hub: HubServer) -> None:
    generator = torch.Generator().manual_seed(5)
    saved = {f"layer.{number}": torch.rand(100_000, generator=generator) for number in range(4)}
    hfshard.save_state_dict(saved, str(store.address), max_shard_size="500KB")
    gate = threading.Event()
    fault = hub.fail(Fault(match=" xorb_get ", kind="slow", direction="down", gate=gate, times=100, skip=5))
    interrupt_at(fault)  # behind the index and the headers

    with pytest.raises(KeyboardInterrupt):
        hfshard.load_state_dict(str(store.address))

    gate.set()
    hub.clear_faults()
    assert len(hfshard.load_state_dict(str(store.address), verify="full")) == 4


def test_threads_share_a_store(store: BucketStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        puts = list(pool.map(lambda i: store.put(f"{i}", RAW[i : i + 100_000]), range(16)))
        reads = list(pool.map(lambda i: store.read(puts[i]), range(16)))

    assert reads == [RAW[i : i + 100_000] for i in range(16)]


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_uses_the_store_of_its_parent(store: BucketStore) -> None:
    put = store.put("a", RAW)
    assert store.read(put) == RAW

    def read_and_put() -> None:
        assert store.read(put) == RAW
        assert store.read(store.put("b", b"child")) == b"child"

    assert processes.exit_of_fork(read_and_put, 20) == 0
    assert sorted(store.list_objects()) == ["a", "b"]
    assert store.read(put) == RAW
