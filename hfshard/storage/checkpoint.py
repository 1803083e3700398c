"""A checkpoint in a directory, opened for reading: located, checked whole, and the same from first byte to last."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from hfshard.constants import (
    ADAPTER_CONFIG_NAME,
    CHANGED_RETRIES,
    CHANGED_WAIT_SECONDS,
    CONFIG_NAME,
    EXPLICIT_WEIGHTS_KEY,
    INDEX_SUFFIX,
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    SAFETENSORS_SUFFIX,
)
from hfshard.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    HfshardError,
    IntegrityError,
    InvalidArgumentError,
    UnsafePathError,
)
from hfshard.storage.index import CheckpointIndex, FileRecord, check_aliases
from hfshard.storage.integrity import sha256_of
from hfshard.storage.names import WeightNames, check_file_name
from hfshard.storage.pickle_file import PickleFile
from hfshard.storage.shard_file import Identity, ShardFile, identity_of, read_small
from hfshard.storage.strict_json import parse_json_object

Verify = Literal["none", "structure", "full", "sha256"]
Kind = Literal["single", "index", "bin", "bin_index"]

_VERIFY_THREADS = 4


@dataclass(frozen=True, slots=True)
class Located:
    """The file that a checkpoint is entered by."""

    kind: Kind
    name: str


@dataclass
class OpenCheckpoint:
    """A checkpoint whose files are open and checked.

    Attributes:
        directory: Where it lies.
        located: The file that it was entered by.
        index: Which file holds which tensor; for a single file, what the file says of itself.
        shards: File -> open safetensors file.
        pickles: File -> tensors of a pickled file.
        config: The bytes of config.json, or None.
    """

    directory: str
    names: WeightNames
    located: Located
    index: CheckpointIndex
    shards: dict[str, ShardFile] = field(default_factory=dict)
    pickles: dict[str, PickleFile] = field(default_factory=dict)
    config: bytes | None = None
    stamp: tuple[Identity | None, ...] = ()

    @property
    def keys(self) -> list[str]:
        """FQNs of the stored tensors, in the order of the files and of the bytes in them."""
        stored = [name for shard in self.shards.values() for name in shard.header.slots]
        return stored + [name for pickled in self.pickles.values() for name in pickled.tensors]

    def tensor(self, name: str, *, mapped: bool = True) -> torch.Tensor:
        """One stored tensor, by its FQN."""
        file = self.index.weight_map[name]
        return (
            self.pickles[file].tensors[name] if file in self.pickles else self.shards[file].tensor(name, mapped=mapped)
        )

    def is_unchanged(self) -> bool:
        """Whether the directory still holds this checkpoint."""
        return self.stamp == _stamp(self.directory, self.names, self.config_explicit)

    @property
    def config_explicit(self) -> str | None:
        """The weights that the config names, where it was entered by them."""
        conventional = {self.names.single, self.names.index, self.names.bin_single, self.names.bin_index}
        return None if self.located.name in conventional else self.located.name

    def close(self) -> None:
        """Close all files; mapped tensors stay valid."""
        for shard in self.shards.values():
            shard.close()


@contextmanager
def open_checkpoint(
    directory: str,
    *,
    variant: str | None = None,
    use_safetensors: bool | None = None,
    verify: Verify = "structure",
    on_bytes: Callable[[int], object] | None = None,
) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint: everything that costs nothing is checked, and with verify="full" every byte.

    A writer may replace the checkpoint meanwhile: then it is opened anew, until all its files are of one save.

    Args:
        directory: Where it lies.
        variant: As in `from_pretrained`.
        use_safetensors: None: safetensors before pickles; True: only them; False: only pickles.
        verify: "none": only what reading needs; "structure": sizes, headers, keys and samples too; "full" (or
            "sha256"): the checksums of all files too.
        on_bytes: Told the bytes that were checked, from any thread.

    Raises:
        CheckpointNotFoundError: No weights there.
        CheckpointChangedError: It kept changing.
        DamagedCheckpointError, UnsafePathError, UnsafePickleError: Something is wrong with a file.
    """
    if verify not in ("none", "structure", "full", "sha256"):
        raise InvalidArgumentError(f"verify must be 'none', 'structure' or 'full' (or 'sha256'), and is {verify!r}.")
    names = WeightNames(variant)
    checkpoint = _open_until_whole(directory, names, use_safetensors, verify)
    try:
        if verify in ("full", "sha256"):
            _check_digests(checkpoint, on_bytes)
        yield checkpoint
    finally:
        checkpoint.close()


def locate_checkpoint(directory: str, names: WeightNames, use_safetensors: bool | None = None) -> Located:
    """Find the file that a checkpoint is entered by, as transformers does.

    Raises:
        CheckpointNotFoundError: There is none.
        DamagedCheckpointError, UnsafePathError: config.json is no JSON, or names weights outside the directory.
    """
    return _locate(directory, names, use_safetensors, _explicit_of(_read_config(directory), directory, names))


def _open_until_whole(
    directory: str, names: WeightNames, use_safetensors: bool | None, verify: Verify
) -> OpenCheckpoint:
    last: HfshardError | None = None
    for _ in range(CHANGED_RETRIES):
        explicit = None
        before = _stamp(directory, names, explicit)
        try:
            config = _read_config(directory)
            explicit = _explicit_of(config, directory, names)
            before = _stamp(directory, names, explicit)
            checkpoint = _open_once(directory, names, _locate(directory, names, use_safetensors, explicit), verify)
        except HfshardError as error:
            if before == _stamp(directory, names, explicit):
                raise
            last = error
        else:
            checkpoint.stamp, checkpoint.config = before, config
            if checkpoint.is_unchanged() and config == _read_config(directory):
                return checkpoint
            checkpoint.close()
        time.sleep(CHANGED_WAIT_SECONDS)
    raise CheckpointChangedError(
        f"The checkpoint in '{directory}' was replaced {CHANGED_RETRIES} times while it was being opened. "
        "Load it when the process that saves there is done.",
        path=directory,
    ) from last


def _locate(directory: str, names: WeightNames, use_safetensors: bool | None, explicit: str | None) -> Located:
    if explicit is not None:
        return Located("index" if explicit.endswith(INDEX_SUFFIX) else "single", explicit)
    candidates: list[tuple[Kind, str]] = []
    if use_safetensors is not False:
        candidates += [("single", names.single), ("index", names.index)]
    if not use_safetensors:
        candidates += [("bin", names.bin_single), ("bin_index", names.bin_index)]
    for kind, name in candidates:
        if os.path.lexists(os.path.join(directory, name)):
            return Located(kind, name)
    raise _not_found(directory, names, [name for _, name in candidates])


def _not_found(directory: str, names: WeightNames, looked_for: list[str]) -> CheckpointNotFoundError:
    if not os.path.isdir(directory):
        return CheckpointNotFoundError(f"There is no directory '{directory}'. Check the path.", path=directory)
    found = sorted(name for name in os.listdir(directory) if name.endswith((SAFETENSORS_SUFFIX, ".bin")))
    hint = f"It holds {', '.join(found[:5])}" if found else "It holds no weights at all"
    if ADAPTER_CONFIG_NAME in os.listdir(directory):
        hint = "It holds a PEFT adapter: load it with from_pretrained of a model class, with peft installed"
    variant = f" of variant '{names.variant}'" if names.variant is not None else ""
    return CheckpointNotFoundError(
        f"There is no checkpoint{variant} in '{directory}': none of {', '.join(looked_for)}. {hint}. "
        f"To see what is there, run: ls -l {directory}",
        path=directory,
    )


def _open_once(directory: str, names: WeightNames, located: Located, verify: Verify) -> OpenCheckpoint:
    path = os.path.join(directory, located.name)
    if located.kind in ("bin", "bin_index"):
        return _open_pickles(directory, names, located)
    if located.kind == "single":
        shard = ShardFile(path, directory)
        checkpoint = OpenCheckpoint(directory, names, located, _index_of_single(shard, located.name))
        checkpoint.shards[located.name] = shard
        shards = {located.name: shard}
    else:
        raw, _ = read_small(path, directory, MAX_INDEX_BYTES)
        index = CheckpointIndex.from_json(raw, path)
        checkpoint = OpenCheckpoint(directory, names, located, index)
        shards = checkpoint.shards
    try:
        if located.kind == "index":
            files = set(checkpoint.index.weight_map.values()) | _tables_shards(checkpoint.index)
            for file in sorted(files):
                shards[file] = ShardFile(os.path.join(directory, file), directory)
        _check_shards(checkpoint, verify)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def _tables_shards(index: CheckpointIndex) -> set[str]:
    return {name for name in index.files if name.endswith(SAFETENSORS_SUFFIX)}


def _index_of_single(shard: ShardFile, name: str) -> CheckpointIndex:
    slots = shard.header.slots
    check_aliases(shard.own.aliases, slots, shard.path)
    digests = shard.own.digests
    files = {**shard.own.files, name: digests} if digests.sample is not None else {}
    return CheckpointIndex(
        weight_map=dict.fromkeys(slots, name),
        total_size=sum(slot.nbytes for slot in slots.values()),
        metadata={key: value for key, value in shard.header.metadata.items() if key != "hfshard"},
        files=files,
        aliases=shard.own.aliases,
        undeclared=shard.own.undeclared,
    )


def _check_shards(checkpoint: OpenCheckpoint, verify: Verify) -> None:
    """Every key in exactly the file that the index names, and every file the one that was saved."""
    seen: dict[str, str] = {}
    weight_map = checkpoint.index.weight_map
    entry = os.path.join(checkpoint.directory, checkpoint.located.name)
    for file, shard in checkpoint.shards.items():
        for name in shard.header.slots:
            if name in seen:
                raise _key_error(shard.path, name, f"stands in '{seen[name]}' too")
            if name not in weight_map:
                raise _key_error(shard.path, name, f"is not in the index '{entry}'")
            if weight_map[name] != file:
                raise _key_error(shard.path, name, f"is said to lie in '{weight_map[name]}' by the index '{entry}'")
            seen[name] = file
    for name, file in weight_map.items():
        if name not in seen:
            path = os.path.join(checkpoint.directory, file)
            raise _key_error(path, name, f"is missing in it, and the index '{entry}' says that it is there")
    if verify != "none":
        for file, record in checkpoint.index.files.items():
            if file in checkpoint.shards:
                checkpoint.shards[file].check_record(record, sample=True)
        _check_total_size(checkpoint, entry)


def _check_total_size(checkpoint: OpenCheckpoint, entry: str) -> None:
    # Foreign indexes count views and ties in their own ways: theirs is not compared.
    declared = checkpoint.index.total_size
    actual = sum(slot.nbytes for shard in checkpoint.shards.values() for slot in shard.header.slots.values())
    if checkpoint.index.files and declared is not None and declared != actual:
        raise DamagedCheckpointError(
            f"Index '{entry}' is damaged: its total_size is {declared}, and the shards hold {actual} bytes. "
            "Download or save the checkpoint again.",
            path=entry,
            expected=declared,
            actual=actual,
        )


def _key_error(path: str, name: str, problem: str) -> DamagedCheckpointError:
    folder = os.path.dirname(path)
    return DamagedCheckpointError(
        f"Tensor '{name}' of shard '{path}' {problem}: the files are of different saves, or damaged. "
        f"Download or save the checkpoint again, or run 'hfshard verify {folder}'.",
        path=path,
        fqn=name,
    )


def _check_digests(checkpoint: OpenCheckpoint, on_bytes: Callable[[int], object] | None) -> None:
    if not checkpoint.index.is_verifiable:
        entry = os.path.join(checkpoint.directory, checkpoint.located.name)
        raise DamagedCheckpointError(
            f"'{entry}' can't be verified in full: it carries no checksums (hfshard writes them). "
            "Load it with verify='structure', or save it once with hfshard.",
            path=entry,
        )
    with ThreadPoolExecutor(_VERIFY_THREADS, thread_name_prefix="hfshard-verify") as pool:
        checks = [
            pool.submit(shard.check_digest, checkpoint.index.files[file], on_bytes)
            for file, shard in checkpoint.shards.items()
        ]
        for check in checks:
            check.result()
    for name, record in checkpoint.index.files.items():
        if name.endswith(".json"):
            check_small_file(checkpoint.directory, name, record)


def check_small_file(directory: str, name: str, record: FileRecord) -> None:
    """Compare config.json or generation_config.json with what was recorded when it was saved.

    Raises:
        DamagedCheckpointError: It is missing (`MissingShardError`), or differs (`IntegrityError`).
    """
    path = os.path.join(directory, name)
    found = sha256_of(read_small(path, directory, MAX_CONFIG_BYTES)[0])
    if record.sha256 is not None and found != record.sha256:
        raise IntegrityError(
            f"'{path}' is not the file that was saved: its sha256 is {found}, and {record.sha256} was recorded. "
            "If you edited it on purpose, load with verify='structure', or save again.",
            path=path,
            expected=record.sha256,
            actual=found,
        )


def _open_pickles(directory: str, names: WeightNames, located: Located) -> OpenCheckpoint:
    path = os.path.join(directory, located.name)
    if located.kind == "bin":
        pickled = PickleFile(path, directory)
        index = CheckpointIndex(weight_map=dict.fromkeys(pickled.tensors, located.name))
        return OpenCheckpoint(directory, names, located, index, pickles={located.name: pickled})
    raw, _ = read_small(path, directory, MAX_INDEX_BYTES)
    index = CheckpointIndex.from_json(raw, path, suffix=".bin")
    checkpoint = OpenCheckpoint(directory, names, located, index)
    seen: dict[str, str] = {}
    for file in sorted(set(index.weight_map.values())):
        pickled = checkpoint.pickles[file] = PickleFile(os.path.join(directory, file), directory)
        for name in pickled.tensors:
            if index.weight_map.get(name) != file or name in seen:
                raise _key_error(pickled.path, name, f"is not said to lie there by the index '{path}'")
            seen[name] = file
    for name, file in index.weight_map.items():
        if name not in seen:
            missing = os.path.join(directory, file)
            raise _key_error(missing, name, f"is missing in it, and the index '{path}' says that it is there")
    return checkpoint


def _read_config(directory: str) -> bytes | None:
    path = os.path.join(directory, CONFIG_NAME)
    return read_small(path, directory, MAX_CONFIG_BYTES)[0] if os.path.lexists(path) else None


def _explicit_of(config: bytes | None, directory: str, names: WeightNames) -> str | None:
    """The weights that config.json tells every reader to load, if it does."""
    if config is None:
        return None
    path = os.path.join(directory, CONFIG_NAME)
    remedy = "Save the model again, or download the file again."
    value = parse_json_object(config, path=path, what="Config", remedy=remedy).get(EXPLICIT_WEIGHTS_KEY)
    if value is None:
        return None
    if not isinstance(value, str) or not value.endswith((SAFETENSORS_SUFFIX, SAFETENSORS_SUFFIX + INDEX_SUFFIX)):
        raise UnsafePathError(
            f"'{path}' names {str(value)[:200]!r} as its weights, which is neither a .safetensors file nor its index. "
            f"Remove '{EXPLICIT_WEIGHTS_KEY}' from it, or download it again.",
            path=path,
            actual=value,
        )
    check_file_name(value, index_path=path, suffix=".json" if value.endswith(".json") else SAFETENSORS_SUFFIX)
    if names.variant is not None and "-hfshard-" in value and not names.is_transient(value):
        return None  # an unfinished commit of the weights beside this variant
    return value


def _stamp(directory: str, names: WeightNames, explicit: str | None) -> tuple[Identity | None, ...]:
    files = [CONFIG_NAME, names.single, names.index, names.bin_single, names.bin_index]
    return tuple(_identity(os.path.join(directory, name)) for name in files + ([explicit] if explicit else []))


def _identity(path: str) -> Identity | None:
    try:
        return identity_of(os.stat(path))
    except OSError:
        return None
