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
    extras: Mapping[str, bytes]
    """Other small files that belong to it: generation_config.json, custom code."""
    digest: str
    """Hex that names this content, for the names of a commit under way."""
    others: Mapping[str, str] = field(default_factory=dict)
    """What goes along with it, staged as the shards are: a tokenizer's files, a README."""
    keeps: frozenset[str] = frozenset()
    """Shards of the old checkpoint that are shards of the new one too, and stay where they are."""

    @property
    def is_sharded(self) -> bool:
        """Whether it has an index."""
        return self.index is not None


@dataclass(frozen=True, slots=True)
class CommitStep:
    """One change of the directory."""

    kind: Literal["place", "link", "remove", "sync"]
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

    def put(self, target: str, content: bytes, *, is_commit: bool = False) -> None:
        """Place a small file."""
        staged = f"{len(self.small_files):03d}.small"
        self.small_files[staged] = content
        self.steps.append(CommitStep("place", target, staged, is_commit))

    def place(self, files: Mapping[str, str], *, is_commit: bool = False) -> None:
        """Place staged files; the last one is the commit, if any is."""
        last = list(files)[-1:]
        self.steps.extend(
            CommitStep("place", target, staged, is_commit and [target] == last) for target, staged in files.items()
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
    """Whether the transition gives a file two names for a while, which some file systems can't."""
    return any(step.kind == "link" for step in plan_commit(old, new).steps)


def _into_empty(old: DirectoryState, new: NewCheckpoint) -> CommitPlan:
    # The config and the index come before the weights that they name, so that a half-written save is an error to
    # every reader: huggingface_hub would take the first of three shards, alone in a directory, for the whole.
    todo = CommitPlan()
    config = _changed_config(old, new)
    if config is not None:
        todo.put(CONFIG_NAME, config)
    for name, content in new.extras.items():
        todo.put(name, content)
    todo.place(new.others)
    if new.index is not None:
        todo.put(old.names.index, new.index)
    todo.sync()
    todo.place(new.shards, is_commit=True)
    todo.sync()
    todo.remove(_leftovers(old, new))
    todo.sync()
    return todo


def _sharded_by_index(old: DirectoryState, new: NewCheckpoint, config: bytes | None) -> CommitPlan:
    todo = CommitPlan()
    _protect_hub_readers(todo, old)
    _new_extras(todo, old, new)
    todo.place(new.shards)
    todo.sync()
    todo.put(old.names.index, new.index or b"", is_commit=True)
    todo.sync()
    if old.has_single:
        todo.remove([old.names.single])  # it outranks the index for transformers: this is the commit for it
        todo.sync()
    _replace_small_files(todo, old, new, config)
    _remove_old(todo, old, _leftovers(old, new) - {old.names.single})
    return todo


def _sharded_by_config(old: DirectoryState, new: NewCheckpoint, config: bytes) -> CommitPlan:
    todo = CommitPlan()
    unique = old.names.unique_index(new.digest)
    _protect_hub_readers(todo, old)
    _new_extras(todo, old, new)
    todo.place(new.shards)
    todo.put(unique, new.index or b"")
    todo.sync()
    todo.put(CONFIG_NAME, with_weights_override(config, unique), is_commit=True)
    todo.sync()
    _replace_small_files(todo, old, new, None)
    todo.put(old.names.index, new.index or b"")
    todo.sync()
    if old.has_single:
        todo.remove([old.names.single])
        todo.sync()
    todo.put(CONFIG_NAME, config)
    todo.sync()
    _remove_old(todo, old, (_leftovers(old, new) | {unique}) - {old.names.single})
    return todo


def _single_by_rename(old: DirectoryState, new: NewCheckpoint, config: bytes | None) -> CommitPlan:
    todo = CommitPlan()
    _new_extras(todo, old, new)
    todo.sync()
    todo.place(new.shards, is_commit=True)
    todo.sync()
    _replace_small_files(todo, old, new, config)
    if old.has_index:
        todo.put(old.names.index, _compat_index(new.keys, old.names.single))
        todo.sync()
    _remove_old(todo, old, _leftovers(old, new) - {old.names.index})
    if old.has_index:
        todo.remove([old.names.index])
        todo.sync()
    return todo


def _single_by_config(old: DirectoryState, new: NewCheckpoint, config: bytes) -> CommitPlan:
    todo = CommitPlan()
    unique, single, index = old.names.unique_single(new.digest), old.names.single, old.names.index
    staged = new.shards[single]
    if old.has_single and not old.has_index:
        _index_of_old_single(todo, old)
        todo.sync()
    _new_extras(todo, old, new)
    todo.place({unique: staged})
    todo.sync()
    todo.put(CONFIG_NAME, with_weights_override(config, unique), is_commit=True)
    todo.sync()
    _replace_small_files(todo, old, new, None)
    todo.put(index, _compat_index(new.keys, unique))
    todo.sync()
    todo.link(unique, single)
    todo.sync()
    todo.put(CONFIG_NAME, config)
    todo.put(index, _compat_index(new.keys, single))
    todo.sync()
    _remove_old(todo, old, (_leftovers(old, new) | {unique}) - {index})
    todo.remove([index])
    todo.sync()
    return todo


def _protect_hub_readers(todo: CommitPlan, old: DirectoryState) -> None:
    """Before shards come to lie beside the old weights, tell huggingface_hub which of them count."""
    if old.has_index:
        return
    if old.has_single:
        _index_of_old_single(todo, old)
    else:  # pickles only, which it does not look at: keep it from taking a lone shard for the whole checkpoint
        todo.put(old.names.placeholder, b"")
    todo.sync()


def _index_of_old_single(todo: CommitPlan, old: DirectoryState) -> None:
    keys = old.single_keys()
    if keys:  # else it is damaged, and loads nowhere
        todo.put(old.names.index, _compat_index(keys, old.names.single))


def _new_extras(todo: CommitPlan, old: DirectoryState, new: NewCheckpoint) -> None:
    for name, content in new.extras.items():
        if name not in old.listing:
            todo.put(name, content)
    todo.place({name: staged for name, staged in new.others.items() if name not in old.listing})


def _replace_small_files(todo: CommitPlan, old: DirectoryState, new: NewCheckpoint, config: bytes | None) -> None:
    """Right after the commit: small files that replace old ones."""
    before = len(todo.steps)
    if config is not None:
        todo.put(CONFIG_NAME, config)
    for name, content in new.extras.items():
        if name in old.listing:
            todo.put(name, content)
    todo.place({name: staged for name, staged in new.others.items() if name in old.listing})
    if len(todo.steps) > before:
        todo.sync()


def _changed_config(old: DirectoryState, new: NewCheckpoint) -> bytes | None:
    """The config to commit, where it differs from the one that stands there."""
    config = new.config
    if old.shares_config:
        if config is not None and old.explicit is not None:  # a killed commit of the weights beside it: not ours to end
            config = with_weights_override(config, old.explicit)
    elif config is None and old.config is not None and weights_override_of(old.config) is not None:
        config = without_weights_override(old.config)
    return None if config == old.config else config


def _remove_old(todo: CommitPlan, old: DirectoryState, doomed: set[str]) -> None:
    """Remove what is left of the old checkpoint; the index of pickled shards last: it tells whose they are."""
    todo.remove(doomed - {old.names.bin_index})
    todo.sync()
    todo.remove(doomed & {old.names.bin_index})
    todo.sync()


def _leftovers(old: DirectoryState, new: NewCheckpoint) -> set[str]:
    """What the old checkpoint owned and the new one does not."""
    kept = {*new.shards, *new.keeps, *new.extras, *new.others} | ({old.names.index} if new.is_sharded else set())
    made_on_the_way = {old.names.placeholder} if not (old.has_index or old.has_single) and old.has_bins else set()
    return (set(old.owned) | (made_on_the_way if new.is_sharded else set())) - kept


def _compat_index(keys: Iterable[str], file: str) -> bytes:
    """An index that points every name at one file."""
    return CheckpointIndex(weight_map=dict.fromkeys(keys, file)).to_json()


def digest_of(parts: Iterable[bytes]) -> str:
    """Hex that names a content, for the names of a commit under way."""
    return sha256_of(b"\0".join(parts))
