"""Recognize other programs' checkpoints in parts, one for each rank, where no reader has found them; say what to do.

Source: DeepSpeed `runtime/engine.py` (`_get_ckpt_name`, `_get_zero_ckpt_name`); torch
`distributed/checkpoint/filesystem.py`; Accelerate `utils/fsdp_utils.py`; verl `model_merger`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hfshard._util.text import shorten_list
from hfshard.errors import AmbiguousWeightsError, CheckpointNotFoundError

_DEEPSPEED: Final = re.compile(r"(?:bf16_|fp16_)?(?:zero_pp_rank|mp_rank|expp_rank|layer|expert)_\d+.*_states\.pt")
"""DeepSpeed's files in a folder such as `global_step20`: models, optimizers, pipeline layers and experts."""

_DCP: Final = re.compile(r".+\.distcp")
DCP_METADATA: Final = ".metadata"
"""The file by which a directory of torch.distributed.checkpoint is known."""

_HF_SHARD: Final = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
"""Files of DCP's Hugging Face writer before they are consolidated. None says how many there are, so that a missing one
could not be noticed."""

_VERL: Final = re.compile(r"model_world_size_\d+_rank_\d+\.pt")
_ACCELERATE: Final = re.compile(r"pytorch_model_fsdp(?:_\d+)?_rank\d+\.bin")
"""Files of torch.save, with LOCAL_STATE_DICT."""
_RANK_FILES: Final = "one file per rank, each with parts of the tensors"

_KINDS: Final = (
    (_DEEPSPEED, "a model that DeepSpeed saved in parts for each rank", ""),
    (_DCP, "tensors that torch.distributed.checkpoint (DCP) saved in parts", ""),
    (
        _HF_SHARD,
        "safetensors that torch.distributed.checkpoint (DCP) saved in parts for each rank",
        "Load them there with dcp.load and HuggingFaceStorageReader, on any number of ranks, and save the model with "
        "hfshard.save_model.",
    ),
    (_VERL, _RANK_FILES, ""),
    (
        _ACCELERATE,
        _RANK_FILES,
        "Load them in the program that saved them, on as many ranks, and save the full model (FULL_STATE_DICT).",
    ),
)
"""Pattern of a kind's files, what they are, and what to do if hfshard cannot read them; the first kind that is found
counts."""

_READABLE: Final = re.compile(r"(?:pytorch_)?model(?:[.-][^/]*)?\.(?:safetensors|bin)(?:\.index\.json)?")
"""Weights that any reader finds: parts next to them are not the only copy."""

_DEPTH: Final = 3
"""Levels that are searched: a Trainer run has `checkpoint-500/global_step500/FILE`."""
_MOST_PATHS: Final = 20_000
"""The most paths to list: a message is not worth more time."""
_SHOWN: Final = 8
"""The most models in a message."""
_NUMBER: Final = re.compile(r"(\d{1,18})\Z")
"""A step, in at most 64 bits: a foreign name may have any number of digits."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """A folder with parts, and the place that contains it."""

    place: str
    is_directory: bool
    folder: str
    """Path relative to the place, with "/"; empty: the place itself."""
    paths: Collection[str]
    """All files of the place."""

    @property
    def names(self) -> list[str]:
        return sorted(path.rpartition("/")[2] for path in self.paths if path.rpartition("/")[0] == self.folder)

    def on_disk(self, path: str) -> str:
        """Return a path in the place for a command; a remote place must be downloaded to DIR."""
        return os.path.join(self.place if self.is_directory else "DIR", path).rstrip("/")

    def describe(self, pattern: re.Pattern[str], what: str, todo: str) -> str:
        """Build the message for a kind of parts, given by its pattern, what they are, and what to do (see `_KINDS`)."""
        found = f"'{self.place}' contains {what}" + (f" in '{self.folder}'" if self.folder else "")
        if todo:
            return f"{found}, but hfshard cannot read these yet. {todo}"
        if pattern is _DCP and DCP_METADATA not in self.names:
            return (
                f"{found}, but not '{DCP_METADATA}', which says where each of them is. Copy it there: its name begins "
                "with a dot, which '*' does not match."
            )
        path = self.on_disk(self.folder)
        convert = f"to write them as safetensors, run: {shlex.join(['hfshard', 'convert', '--weights', path, 'OUT'])}"
        download = "" if self.is_directory else "Download it to a directory DIR. "
        return f"{found}. {download}To load the weights, pass '{path}'; {convert}."


def describe_parts_in(directory: str) -> str | None:
    """Describe a local directory's parts, one for each rank, and how to read them; return None if there are none."""
    return describe_parts(list(_paths_below(directory)), directory)


def describe_parts(paths: Collection[str], place: str, *, is_directory: bool = True) -> str | None:
    """Describe a place's parts, one for each rank, and how to read them.

    Args:
        paths: The files below the place, relative to it, with "/".
        place: A directory; or, for the message, an address or a repo.
        is_directory: Whether it is a directory on this machine.

    Returns:
        Sentences; None if there are no parts, except ones with complete weights next to them.
    """
    near = [path for path in paths if path.count("/") < _DEPTH]
    for pattern, what, todo in _KINDS:
        folders = {folder for folder, _, name in (path.rpartition("/") for path in near) if pattern.fullmatch(name)}
        if kept := sorted((folder for folder in folders if not _is_readable(near, folder)), key=_order):
            models = [one for one in kept if not one.rpartition("/")[2].startswith("optimizer")]
            return _Parts(place, is_directory, (models or kept)[-1], near).describe(pattern, what, todo)
    return None


def names_in(directory: str) -> list[str]:
    """List a directory, sorted; return nothing if there is none, or it may not be listed."""
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def only_model(directory: str, entries: Sequence[str]) -> str | None:
    """Return the only entry of a directory's models, relative to it; None if there is none.

    Raises:
        AmbiguousWeightsError: There are several.
    """
    if len(entries) > 1:
        paths = [os.path.join(directory, os.path.dirname(entry)) for entry in entries]
        raise AmbiguousWeightsError(
            f"'{directory}' has {len(entries)} models. Pass one of them: {shorten_list(paths, _SHOWN, quote=True)}.",
            path=directory,
        )
    return next(iter(entries), None)


def reject_partitioned_file(value: object, path: str) -> None:
    """Reject a file of DeepSpeed ZeRO-3 that has empty tensors in place of a model's parameters.

    Args:
        value: The file's contents: tensors, or descriptions of them, by name under "module".
        path: For the message.

    Raises:
        CheckpointNotFoundError: It is one.
    """
    if not isinstance(value, Mapping):
        return
    tensors, groups = value.get("module"), value.get("param_shapes")
    if not isinstance(tensors, Mapping) or not isinstance(groups, list):
        return
    shapes = [named for group in groups if isinstance(group, Mapping) for named in group.items()]
    empty = [str(name) for name, shape in shapes if _is_emptied(tensors.get(name), shape)]
    if empty:
        folder = os.path.dirname(os.path.abspath(path))
        others = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise CheckpointNotFoundError(
            f"'{path}' has an empty tensor in place of {empty[0]!r:.200}{others}: DeepSpeed ZeRO-3 saved the "
            f"values with the optimizer, in parts for each rank. Pass the directory with all of them: '{folder}'.",
            path=path,
            fqn=empty[0],
        )


def _is_emptied(tensor: Any, shape: Any) -> bool:
    if getattr(tensor, "is_nested", False) or not hasattr(tensor, "shape"):  # a nested tensor's shape raises
        return False
    return tuple(tensor.shape) == (0,) and isinstance(shape, tuple) and 0 not in shape


def _paths_below(directory: str) -> Iterator[str]:
    seen = 0
    for folder, folders, files in os.walk(directory):
        inner = os.path.relpath(folder, directory).replace(os.sep, "/")
        prefix = "" if inner == "." else f"{inner}/"
        folders.sort(key=_order, reverse=True)
        if prefix.count("/") >= _DEPTH - 1:
            folders.clear()
        yield from (prefix + name for name in files)
        seen += len(files) + len(folders)
        if seen > _MOST_PATHS:
            return


def _is_readable(paths: Collection[str], folder: str) -> bool:
    """Return whether a folder, or the one above it, has weights that any reader finds."""
    near = {folder, folder.rpartition("/")[0]}
    return any(path.rpartition("/")[0] in near and _READABLE.fullmatch(path.rpartition("/")[2]) for path in paths)


def _order(folder: str) -> tuple[int, str]:
    """Return a sort key by the number at the end of a name, so that the newest step comes last."""
    number = _NUMBER.search(folder)
    return int(number[1]) if number else -1, folder
