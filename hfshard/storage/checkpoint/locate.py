"""Find the file by which a checkpoint is entered, as transformers does, and notice when it is replaced."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, Literal

from hfshard._util.text import list_some
from hfshard.constants import (
    ADAPTER_CONFIG_NAME,
    BIN_SUFFIX,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    INDEX_SUFFIX,
    MAX_CONFIG_BYTES,
    SAFETENSORS_SUFFIX,
    WEIGHTS_OVERRIDE_KEY,
)
from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError, UnsafePathError
from hfshard.storage.disk.safe_open import Identity, identity_of, read_small
from hfshard.storage.format.names import INDEX_FILE, MODEL_BASE, WeightNames, check_file_name
from hfshard.storage.format.strict_json import parse_json_object

_SHOWN: Final = 5
"""Names of files in a message."""

WeightsKind = Literal["single", "index", "bin", "bin_index"]

_PICKLE_SUFFIXES: Final = (BIN_SUFFIX, ".pt", ".pth", ".ckpt", ".tar")
"""How files of torch.save are called; ".pth.tar" by many programs, though they are no tars."""


@dataclass(frozen=True, slots=True)
class WeightsEntry:
    """The file by which a reader enters a checkpoint: its only file of weights, or its index."""

    kind: WeightsKind
    name: str

    @property
    def is_index(self) -> bool:
        """Whether it is an index, of whatever kind of weights."""
        return self.kind in ("index", "bin_index")


def locate_checkpoint(directory: str, names: WeightNames, use_safetensors: bool | None = None) -> WeightsEntry:
    """Find the file by which transformers enters a checkpoint.

    Raises:
        CheckpointNotFoundError: There is none.
        DamagedCheckpointError, UnsafePathError: config.json is not JSON, or names weights outside the directory.
    """
    override = checked_weights_override(read_config(directory), directory, names)
    return find_weights(directory, names, use_safetensors, override)


def candidate_weights(
    names: WeightNames, use_safetensors: bool | None, weights_override: str | None = None
) -> list[WeightsEntry]:
    """List the files by which a checkpoint may be entered, in the order in which transformers looks for them.

    Of a variant, huggingface_hub's index comes after transformers' own, which does not know it.

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
    """Whether a file of this name can be a checkpoint, or the index of one."""
    return name.endswith((SAFETENSORS_SUFFIX, *_PICKLE_SUFFIXES)) or INDEX_FILE.fullmatch(name) is not None


def entry_of(name: str) -> WeightsEntry:
    """Describe the file that was named, by its suffix."""
    if name.endswith(".json"):
        return WeightsEntry("bin_index" if f"{BIN_SUFFIX}.index" in name else "index", name)
    return WeightsEntry("bin" if name.endswith(_PICKLE_SUFFIXES) else "single", name)


def split_weights_path(path: str) -> tuple[str, str | None]:
    """Split the path of a file of weights, or of an index, into its directory and its name.

    Args:
        path: That of a directory is returned as it is, with None.

    Raises:
        InvalidArgumentError: It is a file of another kind.
    """
    if os.path.isdir(path) or not os.path.lexists(path):
        return path, None
    directory, name = os.path.split(path)
    if not is_weights_name(name):
        raise InvalidArgumentError(
            f"'{path}' is a file, and no checkpoint by its name: give a directory, a file of weights "
            f"({', '.join((SAFETENSORS_SUFFIX, *_PICKLE_SUFFIXES))}) or an index.",
            path=path,
        )
    return directory or os.curdir, name


def find_weights(
    directory: str, names: WeightNames, use_safetensors: bool | None, weights_override: str | None
) -> WeightsEntry:
    """Find the file like `locate_checkpoint`, but with the config read already: it names `weights_override`."""
    candidates = candidate_weights(names, use_safetensors, weights_override)
    for candidate in candidates:
        # What the config names is not looked for: opening it says that it is missing.
        if weights_override is not None or os.path.lexists(os.path.join(directory, candidate.name)):
            return candidate
    raise _not_found(directory, names, [candidate.name for candidate in candidates])


def directory_not_found(directory: str) -> CheckpointNotFoundError:
    """The error for a path where there is no directory."""
    return CheckpointNotFoundError(f"There is no directory '{directory}'. Check the path.", path=directory)


def _not_found(directory: str, names: WeightNames, looked_for: list[str]) -> CheckpointNotFoundError:
    if not os.path.isdir(directory):
        return directory_not_found(directory)
    found = sorted(name for name in os.listdir(directory) if name.endswith((SAFETENSORS_SUFFIX, BIN_SUFFIX)))
    hint = f"It holds {list_some(found, _SHOWN)}" if found else "It holds no weights at all"
    if ADAPTER_CONFIG_NAME in os.listdir(directory):
        hint = "It holds a PEFT adapter: load it with from_pretrained of a model class, with peft installed"
    variant = f" of variant '{names.variant}'" if names.variant is not None else ""
    return CheckpointNotFoundError(
        f"There is no checkpoint{variant} in '{directory}': none of {', '.join(looked_for)}. {hint}. "
        f"To see what is there, run: ls -l {directory}",
        path=directory,
    )


def weights_bytes(directory: str, suffixes: tuple[str, ...] = (SAFETENSORS_SUFFIX, BIN_SUFFIX)) -> int:
    """The size of all files of weights in a directory, in bytes; 0 where there is no directory."""
    if not os.path.isdir(directory):
        return 0
    paths = [os.path.join(directory, name) for name in os.listdir(directory) if name.endswith(suffixes)]
    return sum(os.path.getsize(path) for path in paths if os.path.isfile(path))


def read_config(directory: str) -> bytes | None:
    """The bytes of config.json, or None where there is none."""
    path = os.path.join(directory, CONFIG_NAME)
    return read_small(path, directory, MAX_CONFIG_BYTES)[0] if os.path.lexists(path) else None


def check_generation_config(directory: str) -> None:
    """Refuse a generation_config.json that transformers would hang on, follow outside, or silently ignore.

    Raises:
        DamagedCheckpointError, UnsafePathError: It is not a JSON object, or not a file of the checkpoint.
    """
    path = os.path.join(directory, GENERATION_CONFIG_NAME)
    if os.path.lexists(path):
        raw, _ = read_small(path, directory, MAX_CONFIG_BYTES)
        remedy = "Download it again, or remove it to generate by the defaults."
        parse_json_object(raw, path=path, what="Generation config", remedy=remedy)


def checked_weights_override(config: bytes | None, directory: str, names: WeightNames) -> str | None:
    """The weights file that config.json tells every reader to load, if there is one."""
    if config is None or names.base != MODEL_BASE:
        return None
    path = os.path.join(directory, CONFIG_NAME)
    remedy = "Save the model again, or download the file again."
    found = parse_json_object(config, path=path, what="Config", remedy=remedy, takes_constants=True)
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
    if names.variant is not None and "-hfshard-" in value and not names.is_transient(value):
        return None  # an unfinished commit of the weights beside this variant
    return value


def state_token(directory: str, names: WeightNames, weights_override: str | None) -> tuple[Identity | None, ...]:
    """The identities of all files by which a replaced checkpoint is noticed."""
    files = [CONFIG_NAME, names.single, names.index, names.hub_index, names.bin_single, names.bin_index]
    if weights_override:
        files.append(weights_override)
    return tuple(_identity_or_none(os.path.join(directory, name)) for name in files)


def _identity_or_none(path: str) -> Identity | None:
    try:
        return identity_of(os.stat(path))
    except OSError:
        return None
