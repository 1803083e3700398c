"""What one of many simulated ranks computes in a save: everything but the bytes of tensors, which nobody has."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from math import prod
from typing import Any

from bench.many_ranks.paper import PaperMesh, PaperTensor, held_by
from hfshard.distributed.exchange import Window, schedule
from hfshard.distributed.rank_writer import WriteTask
from hfshard.distributed.tensor_owners import RankGroup, TensorOwners, assign_owners, list_tensors, listing_digest
from hfshard.format.index import CheckpointIndex, FileDigest
from hfshard.saving.pipeline import plan_request
from hfshard.saving.save_request import SaveOptions, SaveRequest
from hfshard.shards.shard_plan import ShardPlan
from hfshard.shards.write_shards import WriteJob, file_order
from hfshard.tensors.stored_tensor import RawTensor


class SimulatedRank:
    """A rank of a save, whose steps are called in their order.

    Args:
        rank: Its number; 0 leads.
        tensors: Of the model.
        mesh: Over which all of them are spread.
        max_shard_size: Of the files.
    """

    def __init__(self, rank: int, tensors: list[PaperTensor], mesh: PaperMesh, max_shard_size: int | str) -> None:
        self.rank = rank
        self.ranks = range(prod(mesh.shape))
        self._held = held_by(rank, tensors, mesh)
        self._options = SaveOptions(max_shard_size=max_shard_size)
        self._request = SaveRequest(options=self._options)
        self.holding = self.groups = self.order = b""
        self._plan: ShardPlan
        self._holders: TensorOwners

    def unite(self) -> None:
        """List what it has, as all others do, and find who holds what."""
        listing, meshes = list_tensors(self._request, self._held)
        digest = listing_digest(listing.to_json())
        self.holding = json.dumps([digest, meshes]).encode()
        self.groups = json.dumps([[list(self.ranks), *json.loads(self.holding)]]).encode()
        [group] = [RankGroup.from_json(value) for value in json.loads(self.groups)]
        self._holders = TensorOwners.unite([group], {digest: listing})

    def plan(self) -> None:
        """Plan the files, as the leader does, and order them."""
        tensors = {name: RawTensor(layout, _no_bytes) for name, layout in self._holders.layouts.items()}
        self._plan = plan_request(SaveRequest(tensors=tensors, options=self._options))
        jobs = [
            WriteJob(shard.file, file_order({name: tensors[name] for name in shard.names}), {"format": "pt"})
            for shard in self._plan.shards
        ]
        self.order = WriteTask.of("write", jobs, "sha256").to_json(list(tensors))

    def rounds(self) -> None:
        """Understand the order, and find in each round what goes to whom."""
        names = list(self._holders.layouts)
        order = WriteTask.from_json(self.order, names)
        wanted = [order.wanted_bytes(file, self._holders.layouts) for file in order.files]
        sizes = [sum(count for _, count in file) for file in wanted]
        owners = assign_owners(sizes, self.ranks)
        streams: dict[int, list[tuple[str, int]]] = {}
        for owner, file in zip(owners, wanted):
            streams.setdefault(owner, []).extend(file)
        loads = {owner: sum(count for _, count in stream) for owner, stream in streams.items()}
        self.files = len(sizes)
        self.owners = len(loads)
        self.balance = max(loads.values()) / (sum(loads.values()) / len(loads))
        self.rounds_count = 0
        self.sent_bytes = self.most_sent_bytes = 0
        for windows in schedule(streams, self._holders):
            sent = self._sent_in(windows)
            self.rounds_count += 1
            self.sent_bytes += sent
            self.most_sent_bytes = max(self.most_sent_bytes, sent)

    def result(self) -> dict[str, Any]:
        """Counts, and bytes of tensors and of what is told over the store."""
        outcome = json.dumps({"index": asdict(self._index()), "digest": "0" * 64})
        return {
            "tensors": len(self._held),
            "bytes": self._plan.total_size,
            "files": self.files,
            "owners": self.owners,
            "balance": round(self.balance, 3),
            "rounds": self.rounds_count,
            "sent": self.sent_bytes,
            "most sent": self.most_sent_bytes,
            "told": len(self.holding),
            "heard": len(self.groups) + len(self.order) + len(outcome),
        }

    def _sent_in(self, windows: Mapping[int, Window]) -> int:
        """The bytes that this rank sends to others in a round."""
        sent = 0
        for owner, window in windows.items():
            for name, start, stop in window if owner != self.rank else ():
                parts = self._holders.parts_of(name)
                number = parts.number_of(self.rank)
                if number is not None and parts.source(number, owner) == self.rank:
                    runs = parts.clip(number, start, stop)
                    sent += 0 if runs is None else runs.total
        return sent

    def _index(self) -> CheckpointIndex:
        plan = self._plan
        files = {
            shard.file: FileDigest(shard.nbytes, "0" * 64, None, "0" * 32, "0" * 16 * len(shard.tensors))
            for shard in plan.shards
        }
        return CheckpointIndex(plan.weight_map, plan.total_size, plan.total_size // 2, files=files)


def _no_bytes(_: int) -> Iterator[memoryview]:
    raise AssertionError("a tensor on paper has no bytes")
