"""What the store of the ranks sends to each of them at the end of a save, in bytes that are counted on the wire."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hfshard.distributed.group_store import TimeoutStore
from hfshard.distributed.rendezvous import GroupSession
from hfshard.distributed.save_on_ranks import SaveOutcome
from hfshard.format.index import CheckpointIndex, FileDigest, sha256_of
from tests.distributed.gloo import check_ranks, free_port

TENSORS = 20_000
FILES = 100


class Relay:
    """A port that leads to another one; counts the bytes that come from there."""

    def __init__(self, listener: socket.socket, target: int) -> None:
        self.port: int = listener.getsockname()[1]
        self.received_bytes = 0
        self._listener = listener
        self._target = target

    def run(self, pool: ThreadPoolExecutor) -> None:
        """Serve until the listener is shut down."""
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = self._connected()
                pool.submit(self._pump, client, server, 0)
                pool.submit(self._pump, server, client, 1)

    def _connected(self) -> socket.socket:
        while True:  # the store may not listen yet
            with suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", self._target))
            time.sleep(0.01)

    def _pump(self, source: socket.socket, target: socket.socket, counts: int) -> None:
        with source, suppress(OSError):
            while block := source.recv(1 << 16):
                self.received_bytes += len(block) * counts
                target.sendall(block)
            target.shutdown(socket.SHUT_WR)


@contextmanager
def relay_to(port: int) -> Iterator[Relay]:
    with ThreadPoolExecutor(16) as pool, socket.create_server(("127.0.0.1", 0)) as listener:
        relay = Relay(listener, port)
        pool.submit(relay.run, pool)
        yield relay
        listener.shutdown(socket.SHUT_RDWR)


def index_of_many_tensors() -> CheckpointIndex:
    names = [f"model.layers.{number // 100}.mlp.experts.{number % 100}.gate_proj.weight" for number in range(TENSORS)]
    numbers = {name: number * FILES // TENSORS + 1 for number, name in enumerate(names)}
    file_of = {name: f"model-{number:05d}-of-{FILES:05d}.safetensors" for name, number in numbers.items()}
    digests = {}
    for number, file in enumerate(dict.fromkeys(file_of.values())):
        digest = sha256_of(file.encode())
        tensors = random.Random(number).randbytes(8 * TENSORS // FILES).hex()
        digests[file] = FileDigest(size=1 << 30, sha256=digest, fingerprint=digest[:32], tensor_digests=tensors)
    return CheckpointIndex(weight_map=file_of, total_size=100 << 30, total_parameters=50 << 30, files=digests)


def end_a_save(rank: int, ports: tuple[int, int], path: Path) -> None:
    store: Any = dist.TCPStore("127.0.0.1", ports[rank], 2, is_master=rank == 0)  # type: ignore[attr-defined]
    index = index_of_many_tensors()
    with GroupSession("save", range(2), rank, store=TimeoutStore(store)) as ranks:
        if rank == 0:
            SaveOutcome.tell(ranks, index, "listing")
        else:
            outcome = SaveOutcome.awaited(ranks)
            assert outcome.listing_digest == "listing"
            assert outcome.index(ranks, str(path)) == index
    dist.barrier()


@pytest.mark.parametrize(("sees", "most_bytes"), [(True, 10_000), (False, 500_000)])
def test_a_rank_is_sent_a_digest_of_the_index_or_little_more_than_its_digests(
    tmp_path: Path, sees: bool, most_bytes: int
) -> None:
    raw = index_of_many_tensors().to_json()
    assert len(raw) > 2_000_000
    if sees:
        (tmp_path / "model.safetensors.index.json").write_bytes(raw)
    port = free_port()
    with relay_to(port) as relay:
        check_ranks(tmp_path / "ranks", 2, end_a_save, (port, relay.port), tmp_path / "model.safetensors.index.json")

        assert 0 < relay.received_bytes < most_bytes
