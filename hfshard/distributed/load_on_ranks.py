"""Loads spread over ranks: all ranks open the same checkpoint, and all of them read their parts, or none does."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from hfshard._util.call_ranks import Session, has_other_ranks
from hfshard._util.progress import byte_progress
from hfshard._util.threads import bound
from hfshard.checkpoint.check_files import check_checksums, check_pickles, retry_if_replaced
from hfshard.checkpoint.into_module import load_into_module
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.disk.direct_io import is_networked
from hfshard.distributed.read_parts import PartMapper, Target, prepare_reads, stored_tensors, with_local
from hfshard.distributed.rendezvous import ANY_PLACE, GroupSession, session
from hfshard.distributed.tensor_owners import assign_owners
from hfshard.errors import CheckpointChangedError, HfshardError, InvalidArgumentError, StateDictMismatchError
from hfshard.format.index import CheckpointIndex, sha256_of
from hfshard.pickles.pickle_file import PickleFile
from hfshard.places.place import ResolvedSource
from hfshard.places.source import CheckpointSource, open_source, use_checkpoint
from hfshard.shards.ranged_shard import RangedShard
from hfshard.shards.shard import SafetensorsShard
from hfshard.tensors.parameter_names import compare_keys, without_wrappers, wrapped_prefixes
from hfshard.tensors.state_dict import (
    assign,
    collect_state_dict,
    has_parts,
    has_spread,
    is_dtensor,
    is_sharded_tensor,
    is_spread_tensor,
    local_tensor,
    parts_of_parameters,
    reject_freed,
)
from hfshard.tensors.stored_tensor import is_torch_tensor_type
from hfshard.tensors.tied import find_shared_tensors
from hfshard.tensors.zero3 import reject_partitioned

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_FSDP: Final = "torch.distributed.fsdp."
"""The package of the hooks that shard the parameters before a load, as they do before `state_dict()` returns."""


def load_into_spread_module(model: nn.Module, source: CheckpointSource, options: LoadOptions) -> dict[str, Any]:
    """Load a checkpoint into a module that has DTensors. Every rank of the default process group must call.

    Each rank reads its part straight into its memory. Tensors on the meta device are mapped from the files if possible
    (see `PartMapper`), or get memory on the mesh's device. Modules with hooks or a `_load_from_state_dict` of their own
    receive their tensors through these.

    Args:
        model: Modified once every rank has found that the checkpoint fits.
        source: The same checkpoint on every rank, wherever each finds it.
        options: How to open and verify it.

    Returns:
        What `load_into_module` returns.

    Raises:
        RankFailedError: Another rank refused, failed, died, or did not come.
        Everything that `load_into_module` raises. The model is half loaded only if a file cannot be read after all, or
        a hook of the model raises.
    """
    with load_together("load_model", is_collective=True) as ranks:
        return use_together(
            ranks, source, options, lambda checkpoint: _load_in_place(model, checkpoint, options, ranks)
        )


def load_opened(model: nn.Module, checkpoint: OpenCheckpoint, options: LoadOptions) -> dict[str, Any]:
    """Load an open checkpoint into a module that is not spread over ranks.

    Remote files are read straight into the module's memory. Then the module is half loaded if a request fails after
    all, or the bytes received are not those that were saved.

    Args, returns, raises: The same as `load_into_module`.
    """
    if checkpoint.reads_ranges:
        return _load_in_place(model, checkpoint, options, Session())
    return load_into_module(model, checkpoint, options)


def _load_in_place(
    model: nn.Module, checkpoint: OpenCheckpoint, options: LoadOptions, ranks: Session
) -> dict[str, Any]:
    """Read a module's tensors straight into its memory, once every rank has found that the checkpoint fits."""
    mapped = stored_tensors(checkpoint, is_mapped=True)
    stored_names = {id(tensor): name for name, tensor in mapped.items()}

    def values_of(described: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        stored = {name: stored_names[id(tensor)] for name, tensor in described.items()}
        tied_names = checkpoint.index.tied_names
        values = checkpoint.read({tied_names.get(name, name) for name in stored.values()})
        return {name: values[tied_names.get(kept, kept)] for name, kept in stored.items()}

    fill = partial(_fill, checkpoint, stored_names, options, ranks)
    return load_into_module(model, checkpoint, options, mapped, fill, values_of if checkpoint.reads_ranges else None)


def load_like(
    source: CheckpointSource, like: Mapping[str, torch.Tensor], device: torch.device, options: LoadOptions
) -> dict[str, torch.Tensor]:
    """Load tensors with the shapes, dtypes, devices and placements of others. With DTensors, every rank must call.

    Args:
        source: The same checkpoint on every rank, wherever each finds it.
        like: Checked by `check_like`; not modified.
        device: The device of tensors whose like is plain and on the meta device.
        options: How to open and verify the checkpoint.

    Raises:
        RankFailedError: Another rank refused, failed, died, or did not come.
        StateDictMismatchError: The checkpoint lacks a name, or has it in another shape, or in a dtype
            that cannot be cast to that of `like`.
        Everything that `open_source` raises.
    """
    with load_together("load_state_dict", is_collective=has_spread(like)) as ranks:
        return use_together(
            ranks, source, options, lambda checkpoint: _read_like(checkpoint, like, device, options, ranks)
        )


def _read_like(
    checkpoint: OpenCheckpoint,
    like: Mapping[str, torch.Tensor],
    device: torch.device,
    options: LoadOptions,
    ranks: Session,
) -> dict[str, torch.Tensor]:
    _reject_misfits(checkpoint, like)
    targets = _Targets(checkpoint, options, device)
    tied_names = checkpoint.index.tied_names
    made: dict[tuple[Any, ...], torch.Tensor] = {}
    keys: dict[str, tuple[Any, ...]] = {}
    for name, tensor in like.items():
        spread = (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None
        keys[name] = (tied_names.get(name, name), tensor.dtype, tensor.device, spread)
        if keys[name] not in made:
            made[keys[name]] = targets.add_new(keys[name][0], tensor, tensor.dtype, tensor.shape)
    read = targets.prepare_reads()
    confirm_same(ranks, checkpoint)
    read()
    return {name: made[key] for name, key in keys.items()}


def has_spread_state(model: nn.Module) -> bool:
    """Return whether a module is spread over ranks. What FSDP2 has gathered after a forward pass is sharded again.

    Raises:
        InvalidArgumentError: Its state dict has ShardedTensors.
    """
    if has_parts(model):
        return True
    if "torch.distributed.tensor" not in sys.modules:
        return False
    state_dict = model.state_dict()
    _reject_sharded_tensors(state_dict)
    return has_spread(state_dict)


def files_of_names(index: CheckpointIndex, names: Collection[str]) -> set[str]:
    """Return the files that contain the tensors of these names; unknown names are ignored."""
    stored = {index.tied_names.get(name, name) for name in names}
    return {index.weight_map[name] for name in stored if name in index.weight_map}


def check_like(like: Mapping[str, Any]) -> None:
    """Reject what is not a state dict.

    Raises:
        InvalidArgumentError: It does not map names to tensors, or has a ShardedTensor or a parameter that DeepSpeed has
            partitioned.
    """
    if not isinstance(like, Mapping):
        raise InvalidArgumentError(f"like must map names to tensors, got a {type(like).__name__}.")
    _reject_sharded_tensors(like)
    reject_partitioned(like, "load")
    for name, tensor in like.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(
                f"like must map names to tensors, but {name!r:.200} is mapped to a {type(tensor).__name__}.",
                fqn=str(name),
            )


def _reject_sharded_tensors(state_dict: Mapping[str, Any]) -> None:
    name = next((name for name, value in state_dict.items() if is_sharded_tensor(value)), None)
    if name is not None:
        raise InvalidArgumentError(
            f"Cannot load into {name!r}: it is a ShardedTensor of FSDP1. Nothing was loaded. Shard the model with "
            "fully_shard, or let FullyShardedDataParallel load full tensors, on every rank: "
            "FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT).",
            fqn=name,
        )


def _fill(
    checkpoint: OpenCheckpoint,
    stored_names: Mapping[int, str],
    options: LoadOptions,
    ranks: Session,
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Read the values of a module's tensors, most of them into the tensors' own memory.

    Tensors that replace meta tensors, or that a module copies from by itself, are mapped where they can be. A tensor
    whose identity `stored_names` lacks has been read already. The ranks agree before the first change.
    """
    model_state = collect_state_dict(model, "load")
    reject_freed(model_state)
    by_modules = _loaded_by_modules(model, model_state)
    in_place = {name for name, own in model_state.items() if name not in by_modules and _has_own_memory(own)}
    parts = parts_of_parameters(model, "load")
    filled = []
    tied = find_shared_tensors(model_state)
    targets = _Targets(checkpoint, options, device_of_meshes(model_state.values()))
    found: dict[str, torch.Tensor] = {}
    fresh: dict[str, torch.Tensor] = {}
    for name in [name for name in tensors if name in model_state]:
        own = model_state[name]
        tensor = tensors[name]
        if id(tensor) not in stored_names:
            fresh[name] = tensor
            continue
        kept = tied.get(name, name)
        key = kept if kept in tensors and (kept in in_place) == (name in in_place) else name
        if key not in found:
            stored = stored_names[id(tensor)]
            if name in in_place:
                found[key] = targets.add_own(stored, own)
                if name in parts:
                    filled.append(parts[name])
                if name in parts and parts[name].is_whole:
                    targets.add_own(stored, parts[name].target)
            else:
                dtype = own.dtype if getattr(own, "is_meta", False) else tensor.dtype
                found[key] = targets.add_new(stored, own, dtype, tensor.shape)
        if name not in in_place:
            fresh[name] = found[key]
    read = targets.prepare_reads()
    confirm_same(ranks, checkpoint)
    try:
        read()
    except HfshardError as error:
        error.add_note("The module is half loaded: load it again before it is used.")
        raise
    for part in filled:
        part.take_loaded()
    assign(model, fresh, runs_hooks=True)


def _loaded_by_modules(model: nn.Module, names: Collection[str]) -> set[str]:
    """Return the names whose tensors a module loads by itself: by hooks, or its own `_load_from_state_dict`."""
    wrapped = wrapped_prefixes(model)
    paths = {
        without_wrappers(f"{path}.", wrapped) if path else ""
        for path, module in model.named_modules(remove_duplicate=False)
        if _loads_by_itself(module) or (not path and type(module).load_state_dict is not nn.Module.load_state_dict)
    }
    if "" in paths:
        return set(names)
    return {name for name in names if not paths.isdisjoint(_prefixes(name))} if paths else set()


def _prefixes(name: str) -> Iterator[str]:
    return (name[: at + 1] for at, letter in enumerate(name) if letter == ".")


def _loads_by_itself(module: nn.Module) -> bool:
    is_own = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    return is_own or any(not getattr(hook, "__module__", "").startswith(_FSDP) for hook in hooks)


def _has_own_memory(value: Any) -> bool:
    """Return whether it is a tensor with memory that can be read into, and not another library's wrapper."""
    part = local_tensor(value) if is_spread_tensor(value) else value
    return is_torch_tensor_type(part) and not part.is_meta


def device_of_meshes(tensors: Iterable[Any]) -> torch.device:
    """Return the device on which the tensors of a model, parts of which may be on the meta device, get memory."""
    return next((_mesh_device(tensor) for tensor in tensors if is_dtensor(tensor)), torch.device("cpu"))


def _mesh_device(tensor: DTensor) -> torch.device:
    return torch.device(tensor.device_mesh.device_type)


class _Targets:
    """Targets of a load: a model's own tensors; and new ones, which are mapped from files where they can be."""

    def __init__(self, checkpoint: OpenCheckpoint, options: LoadOptions, device: torch.device) -> None:
        """Begin without any; `device` is that of new plain tensors whose like is on the meta device."""
        self._checkpoint = checkpoint
        self._device = device
        self._mapper = PartMapper(checkpoint, options.read)
        self._wanted: list[tuple[str, Target]] = []

    def add_own(self, stored: str, own: torch.Tensor) -> torch.Tensor:
        self._wanted.append((stored, own))
        return own

    def add_new(self, stored: str, own: Any, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """Create a tensor for the values of a stored one, spread over ranks as another tensor, and on the same device.

        `own` is that tensor, or another value that a module has by its name; only for that, `shape` counts.
        """
        if is_spread_tensor(own) or is_torch_tensor_type(own):
            part = local_tensor(own) if is_spread_tensor(own) else own
            home = _mesh_device(own) if is_dtensor(own) else self._device
            device = home if part.is_meta else part.device
            mapped = self._mapper.map_like(stored, own, dtype, device)
            if mapped is not None:
                return mapped
            new = with_local(own, torch.empty_like(part, dtype=dtype, device=device, requires_grad=False))
        else:
            new = torch.empty(shape, dtype=dtype, device="cpu")
        self._wanted.append((stored, new))
        return new

    def prepare_reads(self) -> Callable[[], None]:
        """Check what `read_parts` checks, and return a function that then reads."""
        read_parts = prepare_reads(self._checkpoint, self._wanted)

        def read() -> None:
            self._mapper.start_read_ahead()
            read_parts()

        return read


def _reject_misfits(checkpoint: OpenCheckpoint, like: Mapping[str, torch.Tensor]) -> None:
    """Reject all names and shapes of a state dict that differ from the checkpoint's, or the first such dtype."""
    stored = stored_tensors(checkpoint)
    there = {name: stored[name] for name in like if name in stored}
    difference = compare_keys(there, like)
    difference.raise_unless_allowed(strict=True, path=checkpoint.directory, matched=len(there))
    for name, tensor in there.items():
        wanted = like[name].dtype
        if not torch.can_cast(tensor.dtype, wanted):
            raise StateDictMismatchError(
                f"'{name}' of the checkpoint '{checkpoint.directory}' is {tensor.dtype}, whose values {wanted} cannot "
                "represent. Nothing was loaded. Pass a tensor of another dtype in `like`.",
                path=checkpoint.directory,
                fqn=name,
                expected=wanted,
                actual=tensor.dtype,
            )


# Load by many ranks: they open the same checkpoint, share the work of verifying it, and all continue or none does.


_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)

_CHANGED: Final = b"changed"
"""The value that a rank sends to the next meeting, whichever it is, after what it has opened was replaced."""

_CACHE: Final = b"cache "
_SNAPSHOT: Final = b"snapshot "
"""Prefixes of a rank's value for where it loads from: a repo of the Hub, or a directory hub."""

_CURRENT_LOAD: Final[ContextVar[Session | None]] = ContextVar("hfshard_load", default=None)
"""The session of this thread's load: loads by all ranks within it belong to the same one."""


@contextmanager
def load_together(call: str, *, is_collective: bool) -> Iterator[Session]:
    """Run the block on every rank or on none: if one raises before it confirms, the others raise instead of continuing.

    Args:
        call: The call that all ranks of the process group make, if it is collective.
        is_collective: False: this rank loads alone.

    Raises:
        RankFailedError: Another rank failed, died, or did not come.
    """
    if not is_collective or not has_other_ranks():
        ranks = Session()
        with bound(_CURRENT_LOAD, ranks):
            yield ranks
    elif not current_load().is_alone:
        yield current_load()
    else:
        with session(call, needs_all=True) as ranks:
            with bound(_CURRENT_LOAD, ranks):
                yield ranks
            ranks.meet("loaded")
            ranks.finish()


def current_load() -> Session:
    """Return the session of the innermost `load_together` in this thread."""
    return _CURRENT_LOAD.get() or Session()


def fetch_together(ranks: Session, source: CheckpointSource, progress: bool | None = None) -> ResolvedSource:
    """Find the checkpoint on this machine, as `CheckpointSource.fetch` does.

    The first rank resolves the revision, and all load that commit, even if another one is pushed during the load. Of
    the ranks that share a cache of the Hub, one downloads, and the others wait for it without any Hub request.

    Raises:
        RankFailedError: Another rank could not find or download it.
        Everything that `CheckpointSource.fetch` raises.
    """
    if ranks.is_alone:
        return source.fetch(progress)
    local = source.find_local()
    if local is not None and local.mirror is not None:
        local.mirror.fill()
    answers = ranks.meet("source", _snapshot_of(local, source) if local is not None else _cache_of(source))
    if local is not None:
        return _same_snapshot(local, source, answers)
    return _fetch_once(ranks, source, answers, progress)


def attempt_together(
    ranks: Session,
    source: CheckpointSource,
    options: LoadOptions,
    local: ResolvedSource,
    work: Callable[[Callable[[], OpenCheckpoint]], _Result],
    path: str,
    *,
    check_beside: bool = False,
) -> _Result:
    """Call `work` on all ranks, and again on all if a save in a store overtakes one of them.

    Args:
        ranks: The session of the load.
        source: Where to load from; options: how to open and verify it, both as in `open_source`.
        local: What `fetch_together` returned. In a directory, open files stay unchanged, and no rank starts again.
        work: Gets the function that opens the checkpoint until `work` ends, as `open_source` does, and compares it with
            its checksums; a file that several ranks see is hashed by only one of them. All reads come before a last
            meeting.
        path: The checkpoint, for the message.
        check_beside: Compare checksums while `work` runs; ranks that share this work still do it before.

    Raises:
        CheckpointChangedError: It was replaced on every attempt, or kept changing while this rank opened it; or, in a
            directory, while it was read.
        RankFailedError: Another rank found a file damaged, or failed otherwise; here or in `confirm_same`.
        Everything that `open_source` and `work` raise.
    """
    is_shared = not ranks.is_alone and options.verify in ("full", "sha256")
    how = replace(options, verify="structure") if is_shared else options

    def attempt() -> _Result:
        opened: list[OpenCheckpoint] = []
        is_done = False

        def open_checkpoint() -> OpenCheckpoint:
            opening = open_source(source, how, local, check_beside=check_beside and not is_shared)
            opened.append(stack.enter_context(opening))
            if is_shared:
                _check_share(ranks, opened[0], options.progress)
            return opened[0]

        try:
            with ExitStack() as stack:
                result = work(open_checkpoint)
                is_done = True
                return result
        except CheckpointChangedError as error:
            if local.traits.is_directory or not opened or (is_done and not ranks.is_alone):
                error.is_final = True  # after the last meeting, the others do not start again
            elif error.actual is _CHANGED:  # `meet_unchanged` raised it, as on every rank
                error.path, error.actual = local.folder.path, None
            elif not (ranks.is_alone or error.is_final):
                ranks.meet(ANY_PLACE, _CHANGED)
            raise

    return retry_if_replaced(attempt, local.traits, path)


def use_together(
    ranks: Session, source: CheckpointSource, options: LoadOptions, work: Callable[[OpenCheckpoint], _Result]
) -> _Result:
    """Open a checkpoint and work with it; in a store, retry on all ranks if a save overtook any of them.

    Args:
        ranks: The session of the load.
        source: Where to load from.
        options: How to open and verify it.
        work: Calls `confirm_same` once; in a store it may be called again, from the beginning.

    Raises:
        CheckpointChangedError: The checkpoint was replaced on every try.
        Everything that `attempt_together` and `work` raise.
    """
    if ranks.is_alone:
        return use_checkpoint(source, options, work)
    local = fetch_together(ranks, source, options.progress)

    def open_and_work(open_checkpoint: Callable[[], OpenCheckpoint]) -> _Result:
        result = work(open_checkpoint())
        if not local.traits.is_directory:
            meet_unchanged(ranks, "read")
        return result

    return attempt_together(ranks, source, options, local, open_and_work, source.path)


def confirm_same(ranks: Session, checkpoint: OpenCheckpoint, config: bytes | None = None) -> None:
    """Wait until every rank has checked what it can, and has opened the same checkpoint.

    Args:
        ranks: The session of the load.
        checkpoint: This rank's.
        config: The config of the model that is built.

    Raises:
        CheckpointChangedError: The ranks have different ones.
        RankFailedError: A rank refused, failed or died.
    """
    if ranks.is_alone:
        return
    files = _files_with_tensors(checkpoint)
    digests = [
        _checkpoint_digest(checkpoint, config),
        _json_digest(sorted(files)),
        _json_digest(_file_identities(files)),
    ]
    answers = meet_unchanged(ranks, "checked", json.dumps(digests).encode())
    said = {rank: json.loads(words) for rank, words in answers.items()}
    _reject_others(checkpoint, {rank: words[0] for rank, words in said.items()})
    if len({words[1] for words in said.values()}) == 1 < len({words[2] for words in said.values()}):  # copies
        _reject_others(checkpoint, meet_unchanged(ranks, "copies", _contents_digest(checkpoint).encode()))


def all_agree(ranks: Session, word: str, *, is_so: bool) -> bool:
    """Return whether a condition holds on every rank.

    Args:
        ranks: The session of the load.
        word: What the condition is about.
        is_so: Whether it holds on this rank.

    Raises:
        CheckpointChangedError: A save in a store has overtaken another rank.
        RankFailedError: A rank failed or died.
    """
    return set(meet_unchanged(ranks, word, b"%d" % is_so).values()) == {b"1"}


def meet_unchanged(ranks: Session, word: str, value: bytes = b"") -> dict[int, bytes]:
    """Exchange the values of all ranks, unless one of them reports that a save in a store has overtaken it.

    Raises:
        CheckpointChangedError: One does; every rank raises this, with `actual` so that it is not reported again.
        RankFailedError: A rank failed or died.
    """
    answers = ranks.meet(word, value)
    if _CHANGED in answers.values():
        rank = next(rank for rank, said in answers.items() if said == _CHANGED)
        raise CheckpointChangedError(
            f"The checkpoint was replaced while rank {rank} read it. Load it again.", actual=_CHANGED
        )
    return answers


@contextmanager
def attribute_collective_failure(ranks: Session) -> Iterator[None]:
    """Name the rank that failed or died, if a collective in the block, of code outside hfshard, fails.

    Raises:
        RankFailedError: Replaces an error of torch.distributed.
    """
    try:
        yield
    except RuntimeError as error:
        is_of_collective = isinstance(error, dist.DistError) or "gloo" in str(error)  # gloo's are plain RuntimeErrors
        if not isinstance(ranks, GroupSession) or isinstance(error, HfshardError) or not is_of_collective:
            raise
        raise ranks.find_failed_rank(error) from error


def _check_share(ranks: Session, checkpoint: OpenCheckpoint, progress: bool | None) -> None:
    """Compare this rank's share of the files with their checksums."""
    files = _files_with_tensors(checkpoint)
    seen = meet_unchanged(ranks, "files", _json_digest(_file_identities(files)).encode())
    sharing = [rank for rank, sighting in seen.items() if sighting == seen[ranks.rank]]
    names = sorted(files)
    owners = assign_owners([files[name].size for name in names], sharing)
    mine = {name for name, owner in zip(names, owners, strict=True) if owner == ranks.rank}
    with byte_progress("Verifying", sum(files[name].size for name in mine), progress) as progress_callback:
        if checkpoint.pickles:
            check_pickles({name: checkpoint.pickles[name] for name in mine}, progress_callback)
        else:
            shards = {name: checkpoint.shards[name] for name in mine}
            check_checksums(checkpoint.folder, checkpoint.weights_path, checkpoint.index, shards, progress_callback)


def _reject_others(checkpoint: OpenCheckpoint, digests: Mapping[int, str | bytes]) -> None:
    leader = min(digests)
    other = next((rank for rank, digest in digests.items() if digest != digests[leader]), None)
    if other is not None:
        raise CheckpointChangedError(
            f"Ranks {leader} and {other} have different checkpoints in '{checkpoint.directory}': it was replaced "
            "during the load, or is another one on some ranks. Nothing was loaded. Give every rank the same one, "
            "and load again.",
            path=checkpoint.directory,
        )


def _fetch_once(
    ranks: Session, source: CheckpointSource, caches: Mapping[int, bytes], progress: bool | None
) -> ResolvedSource:
    """Let one rank per cache download the commit that the first rank finds; some ranks may have found a directory."""
    from hfshard.hub.cache import RepoCache  # imports huggingface_hub, which takes time

    query = source.query
    first = min(rank for rank, name in caches.items() if name.startswith(_CACHE))
    if ranks.rank == first:
        small = replace(query, files_of=lambda index: (), force_download=False)
        ranks.tell("commit", str(replace(source, query=small).fetch(progress).commit).encode())
    commit = ranks.wait_for("commit", first).decode()
    pinned = replace(source, query=replace(query, revision=commit))
    downloader = min(rank for rank, name in caches.items() if name == caches[ranks.rank])
    if ranks.rank == downloader:
        local = pinned.fetch(progress)
        RepoCache(source.path, query.cache_dir).remember(query.revision, commit)
        ranks.tell("downloaded")
    else:
        ranks.wait_for("downloaded", downloader)
        local = replace(pinned, query=replace(pinned.query, force_download=False)).fetch(progress)
    return replace(local, revision=query.revision)


def _cache_of(source: CheckpointSource) -> bytes:
    """Identify this rank's cache: ranks that share a cache return the same value."""
    from hfshard.hub.cache import RepoCache

    root = os.path.realpath(RepoCache(source.path, source.query.cache_dir).root)
    existing = root
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    return _CACHE + json.dumps([*_host_and_device(os.stat(existing).st_dev), root]).encode(errors="surrogateescape")


def _snapshot_of(local: ResolvedSource, source: CheckpointSource) -> bytes:
    """Describe the directory that this rank found: of a directory hub the commit, else nothing."""
    return _SNAPSHOT + os.path.basename(local.path).encode() if source.place.has_revisions else b""


def _same_snapshot(local: ResolvedSource, source: CheckpointSource, answers: Mapping[int, bytes]) -> ResolvedSource:
    """Replace this rank's commit of a directory hub by the one that the first rank has found."""
    first = next((words for words in answers.values() if words.startswith(_SNAPSHOT)), b"")
    if _snapshot_of(local, source) in (b"", first):
        return local
    commit = first.removeprefix(_SNAPSHOT).decode()
    return replace(source, query=replace(source.query, revision=commit)).find_local() or local


# Identity of an opened checkpoint: what ranks compare to find out whether they have the same one.


def _files_with_tensors(checkpoint: OpenCheckpoint) -> dict[str, SafetensorsShard | PickleFile]:
    return {**checkpoint.shards, **checkpoint.pickles}


def _file_identities(files: Mapping[str, SafetensorsShard | PickleFile]) -> list[list[str | int]]:
    """Identify files: two ranks get equal values if, and only if, their files are the same ones, not copies."""
    said: list[list[str | int]] = []
    for name, file in sorted(files.items()):
        device, *rest = file.identity
        place = ["far", device] if isinstance(file, RangedShard) else _host_and_device(device)
        said.append([name, *place, *rest])
    return said


def _host_and_device(device: int) -> list[str | int]:
    """Identify a file system; a network file system has a different device number on each machine."""
    return ["network"] if is_networked(device) else [_host(), device]


@cache
def _host() -> str:
    """Identify this machine by its host name and, if it has one, its boot ID."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _checkpoint_digest(checkpoint: OpenCheckpoint, config: bytes | None) -> str:
    """Compute a digest of what is stored, from the index and the config of the model that is built."""
    index = checkpoint.index
    files = {name: asdict(digest) for name, digest in index.files.items()}
    return _json_digest([index.weight_map, index.tied_names, files, sha256_of(config or b"")])


def _contents_digest(checkpoint: OpenCheckpoint) -> str:
    """Compute a digest of the fingerprints that the index lacks, as for transformers' files; of pickles, sizes."""
    recorded = checkpoint.index.files
    shards = {name: shard.fingerprint() for name, shard in checkpoint.shards.items() if name not in recorded}
    return _json_digest({**shards, **{name: file.size for name, file in checkpoint.pickles.items()}})


def _json_digest(said: object) -> str:
    """Compute a digest that is equal for two values if, and only if, their JSON is the same."""
    return sha256_of(json.dumps(said, sort_keys=True).encode(errors="surrogatepass"))
