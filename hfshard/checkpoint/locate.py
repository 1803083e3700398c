"""Describe which checkpoint is wanted, find its entry as transformers does, and notice when it is replaced."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Final, Literal

from hfshard._util.arguments import check_text_arguments
from hfshard._util.text import nearest_first, shorten_list
from hfshard.checkpoint.folder import Folder, LocalFolder, as_folder
from hfshard.constants import (
    ADAPTER_CONFIG_NAME,
    BIN_SUFFIX,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    INDEX_SUFFIX,
    MAX_CONFIG_BYTES,
    SAFETENSORS_SUFFIX,
    WEIGHTS_OVERRIDE_KEY,
    WEIGHTS_SUFFIXES,
)
from hfshard.disk.safe_open import read_small
from hfshard.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    HfshardError,
    InvalidArgumentError,
    UnsafePathError,
)
from hfshard.foreign.find_foreign import find_foreign
from hfshard.format.file_names import INDEX_FILE, MODEL_BASE, WeightNames, check_file_name
from hfshard.format.index import CheckpointIndex
from hfshard.format.parts_of_ranks import describe_parts, describe_parts_in
from hfshard.format.strict_json import PassOver, parse_json_object

_SHOWN: Final = 5
"""Maximum number of file names in a message."""

ADAPTER_WEIGHTS: Final = (f"adapter_model{SAFETENSORS_SUFFIX}", f"adapter_model{BIN_SUFFIX}")
"""PEFT's file names for the weights of an adapter; the first existing one is read."""

_OF_VARIANT: Final = re.compile(r"(model|pytorch_model)\..+\.(safetensors|bin)")

WeightsKind = Literal["single", "index", "bin", "bin_index", "foreign"]
"""A file of safetensors or its index, one of torch.save or its index, or the directory of another framework."""

_PICKLE_SUFFIXES: Final = (BIN_SUFFIX, ".pt", ".pth", ".ckpt", ".tar")
"""Suffixes of torch.save files; many programs write ".pth.tar", although the files are not tars."""


FilesOf = Callable[[CheckpointIndex], Collection[str]]
"""Function that chooses the needed files among those that an index names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointQuery:
    """Request for a checkpoint: which one, how much of it, and how to fetch it.

    Raises:
        InvalidArgumentError: The variant can't be part of a file name; the subfolder or the revision is not text.
    """

    variant: str | None = None
    """As in transformers' `from_pretrained`, like the next seven fields."""
    use_safetensors: bool | None = None
    """None: safetensors before pickles; True: only them; False: only pickles."""
    subfolder: str = ""
    revision: str | None = None
    token: str | bool | None = field(default=None, repr=False)
    cache_dir: str | os.PathLike[str] | None = None
    local_files_only: bool = False
    force_download: bool = False
    files_of: FilesOf | None = None
    """Selects the files that are needed, of those that an index names; None: all."""
    needs_code: bool = False
    """Whether the repo's code may be run, so that it is downloaded too."""
    accepts_adapter: bool = False
    """Whether an adapter is wanted too, alone or next to a model."""
    opens_adapter: bool = False
    """Whether the weights of an adapter are opened if there is no model."""
    needs_companions: bool = False
    """Whether the companion files are downloaded too: tokenizer, README."""
    takes_oddities: bool = False
    """Whether to fetch what transformers loads even if it is not valid; that shows when it is opened."""
    needs_signature: bool = False
    """Whether the signature is downloaded too, and the files it covers that a load may read as well as the weights."""
    allow_patterns: list[str] | None = None
    """Globs of paths: companion files to pull."""
    ignore_patterns: list[str] | None = None
    """Globs of paths: companion files to leave out."""

    def __post_init__(self) -> None:
        """Check the texts."""
        WeightNames(self.variant)
        check_text_arguments(subfolder=self.subfolder or None, revision=self.revision or None)
        object.__setattr__(self, "revision", self.revision or None)

    def check_subfolder(self) -> None:
        """Check that the subfolder is a valid path in a repo, before any request to a hub.

        Raises:
            InvalidArgumentError: It is not.
        """
        folder = self.subfolder.strip("/")
        if folder and any(part in ("", ".", "..") for part in folder.split("/")):
            raise InvalidArgumentError(
                f"subfolder must be a folder of the repo, such as 'unet' or 'a/b', got {self.subfolder!r}."
            )

    def path(self, name: str) -> str:
        """Return a file's path in the repo."""
        return f"{self.subfolder.strip('/')}/{name}" if self.subfolder.strip("/") else name


@dataclass(frozen=True, slots=True)
class WeightsEntry:
    """The file by which a reader enters a checkpoint: its single file of weights, or its index.

    For the directory of another framework, it is the file or folder that `find_foreign` returns.
    """

    kind: WeightsKind
    name: str

    @property
    def is_index(self) -> bool:
        """True for an index, of any kind of weights."""
        return self.kind in ("index", "bin_index")


def locate_checkpoint(
    place: str | Folder, names: WeightNames, use_safetensors: bool | None = None, *, opens_foreign: bool = False
) -> WeightsEntry:
    """Find the file by which transformers enters a checkpoint.

    Args:
        place: A directory or folder.
        names: The checkpoint's file names.
        use_safetensors: As in `candidate_weights`.
        opens_foreign: As in `find_weights`.

    Raises:
        CheckpointNotFoundError: There is no such file.
        DamagedCheckpointError, UnsafePathError: config.json is not JSON, or names weights outside the directory.
    """
    folder = as_folder(place)
    override = checked_weights_override(config_in(folder), folder.path, names)
    return find_weights(folder, names, use_safetensors, override, opens_foreign=opens_foreign)


def candidate_weights(
    names: WeightNames, use_safetensors: bool | None, weights_override: str | None = None
) -> list[WeightsEntry]:
    """List the possible entries of a checkpoint, in the order in which transformers looks for them.

    For a variant, huggingface_hub's index, which transformers does not know, comes after transformers' own.

    Args:
        names: The checkpoint's file names.
        use_safetensors: None: safetensors before pickles; True: only safetensors; False: only pickles.
        weights_override: The file that config.json names: then it is the only candidate.
    """
    if weights_override is not None:
        return [entry_of(weights_override)]
    candidates = []
    if use_safetensors is not False:
        candidates += [WeightsEntry("single", names.single), WeightsEntry("index", names.index)]
        if names.hub_index != names.index:
            candidates.append(WeightsEntry("index", names.hub_index))
    if not use_safetensors:
        candidates += [WeightsEntry("bin", names.bin_single), WeightsEntry("bin_index", names.bin_index)]
    return candidates


def is_weights_name(name: str) -> bool:
    """Return whether a file of this name can be a checkpoint, or the index of one."""
    return name.endswith((SAFETENSORS_SUFFIX, *_PICKLE_SUFFIXES)) or INDEX_FILE.fullmatch(name) is not None


def entry_of(name: str) -> WeightsEntry:
    """Build the entry for a file name, judging its kind by the suffix."""
    if name.endswith(".json"):
        return WeightsEntry("bin_index" if f"{BIN_SUFFIX}.index" in name else "index", name)
    return WeightsEntry("bin" if name.endswith(_PICKLE_SUFFIXES) else "single", name)


def split_file_path(path: str) -> tuple[str, str | None]:
    """Split the path of a file of weights, or of an index, into its directory and its name.

    Args:
        path: The path; that of a directory, or a missing one, is returned unchanged, with None.

    Raises:
        InvalidArgumentError: It is a file of another kind.
    """
    if os.path.isdir(path) or not os.path.lexists(path):
        return path, None
    directory, name = os.path.split(path)
    if not is_weights_name(name):
        raise InvalidArgumentError(
            f"'{path}' is a file whose name is not a checkpoint's. Pass a directory, a weights file "
            f"({', '.join((SAFETENSORS_SUFFIX, *_PICKLE_SUFFIXES))}) or an index.",
            path=path,
        )
    return directory or os.curdir, name


def find_weights(
    folder: Folder,
    names: WeightNames,
    use_safetensors: bool | None,
    weights_override: str | None,
    *,
    opens_foreign: bool = False,
) -> WeightsEntry:
    """Find the entry like `locate_checkpoint`, given the `weights_override` that the config names.

    Args:
        folder: The folder.
        names: The checkpoint's file names.
        use_safetensors: As in `candidate_weights`.
        weights_override: The file that config.json names.
        opens_foreign: Whether weights that another framework saved in parts count, where there are no others, neither
            an adapter's nor of another variant.
    """
    candidates = candidate_weights(names, use_safetensors, weights_override)
    for candidate in candidates:
        # The existence of the file that the config names is not checked: opening it reports that it is missing.
        if weights_override is not None or folder.has(candidate.name):
            return candidate
    is_plain = names.variant is None and names.base == MODEL_BASE
    if opens_foreign and is_plain and use_safetensors is not True and folder.traits.is_directory:
        entry = None if _has_other_weights(folder) else find_foreign(folder.path)
        if entry is not None:
            return WeightsEntry("foreign", entry)
    raise _not_found(folder, names, [candidate.name for candidate in candidates])


def _has_other_weights(folder: Folder) -> bool:
    """Return whether a folder has an adapter or a variant of a model: weights in parts are not read beside these."""
    return any(name in ADAPTER_WEIGHTS or _OF_VARIANT.fullmatch(name) for name in folder.names())


def directory_not_found(directory: str) -> CheckpointNotFoundError:
    """Return the error for a path where there is no directory."""
    return CheckpointNotFoundError(f"There is no directory '{directory}'. Check the path.", path=directory)


def adapter_weights(directory: str) -> str | None:
    """Find the weights file of a PEFT adapter in a directory; None if there is none."""
    if not os.path.isfile(os.path.join(directory, ADAPTER_CONFIG_NAME)):
        return None
    return next((name for name in ADAPTER_WEIGHTS if os.path.isfile(os.path.join(directory, name))), None)


def find_lone_adapter(folder: Folder, names: WeightNames) -> str | None:
    """Find the weights file of an adapter in a folder without a model; None if there is a model, or no adapter."""
    if names.variant is not None or any(folder.has(one.name) for one in candidate_weights(names, None)):
        return None
    return next(filter(folder.has, ADAPTER_WEIGHTS), None)


def _not_found(folder: Folder, names: WeightNames, looked_for: list[str]) -> CheckpointNotFoundError:
    directory = folder.path
    is_directory = folder.traits.is_directory
    if is_directory and not folder.exists():
        return directory_not_found(directory)
    there = folder.names()
    below = folder.folders_with({*looked_for, *ADAPTER_WEIGHTS})
    runs = _folders_with(directory, looked_for) if is_directory else []
    if not is_directory and not there and not below:
        beside = nearest_first(directory.rpartition("/")[2], folder.neighbors())
        hint = f"Next to it {'is' if len(beside) == 1 else 'are'} {shorten_list(beside, _SHOWN)}: c" if beside else "C"
        return CheckpointNotFoundError(f"There is nothing at '{directory}'. {hint}heck the address.", path=directory)
    parts = None if below or _has_other_weights(folder) else _describe_parts(folder)
    if parts is not None and names.variant is None:
        return CheckpointNotFoundError(parts, path=directory)
    found = [name for name in there if name.endswith((SAFETENSORS_SUFFIX, *_PICKLE_SUFFIXES))]
    others = [name for name in there if name.endswith(WEIGHTS_SUFFIXES) and name not in found]
    hint = f"It contains {shorten_list(found, _SHOWN)}" if found else "It contains no weights"
    if others and not found:
        hint = f"It contains {shorten_list(others, _SHOWN)}, which hfshard does not read: load the weights with a "
        hint += "library that does, and save them as safetensors"
    lone = [name for name in found if not names.is_shard(name)]
    if lone and is_directory and names.variant is None:
        hint += f": pass {'it' if len(found) == 1 else 'one of them'}, as '{os.path.join(directory, lone[0])}'"
    if below:
        hint = f"Weights are in its {'folder' if len(below) == 1 else 'folders'} {shorten_list(below, _SHOWN)}: pass "
        hint += f"{'it' if len(below) == 1 else 'one of them'} as subfolder"
    if runs and not found:
        hint = f"Its {'folder has' if len(runs) == 1 else 'folders have'} weights, {shorten_list(runs, _SHOWN)}: pass "
        hint += f"{'it' if len(runs) == 1 else 'one of them'}, as '{os.path.join(directory, runs[0])}'"
    if parts is not None:
        hint = "Weights that another framework saved in parts have no variants: leave it out"
    if ADAPTER_CONFIG_NAME in there:
        hint = "It contains a PEFT adapter: load it with a model class's from_pretrained, with peft installed"
    variant = f" of variant '{names.variant}'" if names.variant is not None else ""
    return CheckpointNotFoundError(
        f"There is no checkpoint{variant} in '{directory}': none of {', '.join(looked_for)}. {hint}."
        f"{f' To see what is there, run: ls -l {directory}' if is_directory else ''}",
        path=directory,
    )


def _folders_with(directory: str, names: Collection[str]) -> list[str]:
    """List the folders in a directory that have one of these files, as in a run; the last one by name first."""
    folders = [one.name for one in os.scandir(directory) if one.is_dir() and not one.name.startswith(".")]
    paths = {one: [os.path.join(directory, one, name) for name in names] for one in sorted(folders, reverse=True)}
    return [one for one, files in paths.items() if any(map(os.path.isfile, files))]


def _describe_parts(folder: Folder) -> str | None:
    if folder.traits.is_directory:
        return describe_parts_in(folder.path)
    return describe_parts(folder.paths(), folder.path, is_directory=False)


def weights_bytes(place: str | Folder, suffixes: tuple[str, ...] = (SAFETENSORS_SUFFIX, BIN_SUFFIX)) -> int:
    """Return the total size of the weights files in a directory or folder, in bytes; 0 if there are none."""
    folder = as_folder(place)
    return sum(folder.size(name) for name in folder.names() if name.endswith(suffixes))


def read_config(directory: str) -> bytes | None:
    """Read the bytes of config.json in a directory; None if there is none."""
    return config_in(LocalFolder(directory))


def config_in(folder: Folder) -> bytes | None:
    """Read the bytes of a folder's config.json; None if there is none."""
    return folder.read_small(CONFIG_NAME, MAX_CONFIG_BYTES) if folder.has(CONFIG_NAME) else None


def check_generation_config(directory: str, pass_over: PassOver | None = None) -> None:
    """Reject a generation_config.json that transformers would hang on, follow outside, or silently ignore.

    Args:
        directory: The directory that may contain it.
        pass_over: Passed to `parse_json_object`.

    Raises:
        DamagedCheckpointError, UnsafePathError: It is not a JSON object, or not a file of the checkpoint.
    """
    path = os.path.join(directory, GENERATION_CONFIG_NAME)
    if os.path.lexists(path):
        raw, _ = read_small(path, directory, MAX_CONFIG_BYTES)
        remedy = "Download it again, or delete it to generate with the defaults."
        what = "Generation config"
        parse_json_object(raw, path=path, what=what, remedy=remedy, takes_constants=True, pass_over=pass_over)


def checked_weights_override(
    config: bytes | None, directory: str, names: WeightNames, pass_over: PassOver | None = None
) -> str | None:
    """Find the weights file that config.json names for all readers, if any; `parse_json_object` parses the config."""
    if config is None or names.base != MODEL_BASE:
        return None
    path = os.path.join(directory, CONFIG_NAME)
    remedy = "Save the model again, or download the file again."
    found = parse_json_object(
        config, path=path, what="Config", remedy=remedy, takes_constants=True, pass_over=pass_over
    )
    value = found.get(WEIGHTS_OVERRIDE_KEY)
    if value is None:
        return None
    if not isinstance(value, str) or not value.endswith((SAFETENSORS_SUFFIX, SAFETENSORS_SUFFIX + INDEX_SUFFIX)):
        raise UnsafePathError(
            f"'{path}' names {str(value)[:200]!r} as its weights, which is neither a .safetensors file nor its index. "
            f"Remove '{WEIGHTS_OVERRIDE_KEY}' from it, or download it again.",
            path=path,
            actual=value,
        )
    check_file_name(value, index_path=path, suffix=".json" if value.endswith(".json") else SAFETENSORS_SUFFIX)
    if names.variant is not None and "-hfshard-" in value and not names.is_commit_temporary(value):
        return None  # an unfinished commit of the weights next to this variant
    return value


def entry_versions(folder: Folder, names: WeightNames, weights_override: str | None) -> tuple[Hashable, ...]:
    """Collect the identities of all files by which a replaced checkpoint is noticed."""
    files = [CONFIG_NAME, names.single, names.index, names.hub_index, names.bin_single, names.bin_index]
    if weights_override:
        files.append(weights_override)
    return tuple(folder.version(name) for name in files)


def versions_or_error(folder: Folder, names: WeightNames, weights_override: str | None) -> tuple[Hashable, ...]:
    """Return the result of `entry_versions`; if the index of a save can't be read, the error's message."""
    try:
        return entry_versions(folder, names, weights_override)
    except CheckpointChangedError:
        return (object(),)  # which nothing is equal to
    except HfshardError as error:
        return (error.message,)
