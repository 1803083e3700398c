"""Recognize the directories of other frameworks, and open them: the one place that knows which ones there are."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from hfshard._util.text import shorten_list
from hfshard.constants import CONFIG_NAME
from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError
from hfshard.foreign.byte_runs import ForeignRun, ForeignTable
from hfshard.foreign.foreign_shard import ForeignShard
from hfshard.format.parts_of_ranks import DCP_METADATA, names_in, only_model

_FSDP_FOLDER: Final = re.compile(r"pytorch_model_fsdp_\d+")
"""The folder in which Accelerate and Trainer save an FSDP model."""

_FSDP_OPTIMIZER: Final = re.compile(r"optimizer_\d+")
"""The folder in which they save its optimizer."""

_AS_TRAINED: Final = "module"
"""Key of the 16-bit weights in DeepSpeed's files, next to which there are float32 masters."""

_OF_VERL: Final = "huggingface"
"""The folder next to verl's files that has their config and tokenizer."""

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
    entries: re.Pattern[str]
    """Pattern of what `find` returns."""
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
    return next((entry for _, entry in _found_in(directory)), None)


def _found_in(directory: str) -> Iterator[tuple[_Framework, str]]:
    """Yield each framework that finds weights, and where."""
    for one in _FRAMEWORKS:
        entry = one.find(directory)
        if entry is not None:
            yield one, entry


def open_foreign(directory: str, entry: str | None, key: str | None = None) -> ForeignShard:
    """Open the weights of another framework in a directory.

    Args:
        directory: The directory.
        entry: The result of `find_foreign` for it.
        key: The key under which a program saved the model; None: there must be only one candidate.

    Raises:
        CheckpointNotFoundError: There are no weights.
        AmbiguousWeightsError: There are several sets, and no `key` selects one.
        InvalidArgumentError: There is nothing under `key`; or what was saved cannot be read, such as experts in parts.
        UnsafePickleError: A pickle asks for anything but what the framework writes.
        UnsafePathError, DamagedCheckpointError: A file is missing, incomplete, or outside of the directory.
    """
    for one in reversed(_FRAMEWORKS):  # the first one's pattern is that of any folder
        if entry is not None and one.entries.fullmatch(entry):
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
    for framework, entry in _found_in(directory):
        run = framework.read_run(directory, entry, keys)
        return run if run.optimizer is not None else None
    return None


def is_of_run(name: str) -> bool:
    """Return whether a file next to weights in parts serves only to resume the run that saved them."""
    return _OF_RUNS.fullmatch(name) is not None


def folder_of_model(directory: str, entry: str) -> str:
    """Return the directory with the config and tokenizer of the weights in a directory.

    It is that directory, or the one above, such as Trainer's `checkpoint-500` for `checkpoint-500/global_step500`; or
    verl's `huggingface` next to the weights.

    Args:
        directory: The directory.
        entry: The result of `find_foreign` for it.
    """
    above = [os.path.dirname(os.path.abspath(directory))] if entry in (os.curdir, DCP_METADATA) else []
    beside = os.path.join(directory, os.path.dirname(entry), _OF_VERL)
    candidates = [directory, *above, beside]
    return next((one for one in candidates if os.path.isfile(os.path.join(one, CONFIG_NAME))), directory)


# The frameworks. Their modules are imported when a directory has no other weights.


def _find_dcp(directory: str) -> str | None:
    if os.path.isfile(os.path.join(directory, DCP_METADATA)):
        return DCP_METADATA
    entries = [f"{name}/{DCP_METADATA}" for name in names_in(directory) if _FSDP_FOLDER.fullmatch(name)]
    return only_model(directory, [entry for entry in entries if os.path.isfile(os.path.join(directory, entry))])


def _read_dcp(directory: str, entry: str, key: str | None) -> ForeignTable:
    from hfshard.foreign.dcp_directory import read_dcp_directory

    return read_dcp_directory(_folder_of(directory, entry), key)


def _read_dcp_run(directory: str, entry: str, keys: Mapping[str, str]) -> ForeignRun:
    from hfshard.foreign.dcp_run import read_dcp_run

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


def _find_deepspeed(directory: str) -> str | None:
    from hfshard.foreign.deepspeed import find_tag

    tag = find_tag(directory)
    return os.curdir if tag == "" else tag


def _read_deepspeed(directory: str, entry: str, key: str | None) -> ForeignTable:
    from hfshard.foreign.deepspeed import read_deepspeed

    if key != _AS_TRAINED:
        _reject_keys(directory, "DeepSpeed", key, but=f", except {_AS_TRAINED!r}, its weights as they were trained")
    return read_deepspeed(directory, _tag_of(entry), masters=key is None)


def _read_deepspeed_run(directory: str, entry: str, keys: Mapping[str, str]) -> ForeignRun:
    from hfshard.foreign.deepspeed import read_deepspeed_run

    _reject_keys(directory, "DeepSpeed", *keys.values())
    return read_deepspeed_run(directory, _tag_of(entry))


def _tag_of(entry: str) -> str:
    return "" if entry == os.curdir else entry


def _find_rank_files(directory: str) -> str | None:
    from hfshard.foreign.rank_files import find_rank_files

    return find_rank_files(directory)


def _read_rank_files(directory: str, entry: str, key: str | None) -> ForeignTable:
    from hfshard.foreign.rank_files import read_rank_files

    _reject_keys(directory, "verl", key)
    return read_rank_files(_folder_of(directory, entry))


def _read_rank_run(directory: str, entry: str, keys: Mapping[str, str]) -> ForeignRun:
    from hfshard.foreign.rank_files import read_rank_run

    _reject_keys(directory, "verl", *keys.values())
    return read_rank_run(_folder_of(directory, entry))


def _folder_of(directory: str, entry: str) -> str:
    return os.path.join(directory, os.path.dirname(entry)).rstrip("/")


def _reject_keys(directory: str, program: str, *keys: str | None, but: str = "") -> None:
    for key in keys:
        if key is not None:
            raise InvalidArgumentError(
                f"'{directory}' was saved by {program}, and has no key={key!r:.200}: all of it is one model{but}. "
                "Leave it out.",
                path=directory,
            )


_FRAMEWORKS: Final = (
    _Framework(_find_deepspeed, re.compile(r"[^/]+"), _read_deepspeed, _read_deepspeed_run),
    _Framework(_find_dcp, re.compile(r"(?:[^/]+/)?\.metadata"), _read_dcp, _read_dcp_run),
    _Framework(_find_rank_files, re.compile(r"(?:[^/]+/)?model_world_size_.+\.pt"), _read_rank_files, _read_rank_run),
)
"""The first one that finds weights reads them."""
