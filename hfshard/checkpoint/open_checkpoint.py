"""Open a checkpoint for reading: check that all files belong to one save, and read its tensors or their bytes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch

from hfshard._util.progress import ProgressCallback, byte_progress
from hfshard._util.threads import cancellable, result_of, start_worker, wait_all
from hfshard.checkpoint.check_files import (
    ReplacedMeanwhile,
    check_checksums,
    check_fingerprints,
    check_keys,
    check_pickle_checksums,
    check_pickles,
    check_small_file,
    check_small_files,
    find_places,
    reject_unverifiable,
    retry_if_replaced,
)
from hfshard.checkpoint.folder import Folder, as_folder
from hfshard.checkpoint.locate import (
    FilesOf,
    WeightsEntry,
    checked_weights_override,
    config_in,
    entry_versions,
    find_lone_adapter,
    find_weights,
    versions_or_error,
)
from hfshard.constants import CONFIG_NAME, MAX_INDEX_BYTES, METADATA_KEY, SAFETENSORS_SUFFIX
from hfshard.errors import (
    CheckpointChangedError,
    DamagedCheckpointError,
    HfshardError,
    IntegrityError,
    InvalidArgumentError,
    MissingShardError,
    repair_hint,
)
from hfshard.foreign.find_foreign import open_foreign
from hfshard.foreign.foreign_shard import ForeignShard
from hfshard.format.file_names import MODEL_BASE, WeightNames
from hfshard.format.header import TensorInfo
from hfshard.format.index import (
    FULL,
    CheckpointIndex,
    FileDigest,
    Verify,
    check_tied_names,
    check_verify_level,
    tensor_hasher,
)
from hfshard.pickles.pickle_file import PickleFile
from hfshard.shards.ranged_shard import RangedShard, read_full_tensors
from hfshard.shards.read_tensors import ReadMode, mode_of, read_from
from hfshard.shards.shard import SafetensorsShard
from hfshard.shards.shard_file import SafetensorsFile
from hfshard.tensors.stored_tensor import (
    DTYPE_BITS,
    TORCH_DTYPES,
    RawTensor,
    TensorLayout,
    TensorLike,
    allocate_pages,
    bytes_view,
    iter_blocks,
    stored_dtype_name,
    tensor_layout,
    tensor_nbytes,
)

logger = logging.getLogger(__name__)

# Open files of a checkpoint, for reading its tensors and noticing that it was replaced.


@dataclass
class OpenCheckpoint:
    """A checkpoint whose files are open and checked.

    Attributes:
        folder: The folder of its files.
        weights: The file by which it was entered.
        index: The index; for a single file, one built from the file's own header.
        shards: File -> open safetensors file; all on this machine, or all read by ranges.
        pickles: File -> tensors of a pickled file.
        raw_index: The bytes of the index, if `keeps_index` was passed.
    """

    folder: Folder
    names: WeightNames
    weights: WeightsEntry
    index: CheckpointIndex
    shards: dict[str, SafetensorsShard] = field(default_factory=dict)
    pickles: dict[str, PickleFile] = field(default_factory=dict)
    raw_index: bytes | None = field(default=None, repr=False)
    weights_override: str | None = None
    """The weights file that config.json names, if it names one."""
    entry_versions: tuple[Hashable, ...] = ()
    """The identities of the files by which a replaced checkpoint is noticed."""
    check: Future[None] | None = None
    """Running check of every byte in another thread, if any."""
    level: Verify = "none"
    """Level of the checks while tensors are read by ranges."""
    progress: bool | None = False
    """A bar while tensors are read by ranges."""

    @property
    def directory(self) -> str:
        """The path of its directory, or its address."""
        return self.folder.path

    @property
    def reads_ranges(self) -> bool:
        """True if its files are read by ranges, so that each read sends requests, and can fail at any time."""
        return any(isinstance(shard, RangedShard) for shard in self.shards.values())

    @property
    def foreign(self) -> ForeignShard | None:
        """The weights of another framework's directory; None if it is no such checkpoint."""
        return next((shard for shard in self.shards.values() if isinstance(shard, ForeignShard)), None)

    @property
    def weights_path(self) -> str:
        """The path of the file by which it was entered."""
        return os.path.join(self.directory, self.weights.name)

    @property
    def keys(self) -> list[str]:
        """FQNs of the stored tensors, in the order of the files and of the bytes in them."""
        stored = [name for shard in self.shards.values() for name in shard.header.tensors]
        return stored + [name for pickled in self.pickles.values() for name in pickled.tensors]

    @property
    def others(self) -> dict[str, Any]:
        """FQN -> entry of a pickle that is not a dense tensor; only its name is of use to a model (`OtherEntry`)."""
        return {name: entry for pickled in self.pickles.values() for name, entry in pickled.others.items()}

    def reject_others(self, names: Collection[str] | None = None) -> None:
        """Reject entries of these names, or all, that are not dense tensors: they can be neither returned nor stored.

        Raises:
            DamagedCheckpointError: There is one.
        """
        others = self.others
        for name in others if names is None else others.keys() & names:
            raise others[name].error

    def read(
        self, names: Collection[str], read: ReadMode = "auto", device: str | torch.device = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Read stored tensors, in the order of the names (see `read_tensors.read_from`).

        Unless they are mapped, this waits for a running check, so that no byte is read from disk twice.

        Raises:
            IntegrityError: That check found a damaged file.
        """
        device, wanted = torch.device(device), set(names)
        if self.reads_ranges:
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
        with byte_progress("Loading", total, self.progress) as progress_callback:
            tensors = read_full_tensors(
                held,
                device,
                level=self.level,
                progress_callback=progress_callback,
                memory_bytes=self.folder.traits.read_memory_bytes,
            )
        return {name: tensors[name] for name in names}

    def pickled_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of all pickles, mapped, for finding those that share memory."""
        return {name: tensor for pickled in self.pickles.values() for name, tensor in pickled.tensors.items()}

    def is_unchanged(self) -> bool:
        """Return whether the folder still has this checkpoint."""
        folder = self.folder
        if (foreign := self.foreign) is not None and not foreign.is_current():
            return False
        folder.refresh()
        now = entry_versions(folder, self.names, self.weights_override)
        # Open files of a directory stay what they are.
        has_shards = folder.traits.is_directory or all(
            folder.version(name) == shard.identity for name, shard in self.shards.items()
        )
        return self.entry_versions == now and has_shards

    def is_of_one_save(self) -> bool:
        """Return whether the small files read since the opening belong to it, as no save has replaced it."""
        return self.folder.is_pinned or self.is_unchanged()

    def close(self) -> None:
        """Close all files; mapped tensors stay valid."""
        for shard in self.shards.values():
            shard.close()
        for pickled in self.pickles.values():
            pickled.close()


WhenOpen = Callable[[OpenCheckpoint], None]
"""Function that reads other files of a checkpoint; if it raises CheckpointChangedError, everything is opened again."""


def _reject_casts() -> None:
    """Reject to read where torch's functions return other dtypes than they are asked for: bytes would be misread."""
    for asked in (torch.float32, torch.bfloat16):
        made = torch.empty(0, dtype=asked, device="cpu").dtype
        if made != asked:
            raise InvalidArgumentError(
                f"torch.empty returns {made} for {asked} here, as inside deepspeed.zero.Init, so that bytes would be "
                "misread. Nothing was loaded. Build the model in that block, and load after it: "
                "hfshard.load_model(model, path)."
            )


@contextmanager
def open_checkpoint(
    directory: str | Folder,
    *,
    variant: str | None = None,
    use_safetensors: bool | None = None,
    verify: Verify = "structure",
    progress_callback: ProgressCallback | None = None,
    files_of: FilesOf | None = None,
    base: str = MODEL_BASE,
    weights_name: str | None = None,
    check_beside: bool = False,
    key: str | None = None,
    when_open: WhenOpen | None = None,
    keeps_index: bool = False,
    opens_adapter: bool = False,
) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint, and check its structure; with verify="full", check every byte.

    If a save replaces it meanwhile, it is opened again, until all its files belong to one save.

    Args:
        directory: The path of a directory, or a folder.
        variant: Name of the variant; see `from_pretrained`.
        use_safetensors: None: safetensors before pickles; True: only safetensors; False: only pickles.
        verify: "none": only what reading needs; "structure": also sizes, fingerprints and the total; "full" (or
            "sha256"): also the checksums of all files.
        progress_callback: Called from any thread with the number of bytes that were checked.
        files_of: Chooses the files of an index to open and check; the others may be missing.
        base: The beginning of the names of its files.
        weights_name: The index or single file to open, regardless of other files. None: the one transformers finds.
        check_beside: Compare the checksums while the block runs, not before it. Damage is raised at the end of the
            block, also in place of an error of its own. For a block that discards everything it read in that case.
        key: Key of the weights in a single pickle, as for `select_weights`.
        when_open: Called with the open checkpoint before all of it is known to be of one save; again if it is not.
        keeps_index: Keep the bytes of the index, for `raw_index`.
        opens_adapter: Open the weights of an adapter if there is no model.

    Raises:
        CheckpointNotFoundError: There are no weights.
        InvalidArgumentError: `key` does not identify the weights of a pickle; or there is no single pickle for a `key`;
            or torch's functions are made to return other dtypes here, as inside `deepspeed.zero.Init`.
        CheckpointChangedError: It kept changing.
        DamagedCheckpointError, UnsafePathError, UnsafePickleError: Something is wrong with a file.
    """
    check_verify_level(verify)
    _reject_casts()
    names = WeightNames(variant, base)
    folder = as_folder(directory)

    def find_name() -> str | None:
        """Return the name of the file to open, regardless of other files; None: the one that transformers finds."""
        found = weights_name or checked_weights_override(config_in(folder), folder.path, names, folder.pass_over)
        return find_lone_adapter(folder, names) if found is None and opens_adapter else found

    def finish(opened: OpenCheckpoint) -> None:
        if verify in FULL and opened.foreign is not None:
            opened.foreign.check_records(progress_callback)
        elif verify in FULL and opened.reads_ranges:  # the weights are compared while they are read: none comes twice
            reject_unverifiable(opened.weights_path, opened.index, opened.shards)
            check_small_files(folder, opened.index)
        if when_open is not None:
            when_open(opened)

    open_once = partial(
        _open_once, folder, names, verify=verify, files_of=files_of, key=key, finish=finish, keeps_index=keeps_index
    )
    checkpoint = _open_until_whole(folder, names, use_safetensors, weights_name, find_name, open_once)
    checkpoint.level = verify
    try:
        if verify not in FULL or checkpoint.reads_ranges:
            yield checkpoint
        elif check_beside:
            with _checked_beside(checkpoint, progress_callback):
                yield checkpoint
        else:
            _check_contents(checkpoint, progress_callback, threading.Event())
            yield checkpoint
    finally:
        checkpoint.close()


def warn_of_others_files(checkpoint: OpenCheckpoint, verify: Verify) -> None:
    """Log small files that were edited since a save, if only the structure is checked, and weights of another tool."""
    names = [name for name in checkpoint.index.files if name.endswith(".json")] if verify == "structure" else []
    for name in names:
        if name == CONFIG_NAME or not checkpoint.reads_ranges:  # another one would cost a request
            try:
                check_small_file(checkpoint.folder, name, checkpoint.index.files[name])
            except DamagedCheckpointError as error:
                logger.warning("%s", error)
    if (message := checkpoint.folder.describe_plain_weights()) is not None:
        logger.warning("%s", message)


def _check_contents(
    checkpoint: OpenCheckpoint, progress_callback: ProgressCallback | None, cancelled: threading.Event
) -> None:
    if checkpoint.pickles:
        check_pickles(checkpoint.pickles, cancellable(progress_callback, cancelled))
    else:
        path, index, shards = checkpoint.weights_path, checkpoint.index, checkpoint.shards
        check_checksums(checkpoint.folder, path, index, shards, progress_callback, cancelled)


@contextmanager
def _checked_beside(checkpoint: OpenCheckpoint, progress_callback: ProgressCallback | None) -> Iterator[None]:
    """Compare every byte in another thread while the block runs, and raise damage at its end."""
    cancelled = threading.Event()
    checking = start_worker(partial(_check_contents, checkpoint, progress_callback, cancelled), "hfshard-check")
    if checking is None:
        _check_contents(checkpoint, progress_callback, cancelled)
        yield
        return
    checkpoint.check = checking
    try:
        try:
            yield
        except Exception:
            result_of(checking)  # damage may be the cause of the block's error
            raise
        result_of(checking)
    finally:
        cancelled.set()  # Ctrl-C
        wait_all([checking])


def _open_until_whole(
    folder: Folder,
    names: WeightNames,
    use_safetensors: bool | None,
    weights_name: str | None,
    find_name: Callable[[], str | None],
    open_once: Callable[[WeightsEntry], OpenCheckpoint],
) -> OpenCheckpoint:

    def open_one_save() -> OpenCheckpoint:
        weights_override = weights_name
        folder.refresh(names if weights_name is None else None)
        before = versions_or_error(folder, names, weights_override)
        try:
            weights_override = find_name()
            if weights_override != weights_name:
                before = (*before, *entry_versions(folder, names, weights_override)[len(before) :])
            weights = find_weights(folder, names, use_safetensors, weights_override, opens_foreign=True)
            checkpoint = open_once(weights)
        except HfshardError as error:
            folder.refresh()
            is_unchanged = before == versions_or_error(folder, names, weights_override)
            if isinstance(error, CheckpointChangedError):
                if error.is_final:
                    raise
            elif is_unchanged and not _is_listed_now(folder, error):
                raise
            raise ReplacedMeanwhile from error
        checkpoint.weights_override, checkpoint.entry_versions = weights_override, before
        if not checkpoint.is_of_one_save():
            checkpoint.close()
            raise ReplacedMeanwhile
        return checkpoint

    too_often = (
        f"The checkpoint in '{folder.path}' was replaced {folder.traits.retries} times while it was being opened. "
        "Retry when no save is running."
    )
    return retry_if_replaced(open_one_save, folder.traits, folder.path, too_often)


def _is_listed_now(folder: Folder, error: HfshardError) -> bool:
    """Return whether a file was missing only because it was put between two pages of a listing."""
    is_missing = isinstance(error, MissingShardError) and not folder.traits.is_directory
    return is_missing and error.path in {f"{folder.path}/{name}" for name in folder.paths()}


def _open_once(
    folder: Folder,
    names: WeightNames,
    weights: WeightsEntry,
    *,
    verify: Verify,
    files_of: FilesOf | None,
    key: str | None,
    finish: WhenOpen,
    keeps_index: bool,
) -> OpenCheckpoint:
    path = os.path.join(folder.path, weights.name)
    if weights.kind == "bin":
        pickled = folder.open_pickle(weights.name, key)
        index = CheckpointIndex(weight_map=dict.fromkeys([*pickled.tensors, *pickled.others], weights.name))
        checkpoint = OpenCheckpoint(folder, names, weights, index, pickles={weights.name: pickled})
        finish(checkpoint)
        return checkpoint
    if key is not None and weights.kind != "foreign":
        raise InvalidArgumentError(
            f"'{path}' has no key={key!r:.200}: only single files of torch.save have keys. Leave it out.",
            path=path,
        )
    if not weights.is_index:
        is_foreign = weights.kind == "foreign"
        shard = open_foreign(folder.path, weights.name, key) if is_foreign else folder.open_shard(weights.name)
        checkpoint = checkpoint_of(shard, folder, names, weights)
    else:
        raw = folder.read_small(weights.name, MAX_INDEX_BYTES)
        checkpoint = OpenCheckpoint(folder, names, weights, CheckpointIndex.from_json(raw, path, folder.pass_over))
        checkpoint.raw_index = raw if keeps_index else None
    try:
        if weights.is_index:
            _open_files(checkpoint, files_of)
        for file, shard in checkpoint.shards.items():
            if isinstance(shard, RangedShard):
                shard.recorded = checkpoint.index.files.get(file, FileDigest())
        if verify != "none":
            is_part = weights.is_index and files_of is not None
            index = replace(checkpoint.index, total_size=None) if is_part else checkpoint.index
            check_fingerprints(checkpoint.weights_path, index, checkpoint.shards)
        finish(checkpoint)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def _open_files(checkpoint: OpenCheckpoint, files_of: FilesOf | None) -> None:
    index = checkpoint.index
    weight_map = index.weight_map
    wanted = {name for name in index.files if name.endswith(SAFETENSORS_SUFFIX)} | set(weight_map.values())
    if files_of is not None:
        wanted &= set(files_of(index))
        weight_map = {name: file for name, file in weight_map.items() if file in wanted}
    if checkpoint.weights.kind == "index":
        checkpoint.shards = checkpoint.folder.open_shards(sorted(wanted))
    else:
        checkpoint.pickles = {file: checkpoint.folder.open_pickle(file, None) for file in sorted(wanted)}
    contents = {file: list(shard.header.tensors) for file, shard in checkpoint.shards.items()}
    contents |= {file: [*pickled.tensors, *pickled.others] for file, pickled in checkpoint.pickles.items()}
    try:
        check_keys(checkpoint.weights_path, weight_map, contents)
    except DamagedCheckpointError as error:
        found = None if index.files or files_of is not None else find_places(weight_map, contents)
        if found is None:
            raise
        checkpoint.folder.pass_over(error)
        checkpoint.index = replace(index, weight_map=found)


def checkpoint_of(shard: SafetensorsShard, folder: Folder, names: WeightNames, weights: WeightsEntry) -> OpenCheckpoint:
    """Return the checkpoint that consists of one file.

    Args:
        shard: Open; it is closed with the checkpoint, or on an error.
        folder, names, weights: Where it is, or would be.

    Raises:
        DamagedCheckpointError: It declares ties to tensors that it lacks.
    """
    try:
        tensors = shard.header.tensors
        metadata = shard.hfshard_metadata
        check_tied_names(metadata.tied_names, tensors, shard.path)
        index = CheckpointIndex(
            weight_map=dict.fromkeys(tensors, weights.name),
            total_size=shard.data_bytes,
            metadata={
                key: value
                for key, value in shard.header.metadata.items()
                if key != METADATA_KEY and key not in metadata.tied_names
            },
            files={**metadata.files, weights.name: metadata.digests}
            if metadata.digests.fingerprint is not None
            else {},
            tied_names=metadata.tied_names,
            undeclared_ties=metadata.undeclared_ties,
        )
    except BaseException:
        shard.close()
        raise
    return OpenCheckpoint(folder, names, weights, index, shards={weights.name: shard})


# Tensors of an open checkpoint as bytes for a save, compared with their digests while they are read.


_CAST_DTYPES = frozenset({"F16", "BF16", "F32", "F64"})
"""Dtypes that a cast changes: 8-bit floats and smaller are packed weights, meaningless without their scales."""

_PACKED_BITS = 8

_LEAST_READ_BYTES: Final = 16 * 1024
"""Size below which tensors of pickles stay mapped."""


def raw_tensors(checkpoint: OpenCheckpoint, *, checks_files: bool = True) -> dict[str, TensorLike]:
    """Return the stored tensors by name, in the order of the files and of the bytes in them; nothing is read yet.

    The bytes of a safetensors file are read when a block is requested, whether torch knows their dtype or not, and
    compared with the tensor's digest after the last block. Large contiguous tensors of a pickle are read in the same
    way, but have no digests; its other tensors are torch tensors.

    Args:
        checkpoint: Open.
        checks_files: Compare a file that has a checksum, but no digests of its tensors, with the checksum here.

    Raises:
        IntegrityError: A file without tensor digests differs from its checksum. (While reading: a tensor differs.)
        DamagedCheckpointError: A pickle has an entry that is not a dense tensor.
    """
    checkpoint.reject_others()
    found: dict[str, TensorLike] = {}
    for file, shard in checkpoint.shards.items():
        recorded = checkpoint.index.files.get(file, FileDigest())
        digests = recorded.split_tensor_digests(shard.header.tensors)
        if digests is None and checks_files:
            shard.check_contents(recorded)
        for info in shard.header.tensors.values():
            layout = TensorLayout(info.dtype, info.shape, info.nbytes, info.name in shard.complex_as_real)
            digest = None if digests is None else digests[info.name]
            found[info.name] = RawTensor(layout, partial(_checked_blocks, shard, info, digest), digest)
    for pickled in checkpoint.pickles.values():
        found.update(pickled.stored_tensors(_LEAST_READ_BYTES))
    return found


def is_compared(checkpoint: OpenCheckpoint) -> bool:
    """Return whether every byte is compared with a checksum: pickles right here, safetensors files by `raw_tensors`.

    Raises:
        IntegrityError: A pickle is damaged.
    """
    if checkpoint.pickles:
        return not check_pickle_checksums(checkpoint.pickles)
    return checkpoint.index.is_verifiable


def _checked_blocks(
    shard: SafetensorsShard, info: TensorInfo, digest: str | None, block_bytes: int
) -> Iterator[memoryview]:
    if digest is None:
        yield from shard.blocks(info, block_bytes)
        return
    hasher = tensor_hasher()
    for block in shard.blocks(info, block_bytes):
        hasher.update(block)
        yield block
    if (found := hasher.hexdigest()) != digest:
        raise IntegrityError(
            f"Tensor '{info.name}' of shard '{shard.path}' is damaged: its xxh3 is {found}, but was {digest} "
            f"when it was saved. {repair_hint(shard.path)}",
            path=shard.path,
            fqn=info.name,
            expected=digest,
            actual=found,
        )


def is_packed(value: TensorLike) -> bool:
    """Return whether a tensor has floats too small to be weights by themselves (fp8, fp6, fp4)."""
    dtype = tensor_layout(value).dtype
    return dtype.startswith("F") and DTYPE_BITS[dtype] <= _PACKED_BITS


def cast(value: TensorLike, dtype: torch.dtype) -> TensorLike:
    """Cast a floating tensor to another dtype, block by block when it is read; other tensors stay as they are."""
    layout = tensor_layout(value)
    if layout.dtype not in _CAST_DTYPES or layout.complex_as_real or TORCH_DTYPES[layout.dtype] == dtype:
        return value
    nbytes = layout.parameters * dtype.itemsize
    new = TensorLayout(stored_dtype_name(dtype) or "", layout.shape, nbytes)
    return RawTensor(new, partial(_cast_blocks, value, TORCH_DTYPES[layout.dtype], dtype))


def _cast_blocks(
    value: TensorLike, dtype: torch.dtype, new_dtype: torch.dtype, block_bytes: int
) -> Iterator[memoryview]:
    # An old block yields at most one new block, and less if the new elements are smaller.
    source_bytes = block_bytes * dtype.itemsize // max(dtype.itemsize, new_dtype.itemsize)
    room = allocate_pages((min(source_bytes, tensor_nbytes(value)) // dtype.itemsize,), new_dtype)
    for block in iter_blocks(value, source_bytes):
        old = torch.frombuffer(block, dtype=dtype)
        yield bytes_view(room[: old.numel()].copy_(old))
