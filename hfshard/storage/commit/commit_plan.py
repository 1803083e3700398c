"""The steps that turn one checkpoint in a directory into another, such that after each of them it loads whole.

Readers to be kept whole, and what they look for first:

- transformers and hfshard: `transformers_weights` of config.json, `model.safetensors`, the index, pickles;
- huggingface_hub: the index, else the only `*.safetensors` in the directory (several without an index: an error).

So an index must stand wherever two `*.safetensors` do, one rename must switch config and weights together when the
config changed, and nothing that the old checkpoint needs may go before both kinds of reader have left it. That was
shown by killing saves at every system call (`scripts/crash_sweep`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hfshard.constants import CONFIG_NAME
from hfshard.storage.commit.directory_state import DirectoryState, weights_override_of
from hfshard.storage.format.index import CheckpointIndex
from hfshard.storage.format.integrity import sha256_of
from hfshard.storage.format.weights_override import with_weights_override, without_weights_override


@dataclass(frozen=True, slots=True)
class NewCheckpoint:
    """What a save has written into the staging directory, and what goes with it."""

    shards: Mapping[str, str]
    """Name in the directory -> name in the staging directory."""
    keys: Sequence[str]
    """FQNs of the stored tensors."""
    index: bytes | None
    """The index's bytes; None for a single file."""
    config: bytes | None
    """The bytes of config.json; None where the save has none, and leaves the one that stands there."""
    model_files: Mapping[str, bytes]
    """Other small files that belong to it: generation_config.json, custom code."""
    digest: str
    """Hex that names this content, for the names of a commit under way."""
    companion_files: Mapping[str, str] = field(default_factory=dict)
    """What goes along with it, staged as the shards are: a tokenizer's files, a README."""
    kept_shards: frozenset[str] = frozenset()
    """Shards of the old checkpoint that are shards of the new one too, and stay where they are."""

    @property
    def is_sharded(self) -> bool:
        """Whether it has an index."""
        return self.index is not None


@dataclass(frozen=True, slots=True)
class CommitStep:
    """One change of the directory."""

    kind: Literal["rename", "link", "remove", "sync"]
    """place: rename a staged file; link: give a file a second name; remove; sync: make all before it durable."""
    target: str = ""
    source: str = ""
    is_commit: bool = False
    """From this step on the new checkpoint is the one that loads; an error before it is undone."""


@dataclass
class CommitPlan:
    """The steps of one commit, and the small files that they place."""

    steps: list[CommitStep] = field(default_factory=list)
    small_files: dict[str, bytes] = field(default_factory=dict)
    """Name in the staging directory -> bytes."""

    def write_small(self, target: str, content: bytes, *, is_commit: bool = False) -> None:
        """Place a small file."""
        staged = f"{len(self.small_files):03d}.small"
        self.small_files[staged] = content
        self.steps.append(CommitStep("rename", target, staged, is_commit))

    def rename(self, files: Mapping[str, str], *, is_commit: bool = False) -> None:
        """Place staged files; the last one is the commit, if any is."""
        last = list(files)[-1:]
        self.steps.extend(
            CommitStep("rename", target, staged, is_commit and [target] == last) for target, staged in files.items()
        )

    def link(self, source: str, target: str) -> None:
        """Give a file in the directory a second name, replacing what has it."""
        self.steps.append(CommitStep("link", target, source))

    def remove(self, targets: Iterable[str]) -> None:
        """Remove files that are there."""
        self.steps.extend(CommitStep("remove", target) for target in sorted(targets))

    def sync(self) -> None:
        """Make what came before durable before what comes after."""
        if self.steps and self.steps[-1].kind != "sync":
            self.steps.append(CommitStep("sync"))


def plan_commit(old: DirectoryState, new: NewCheckpoint) -> CommitPlan:
    """Plan the commit of a new checkpoint over whatever stands in the directory; pure."""
    if not old.has_weights:
        return _into_empty(old, new)
    config = _changed_config(old, new)
    if config is None or old.shares_config:
        # A variant shares config.json with the weights beside it, which must not be led to the variant's file.
        return _sharded_by_index(old, new, config) if new.is_sharded else _single_by_rename(old, new, config)
    return _sharded_by_config(old, new, config) if new.is_sharded else _single_by_config(old, new, config)


def needs_links(old: DirectoryState, new: NewCheckpoint) -> bool:
    """Whether the plan gives a file two names for a while, which some file systems can't."""
    return any(step.kind == "link" for step in plan_commit(old, new).steps)


def _into_empty(old: DirectoryState, new: NewCheckpoint) -> CommitPlan:
    # The config and the index come before the weights that they name, so that a half-written save is an error to
    # every reader: huggingface_hub would take the first of three shards, alone in a directory, for the whole.
    plan = CommitPlan()
    config = _changed_config(old, new)
    if config is not None:
        plan.write_small(CONFIG_NAME, config)
    for name, content in new.model_files.items():
        plan.write_small(name, content)
    plan.rename(new.companion_files)
    if new.index is not None:
        plan.write_small(old.names.index, new.index)
    plan.sync()
    plan.rename(new.shards, is_commit=True)
    plan.sync()
    plan.remove(_outdated_files(old, new))
    plan.sync()
    return plan


def _sharded_by_index(old: DirectoryState, new: NewCheckpoint, config: bytes | None) -> CommitPlan:
    plan = CommitPlan()
    _protect_hub_readers(plan, old)
    _add_new_files(plan, old, new)
    plan.rename(new.shards)
    plan.sync()
    plan.write_small(old.names.index, new.index or b"", is_commit=True)
    plan.sync()
    if old.has_single:
        plan.remove([old.names.single])  # it outranks the index for transformers: this is the commit for it
        plan.sync()
    _replace_small_files(plan, old, new, config)
    _remove_old(plan, old, _outdated_files(old, new) - {old.names.single})
    return plan


def _sharded_by_config(old: DirectoryState, new: NewCheckpoint, config: bytes) -> CommitPlan:
    plan = CommitPlan()
    unique = old.names.unique_index(new.digest)
    _protect_hub_readers(plan, old)
    _add_new_files(plan, old, new)
    plan.rename(new.shards)
    plan.write_small(unique, new.index or b"")
    plan.sync()
    plan.write_small(CONFIG_NAME, with_weights_override(config, unique), is_commit=True)
    plan.sync()
    _replace_small_files(plan, old, new, None)
    plan.write_small(old.names.index, new.index or b"")
    plan.sync()
    if old.has_single:
        plan.remove([old.names.single])
        plan.sync()
    plan.write_small(CONFIG_NAME, config)
    plan.sync()
    _remove_old(plan, old, (_outdated_files(old, new) | {unique}) - {old.names.single})
    return plan


def _single_by_rename(old: DirectoryState, new: NewCheckpoint, config: bytes | None) -> CommitPlan:
    plan = CommitPlan()
    _add_new_files(plan, old, new)
    plan.sync()
    plan.rename(new.shards, is_commit=True)
    plan.sync()
    _replace_small_files(plan, old, new, config)
    if old.has_index:
        plan.write_small(old.names.index, _compat_index(new.keys, old.names.single))
        plan.sync()
    _remove_old(plan, old, _outdated_files(old, new) - {old.names.index})
    if old.has_index:
        plan.remove([old.names.index])
        plan.sync()
    return plan


def _single_by_config(old: DirectoryState, new: NewCheckpoint, config: bytes) -> CommitPlan:
    plan = CommitPlan()
    unique, single, index = old.names.unique_single(new.digest), old.names.single, old.names.index
    staged = new.shards[single]
    if old.has_single and not old.has_index:
        _index_of_old_single(plan, old)
        plan.sync()
    _add_new_files(plan, old, new)
    plan.rename({unique: staged})
    plan.sync()
    plan.write_small(CONFIG_NAME, with_weights_override(config, unique), is_commit=True)
    plan.sync()
    _replace_small_files(plan, old, new, None)
    plan.write_small(index, _compat_index(new.keys, unique))
    plan.sync()
    plan.link(unique, single)
    plan.sync()
    plan.write_small(CONFIG_NAME, config)
    plan.write_small(index, _compat_index(new.keys, single))
    plan.sync()
    _remove_old(plan, old, (_outdated_files(old, new) | {unique}) - {index})
    plan.remove([index])
    plan.sync()
    return plan


def _protect_hub_readers(plan: CommitPlan, old: DirectoryState) -> None:
    """Before shards come to lie beside the old weights, tell huggingface_hub which of them count."""
    if old.has_index:
        return
    if old.has_single:
        _index_of_old_single(plan, old)
    else:  # pickles only, which it does not look at: keep it from taking a lone shard for the whole checkpoint
        plan.write_small(old.names.placeholder, b"")
    plan.sync()


def _index_of_old_single(plan: CommitPlan, old: DirectoryState) -> None:
    keys = old.single_keys()
    if keys:  # else it is damaged, and loads nowhere
        plan.write_small(old.names.index, _compat_index(keys, old.names.single))


def _add_new_files(plan: CommitPlan, old: DirectoryState, new: NewCheckpoint) -> None:
    for name, content in new.model_files.items():
        if name not in old.listing:
            plan.write_small(name, content)
    plan.rename({name: staged for name, staged in new.companion_files.items() if name not in old.listing})


def _replace_small_files(plan: CommitPlan, old: DirectoryState, new: NewCheckpoint, config: bytes | None) -> None:
    """Right after the commit: small files that replace old ones."""
    before = len(plan.steps)
    if config is not None:
        plan.write_small(CONFIG_NAME, config)
    for name, content in new.model_files.items():
        if name in old.listing:
            plan.write_small(name, content)
    plan.rename({name: staged for name, staged in new.companion_files.items() if name in old.listing})
    if len(plan.steps) > before:
        plan.sync()


def _changed_config(old: DirectoryState, new: NewCheckpoint) -> bytes | None:
    """The config to commit, where it differs from the one that stands there."""
    config = new.config
    if old.shares_config:
        # An override that stands there belongs to a killed commit of the weights beside it: not ours to end.
        if config is not None and old.weights_override is not None:
            config = with_weights_override(config, old.weights_override)
    elif config is None and old.config is not None and weights_override_of(old.config) is not None:
        config = without_weights_override(old.config)
    return None if config == old.config else config


def _remove_old(plan: CommitPlan, old: DirectoryState, doomed: set[str]) -> None:
    """Remove what is left of the old checkpoint; the index of pickled shards last: it tells whose they are."""
    plan.remove(doomed - {old.names.bin_index})
    plan.sync()
    plan.remove(doomed & {old.names.bin_index})
    plan.sync()


def _outdated_files(old: DirectoryState, new: NewCheckpoint) -> set[str]:
    """What the old checkpoint owned and the new one does not."""
    kept = {*new.shards, *new.kept_shards, *new.model_files, *new.companion_files}
    if new.is_sharded:
        kept.add(old.names.index)
    made_on_the_way = {old.names.placeholder} if not (old.has_index or old.has_single) and old.has_bins else set()
    return (set(old.owned) | (made_on_the_way if new.is_sharded else set())) - kept


def _compat_index(keys: Iterable[str], file: str) -> bytes:
    """An index that points every name at one file."""
    return CheckpointIndex(weight_map=dict.fromkeys(keys, file)).to_json()


def content_digest(parts: Iterable[bytes]) -> str:
    """Hex that names a content, for the names of a commit under way."""
    return sha256_of(b"\0".join(parts))
