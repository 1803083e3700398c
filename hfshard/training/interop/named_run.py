"""A run that ranks have saved in parts, as states of a model and an optimizer whose tensors are read when needed.

The states are what `state_dict()` returns, and the optimizer's names its parameters; tensors are on the meta device.
So they are compared like those of any program, and each rank reads of a tensor just the part that it restores.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import Any, TypeGuard

import torch

from hfshard.checkpoint.folder import LocalFolder
from hfshard.checkpoint.load_options import read_tensors
from hfshard.checkpoint.locate import WeightsEntry
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint, checkpoint_of, raw_tensors
from hfshard.foreign.byte_runs import ForeignRun, ForeignTensor
from hfshard.foreign.foreign_shard import ForeignShard
from hfshard.format.file_names import WeightNames
from hfshard.pickles.plain_values import NotStored
from hfshard.tensors.stored_tensor import TensorLike, storage_id
from hfshard.training.restoring.spread_read import StateLayouts, read_local_parts
from hfshard.training.state.nested import find_in
from hfshard.training.state.optimizer import BY_OPTIONS


class NamedRun:
    """A run by name.

    Attributes:
        run: Where its tensors are.
    """

    def __init__(self, run: ForeignRun) -> None:
        """Read nothing yet."""
        self.run = run
        self._tensors: dict[int, ForeignTensor] = {}
        """Storage of a tensor on the meta device -> the tensor that it is in place of."""
        self._held: list[torch.Tensor] = []

    def parts(self, kinds: Collection[str]) -> dict[str, Any]:
        """Return the states of the run's parts by name.

        Args:
            kinds: Names of the parts that are restored; empty: all. A loss scaler is left out if it is not among them.
        """
        run = self.run
        model = {name: self._described(tensor) for name, tensor in run.weights.tensors.items()}
        model |= {alias: model[name] for alias, name in run.weights.aliases.items()}
        parts: dict[str, Any] = {"model": model}
        if run.optimizer is not None:
            parts["optimizer"] = self._optimizer()
        return parts | {
            name: value for name, value in run.parts.items() if not kinds or name in kinds or name != "scaler"
        }

    def _optimizer(self) -> dict[str, Any]:
        """Return what the optimizer's `state_dict()` would, had it been given names."""
        assert self.run.optimizer is not None
        # A count of steps that parameters shared would be increased for each of them.
        slots: dict[str, dict[str, Any]] = {name: deepcopy(dict(own)) for name, own in self.run.optimizer.slots.items()}
        for place, tensor in self.run.optimizer.table.tensors.items():
            name, _, slot = place.rpartition("/")
            slots.setdefault(name, {})[slot] = self._described(tensor)
        numbers: dict[str, int] = {}
        groups = []
        for group in self.run.optimizer.groups:
            numbers |= {name: len(numbers) + at for at, name in enumerate(group.parameters)}
            own = [numbers[name] for name in group.parameters]
            groups.append({**group.options, "params": own, "param_names": list(group.parameters)})
        state = {numbers[name]: own for name, own in slots.items()}
        return {"state": state, "param_groups": groups, BY_OPTIONS: not self.run.optimizer.has_groups}

    def extra(self) -> dict[str, Any]:
        """Return what the user has saved besides, but for objects that are more than data."""
        found = self.run.extra.items()
        return {name: one for name, one in found if find_in(one, lambda value: isinstance(value, NotStored)) is None}

    def check_values(self) -> None:
        """Do what `ForeignShard.check_values` does with the weights and the state of the optimizer.

        Raises:
            IntegrityError: Something differs.
        """
        states = {} if self.run.optimizer is None else self.run.optimizer.table.tensors
        with self._opened({**self.run.weights.tensors, **states}, {}, self.run.weights.trained) as shard:
            shard.check_values()

    def read(
        self, base: str, tensors: Mapping[str, torch.Tensor], layouts: StateLayouts | None
    ) -> dict[str, torch.Tensor]:
        """Read tensors that are on the meta device.

        Args:
            base: The set of tensors that they belong to, as in a checkpoint of hfshard.
            tensors: Their names in the state that is restored -> what `parts` returned.
            layouts: Those of the state, to read this rank's parts; None: tensors are read in full.
        """
        with self._checkpoint(tensors) as checkpoint:
            if layouts is not None:
                return read_local_parts(checkpoint, base, layouts, 0)
            return read_tensors(checkpoint, None, "cpu", "pread")

    @contextmanager
    def raw(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, TensorLike]]:
        """Yield the bytes of tensors that are on the meta device, to be read while the block runs.

        Args:
            tensors: Name -> what `parts` returned.
        """
        with self._checkpoint(tensors) as checkpoint:
            found = raw_tensors(checkpoint)
            tied = checkpoint.index.tied_names
            yield {name: found[tied.get(name, name)] for name in tensors}

    @contextmanager
    def _checkpoint(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[OpenCheckpoint]:
        """Open a checkpoint that has just these tensors, under these names."""
        first: dict[int, str] = {}
        aliases = {}
        for name, tensor in tensors.items():
            kept = first.setdefault(storage_id(tensor), name)
            if kept != name:
                aliases[name] = kept
        found = {name: self._tensors[storage] for storage, name in first.items()}
        names = WeightNames()
        with self._opened(found, aliases, {}) as shard:
            folder = LocalFolder(self.run.weights.directory)
            yield checkpoint_of(shard, folder, names, WeightsEntry("foreign", names.single))

    @contextmanager
    def _opened(
        self, tensors: Mapping[str, ForeignTensor], aliases: Mapping[str, str], trained: Mapping[str, ForeignTensor]
    ) -> Iterator[ForeignShard]:
        tables = [self.run.weights, *([] if self.run.optimizer is None else [self.run.optimizer.table])]
        sizes = {file: size for table in tables for file, size in table.sizes.items()}
        identities = {file: one for table in tables for file, one in table.identities.items()}
        records = dict.fromkeys(record for table in tables for record in table.records)
        used = {run.file for tensor in chain(tensors.values(), trained.values()) for run in tensor.runs}
        table = replace(
            self.run.weights,
            tensors=tensors,
            aliases=aliases,
            sizes={file: size for file, size in sizes.items() if file in used},
            identities=identities,
            records=tuple(record for record in records if record.file in used),
            trained=trained,
        )
        with closing(ForeignShard(table)) as shard:
            yield shard

    def _described(self, tensor: ForeignTensor) -> torch.Tensor:
        described = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self._tensors[storage_id(described)] = tensor
        self._held.append(described)  # as long as it is there, no other has its storage
        return described


def is_unread(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor on the meta device, in place of one of a run."""
    return isinstance(value, torch.Tensor) and value.is_meta
