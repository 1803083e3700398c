"""A repo as the target of the one save; weights that another framework saved in parts are pushed in this way, too.

It is not in hub/, which works without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from hfshard._util.progress import byte_progress
from hfshard._util.threads import run_in_threads
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.commit.transaction import JobsOf, NewCheckpoint
from hfshard.disk.byte_source import ByteSource, BytesSource, StreamSource, sha256_of_reader
from hfshard.format.file_names import MODEL_BASE, WeightNames
from hfshard.format.index import CheckpointIndex, FileDigest
from hfshard.hub.push_files import PushOptions, PushRequest, push_files, select_names
from hfshard.hub.repo import PushResult
from hfshard.places.source import CheckpointSource, open_source
from hfshard.saving.pipeline import Save
from hfshard.saving.resharding import SourceUnchangedCheck, request_of_parts
from hfshard.saving.save_request import SaveOptions
from hfshard.shards.shard_plan import ShardPlan
from hfshard.shards.write_shards import SafetensorsStream, WriteJob, digest_shard, writer_threads


def push_parts(
    source: CheckpointSource,
    repo_id: str,
    options: PushOptions,
    *,
    allow_patterns: list[str] | str | None = None,
    ignore_patterns: list[str] | str | None = None,
) -> PushResult:
    """Push the weights that another framework saved in parts, as the safetensors files of `hfshard convert`.

    Each tensor is read twice: for the hashes, and when its file is sent. Nothing is written to disk. The patterns
    select the companion files.

    Raises:
        CheckpointChangedError: The files were replaced meanwhile; nothing was committed.
        Everything that `reshard_checkpoint` and `push_checkpoint` raise.
    """
    with open_source(source, LoadOptions(progress=options.progress)) as checkpoint:
        how = SaveOptions(progress=options.progress)
        request = request_of_parts(checkpoint, how, repo_id, follow_links=options.follow_links)
        save = Save({MODEL_BASE: request})

        def push(contents: dict[str, ByteSource]) -> list[PushResult]:
            selected = select_names(request.companion_files, allow_patterns, ignore_patterns)
            companions = {name: file for name, file in request.companion_files.items() if name in selected}
            pushed = PushRequest(contents={**contents, **companions}, variants=frozenset({None}), options=options)
            return [push_files(pushed, repo_id)]

        target = HubTransaction(save.new, push)
        save.into(target, SourceUnchangedCheck(checkpoint))
    return target.results[0]


class HubTransaction:
    """`Transaction` of a repo: the files that a save into an empty directory would write, pushed as one commit.

    They are streamed from the tensors, without a copy on disk.

    Each tensor is read once for the hashes, and again when its file is sent. The tensors of a single file are read
    twice for the hashes, because the file contains its own digests. They must not change until the push is done.
    """

    def __init__(self, new: NewCheckpoint, push: Callable[[dict[str, ByteSource]], list[PushResult]]) -> None:
        """Keep what is pushed; `commit` calls `push` once, with name -> contents."""
        self._new = new
        self._push = push
        self._contents: dict[str, ByteSource] = {}
        self.results: list[PushResult] = []
        """What the push has returned."""

    def prepare(self, plan: ShardPlan, names: WeightNames, jobs_of: JobsOf) -> ShardPlan:
        """Keep the standard names: a commit of a repo replaces all files at once."""
        return plan

    def write(self, jobs: Mapping[str, WriteJob]) -> dict[str, FileDigest]:
        """Hash the files; nothing is sent yet."""
        total = sum(job.nbytes for job in jobs.values())
        with byte_progress("Hashing", total, self._new.progress) as show:
            hashed = run_in_threads(
                lambda job, cancelled: digest_shard(job, "sha256", show, cancelled), jobs.values(), writer_threads()
            )
        digests = {}
        for (file, job), (digest, header) in zip(jobs.items(), hashed, strict=True):
            opener = partial(SafetensorsStream, header, list(job.tensors.values()))
            sha256 = digest.sha256 if job.hfshard_metadata is None else None  # a single file has its own digests
            sha256 = sha256 or sha256_of_reader(opener())
            self._contents[file] = StreamSource(digest.size or 0, sha256, opener)
            digests[file] = digest
        return digests

    def commit(
        self,
        indexes: Mapping[str, CheckpointIndex],
        index_files: Mapping[str, bytes],
        confirm: Callable[[], None],
    ) -> bool:
        """Push the files."""
        small_files = {name: BytesSource(raw) for name, raw in {**index_files, **self._new.small_files}.items()}
        confirm()
        self.results = self._push({**self._contents, **small_files})
        return True
