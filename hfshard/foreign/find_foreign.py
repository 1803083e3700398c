"""Recognize the directories of other frameworks, and open them: the one place that knows which ones there are."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from hfshard._util.text import shorten_list
from hfshard.constants import CONFIG_NAME
from hfshard.errors import AmbiguousWeightsError, CheckpointNotFoundError, InvalidArgumentError
from hfshard.foreign.byte_runs import ForeignTable
from hfshard.foreign.dcp_directory import read_dcp_directory
from hfshard.foreign.dcp_metadata import METADATA
from hfshard.foreign.dcp_run import read_dcp_run
from hfshard.foreign.deepspeed import find_tag, read_deepspeed, read_deepspeed_run
from hfshard.foreign.foreign_run import ForeignRun
from hfshard.foreign.foreign_shard import ForeignShard
from hfshard.foreign.rank_files import find_rank_files, read_rank_files, read_rank_run

_FSDP_FOLDER: Final = re.compile(r"pytorch_model_fsdp_\d+")
"""The folder in which Accelerate and Trainer save an FSDP model."""

_FSDP_OPTIMIZER: Final = re.compile(r"optimizer_\d+")
"""The folder in which they save its optimizer."""

_OF_RUNS: Final = re.compile(
    r"latest(_universal)?|zero_to_(fp32|torch)\.py|trainer_state\.json|(random_states|rng_state)(_\d+)?\..*"
    r"|(optim|extra_state)_world_size_.*|fsdp_config\.json"
)
"""Files that are of no use without the states of the ranks: they don't go along with the weights."""

_SHOWN: Final = 8


class _Framework(NamedTuple):
    """A framework's directories."""

    find: Callable[[str], str | None]
    """Return the folder, or the file, by which its weights in a directory are entered; None if it has none."""
    read: Callable[[str, str, str | None], ForeignTable]
    """Read the table of a directory, given what `find` has returned, and the key of the weights."""
    read_run: Callable[[str, str, Mapping[str, str]], ForeignRun]
    """Read the run of a directory, given what `find` has returned, and the keys of its parts."""


def find_foreign(directory: str) -> str | None:
    """Find the weights of another framework in a directory.

    Returns:
        The folder, or the file, by which they are entered, relative to the directory; None if there are none.

    Raises:
        AmbiguousWeightsError: There are several models or steps, which the error lists.
        CheckpointNotFoundError, UnsafePathError: What names the newest step is wrong.
    """
    return next((entry for one in _FRAMEWORKS if (entry := one.find(directory)) is not None), None)


def open_foreign(directory: str, key: str | None = None) -> ForeignShard:
    """Open the weights of another framework in a directory.

    Args:
        directory: One in which `find_foreign` finds weights.
        key: The key under which a program saved the model; None: there must be only one candidate.

    Raises:
        CheckpointNotFoundError: There are no weights.
        AmbiguousWeightsError: There are several sets, and no `key` selects one.
        InvalidArgumentError: There is nothing under `key`; or what was saved cannot be read, such as experts in parts.
        UnsafePickleError: A pickle asks for anything but what the framework writes.
        UnsafePathError, DamagedCheckpointError: A file is missing, incomplete, or outside of the directory.
    """
    for one in _FRAMEWORKS:
        entry = one.find(directory)
        if entry is not None:
            return ForeignShard(one.read(directory, entry, key))
    raise CheckpointNotFoundError(f"There are no weights of another framework in '{directory}'.", path=directory)


def open_foreign_run(directory: str, keys: Mapping[str, str] = MappingProxyType({})) -> ForeignRun | None:
    """Read a run that another framework has saved in parts, by names; no byte of a large tensor is read.

    Args:
        directory: As in `open_foreign`.
        keys: "model" and "optimizer" -> the key under which a program saved it; missing: there must be only one.

    Returns:
        None if there is none, or weights without an optimizer.

    Raises:
        What `open_foreign` raises.
        InvalidArgumentError: The optimizer's state cannot be matched to parameters by name, element by element.
    """
    for one in _FRAMEWORKS:
        entry = one.find(directory)
        if entry is not None:
            run = one.read_run(directory, entry, keys)
            return run if run is not None and run.optimizer is not None else None
    return None


def is_of_run(name: str) -> bool:
    """Return whether a file next to weights in parts serves only to resume the run that saved them."""
    return _OF_RUNS.fullmatch(name) is not None


def folder_of_model(directory: str) -> str:
    """Return the directory with the config and tokenizer of the weights in a directory.

    It is that directory, or the one above, such as Trainer's `checkpoint-500` for `checkpoint-500/global_step500`.
    """
    above = os.path.dirname(os.path.abspath(directory))
    is_inner = find_foreign(directory) in (os.curdir, METADATA)
    has_config = [os.path.isfile(os.path.join(folder, CONFIG_NAME)) for folder in (directory, above)]
    return above if is_inner and has_config == [False, True] else directory


def _find_dcp(directory: str) -> str | None:
    if os.path.isfile(os.path.join(directory, METADATA)):
        return METADATA
    try:
        folders = [name for name in sorted(os.listdir(directory)) if _FSDP_FOLDER.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    found = [name for name in folders if os.path.isfile(os.path.join(directory, name, METADATA))]
    if len(found) > 1:
        paths = shorten_list([os.path.join(directory, name) for name in found], _SHOWN, quote=True)
        raise AmbiguousWeightsError(
            f"'{directory}' has {len(found)} models. Pass one of them: {paths}.", path=directory
        )
    return f"{found[0]}/{METADATA}" if found else None


def _read_dcp(directory: str, entry: str, key: str | None) -> ForeignTable:
    return read_dcp_directory(os.path.join(directory, os.path.dirname(entry)).rstrip("/"), key)


def _find_deepspeed(directory: str) -> str | None:
    tag = find_tag(directory)
    return os.curdir if tag == "" else tag


def _read_deepspeed(directory: str, _entry: str, key: str | None) -> ForeignTable:
    _reject_key(directory, "DeepSpeed", key)
    return read_deepspeed(directory)


def _read_deepspeed_run(directory: str, _entry: str, keys: Mapping[str, str]) -> ForeignRun:
    _reject_key(directory, "DeepSpeed", *keys.values())
    return read_deepspeed_run(directory)


def _read_dcp_run(directory: str, entry: str, keys: Mapping[str, str]) -> ForeignRun:
    folder = os.path.dirname(entry)
    key, optimizer_key = keys.get("model"), keys.get("optimizer")
    if not folder:
        return read_dcp_run(directory, key, optimizer_key=optimizer_key)
    optimizers = [name for name in sorted(os.listdir(directory)) if _FSDP_OPTIMIZER.fullmatch(name)]
    if len(optimizers) > 1:
        raise InvalidArgumentError(
            f"'{directory}' has {len(optimizers)} optimizers ({shorten_list(optimizers, _SHOWN, quote=True)}), but one "
            "model. hfshard reads one of each. For the weights alone: hfshard convert --weights.",
            path=directory,
        )
    return read_dcp_run(
        directory, key, optimizer_key=optimizer_key, folder=folder, optimizer_folder=next(iter(optimizers), None)
    )


def _read_rank_files(directory: str, entry: str, key: str | None) -> ForeignTable:
    _reject_key(directory, "verl", key)
    return read_rank_files(os.path.normpath(os.path.join(directory, entry)))


def _read_rank_run(directory: str, entry: str, keys: Mapping[str, str]) -> ForeignRun:
    _reject_key(directory, "verl", *keys.values())
    return read_rank_run(os.path.normpath(os.path.join(directory, entry)))


def _reject_key(directory: str, program: str, *keys: str | None) -> None:
    for key in keys:
        if key is not None:
            raise InvalidArgumentError(
                f"'{directory}' was saved by {program}, and has no key={key!r:.200}: all of it is one model. Leave it "
                "out.",
                path=directory,
            )


_FRAMEWORKS: Final = (
    _Framework(_find_deepspeed, _read_deepspeed, _read_deepspeed_run),
    _Framework(_find_dcp, _read_dcp, _read_dcp_run),
    _Framework(find_rank_files, _read_rank_files, _read_rank_run),
)
"""The first one that finds weights reads them."""
