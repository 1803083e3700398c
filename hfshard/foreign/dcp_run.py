"""Runs that torch.distributed.checkpoint (DCP) has saved: weights, an optimizer by parameter name, and other values.

An optimizer is nested as `get_optimizer_state_dict` returns it, or flat, with a name such as "state.up.weight.exp_avg"
for each value. A flat one has options for each parameter, and no groups.

Source: torch `distributed/checkpoint/{state_dict,_traverse}.py`.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch

from hfshard._util.text import shorten_list
from hfshard.disk.safe_open import Identity, identity_of
from hfshard.errors import DamagedCheckpointError, InvalidArgumentError, UnsafePickleError
from hfshard.foreign.byte_runs import ForeignGroup, ForeignOptimizer, ForeignRun, ForeignTable
from hfshard.foreign.dcp_directory import SavedItem, candidates, choose_weights, read_metadata, table_of, tensors_below
from hfshard.foreign.dcp_items import open_items
from hfshard.foreign.foreign_shard import ForeignShard
from hfshard.format.parts_of_ranks import DCP_METADATA
from hfshard.pickles.described_file import reject_code
from hfshard.pickles.plain_values import PlainValues, read_plain_file
from hfshard.pickles.read_pickle import iter_nested
from hfshard.shards.ranged_shard import read_full_tensors

Path = tuple[str | int, ...]
"""Keys of a value, the outermost first."""

_GROUPS: Final = re.compile(r"(?:(.*?)\.)?param_groups(?:\.|$)")
"""Name of an option of an optimizer's group, or of all groups; group 1 is the optimizer's key."""

_META: Final = "meta.pt"
"""File in which Lightning saves all that has no tensors of the model or the optimizer."""

_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor that was not read."""

    fqn: str


def read_dcp_run(
    directory: str,
    key: str | None = None,
    *,
    optimizer_key: str | None = None,
    folder: str = "",
    optimizer_folder: str | None = None,
) -> ForeignRun:
    """Read a run without reading its tensors, except for those of other values; weights alone have no other values.

    Args:
        directory: The directory with `.metadata`, or above it.
        key: The key of the weights, as in `read_dcp_directory`.
        optimizer_key: The key of the optimizer; None: there must be only one.
        folder: The folder of the directory that has the model; empty: the directory itself.
        optimizer_folder: The one that has the optimizer; None: the same.

    Raises:
        CheckpointNotFoundError, AmbiguousWeightsError: There are no weights, or several sets of them.
        InvalidArgumentError: There are several optimizers; or the optimizer's parameters have no names.
        UnsafePickleError: An item asks for anything but plain data. Nothing of it was run.
        UnsafePathError, DamagedCheckpointError: A file is missing, incomplete, or outside of the directory.
    """
    saved = _SavedDirectory(directory, folder)
    chosen_key = choose_weights(saved.metadata, key, saved.path)
    names = tensors_below(saved.metadata, chosen_key)
    weights = saved.table(names)
    other = saved if optimizer_folder is None else _SavedDirectory(directory, optimizer_folder)
    found = other.optimizers(set(names.values()) if other is saved else set())
    chosen = next(iter(found), None) if optimizer_key is None else optimizer_key
    if chosen not in {None, *found} or (optimizer_key is None and len(found) > 1):
        has = shorten_list(sorted(found), _SHOWN, quote=True) or "none"
        raise InvalidArgumentError(
            f"'{other.path}' has the optimizers {has}. Nothing was read. Pass the key of one: "
            "keys={'optimizer': ...}; hfshard reads one optimizer.",
            path=other.path,
        )
    files = {**saved.files, **other.files}
    if chosen is None:
        return ForeignRun(weights=weights, optimizer=None, files=files)
    optimizer = other.optimizer(found[chosen])
    sets = [tensors_below(saved.metadata, one) for one in {chosen_key, *candidates(saved.metadata)}]
    taken = {fqn for one in sets for fqn in one.values()}
    if other is saved:
        taken |= {fqn for paths in found.values() for fqn in paths.values()}
    extra = saved.values({path: fqn for fqn, path in saved.metadata.paths.items() if fqn not in taken})
    for part in chosen_key.split(".")[:-1]:  # what is next to the weights
        inner = extra.pop(part, {})
        extra |= inner if isinstance(inner, dict) else {part: inner}
    if os.path.isfile(meta := os.path.join(saved.path, _META)):
        more = read_plain_file(meta, saved.path, strict=False, verify="full")
        files[meta] = more.identity
        value = more.copied(more.value, _META)
        extra |= value if isinstance(value, dict) else {}
    return ForeignRun(weights=weights, optimizer=optimizer, files=files, extra=extra)


class _SavedDirectory:
    """A directory, or a folder of it, and the values that are read from it."""

    def __init__(self, directory: str, folder: str) -> None:
        self.directory, self.folder = directory, folder
        self.path = path = os.path.join(directory, folder) if folder else directory
        self.files: dict[str, Identity] = {}
        self._note(DCP_METADATA)
        self.metadata = read_metadata(path)
        files = {chunk.file for tensor in self.metadata.tensors.values() for chunk in tensor.chunks}
        for file in sorted(files | {item.file for item in self.metadata.values.values()}):
            self._note(file)

    def table(self, names: Mapping[str, str]) -> ForeignTable:
        """Return the table of some tensors, as `table_of` does."""
        return table_of(self.directory, self.metadata, names, self.folder)

    def optimizers(self, weights: Collection[str]) -> dict[str, dict[Path, str]]:
        """Find the optimizers: key -> keys of a value in the optimizer -> joined name."""
        others = {fqn: path for fqn, path in self.metadata.paths.items() if fqn not in weights}
        matches = (_GROUPS.match(_text(path)) for path in others.values())
        found: dict[str, dict[Path, str]] = {key: {} for key in sorted({one[1] or "" for one in matches if one})}
        for fqn, path in others.items():
            for key, paths in found.items():
                below = _below(path, key)
                if below is not None and (key or str(below[0]).partition(".")[0] in ("state", "param_groups")):
                    paths[below] = fqn
                    break
        return found

    def optimizer(self, paths: Mapping[Path, str]) -> ForeignOptimizer:
        """Read an optimizer; its tensors are not read."""
        tree = self._tree(paths)
        is_flat = tree.keys().isdisjoint({"state", "param_groups"})
        state, groups = self._flat(tree) if is_flat else self._nested(tree)
        counts = Counter(name for group in groups for name in group.parameters)
        if unknown := [name for name in state if name not in counts]:
            raise self._damaged(
                f"its optimizer has a state of '{unknown[0]}', which is in no group. With FSDP1, groups chosen "
                "by the shapes of parameters differ between ranks: choose them by name"
            )
        if twice := [name for name, count in counts.items() if count > 1]:
            raise self._damaged(f"its optimizer has '{twice[0]}' in two groups")
        tensors: dict[str, str] = {}
        slots: dict[str, dict[str, Any]] = {}
        for name, own in state.items():
            for slot, value in own.items():
                if isinstance(value, _Stored):
                    tensors[f"{name}/{slot}"] = value.fqn
                elif isinstance(value, dict | list):
                    raise InvalidArgumentError(
                        f"'{self.path}' has a nested state '{slot}' of '{name}' in its optimizer, which hfshard cannot "
                        "read. Resume it in the program that saved it, and save there: manager.save(step, state).",
                        path=self.path,
                        fqn=name,
                    )
                else:
                    slots.setdefault(name, {})[slot] = value
        return ForeignOptimizer(self.table(tensors), groups, slots, has_groups=not is_flat)

    def values(self, paths: Mapping[Path, str]) -> dict[str, Any]:
        """Read values, nested as they were saved, with their tensors in memory."""
        tree: dict[str, Any] = self._with_tensors(self._tree(paths))
        return tree

    def _tree(self, paths: Mapping[Path, str]) -> dict[str, Any]:
        """Nest values by their keys."""
        plain = self._plain({fqn: self.metadata.values[fqn] for fqn in paths.values() if fqn in self.metadata.values})
        leaves = {path: plain[fqn] if fqn in plain else _Stored(fqn) for path, fqn in paths.items()}
        try:
            tree = _nest(leaves)
        except (KeyError, ValueError) as error:
            raise self._damaged(f"the keys of its values do not fit together ({error!r:.200})") from error
        if not isinstance(tree, dict):
            raise self._damaged("its values have numbers as keys")
        return tree

    def _plain(self, items: Mapping[str, SavedItem]) -> dict[str, Any]:
        """Read values that are not tensors."""
        by_file: dict[str, list[str]] = defaultdict(list)
        for fqn, item in items.items():
            by_file[item.file].append(fqn)
        found = {}
        for file, fqns in sorted(by_file.items()):
            with open_items(self.path, file, {}) as opened:
                for fqn in sorted(fqns, key=lambda fqn: items[fqn].begin):
                    described = opened.describe(fqn, items[fqn].begin, items[fqn].length)
                    reject_code(described.path, described.names)
                    values = PlainValues(described.path, described)
                    found[fqn] = values.of(described.value, fqn)
                    if values.unread:
                        kind = next(iter(values.unread.values()))
                        raise UnsafePickleError(
                            f"'{described.path}' has an object of '{kind}' as '{fqn}', which cannot be read without "
                            "running code. Nothing of it was run. Load it in the program that made it, and save "
                            "tensors, numbers, text, lists and dicts.",
                            path=described.path,
                            fqn=fqn,
                            actual=kind,
                        )
        return found

    def _nested(self, tree: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], tuple[ForeignGroup, ...]]:
        """Return the state and groups of an optimizer as `get_optimizer_state_dict` returns it."""
        groups, state = tree.get("param_groups"), tree.get("state", {})
        others = sorted(tree.keys() - {"state", "param_groups"})
        if not isinstance(groups, list) or not isinstance(state, dict) or others:
            has = shorten_list([*others, *tree.keys() - set(others)], _SHOWN, quote=True)
            raise self._damaged(f"its optimizer is not a state and a list of groups, but has {has}")
        found = []
        for number, group in enumerate(groups):
            parameters = group.get("params") if isinstance(group, dict) else None
            if not isinstance(parameters, list):
                raise self._damaged(f"group {number} of its optimizer has no list of parameters")
            if not all(isinstance(name, str) for name in parameters):
                raise InvalidArgumentError(
                    f"'{self.path}' has numbers, not names, for the parameters of its optimizer, so that it is not "
                    "known which parameter a state belongs to. Save it with torch.distributed.checkpoint.state_dict."
                    "get_optimizer_state_dict; or convert the weights alone: hfshard convert --weights.",
                    path=self.path,
                )
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            found.append(ForeignGroup(tuple(parameters), self._with_tensors(options)))
        for name, own in state.items():
            if not isinstance(own, dict):
                raise self._damaged(f"the state of '{name}' is not a dict")
        return state, tuple(found)

    def _flat(self, tree: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], tuple[ForeignGroup, ...]]:
        """Return the state of a flat optimizer, and groups of equal options."""
        options: dict[str, dict[str, Any]] = {}
        states = {}
        for key, value in tree.items():
            kind, _, rest = key.partition(".")
            name, _, option = rest.rpartition(".")
            if kind == "param_groups" and name:
                options.setdefault(name, {})[option] = value
            elif kind == "state" and name:
                states[rest] = value
            else:
                raise self._damaged(f"its optimizer has '{key}' besides a state and groups")
        state: dict[str, dict[str, Any]] = {}
        for rest, value in states.items():
            name, slot = _split(rest, options)
            if not slot:
                raise self._damaged(f"its optimizer has a state '{rest}' of a parameter that it does not list")
            state.setdefault(name, {})[slot] = value
        groups: dict[str, tuple[list[str], dict[str, Any]]] = {}
        for name, own in self._with_tensors(options).items():
            plain = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in own.items()}
            shown = repr(sorted(plain.items(), key=lambda item: item[0]))
            groups.setdefault(shown, ([], own))[0].append(name)
        return state, tuple(ForeignGroup(tuple(names), own) for names, own in groups.values())

    def _with_tensors(self, tree: Any) -> Any:
        """Return nested values with the tensors that they name, which are read."""
        names = [one.fqn for one in iter_nested(tree) if isinstance(one, _Stored)]
        if not names:
            return tree
        shard = ForeignShard(self.table({fqn: fqn for fqn in names}))
        try:
            tensors = read_full_tensors([(shard, list(shard.header.tensors))], torch.device("cpu"))
        finally:
            shard.close()
        return _filled(tree, tensors)

    def _note(self, file: str) -> None:
        path = os.path.join(self.path, file)
        with suppress(FileNotFoundError):  # an error when it is read
            self.files[path] = identity_of(os.stat(path))

    def _damaged(self, problem: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"The torch DCP checkpoint in '{self.path}' is damaged: {problem}. Use another one.", path=self.path
        )


def _text(path: Path) -> str:
    return ".".join(map(str, path))


def _below(path: Path, key: str) -> Path | None:
    """Return the keys below a key; a joined name of everything below it, if the program has joined the keys itself."""
    if not key:
        return path
    for count in range(1, len(path)):
        if _text(path[:count]) == key:
            return path[count:]
    text = _text(path)
    return (text.removeprefix(f"{key}."),) if text.startswith(f"{key}.") else None


def _split(joined: str, names: Mapping[str, Any]) -> tuple[str, str]:
    """Split a joined name into the longest known one and what follows; that is empty if none is known."""
    name, rest = joined, ""
    while name and name not in names:
        name = name.rpartition(".")[0]
        rest = joined[len(name) :].removeprefix(".")
    return name, rest if name else ""


def _nest(leaves: Mapping[Path, Any]) -> Any:
    """Nest values by their keys: dicts, and lists where keys are numbers."""
    if () in leaves:
        if len(leaves) > 1:
            raise ValueError("a value and others below its key")
        return leaves[()]
    inner: dict[str | int, dict[Path, Any]] = defaultdict(dict)
    for path, value in leaves.items():
        inner[path[0]][path[1:]] = value
    built = {key: _nest(below) for key, below in inner.items()}
    if any(isinstance(key, int) for key in built):
        return [built[number] for number in range(len(built))]
    return built


def _filled(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(tree, _Stored):
        return tensors[tree.fqn]
    if isinstance(tree, dict):
        return {key: _filled(one, tensors) for key, one in tree.items()}
    return [_filled(one, tensors) for one in tree] if isinstance(tree, list) else tree
