"""DeepSpeed's checkpoints as tables of byte runs: ZeRO 1, 2, 3, universal ones, pipelines, and ones without ZeRO.

How parameters are cut, as seen in files of DeepSpeed 0.19.8 and read in its sources:

- ZeRO 1 and 2 put a group's parameters end to end, each with a gap after it that a file may name, and pad the end to a
  multiple of twice the ranks (older versions: of the ranks). Each rank has an equal partition, which is saved with or
  without the padding at the end.
- ZeRO 3 pads each parameter to a multiple of the ranks and cuts it there; a rank's parts are end to end, over all of
  its sub-groups.
- With round_robin_gradients, ZeRO 1 and 2 reorder the parameters of a group. The model's file has that order, but
  `param_slice_mappings` has the other one (a fault of DeepSpeed 0.19.8), and `ds_to_universal` cuts by it.
- A universal checkpoint has a folder for each trained parameter. What it has there besides them was converted to
  float32, also integers, so buffers and frozen parameters come from the model's file.
- In a pipeline, each stage is what a rank is without one, and the names of layer 2 begin with "2.".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any, Final, TypeVar

import torch

from hfshard._util.text import count_of, shorten_list
from hfshard.disk.safe_open import read_small
from hfshard.errors import (
    AmbiguousWeightsError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    MissingShardError,
    UnsafePathError,
)
from hfshard.foreign.byte_runs import ForeignGroup, ForeignOptimizer, ForeignRun, ForeignTable, ForeignTensor
from hfshard.foreign.deepspeed_files import (
    BaseState,
    ModelStates,
    OptimizerStates,
    Progress,
    Shapes,
    StateFiles,
    TensorInFile,
)
from hfshard.foreign.deepspeed_partitions import SplitGroups, SplitParameters, join_frozen
from hfshard.foreign.described_values import damaged, missing_rank
from hfshard.format.file_names import is_safe_file_name
from hfshard.format.parts_of_ranks import names_in

Rank = TypeVar("Rank", int, int | None)

_MODEL: Final = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
_OPTIMIZER: Final = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
_LAYER: Final = re.compile(r"layer_(\d{1,6})(?:-model_(\d{1,6}))?-model_states\.pt")
_IN_LAYER: Final = re.compile(r"([0-9]{1,6})\.")
"""Beginning of the names of a pipeline's parameters."""
_EXPERT: Final = re.compile(r"(?:(?:layer_\d+_)?expert|expp_rank)_\d+_mp_rank_\d+_(?:model|optim)_states\.pt")
_FILES: Final = (_MODEL, _OPTIMIZER, _LAYER, _EXPERT)

_UNIVERSAL: Final = "zero"
"""Folder with a universal checkpoint's parameters."""
_MASTER: Final = "fp32.pt"
_STATE: Final = "optimizer_state.pt"
"""File of a universal checkpoint's groups."""
_LATEST: Final = ("latest", "latest_universal")
"""Files that name the newest tag."""
_LATEST_BYTES: Final = 4096
_ON_NVME: Final = "offloaded_tensors"
"""Folder with copies of an optimizer's swap files."""
_ROUND_ROBIN: Final = "round_robin_gradients"
"""Setting with which ranks reduce gradients in turn."""
_TIED: Final = "tied_modules."
"""Prefix of a pipeline's parameters that several layers share."""
_SHOWN: Final = 8
"""The most names in a message."""


def read_deepspeed(directory: str, tag: str, *, masters: bool = True) -> ForeignTable:
    """Read where the weights and buffers of a DeepSpeed checkpoint are; of them, no byte is read.

    Args:
        directory: The folder of a tag, or the one above it.
        tag: The result of `find_tag` for it.
        masters: Return the float32 masters, where there are any. False: the weights as they were trained.

    Raises:
        InvalidArgumentError: The parts cannot be joined: experts, tensor parallel slices, and others, by name. Or the
            weights as trained are wanted of ZeRO-3, which does not save them.
        MissingShardError: A rank's file is missing.
        DamagedCheckpointError: The files don't fit together, or are not as DeepSpeed writes them.
        UnsafePickleError, UnsafePathError: A file names what no checkpoint needs, or leads out of the directory.
    """
    return _Reader(directory, tag, masters).read()


def read_deepspeed_run(directory: str, tag: str) -> ForeignRun:
    """Read a run of DeepSpeed by names: masters, the optimizer's state, and what the model's file has besides weights.

    Args:
        directory, tag: As in `read_deepspeed`.

    Raises:
        InvalidArgumentError: The optimizer's state is by position, or not one value for each element.
        What `read_deepspeed` raises.
    """
    return _Reader(directory, tag, masters=True, with_state=True).read_run()


def find_tag(directory: str) -> str | None:
    """Find the folder with a DeepSpeed checkpoint's files.

    Returns:
        Its name; "" for the directory itself; None if there are no such files.

    Raises:
        AmbiguousWeightsError: There are several, and none is the latest.
        CheckpointNotFoundError: The latest one is missing, but others exist.
        UnsafePathError: The file `latest` names something other than a folder in the directory.
    """
    names = names_in(directory)
    if _has_states(names):
        return ""
    folders = {name: os.path.join(directory, name) for name in names}
    tags = [name for name, folder in folders.items() if os.path.isdir(folder) and _has_states(names_in(folder))]
    if not tags:
        return None
    for name in _LATEST:
        path = os.path.join(directory, name)
        if not os.path.lexists(path):
            continue
        raw, _ = read_small(path, directory, _LATEST_BYTES)
        latest = raw.decode("utf-8", "replace").strip()
        if "/" in latest or not is_safe_file_name(latest):
            raise UnsafePathError(
                f"'{path}' names {latest!r:.200}, which is not a folder in '{directory}'. Pass the folder of a tag: "
                f"{_paths(directory, tags)}.",
                path=path,
                actual=latest,
            )
        if latest in tags:
            return latest
        raise CheckpointNotFoundError(
            f"'{path}' names '{latest}', but '{directory}' has no such DeepSpeed checkpoint. Copy it there, or pass "
            f"another one: {_paths(directory, tags)}.",
            path=path,
        )
    if len(tags) > 1:
        raise AmbiguousWeightsError(
            f"'{directory}' has {len(tags)} DeepSpeed checkpoints, and no file 'latest' that names one of them. Pass "
            f"one: {_paths(directory, tags)}.",
            path=directory,
        )
    return tags[0]


def _has_states(names: Iterable[str]) -> bool:
    """Return whether files of DeepSpeed are among the names."""
    return any(pattern.fullmatch(name) for name in names for pattern in _FILES)


def _paths(directory: str, names: Sequence[str]) -> str:
    return shorten_list([os.path.join(directory, name) for name in names], _SHOWN, quote=True)


class _Reader:
    """Reader of the files of one tag."""

    def __init__(self, directory: str, tag: str, masters: bool, *, with_state: bool = False) -> None:
        """List the files.

        Args:
            directory, tag: The checkpoint.
            masters: As in `read_deepspeed`.
            with_state: Whether the optimizer's state is read, too.

        Raises:
            InvalidArgumentError: Some have what cannot be read.
            DamagedCheckpointError: There are two of one rank.
        """
        self.directory = directory
        self.tag = tag
        self.folder = os.path.join(directory, tag) if tag else directory
        self.masters = masters
        self.with_state = with_state
        self.state: dict[str, ForeignTensor] = {}
        """Parameter, "/" and slot -> tensor of the optimizer's state."""
        self.slots: dict[str, dict[str, Any]] = {}
        self.groups: list[ForeignGroup] = []
        self.scaler: Mapping[str, Any] = {}
        self.files = StateFiles(directory)
        names = sorted(os.listdir(self.folder))
        self.models: dict[int, dict[int | None, str]] = {}
        """Model-parallel rank -> its files; None in place of a rank: the complete weights."""
        self.optimizers: dict[int, dict[int, str]] = {}
        self.layers: dict[int, str] = {}
        self.tensors: dict[str, ForeignTensor] = {}
        self.aliases: dict[str, str] = {}
        self.trained: dict[str, ForeignTensor] = {}
        """Parameter with a master -> its weight in the model's file or in a layer's."""
        self.kind = "without ZeRO"
        self.version: tuple[str, str] | None = None
        """A file, and the version of DeepSpeed that wrote it."""
        if any(map(_EXPERT.fullmatch, names)):
            raise self._unreadable("experts in parts, a file for each")
        for name in names:
            if (found := _LAYER.fullmatch(name)) is not None:
                if int(found[2] or 0) > 0:
                    raise self._tensor_parallel("several")
                self._add(self.layers, int(found[1]), name)
            elif (found := _MODEL.fullmatch(name)) is not None:
                rank = None if found[1] is None else int(found[1])
                self._add(self.models.setdefault(int(found[2]), {}), rank, name)
            elif (found := _OPTIMIZER.fullmatch(name)) is not None:
                self._add(self.optimizers.setdefault(int(found[2]), {}), int(found[1]), name)
        self.is_universal = not self.optimizers and os.path.isdir(os.path.join(self.folder, _UNIVERSAL))

    def _add(self, found: dict[Rank, str], key: Rank, name: str) -> None:
        if key in found:
            raise damaged(self.folder, f"'{found[key]}' and '{name}' are two files of one rank, left by different runs")
        found[key] = name

    def read(self) -> ForeignTable:
        """Read all files, check that they fit together, and return the table."""
        states = {rank: self._read_models(files) for rank, files in sorted(self.models.items())}
        self._check_stages(states)
        for rank, models in states.items():
            self._add_stage(rank, models)
        trained = chain.from_iterable(shapes for models in states.values() for shapes in models[0].groups or ())
        self._check_layers(trained)
        self._add_layers()
        return ForeignTable(
            directory=self.directory,
            framework=f"DeepSpeed {self.kind}" + (f", {len(states)} pipeline stages" if len(states) > 1 else ""),
            tensors=self.tensors,
            sizes={file: identity[2] for file, identity in self.files.identities.items()},
            identities=self.files.identities,
            aliases=self.aliases,
            records=self.files.records,
            trained=self.trained,
        )

    def read_run(self) -> ForeignRun:
        """Read all files like `read`, and return the run."""
        weights = self.read()
        file = self._path(next(iter(self.models[min(self.models)].values())))
        progress = self.files.read_progress(file)
        if progress.has_optimizer and not self.groups:
            path = os.path.join(self.directory, file)
            raise InvalidArgumentError(
                f"'{self.folder}' has an optimizer's state without ZeRO, which has no names. Nothing was loaded. Pass "
                f"the file, which is matched by order: '{path}'. For the weights alone: hfshard convert --weights.",
                path=path,
            )
        table = replace(weights, tensors=self.state, aliases={}, trained={}) if self.groups else None
        return ForeignRun(
            weights=weights,
            optimizer=None if table is None else ForeignOptimizer(table, tuple(self.groups), self.slots),
            files={os.path.join(self.directory, file): one for file, one in self.files.identities.items()},
            step=progress.step,
            parts=_parts(progress, self.scaler),
            extra=progress.client,
        )

    def _path(self, name: str) -> str:
        return f"{self.tag}/{name}" if self.tag else name

    def _read_models(self, files: Mapping[int | None, str]) -> list[ModelStates]:
        """Read the model files of one pipeline stage, in the order of the ranks."""
        if None in files and len(files) > 1:
            shown = shorten_list(list(files.values()), _SHOWN, quote=True)
            raise damaged(self.folder, f"it has files of two runs, with ZeRO-3 and without it: {shown}")
        ranks = sorted((rank, name) for rank, name in files.items() if rank is not None)
        names = [name for _, name in ranks] or list(files.values())
        states = [self.files.read_model(self._path(name)) for name in names]
        if ranks:
            self._check_ranks(dict(ranks), self._count_of_ranks(states), "model")
        for one in states:
            self._check_version(one)
            orders = [[list(shapes) for shapes in of_rank.groups or ()] for of_rank in (one, states[0])]
            is_same = one.groups == states[0].groups and one.frozen_shapes == states[0].frozen_shapes
            if not is_same or orders[0] != orders[1]:
                raise damaged(self.folder, f"'{one.file}' and '{states[0].file}' have parameters of different shapes")
        return states

    def _count_of_ranks(self, states: Sequence[ModelStates]) -> int:
        """Return the number of ranks of ZeRO-3, which the model files do not state: that of the optimizer files."""
        files = self.optimizers.get(0)
        if not files:
            return len(states)
        return max(self.files.read_optimizer(self._path(files[min(files)])).counts, default=0)

    def _check_stages(self, states: Mapping[int, Sequence[ModelStates]]) -> None:
        """Check that all pipeline stages are there, and that no tensor is split between model-parallel ranks."""
        if not states:
            if self.optimizers or self.is_universal:
                raise self._missing("mp_rank_00_model_states.pt", "file of the weights")
            return
        first = states[min(states)][0]
        parallel = max(first.model_ranks or 1, max(states) + 1)
        is_split = first.tensor_ranks > 1
        is_split |= first.weights is not None and parallel > 1  # a pipeline's are in files of layers
        if is_split and not self.is_universal:
            raise self._tensor_parallel(str(max(first.tensor_ranks, parallel)))
        if first.weights is None and not self.layers and not self.is_universal:
            raise self._missing("layer_00-model_states.pt", "files of the pipeline's layers")
        for rank in chain(range(parallel), self.optimizers):
            if rank not in states:
                raise self._missing(f"mp_rank_{rank:02d}_model_states.pt", f"file of pipeline stage {rank}")

    def _add_stage(self, rank: int, models: Sequence[ModelStates]) -> None:
        """Add the tensors of one pipeline stage, or of the complete model."""
        first = models[0]
        is_partitioned = None not in self.models[rank]
        self._check_settings(first, is_partitioned)
        trained = self._trained(rank, models, is_partitioned)
        frozen = join_frozen(self.folder, models) if is_partitioned else {}
        weights = first.weights or {}
        added = {}
        aliases = dict(first.shared) or ({} if is_partitioned else _tied(weights))
        for name in dict.fromkeys(chain(weights, trained, frozen)):
            if name in trained:
                added[name] = trained[name]
            elif name in frozen:
                added[name] = frozen[name]
            elif not _is_alias(name, aliases, weights, is_partitioned):
                added[name] = self._weight(name, weights[name], first, is_partitioned)
        for name, tensor in added.items():
            present = self.tensors.setdefault(name, tensor)  # stages train what they share alike
            if present.shape != tensor.shape:
                raise damaged(self.folder, f"pipeline stages have different shapes of parameter '{name}'", name)
        self.aliases |= {alias: name for alias, name in aliases.items() if alias not in added and name in added}

    def _weight(self, name: str, piece: TensorInFile, models: ModelStates, is_partitioned: bool) -> ForeignTensor:
        """Return a tensor that one file has complete."""
        if is_partitioned and piece.tensor.shape == (0,) and name not in models.buffers:
            raise damaged(
                self.folder,
                f"no file has the values of parameter '{name}', and none is tied to it",
                name,
                hint="DeepSpeed before 0.9 does not save which ones are tied: load it there, and save the weights.",
            )
        return piece.complete()

    def _trained(self, rank: int, models: Sequence[ModelStates], is_partitioned: bool) -> Mapping[str, ForeignTensor]:
        """Return the masters of one pipeline stage; nothing if there are none, or they are not wanted."""
        first = models[0]
        groups = first.groups
        if groups is None:
            return {}
        if self.is_universal:
            self.kind = "universal checkpoint"
        elif not is_partitioned:
            self.kind = "ZeRO without masters"
        if not self.masters:
            if is_partitioned or (first.weights is None and not self.layers):
                raise InvalidArgumentError(
                    f"'{self.folder}' has no weights as they were trained: DeepSpeed has saved the float32 masters "
                    "alone. Leave out key='module', and cast them: hfshard convert --dtype bfloat16.",
                    path=self.folder,
                )
            return {}
        is_reordered = bool(first.settings.get(_ROUND_ROBIN)) and not is_partitioned
        if self.is_universal:
            if is_reordered:
                raise damaged(
                    self.folder,
                    f"DeepSpeed's ds_to_universal takes wrong values of runs with {_ROUND_ROBIN}, such as this one",
                    hint="Load the save that was converted; it has the right ones.",
                )
            if len(self.models) > 1 and not set(first.weights or {}) <= {*chain(*groups), *first.shared}:
                raise self._tensor_parallel(str(len(self.models)))
            if self.with_state:
                self._add_universal_state(groups, first)
            return {
                name: self._universal(name, shape, first, _MASTER)
                for shapes in groups
                for name, shape in shapes.items()
            }
        if rank not in self.optimizers:
            if is_partitioned or self.optimizers:
                raise self._missing(f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt", "file of rank 0's masters")
            return {}
        partitions = self._partitions(rank)
        if is_reordered:
            partitions = [replace(one, slices=()) for one in partitions]
        if is_partitioned != (partitions[0].stage == 3):
            raise damaged(self.folder, "its model files and optimizer files are of different stages of ZeRO")
        stage = partitions[0].stage
        self.kind = f"{'BF16_Optimizer' if stage is None else f'ZeRO-{stage}'}, {count_of(len(partitions), 'rank')}"
        if not is_partitioned and not len(partitions[0].masters) == len(partitions[0].counts) == len(groups):
            raise damaged(self.folder, f"'{partitions[0].file}' has other groups than '{first.file}'")
        layout = SplitParameters if is_partitioned else SplitGroups
        split = layout(self.folder, groups, partitions)
        if self.with_state:
            self._add_state(split, groups, partitions)
        found = split.join([one.masters for one in partitions])
        if is_partitioned:
            return found
        for name, tensor in found.items():
            weight = (first.weights or {}).get(name)
            if weight is not None and weight.tensor.shape != tensor.shape:
                raise damaged(self.folder, f"'{first.file}' has two shapes of parameter '{name}'", name)
            if weight is not None:
                self.trained[name] = weight.complete()
        return found

    def _partitions(self, rank: int) -> list[OptimizerStates]:
        """Read the optimizer files of one pipeline stage, in the order of the ranks."""
        files = self.optimizers[rank]
        found = {number: self.files.read_optimizer(self._path(name)) for number, name in sorted(files.items())}
        first = found[min(found)]
        if not first.counts:
            raise damaged(self.folder, f"'{first.file}' has no groups")
        count = max(first.counts)
        if any(one.has_experts for one in found.values()) or min(first.counts) < count:
            raise self._unreadable("experts in parts, whose groups have fewer ranks than the others")
        for one in found.values():
            self._check_version(one)
            if max(one.counts, default=0) != count:
                raise damaged(
                    self.folder,
                    f"'{first.file}' was saved by {count_of(count, 'rank')}, and '{one.file}' by "
                    f"{max(one.counts, default=0)}: one of them is a leftover of another run",
                    hint="Move it away.",
                )
            if one.stage != first.stage or one.counts != first.counts:
                raise damaged(self.folder, f"'{one.file}' and '{first.file}' have different groups")
            if any(first.steps.get(place, step) != step for place, step in one.steps.items()):
                raise damaged(
                    self.folder,
                    f"'{one.file}' and '{first.file}' are of different optimizer steps: a save was interrupted, or "
                    "files of several saves were mixed",
                    hint="Copy all ranks' files from one save.",
                )
            if len(one.masters) != len(first.masters):
                raise damaged(self.folder, f"'{one.file}' and '{first.file}' have different numbers of groups")
        self._check_ranks(files, count, "optimizer")
        return list(found.values())

    def _add_state(
        self, split: SplitGroups | SplitParameters, groups: Sequence[Shapes], partitions: Sequence[OptimizerStates]
    ) -> None:
        """Add the optimizer's state of one pipeline stage, which lies as the masters do."""
        states = [self.files.read_state(one.file, one.stage) for one in partitions]
        first = states[0]
        self.scaler = first.scaler
        numbers = [_numbers(group, self.folder, first) for group in first.groups]
        count = len(partitions[0].masters)
        if len(groups) == count:  # ZeRO-3 lists the parameters of each sub-group
            owners = [[groups[one] for one in own if one < count] for own in numbers]
        else:
            owners = [[shapes] for shapes in groups]
        if len(numbers) != len(owners) or sorted(chain(*numbers)) != [*range(count)]:
            raise damaged(self.folder, f"'{first.file}' has other groups of the optimizer than of the masters")
        for one in states:
            if one.counts.keys() != first.counts.keys() or any(
                one.tensors[number].keys() != slots.keys() for number, slots in first.tensors.items()
            ):
                raise damaged(self.folder, f"'{one.file}' and '{first.file}' have different states of the optimizer")
        self._check_numels(split, states)
        for shapes, options, own in zip(owners, first.groups, numbers, strict=True):
            names = [*chain(*shapes)]
            counts = [_comparable(one.counts.get(number, {})) for one in states for number in own]
            if any(one != counts[0] for one in counts):
                raise damaged(self.folder, "its files have different counts in the optimizer's state", names[0])
            self._add_group(names, options, first.counts.get(own[0], {}) if own else {})
        slots = {number: frozenset(one) for number, one in first.tensors.items()}
        for slot in sorted(set().union(*slots.values())):
            has_slot = [slot in slots.get(number, ()) for number in range(len(partitions[0].masters))]
            pieces = [
                [one.tensors[number][slot] if has else None for number, has in enumerate(has_slot)] for one in states
            ]
            joined = split.join(pieces)
            for name, tensor in joined.items():
                self.state.setdefault(f"{name}/{slot}", tensor)

    def _check_numels(self, split: SplitGroups | SplitParameters, states: Sequence[BaseState]) -> None:
        for rank, one in enumerate(states):
            for number, slots in one.tensors.items():
                for slot, piece in slots.items():
                    if len(piece.tensor.shape) != 1 or not split.fits(rank, number, piece.tensor.numel):
                        raise InvalidArgumentError(
                            f"'{piece.file}' has '{slot}' of shape {list(piece.tensor.shape)} in the optimizer's "
                            "state, which is not one value for each element of the parameters, so that hfshard cannot "
                            "restore it. Nothing was loaded. For the weights alone: hfshard convert --weights.",
                            path=os.path.join(self.directory, piece.file),
                        )

    def _add_group(self, shapes: Iterable[str], options: Mapping[str, Any], counts: Mapping[str, Any]) -> None:
        """Add a group of the optimizer; one with the options of a previous stage's belongs to that."""
        options = {key: value for key, value in options.items() if key != "params"}
        counts = dict(counts)
        if options and "step" in options:  # as apex and DeepSpeed's FusedAdam count
            counts.setdefault("step", options.pop("step"))
        if options.get("bias_correction") is True:  # what DeepSpeed's Adam lets one turn off
            del options["bias_correction"]
            options.setdefault("amsgrad", False)
        self.groups.append(ForeignGroup(tuple(shapes), options))
        if counts:
            self.slots |= dict.fromkeys(shapes, counts)

    def _add_universal_state(self, groups: Sequence[Shapes], models: ModelStates) -> None:
        state = self.files.read_universal_state(self._path(f"{_UNIVERSAL}/{_STATE}"))
        self.scaler = state.scaler
        if len(state.groups) != len(groups):
            raise damaged(self.folder, f"'{_STATE}' has other groups than '{models.file}'")
        for shapes, own in zip(groups, state.groups, strict=True):
            numbers = _numbers(own, self.folder, state)
            self._add_group(shapes, own, state.counts.get(numbers[0], {}) if numbers else {})
            for name, shape in shapes.items():
                counts = dict(self.slots.get(name, {}))
                folder = f"{_UNIVERSAL}/{name}" if is_safe_file_name(name) else _UNIVERSAL
                for file in sorted(os.listdir(os.path.join(self.folder, folder))):
                    slot = file.removesuffix(".pt")
                    if slot == file or file == _MASTER:
                        continue
                    value = self.files.read_universal_slot(self._path(f"{folder}/{file}"))
                    if isinstance(value, TensorInFile):
                        self.state[f"{name}/{slot}"] = self._universal(name, shape, models, file)
                    else:
                        counts[slot] = value
                if counts:
                    self.slots[name] = counts

    def _universal(self, name: str, shape: tuple[int, ...], models: ModelStates, file: str) -> ForeignTensor:
        """Return a parameter of a universal checkpoint, which has a folder of its own."""
        if not is_safe_file_name(name):
            raise UnsafePathError(
                f"'{models.file}' has a parameter {name!r:.200}, which would be a folder outside of '{self.folder}'. "
                "Do not load it unless you know its origin.",
                path=models.file,
                actual=name,
            )
        piece, is_cut = self.files.read_universal(self._path(f"{_UNIVERSAL}/{name}/{file}"))
        if piece.tensor.shape == (prod(shape),):  # as ZeRO-3's are converted
            return replace(piece.complete(), shape=shape)
        is_joined = len(self.models) > 1 and models.weights is not None
        if piece.tensor.shape != shape and not is_cut and not is_joined:
            raise damaged(self.folder, f"'{piece.file}' and '{models.file}' have different shapes", name)
        return piece.complete()

    def _check_layers(self, trained: Iterable[str]) -> None:
        """Check that each layer of a pipeline that has trained parameters has its file, which has its buffers."""
        needed = {int(found[1]) for name in trained if (found := _IN_LAYER.match(name)) is not None}
        for number in sorted(needed - self.layers.keys() if self.layers else ()):
            raise self._missing(
                f"layer_{number:02d}-model_00-model_states.pt", f"file of the pipeline's layer {number}"
            )

    def _add_layers(self) -> None:
        """Add what the files of a pipeline's layers have besides the masters; all of it if there are none."""
        tied: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, tensor in self.tensors.items():
            if name.startswith(_TIED):
                key, _, rest = name.removeprefix(_TIED).partition(".")
                tied.setdefault(key, {})[rest] = tensor.shape
        layers = {number: self.files.read_layer(self._path(file)) for number, file in sorted(self.layers.items())}
        keys = {number: self._tied_key(number, pieces, tied) for number, pieces in layers.items()}
        checksums = {
            key: {_checksums(layers[number]) for number, found in keys.items() if found == key}
            for key in set(keys.values())
        }
        for number, pieces in layers.items():
            tied_to = keys[number]
            if tied_to is not None and len(checksums[tied_to]) == 1:  # else one has just the shapes: a frozen layer
                self.aliases |= {f"{number}.{name}": f"{_TIED}{tied_to}.{name}" for name in pieces}
                continue
            for name, piece in pieces.items():
                weight = piece.complete()
                master = self.tensors.setdefault(f"{number}.{name}", weight)
                if self.optimizers and master is not weight and master.shape == weight.shape:
                    self.trained[f"{number}.{name}"] = weight

    def _tied_key(
        self, number: int, pieces: Mapping[str, TensorInFile], tied: Mapping[str, Mapping[str, tuple[int, ...]]]
    ) -> str | None:
        """Return the key of the only tied layer that has the shapes of a layer without masters of its own."""
        shapes = {name: piece.tensor.shape for name, piece in pieces.items()}
        found = [key for key, parameters in tied.items() if shapes and parameters == shapes]
        is_new = all(f"{number}.{name}" not in self.tensors for name in pieces)
        return found[0] if len(found) == 1 and is_new else None

    def _check_settings(self, models: ModelStates, is_partitioned: bool) -> None:
        settings = models.settings
        offload = settings.get("offload_optimizer")
        is_on_nvme = isinstance(offload, dict) and offload.get("device") == "nvme"
        parameters = settings.get("offload_param")
        is_on_nvme |= isinstance(parameters, dict) and parameters.get("device") == "nvme"
        if os.path.isdir(os.path.join(self.folder, _ON_NVME)) or (is_on_nvme and is_partitioned):
            raise self._unreadable("weights or optimizer states on NVMe")
        group = settings.get("mics_shard_size")
        if is_partitioned and type(group) is int and group > 0:
            raise self._unreadable("partitions within groups of ranks (MiCS)")
        if is_partitioned and settings.get("zero_quantized_nontrainable_weights") and models.frozen_shapes:
            raise self._unreadable("quantized frozen weights (ZeRO++)")

    def _check_version(self, states: ModelStates | OptimizerStates) -> None:
        if states.version is None:
            return
        if self.version is None:
            self.version = states.file, states.version
        file, version = self.version
        if states.version != version:
            raise damaged(
                self.folder,
                f"'{file}' was written by DeepSpeed {version}, and '{states.file}' by {states.version}: one of them is "
                "a leftover of another run",
                hint="Move it away.",
            )

    def _check_ranks(self, files: Mapping[int, str], count: int, what: str) -> None:
        """Check that there is a file of each rank, and no other."""
        more = [name for rank, name in sorted(files.items()) if rank >= count]
        if more:
            raise damaged(
                self.folder,
                f"it was saved by {count_of(count, 'rank')}, but has {shorten_list(more, _SHOWN, quote=True)}, too: "
                "leftovers of a larger run",
                hint="Move them away.",
            )
        for rank in range(count):
            if rank not in files:
                name = files[min(files)].replace(f"_pp_rank_{min(files)}_", f"_pp_rank_{rank}_")
                raise missing_rank(self.folder, f"{what} files", files, count, rank, name)

    def _missing(self, name: str, what: str) -> MissingShardError:
        return MissingShardError(
            f"'{self.folder}' lacks the {what} ('{name}'). Copy it there: every rank's disk may have its own.",
            path=os.path.join(self.folder, name),
        )

    def _tensor_parallel(self, count: str) -> InvalidArgumentError:
        return self._unreadable(f"tensor parallel slices ({count}) without a rule how to join them")

    def _unreadable(self, what: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"'{self.folder}' has {what}, which hfshard cannot read. Nothing was loaded. Convert it with DeepSpeed's "
            "ds_to_universal and load its output; or load it with DeepSpeed, and save the weights there.",
            path=self.folder,
        )


def _is_alias(name: str, aliases: Mapping[str, str], weights: Mapping[str, TensorInFile], is_partitioned: bool) -> bool:
    """Return whether a name has no data of its own; DeepSpeed takes all tensors without elements for tied.

    The parameter with the data may be left out, if it is frozen. Then a file with complete weights has them here.
    """
    if name not in aliases or is_partitioned:
        return name in aliases
    target = weights.get(aliases[name])
    return target is not None and target.tensor.numel > 0 and _has_same_bytes(weights[name], target)


def _has_same_bytes(piece: TensorInFile, other: TensorInFile) -> bool:
    """Return whether two tensors of a file have one place, or copies with equal checksums."""
    a, b = piece.tensor, other.tensor
    is_copy = a.first == b.first and a.storage.size == b.storage.size and bool(a.storage.crc32)
    is_copy &= a.storage.crc32 == b.storage.crc32
    return (a.shape, a.dtype) == (b.shape, b.dtype) and (a.offset == b.offset or is_copy)


def _tied(weights: Mapping[str, TensorInFile]) -> dict[str, str]:
    """Find names of one file that share their bytes: name -> the first one with them."""
    first: dict[tuple[object, ...], str] = {}
    found = {}
    for name, piece in weights.items():
        place = (piece.tensor.offset, piece.tensor.dtype, piece.tensor.shape)
        if piece.tensor.numel and first.setdefault(place, name) != name:
            found[name] = first[place]
    return found


def _checksums(pieces: Mapping[str, TensorInFile]) -> tuple[tuple[str, int | None], ...]:
    """Return the checksums of a layer's tensors."""
    return tuple((name, piece.tensor.storage.crc32) for name, piece in sorted(pieces.items()))


def _numbers(group: Mapping[str, Any], folder: str, state: BaseState) -> list[int]:
    """Return the numbers of a group's flat tensors."""
    numbers = group.get("params")
    if not isinstance(numbers, list) or not all(type(one) is int for one in numbers):
        raise damaged(folder, f"'{state.file}' has a group of the optimizer without the numbers of its states")
    return numbers


def _comparable(counts: Mapping[str, Any]) -> dict[str, Any]:
    return {slot: (one.dtype, one.item()) if isinstance(one, torch.Tensor) else one for slot, one in counts.items()}


def _parts(progress: Progress, scaler: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a run besides model and optimizer, by their names in a `TrainingState`."""
    found = {}
    if isinstance(progress.scheduler, dict):
        found["scheduler"] = progress.scheduler
    if scaler:
        found["scaler"] = dict(scaler)
    return found
