"""The open files of a checkpoint: what reads its tensors, and notices that it was replaced."""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from hfshard._util.progress import bytes_bar
from hfshard._util.threads import result_of
from hfshard.format.digests import Verify
from hfshard.format.file_names import WeightNames
from hfshard.format.index import CheckpointIndex
from hfshard.pickles.pickle_file import PickleFile
from hfshard.shards.ranged_shard import RangedShard, read_whole
from hfshard.shards.read_tensors import ReadMode, mode_of, read_from
from hfshard.shards.shard import SafetensorsShard
from hfshard.shards.shard_file import SafetensorsFile
from hfshard.storage.checkpoint.folder import CheckpointFolder
from hfshard.storage.checkpoint.locate import WeightsEntry, state_token


@dataclass
class OpenCheckpoint:
    """A checkpoint whose files are open and checked.

    Attributes:
        folder: Where its files lie.
        weights: The file by which it was entered.
        index: Which file holds which tensor; for a single file, what the file says about itself.
        shards: File -> open safetensors file; all of this machine, or all read by ranges.
        pickles: File -> tensors of a pickled file.
        raw_index: The bytes of the index, where whoever opened it asked to keep them.
    """

    folder: CheckpointFolder
    names: WeightNames
    weights: WeightsEntry
    index: CheckpointIndex
    shards: dict[str, SafetensorsShard] = field(default_factory=dict)
    pickles: dict[str, PickleFile] = field(default_factory=dict)
    raw_index: bytes | None = field(default=None, repr=False)
    weights_override: str | None = None
    """The weights file that config.json names, if it names one."""
    state_token: tuple[Hashable, ...] = ()
    """The identities of the files by which a replaced checkpoint is noticed."""
    check: Future[None] | None = None
    """The check of every byte that is under way in another thread, if one is."""
    level: Verify = "none"
    """What is compared while tensors are read by ranges."""
    progress: bool | None = False
    """A bar while tensors are read by ranges."""

    @property
    def directory(self) -> str:
        """Where it is: the path of a directory, or an address."""
        return self.folder.path

    @property
    def is_ranged(self) -> bool:
        """Whether its files are read by ranges, so that reading is a matter of requests, and can fail at any time."""
        return any(isinstance(shard, RangedShard) for shard in self.shards.values())

    @property
    def weights_path(self) -> str:
        """The path of the file by which it was entered."""
        return os.path.join(self.directory, self.weights.name)

    @property
    def keys(self) -> list[str]:
        """FQNs of the stored tensors, in the order of the files and of the bytes in them."""
        stored = [name for shard in self.shards.values() for name in shard.header.tensors]
        return stored + [name for pickled in self.pickles.values() for name in pickled.tensors]

    def read(
        self, names: Collection[str], read: ReadMode = "auto", device: str | torch.device = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Read stored tensors, in the order of the names (see `tensor_reader.read_from`).

        Where they are not mapped, this waits for a check that is under way: no byte is read from the disk twice.

        Raises:
            IntegrityError: That check found a file damaged.
        """
        device, wanted = torch.device(device), set(names)
        if self.is_ranged:
            return self._read_by_ranges(wanted, device, names)
        held = [
            (shard, [name for name in shard.header.tensors if name in wanted])
            for shard in self.shards.values()
            if isinstance(shard, SafetensorsFile)
        ]
        read = mode_of(held, read, device)
        if self.check is not None and (read != "mmap" or device.type != "cpu"):
            result_of(self.check)
        tensors = read_from(held, read, device, ahead=self.check is None)
        for pickled in self.pickles.values():
            tensors |= {name: tensor.to(device) for name, tensor in pickled.tensors.items() if name in wanted}
        return {name: tensors[name] for name in names}

    def _read_by_ranges(
        self, wanted: set[str], device: torch.device, names: Collection[str]
    ) -> dict[str, torch.Tensor]:
        held = [
            (shard, [name for name in shard.header.tensors if name in wanted])
            for shard in self.shards.values()
            if isinstance(shard, RangedShard)
        ]
        total = sum(shard.header.tensors[name].nbytes for shard, some in held for name in some)
        with bytes_bar("Loading", total, self.progress) as progress_callback:
            tensors = read_whole(
                held,
                device,
                level=self.level,
                progress_callback=progress_callback,
                memory_bytes=self.folder.memory_bytes,
            )
        return {name: tensors[name] for name in names}

    def pickled_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of all pickles, mapped: to tell which of them share memory."""
        return {name: tensor for pickled in self.pickles.values() for name, tensor in pickled.tensors.items()}

    def is_unchanged(self) -> bool:
        """Whether the folder still holds this checkpoint."""
        self.folder.look()
        now = state_token(self.folder, self.names, self.weights_override)
        return self.state_token == now and self.folder.still_holds(self.shards)

    def is_of_one_save(self) -> bool:
        """Whether the small files that were read since it was opened belong to it: no save has come between."""
        return self.folder.is_pinned or self.is_unchanged()

    def close(self) -> None:
        """Close all files; mapped tensors stay valid."""
        for shard in self.shards.values():
            shard.close()
        for pickled in self.pickles.values():
            pickled.close()
