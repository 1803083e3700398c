"""The one save, from its requests to its commit, into any place."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from hfshard.commit.transaction import NamesTakenError, NewCheckpoint, OwnShardWriter, ShardWriter, Transaction
from hfshard.errors import InvalidArgumentError
from hfshard.format.file_names import MODEL_BASE
from hfshard.format.index import TENSOR_DIGEST_HEX, CheckpointIndex, FileDigest, build_hfshard_metadata
from hfshard.places.place import SavePlace
from hfshard.saving.save_request import SaveRequest
from hfshard.shards.shard_plan import PlannedShard, ShardPlan, plan_specs, with_one_more_shard
from hfshard.shards.write_shards import WriteJob, file_order, shard_metadata, writer_threads
from hfshard.tensors.stored_tensor import TensorSpec, parameter_count, tensor_specs

_OWN_DIGEST_BYTES: Final = 256
"""Bytes of a single file's digests in its own header, with their names, without those of its tensors."""


def plan_request(request: SaveRequest) -> ShardPlan:
    """Plan the files of a request, with room in their headers for their metadata.

    Raises:
        InvalidArgumentError: It has no tensors, but needs some.
        UnstorableTensorError: A value can't be stored in the format.
    """
    if request.needs_tensors and not request.tensors:
        raise InvalidArgumentError(
            "state_dict is empty: a checkpoint without weights would replace the model's. Pass its tensors, or none to "
            "save the model's own; to save the config alone, call model.config.save_pretrained(save_directory)."
        )
    specs = tensor_specs(request.tensors)
    room = shard_metadata_bytes_of(request)
    hfshard_metadata = build_hfshard_metadata(request.model_file_digests, request.tied_names, request.undeclared_ties)
    digests = _OWN_DIGEST_BYTES + TENSOR_DIGEST_HEX * len(specs)
    single_metadata_bytes = room + digests + _json_bytes(hfshard_metadata)
    single_metadata_bytes += _json_bytes(dict(request.options.metadata))
    if request.kept_files:
        return _plan_of_files(request, specs)
    return plan_specs(
        specs,
        request.options.max_shard_bytes,
        packing=request.options.packing,
        names=request.options.names,
        tied_names=request.tied_names,
        single_metadata_bytes=single_metadata_bytes,
        shard_metadata_bytes=room,
        separate_names=request.separate_names,
        headers_count=request.options.headers_count,
    )


def _plan_of_files(request: SaveRequest, specs: Sequence[TensorSpec]) -> ShardPlan:
    """Plan the files that a request keeps, regardless of their sizes."""
    spec_of = {spec.name: spec for spec in specs}
    names, files = request.options.names, request.kept_files
    file_names = [names.single] if len(files) == 1 else names.shards(len(files))
    shards = tuple(
        PlannedShard(file, tuple(spec_of[name] for name in held)) for file, held in zip(file_names, files, strict=True)
    )
    return ShardPlan(shards, dict(request.tied_names), request.options.max_shard_bytes)


def shard_metadata_bytes_of(request: SaveRequest) -> int:
    """Compute the maximum bytes of metadata in the header of one of several files."""
    return _json_bytes(shard_metadata(request.tensors, request.file_metadata))


def _json_bytes(value: Any) -> int:
    """Compute the maximum bytes of a value as JSON inside a JSON string."""
    return len(json.dumps(json.dumps(value))) + len('"__metadata__":{},')


def shard_jobs(plan: ShardPlan, request: SaveRequest) -> dict[str, WriteJob]:
    """Build the jobs that write a plan's files: file -> contents; their paths are yet to be set."""
    hfshard_metadata = None
    extra = dict(request.file_metadata)
    if not plan.is_sharded:
        hfshard_metadata = build_hfshard_metadata(
            request.model_file_digests, request.tied_names, request.undeclared_ties
        )
        for key, value in request.options.metadata.items():
            extra[key] = value if isinstance(value, str) else json.dumps(value)
    jobs = {}
    for shard in plan.shards:
        tensors = file_order({name: request.tensors[name] for name in shard.names})
        jobs[shard.file] = WriteJob(shard.file, tensors, shard_metadata(tensors, extra), hfshard_metadata)
    return jobs


def index_of(plan: ShardPlan, request: SaveRequest, digests: Sequence[FileDigest]) -> CheckpointIndex:
    """Build the index of a plan whose files have these digests."""
    files = {shard.file: digest for shard, digest in zip(plan.shards, digests, strict=True)}
    return CheckpointIndex(
        weight_map=plan.weight_map,
        total_size=plan.total_size,
        total_parameters=_total_parameters(request),
        metadata=dict(request.options.metadata),
        files={**files, **request.model_file_digests},
        tied_names=dict(request.tied_names),
        undeclared_ties=request.undeclared_ties,
    )


def _total_parameters(request: SaveRequest) -> int:
    if request.total_parameters is not None:
        return request.total_parameters
    return sum(map(parameter_count, request.tensors.values()))


# The one save: plan, write, commit, into any place.


logger = logging.getLogger(__name__)


class Save:
    """One save, planned when it is made: `prepare`, `write` and `commit` follow, in this order.

    torch.distributed.checkpoint fills the files between the first two. A run saves several requests at once, which
    become the parts of one checkpoint.
    """

    def __init__(
        self,
        requests: Mapping[str, SaveRequest],
        writer: ShardWriter | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Plan the files of each request.

        Args:
            requests: Base of the file names -> data and options; at least one.
            writer: Writes the files; None: the place does.
            files: More small files.

        Raises:
            InvalidArgumentError: A setting in the environment is invalid.
            UnstorableTensorError: A value can't be stored in the format.
        """
        writer_threads()  # raises where the environment asks for more than there is
        self.requests = dict(requests)
        self.writer = writer
        self.plans = {base: plan_request(request) for base, request in self.requests.items()}
        self._files = dict(files or {})
        self._indexes: dict[str, CheckpointIndex] = {}

    @property
    def new(self) -> NewCheckpoint:
        """Everything that is saved except for the tensors."""
        [first, *_] = self.requests.values()
        small_files = {name: raw for request in self.requests.values() for name, raw in request.small_files.items()}
        return NewCheckpoint(
            names=first.options.names,
            checksum=first.options.checksum,
            small_files={**self._files, **small_files},
            companion_files=first.companion_files,
            drops_config=first.drops_config,
            hides_single=first.hides_single,
            is_copy=bool(first.kept_files),
            replaces_readme=first.replaces_readme,
            drops_signature=first.options.drop_signature,
            progress=first.options.progress,
        )

    @property
    def total_size(self) -> int:
        """Bytes of tensor data in all files."""
        return sum(plan.total_size for plan in self.plans.values())

    @property
    def jobs(self) -> dict[str, WriteJob]:
        """The files to write: file -> contents."""
        return {
            file: job
            for base, plan in self.plans.items()
            for file, job in shard_jobs(plan, self.requests[base]).items()
        }

    def into(self, target: Transaction, check: Callable[[], None] = lambda: None) -> bool:
        """Save into an open place.

        `check` is called before anything is written, and just before the commit; it raises to cancel the save.

        Returns:
            False if the place had exactly this already.
        """
        check()
        self.prepare(target)
        self.write(target)
        return self.commit(target, check)

    def prepare(self, target: Transaction) -> None:
        """Give the files names that are free in the place."""
        for base, plan in self.plans.items():
            request = self.requests[base]
            self.plans[base] = target.prepare(plan, request.options.names, partial(shard_jobs, request=request))

    def add_shard(self, target: Transaction) -> None:
        """Plan with one file more, after a NamesTakenError, which only places of one request raise."""
        for base, plan in self.plans.items():
            self.plans[base] = with_one_more_shard(plan, self.requests[base].options.names)
        self.prepare(target)

    def write(self, target: Transaction) -> None:
        """Write the files, and build the indexes."""
        try:
            digests = target.write(self.jobs)
        except NamesTakenError:
            self.add_shard(target)
            digests = target.write(self.jobs)
        for base, plan in self.plans.items():
            own = [digests[shard.file] for shard in plan.shards]
            self._indexes[base] = index_of(plan, self.requests[base], own)

    def commit(self, target: Transaction, check: Callable[[], None] = lambda: None) -> bool:
        """Make what was written visible at once; returns False if the place had exactly this already."""

        def confirm() -> None:
            check()
            if self.writer is not None:
                self.writer.confirm()

        files = {
            self.requests[base].options.names.index: self._indexes[base].to_json()
            for base, plan in self.plans.items()
            if plan.is_sharded
        }
        return target.commit(self._indexes, files, confirm)

    def index(self, base: str = MODEL_BASE) -> CheckpointIndex:
        """Return the index of a part, once its files are written."""
        return self._indexes[base]


def save_request(
    request: SaveRequest,
    place: SavePlace,
    check: Callable[[], None] = lambda: None,
    writer: ShardWriter | None = None,
) -> CheckpointIndex:
    """Save the contents of a request, durably and all or nothing; a directory is created if it is missing.

    Args:
        request, place: What, and where.
        check: Called when the place is open, and just before the commit.
        writer: Writes the files; None: this process does.

    Raises:
        Everything that `hfshard.save_state_dict` raises.
    """
    writer = writer or OwnShardWriter()
    save = Save({MODEL_BASE: request}, writer)
    with place.transaction(save.new, writer) as target:
        is_new = save.into(target, check)
    index = save.index()
    if is_new:
        logger.info("Saved %d tensors, %d bytes, into '%s'.", len(index.weight_map), save.total_size, place.address)
    return index
