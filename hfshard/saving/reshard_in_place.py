"""Resharding in place, group by group, so that only one group of files is on disk twice at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hfshard._util.progress import byte_progress
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.commit.commit_plan import StagedCheckpoint, content_digest, plan_commit
from hfshard.commit.directory_commit import DirectorySession, save_session
from hfshard.commit.directory_state import read_directory_state
from hfshard.disk.fsops import can_link
from hfshard.format.file_names import WeightNames
from hfshard.format.index import CheckpointIndex, FileDigest, tensor_digest
from hfshard.places.place import SavePlace
from hfshard.saving.pipeline import index_of, plan_request, save_request, shard_metadata_bytes_of
from hfshard.saving.save_request import SaveRequest
from hfshard.shards.shard_plan import PlannedShard, ShardPlan, plan_specs
from hfshard.shards.write_shards import WriteJob, file_order, shard_metadata, write_shards, writer_threads
from hfshard.tensors.stored_tensor import TensorSpec, tensor_specs


@dataclass(frozen=True, slots=True)
class Group:
    """New files with exactly the tensors of some old files."""

    old: tuple[str, ...]
    new: tuple[PlannedShard, ...]
    is_kept: bool
    """True for one file that stays as it is, except for its name."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(shard.nbytes for shard in self.new)


def reshard_in_place(
    checkpoint: OpenCheckpoint, request: SaveRequest, place: SavePlace, check: Callable[[], None]
) -> CheckpointIndex:
    """Reshard the checkpoint in a directory in groups of its files.

    1. A group is written.
    2. It is committed by renaming an index that names its new files, and the old files of the groups to come.
    3. Its old files are removed, and the next group follows.

    Readers see a complete checkpoint at any time; so does the next run if this one is killed. The open files that are
    removed are closed. `check` is called when the directory is locked.

    Raises:
        InvalidArgumentError: A setting in the environment is invalid.
    """
    writer_threads()  # raises before the directory is locked, also if no file is to be written
    plan = plan_request(request)
    aligned = aligned_plan(checkpoint, request, plan)
    if checkpoint.weights.kind != "index" or not plan.is_sharded or not aligned.is_sharded:
        return save_request(request, place, check)  # one file, old or new: no group is smaller than everything
    with save_session(place.address, request.options.names) as session:
        session.drops_signature = request.options.drop_signature
        check()
        contents = {file: list(shard.header.tensors) for file, shard in checkpoint.shards.items()}
        taken = session.state.listing | session.state.referenced
        while _is_blocked(aligned, contents, taken):
            aligned = split_one_shard(aligned, request.options.names, contents)
        return _InPlaceReshard(checkpoint, request, session, aligned, contents).run()


def aligned_plan(checkpoint: OpenCheckpoint, request: SaveRequest, whole: ShardPlan) -> ShardPlan:
    """Plan files that each consist of complete neighboring old files that fit, or of parts of one that does not.

    `whole` is the plan that ignores the old files.
    """
    specs = {spec.name: spec for spec in tensor_specs(request.tensors)}
    room = shard_metadata_bytes_of(request)

    def parts(names: Iterable[str]) -> list[tuple[TensorSpec, ...]]:
        part = [specs[name] for name in names]
        plan = plan_specs(
            part, request.options.max_shard_bytes, packing=request.options.packing, names=request.options.names,
            single_metadata_bytes=room, shard_metadata_bytes=room,
        )  # fmt: skip
        return [shard.tensors for shard in plan.shards]

    groups: list[tuple[TensorSpec, ...]] = []
    current: list[str] = []
    for shard in checkpoint.shards.values():
        names = list(shard.header.tensors)
        if len(parts(current + names)) == 1:
            current += names
            continue
        if current:
            groups += parts(current)
        own_parts = parts(names)
        current = names if len(own_parts) == 1 else []
        groups += own_parts if len(own_parts) > 1 else []
    groups += parts(current) if current else []
    files = request.options.names.shards(len(groups))
    shards = tuple(PlannedShard(file, tensors) for file, tensors in zip(files, groups, strict=True))
    return replace(whole, shards=shards)


def groups_of(plan: ShardPlan, contents: Mapping[str, Sequence[str]]) -> list[Group]:
    """Group the new files, as of `aligned_plan`, by the old ones (file -> names in it) that their tensors come from."""
    old_of = {name: file for file, names in contents.items() for name in names}
    groups: list[tuple[set[str], list[PlannedShard]]] = []
    for shard in plan.shards:
        old, new = {old_of[name] for name in shard.names}, [shard]
        for other in [group for group in groups if not old.isdisjoint(group[0])]:
            groups.remove(other)
            old, new = old | other[0], other[1] + new
        groups.append((old, new))
    return [
        Group(
            tuple(sorted(old)), tuple(new), len(old) == len(new) == 1 and set(new[0].names) == set(contents[min(old)])
        )
        for old, new in groups
    ]


def split_one_shard(plan: ShardPlan, names: WeightNames, contents: Mapping[str, Sequence[str]]) -> ShardPlan:
    """Cut the smallest file of an `aligned_plan` in two, near its middle, so that the groups stay the same.

    A file that consists of several old ones is cut between two of them. If no file can be cut, an empty one is added.
    """
    old_of = {name: file for file, members in contents.items() for name in members}
    shards = [shard.tensors for shard in plan.shards]
    cuts = {number: at for number, specs in enumerate(shards) if (at := _cut(specs, old_of)) is not None}
    if cuts:
        number = min(cuts, key=lambda number: (plan.shards[number].nbytes, number))
        specs, at = shards[number], cuts[number]
        shards[number : number + 1] = [specs[:at], specs[at:]]
    else:
        shards.append(())
    files = names.shards(len(shards))
    return replace(plan, shards=tuple(map(PlannedShard, files, shards)))


def _cut(specs: Sequence[TensorSpec], old_of: Mapping[str, str]) -> int | None:
    """Find the cut of a file nearest to its middle, as the index of the tensor after it; None: it can't be cut."""
    files = [old_of[spec.name] for spec in specs]
    has_one_source = len(set(files)) <= 1
    cuts = [at for at in range(1, len(specs)) if has_one_source or files[at] != files[at - 1]]
    half = sum(spec.nbytes for spec in specs) / 2
    passed = 0
    distance = {}
    for at, spec in enumerate(specs):
        distance[at] = abs(passed - half)
        passed += spec.nbytes
    return min(cuts, key=lambda at: (distance[at], at), default=None)


def _is_blocked(plan: ShardPlan, contents: Mapping[str, Sequence[str]], taken: frozenset[str]) -> bool:
    """Return whether a name of the plan is taken by another file."""
    stay = {group.new[0].file for group in groups_of(plan, contents) if group.is_kept and group.old[0] in _names(group)}
    return any(shard.file in taken and shard.file not in stay for shard in plan.shards)


def _names(group: Group) -> set[str]:
    return {shard.file for shard in group.new}


class _InPlaceReshard:
    """One resharding in place, in a locked directory."""

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        request: SaveRequest,
        session: DirectorySession,
        plan: ShardPlan,
        contents: Mapping[str, Sequence[str]],
    ) -> None:
        self.checkpoint = checkpoint
        self.request = request
        self.session = session
        self.checksum = request.options.checksum
        self.base = index_of(plan, request, [FileDigest()] * len(plan.shards))
        self.groups = groups_of(plan, contents)
        self.files = {file: tuple(names) for file, names in contents.items() if names}
        """Current file of the checkpoint -> the names in it; files without tensors are dropped."""
        self.has_empty = len(self.files) < len(contents)
        self.digests = {file: checkpoint.index.files[file] for file in self.files if file in checkpoint.index.files}
        self.has_all_digests = len(self.digests) == len(self.files)

    def run(self) -> CheckpointIndex:
        """Write group after group, then rename the files that stay."""
        changed = [group for group in self.groups if not group.is_kept]
        total_bytes = sum(group.nbytes for group in changed)
        self.session.check_space(max((group.nbytes for group in changed), default=0))
        with byte_progress("Re-sharding", total_bytes, self.request.options.progress) as progress_callback:
            for group in changed:
                self._write(group, progress_callback)
        return self._rename([group for group in self.groups if group.is_kept])

    def _write(self, group: Group, progress_callback: Callable[[int], object]) -> None:
        staged = {shard.file: f"{number:05d}.weights" for number, shard in enumerate(group.new)}
        jobs = []
        for shard in group.new:
            tensors = file_order({name: self.request.tensors[name] for name in shard.names})
            metadata = shard_metadata(tensors, self.request.file_metadata)
            path = os.path.join(self.session.staging, staged[shard.file])
            jobs.append(WriteJob(path, tensors, metadata, like=self.session.replaced))
        digests = write_shards(jobs, checksum=self.checksum, progress_callback=progress_callback)
        for file in group.old:
            del self.files[file]
            self.digests.pop(file, None)
        self.files |= {shard.file: shard.names for shard in group.new}
        self.digests |= zip((shard.file for shard in group.new), digests, strict=True)
        self._commit(staged)
        for file in group.old:
            self.checkpoint.shards.pop(file).close()  # only now is their space on the disk free

    def _rename(self, kept: Sequence[Group]) -> CheckpointIndex:
        """Complete the digests of the files that stay, and link them under the names of the plan if possible."""
        known = dict(self.digests)
        for group in kept:
            [file] = group.old
            self.digests[file] = self._digest_of(file)
        staged: dict[str, str] = {}
        for file, name in self._moved(kept).items():
            staged[name] = f"{len(staged):05d}.weights"
            os.link(os.path.join(self.session.directory, file), os.path.join(self.session.staging, staged[name]))
            self.files[name], self.digests[name] = self.files.pop(file), self.digests.pop(file)
        is_new = bool(staged) or self.has_empty or not self.has_all_digests or self.digests != known
        self.has_all_digests = True
        return self._commit(staged) if is_new else self._index()

    def _moved(self, kept: Sequence[Group]) -> dict[str, str]:
        """Map old to new names, for the files that can be hard-linked."""
        names = {group.old[0]: group.new[0].file for group in kept if group.old[0] != group.new[0].file}
        paths = {file: os.path.join(self.session.directory, file) for file in names}
        plain = [file for file in names if not os.path.islink(paths[file])]
        return {file: names[file] for file in plain if can_link(self.session.staging, paths[file])}

    def _digest_of(self, file: str) -> FileDigest:
        shard = self.checkpoint.shards[file]
        known = self.digests.get(file, FileDigest())
        checksum = self.checksum
        if known.fingerprint is not None and (checksum is None or getattr(known, checksum) is not None):
            return known
        shard.check_contents(known)
        found = FileDigest(shard.size, fingerprint=shard.fingerprint())
        if checksum is None:
            return found
        tensors = "".join(tensor_digest(shard.blocks(info)) for info in shard.header.tensors.values())
        digest = shard.checksum(checksum)
        found = replace(found, sha256=digest) if checksum == "sha256" else replace(found, xxh3=digest)
        return replace(found, tensor_digests=tensors)

    def _index(self) -> CheckpointIndex:
        """Build the index of the current files; without any digests as long as one file has none."""
        digests = {**self.digests, **self.request.model_file_digests} if self.has_all_digests else {}
        weight_map = {name: file for file, names in self.files.items() for name in names}
        return replace(self.base, weight_map=weight_map, files=digests)

    def _commit(self, staged: Mapping[str, str]) -> CheckpointIndex:
        index = self._index()
        if index.weight_map.keys() != self.request.tensors.keys():
            raise RuntimeError(
                "A group of the re-shard is incomplete, which is a bug in hfshard. Nothing was removed for it."
            )
        raw = index.to_json()
        kept_shards = frozenset(self.files) - frozenset(staged)
        new = StagedCheckpoint(
            shards=dict(staged),
            keys=list(index.weight_map),
            index=raw,
            config=None,
            model_files={},
            digest=content_digest([raw]),
            kept_shards=kept_shards,
        )
        session = self.session
        session.commit(plan_commit(session.state, new))
        session.empty_staging()
        session.state = read_directory_state(session.directory, self.request.options.names)
        return index
