"""Plan the steps from one checkpoint in a directory to the next, so that a complete one loads after each of them.

Two kinds of readers must find a complete checkpoint at every moment. They look for, in this order:

- transformers and hfshard: `transformers_weights` in config.json, `model.safetensors`, the index, pickles;
- huggingface_hub: the index, else the only `*.safetensors` file (several without an index are an error).

Three rules follow. An index must exist wherever two `*.safetensors` files do. If the config changes, one rename must
switch config and weights together. And a file of the old checkpoint may be removed only when neither kind of reader
looks at it any more.

If no single step moves both kinds of readers, one step moves the first, and the next step moves the other. The second
step is the commit; an error between the two rolls back the first.

GUIDE.md next to this file shows each path as a table; `scripts/crash_sweep` kills saves at every system call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from hfshard.commit.directory_state import DirectoryState, weights_override_of
from hfshard.constants import CONFIG_NAME
from hfshard.format.index import CheckpointIndex, sha256_of, with_weights_override, without_weights_override


def plan_commit(old: DirectoryState, new: StagedCheckpoint, plan: CommitPlan | None = None) -> CommitPlan:
    """Plan the commit of a new checkpoint over the existing files of the directory, as it is after the steps of `plan`.

    A pure function: it uses only its arguments, except for the files in folders (see `has`) and the names in a
    single file (see `single_keys`). The steps are added to `plan`, if there is one.
    """
    plan = CommitPlan() if plan is None else plan
    if not old.has_weights:
        return _into_empty(plan, old, new)
    config = changed_config(old, new)
    # A variant shares config.json with the weights next to it, which must not be redirected to the variant's files.
    if config is None or old.shares_config:
        by_files = _sharded_by_index if new.is_sharded else _single_by_rename
        return by_files(plan, old, new, config)
    if new.hides_single and old.has_single:
        old = _hide_single(plan, old, new)
    if new.is_sharded:
        return _sharded_by_config(plan, old, new, config)
    return _single_by_config(plan, old, new, config)


def needs_hard_links(old: DirectoryState, new: StagedCheckpoint) -> bool:
    """Return whether the plan temporarily gives a file two names, which some file systems cannot."""
    return any(step.kind == "link" for step in plan_commit(old, new).steps)


def _into_empty(plan: CommitPlan, old: DirectoryState, new: StagedCheckpoint) -> CommitPlan:
    """Commit into a directory without weights. There is nothing to protect, but half a save must not load."""
    # Announce: config and index come before the weights that they name, so that half a save is an error to every
    # reader. Without the index, huggingface_hub would take the first of three shards for the complete checkpoint; and
    # a pull would take the other files for the user's own.
    config = changed_config(old, new)
    if config is not None:
        put_config(plan, new, config)
    if new.index is not None:
        plan.write_small(old.names.index, new.index)
    elif old.strays:  # next to them, huggingface_hub needs an index that names the file that counts
        plan.write_small(old.names.index, compat_index(new.keys, old.names.single))
    for name, content in new.model_files.items():
        plan.write_small(name, content)
    plan.rename(new.companion_files)
    plan.sync()

    # Commit: the last file of weights makes the checkpoint complete.
    plan.rename(new.shards, is_commit=True)
    plan.sync()

    # Clean up: files with names that only an unfinished commit gives, and shards of a killed stock save.
    plan.remove(superseded_files(old, new))
    plan.sync()
    if new.index is None and old.strays:
        plan.remove([old.names.index])
        plan.sync()
    return plan


def _sharded_by_index(plan: CommitPlan, old: DirectoryState, new: StagedCheckpoint, config: bytes | None) -> CommitPlan:
    """Commit shards by renaming the index. The config is unchanged, or shared with other weights."""
    # Prepare: the shards get names that no file has, so that both readers still load the old checkpoint.
    _protect_hub_readers(plan, old)
    _add_new_files(plan, old, new)
    plan.rename(new.shards)
    plan.sync()

    # Commit: the index. For transformers, a single file outranks it: then it moves huggingface_hub alone, and the
    # removal of the single file is the commit.
    index = new.index or b""
    plan.write_small(old.names.index, index, is_commit=not old.has_single, moves=HUB if old.has_single else "")
    plan.sync()
    if old.has_single:
        plan.remove([old.names.single], is_commit=True)
        plan.sync()

    # Replace the small files, then clean up what only the old checkpoint needed.
    _replace_small_files(plan, old, new, config)
    _remove_old(plan, old, superseded_files(old, new) - {old.names.single})
    return plan


def _sharded_by_config(plan: CommitPlan, old: DirectoryState, new: StagedCheckpoint, config: bytes) -> CommitPlan:
    """Commit shards and a changed config by renaming config.json, which temporarily names the new index."""
    unique = old.names.unique_index(new.digest)

    # Prepare: the shards, and their index under a name that nothing reads yet.
    _protect_hub_readers(plan, old)
    _add_new_files(plan, old, new)
    plan.rename(new.shards)
    plan.write_small(unique, new.index or b"")
    plan.sync()

    # Commit: the new config has the override that leads transformers to the new index; the conventional index moves
    # huggingface_hub, and then leads transformers to the new weights too.
    plan.write_small(CONFIG_NAME, with_weights_override(config, unique), moves=TRANSFORMERS)
    plan.sync()
    plan.write_small(old.names.index, new.index or b"", is_commit=True)
    plan.sync()

    # Settle: the conventional files lead to where the override did.
    _replace_small_files(plan, old, new, None)
    if old.has_single:  # it outranks the index once the override is gone
        plan.remove([old.names.single])
        plan.sync()
    put_config(plan, new, config)
    plan.sync()

    # Clean up.
    _remove_old(plan, old, (superseded_files(old, new) | {unique}) - {old.names.single})
    return plan


def _single_by_rename(plan: CommitPlan, old: DirectoryState, new: StagedCheckpoint, config: bytes | None) -> CommitPlan:
    """Commit a single file by renaming it. The config is unchanged, or shared with other weights."""
    # Prepare: next to shards that no index names, huggingface_hub needs an index that names the file that counts.
    if old.strays and not old.has_index:
        _index_of_old_single(plan, old)
        plan.sync()
    _add_new_files(plan, old, new)
    plan.sync()

    # Commit: for transformers, `model.safetensors` outranks the old index. huggingface_hub reads the index first, so
    # that is made to point at the single file ...
    needs_index = old.has_index or bool(old.strays)
    plan.rename(new.shards, is_commit=not needs_index, moves=TRANSFORMERS if needs_index else "")
    plan.sync()
    if needs_index:
        plan.write_small(old.names.index, compat_index(new.keys, old.names.single), is_commit=True)
        plan.sync()
    _replace_small_files(plan, old, new, config)

    # ... until the old shards are gone, and the single file is the only one left.
    _remove_old(plan, old, superseded_files(old, new) - {old.names.index})
    if needs_index:
        plan.remove([old.names.index])
        plan.sync()
    return plan


def _single_by_config(plan: CommitPlan, old: DirectoryState, new: StagedCheckpoint, config: bytes) -> CommitPlan:
    """Commit a single file and a changed config by renaming config.json, which temporarily names the file."""
    unique = old.names.unique_single(new.digest)
    single = old.names.single
    index = old.names.index

    # Prepare: the weights under a name that nothing reads yet; an index keeps huggingface_hub on the old ones.
    if old.has_single and not old.has_index:
        _index_of_old_single(plan, old)
        plan.sync()
    _add_new_files(plan, old, new)
    plan.rename({unique: new.shards[single]})
    plan.sync()

    # Commit: the new config has the override that leads transformers to the new file, and an index leads
    # huggingface_hub there.
    plan.write_small(CONFIG_NAME, with_weights_override(config, unique), moves=TRANSFORMERS)
    plan.sync()
    plan.write_small(index, compat_index(new.keys, unique), is_commit=True)
    plan.sync()

    # Settle: the new file gets its conventional name as a second one.
    _replace_small_files(plan, old, new, None)
    plan.link(unique, single)
    plan.sync()
    put_config(plan, new, config)
    plan.write_small(index, compat_index(new.keys, single))
    plan.sync()

    # Clean up: the index goes last, when `model.safetensors` is the only file of weights.
    _remove_old(plan, old, (superseded_files(old, new) | {unique}) - {index})
    plan.remove([index])
    plan.sync()
    return plan


def _hide_single(plan: CommitPlan, old: DirectoryState, new: StagedCheckpoint) -> DirectoryState:
    """Give the old single file a temporary name that config and index name, and remove its usual name.

    Returns:
        The state of the directory then, for all readers except those that look for `model.safetensors` alone.
    """
    keys = old.single_keys()
    single = old.names.single
    hidden = old.names.unique_single(content_digest([new.digest.encode(), b"the old one"]))
    if not keys:
        return old  # it is damaged, and does not load
    is_indexed = not old.has_index or (old.index is not None and set(old.index.weight_map.values()) == {single})
    if not old.has_index:
        _index_of_old_single(plan, old)
        plan.sync()
    plan.link(single, hidden)
    plan.sync()
    if is_indexed:
        plan.write_small(old.names.index, compat_index(keys, hidden))
    if old.config and old.weights_override is None:  # one that is damaged leads nowhere
        plan.write_small(CONFIG_NAME, with_weights_override(old.config, hidden))
    plan.sync()
    plan.remove([single])
    plan.sync()
    listing = (old.listing - {single}) | {hidden, old.names.index}
    return replace(old, listing=listing, owned=(old.owned - {single}) | {hidden, old.names.index})


def _protect_hub_readers(plan: CommitPlan, old: DirectoryState) -> None:
    """Keep huggingface_hub on the old weights before shards appear next to them."""
    if old.has_index:
        return
    if old.has_single:
        _index_of_old_single(plan, old)
    else:  # it ignores the old files; a second .safetensors file keeps it from taking a lone shard for the checkpoint
        plan.write_small(old.names.placeholder, b"")
    plan.sync()


def _index_of_old_single(plan: CommitPlan, old: DirectoryState) -> None:
    keys = old.single_keys() if old.has_single else []
    if keys:  # otherwise the file is damaged, and does not load
        plan.write_small(old.names.index, compat_index(keys, old.names.single))


def _add_new_files(plan: CommitPlan, old: DirectoryState, new: StagedCheckpoint) -> None:
    """Add, before the commit, the small files that replace nothing."""
    for name, content in new.model_files.items():
        if not old.has(name):
            plan.write_small(name, content)
    plan.rename({name: staged for name, staged in new.companion_files.items() if not old.has(name)})


def _replace_small_files(plan: CommitPlan, old: DirectoryState, new: StagedCheckpoint, config: bytes | None) -> None:
    """Replace the old small files right after the commit."""
    before = len(plan.steps)
    if config is not None:
        put_config(plan, new, config)
    for name, content in new.model_files.items():
        if old.has(name):
            plan.write_small(name, content)
    plan.rename({name: staged for name, staged in new.companion_files.items() if old.has(name)})
    if len(plan.steps) > before:
        plan.sync()


def _remove_old(plan: CommitPlan, old: DirectoryState, outdated: set[str]) -> None:
    """Remove the rest of the old checkpoint; the index of pickled shards last, because it records whose they are."""
    plan.remove(outdated - {old.names.bin_index})
    plan.sync()
    plan.remove(outdated & {old.names.bin_index})
    plan.sync()


# Steps of a commit, and the plan that lists them.


TRANSFORMERS: Final = "hfshard and transformers"
HUB: Final = "huggingface_hub"
"""The two kinds of readers, which look for the weights in different orders."""


@dataclass(frozen=True, slots=True)
class CommitStep:
    """One change of the directory."""

    kind: Literal["rename", "link", "remove", "sync"]
    """rename: move a staged file into place; link: give a file a second name; sync: make all previous steps durable."""
    target: str = ""
    source: str = ""
    is_commit: bool = False
    """From this step on every reader finds the new checkpoint. An error up to here is rolled back."""
    moves: str = ""
    """Description of the readers that find the new checkpoint from this step on, if the others follow at the commit."""


@dataclass
class CommitPlan:
    """The steps of one commit, and the bytes of the small files that they move into place."""

    steps: list[CommitStep] = field(default_factory=list)
    small_files: dict[str, bytes] = field(default_factory=dict)
    """Name in the staging directory -> bytes."""

    def write_small(self, target: str, content: bytes, *, is_commit: bool = False, moves: str = "") -> None:
        """Stage a small file and rename it into place."""
        staged = f"{len(self.small_files):03d}.small"
        self.small_files[staged] = content
        self.steps.append(CommitStep("rename", target, staged, is_commit, moves))

    def rename(self, files: Mapping[str, str], *, is_commit: bool = False, moves: str = "") -> None:
        """Rename staged files into place; if they are the commit, the last rename is the decisive one."""
        last = list(files)[-1:]
        self.steps.extend(
            CommitStep("rename", target, staged, is_commit and [target] == last, moves)
            for target, staged in files.items()
        )

    def link(self, source: str, target: str) -> None:
        """Give a file in the directory a second name, replacing any file of that name."""
        self.steps.append(CommitStep("link", target, source))

    def remove(self, targets: Iterable[str], *, is_commit: bool = False) -> None:
        """Remove files, in the order of their names; only the removal of a single file can be the commit."""
        self.steps.extend(CommitStep("remove", target, is_commit=is_commit) for target in sorted(targets))

    @property
    def to_commit(self) -> list[CommitStep]:
        """The steps up to the commit."""
        return self.steps[: next(number for number, step in enumerate(self.steps, 1) if step.is_commit)]

    def sync(self) -> None:
        """Make the previous steps durable before any later step; do nothing if there is nothing to sync."""
        if self.steps and self.steps[-1].kind != "sync":
            self.steps.append(CommitStep("sync"))


# A save's new checkpoint, and its effect on the config and the old files, in any kind of place.


NO_CONFIG: Final = b"{}"
"""Replacement for a config that is removed, as long as a config must lead to the new weights."""


@dataclass(frozen=True, slots=True)
class StagedCheckpoint:
    """A checkpoint that was written into the staging directory, with its small files."""

    shards: Mapping[str, str]
    """Name in the directory -> name in the staging directory."""
    keys: Sequence[str]
    """FQNs of the stored tensors."""
    index: bytes | None
    """The bytes of the index; None for a single file."""
    config: bytes | None
    """The bytes of config.json; None if the save has none and keeps the existing one."""
    model_files: Mapping[str, bytes]
    """The other small files of the model: generation_config.json, custom code. Name -> bytes."""
    digest: str
    """Hex digits that depend on the content; part of the names that exist only during the commit."""
    companion_files: Mapping[str, str] = field(default_factory=dict)
    """Files that go along with the model, such as a tokenizer or a README. Name -> name in the staging directory."""
    kept_shards: frozenset[str] = frozenset()
    """Shards of the old checkpoint that belong to the new one too, and stay where they are."""
    drops_config: bool = False
    """Remove an existing config.json, because the new checkpoint has none."""
    hides_single: bool = False
    """Let readers that know only config.json and `model.safetensors` find an error between old and new, not the config
    of one and the weights of the other. This takes hard links."""

    @property
    def is_sharded(self) -> bool:
        """True if the checkpoint has an index."""
        return self.index is not None


def put_config(plan: CommitPlan, new: StagedCheckpoint, config: bytes) -> None:
    """Write the given config, or remove the existing one if `drops_config` is set."""
    if new.drops_config:
        plan.remove([CONFIG_NAME])
    else:
        plan.write_small(CONFIG_NAME, config)


def changed_config(old: DirectoryState, new: StagedCheckpoint) -> bytes | None:
    """Return the config to commit; None if the one in the directory is right already."""
    config = new.config
    if new.drops_config and old.config is not None and not old.shares_config:
        return NO_CONFIG
    if old.shares_config:
        # The override belongs to a killed commit of the weights next to this variant, which this save must not finish.
        if config is not None and old.weights_override is not None:
            config = with_weights_override(config, old.weights_override)
    elif config is None and old.config is not None and weights_override_of(old.config) is not None:
        config = without_weights_override(old.config)
    return None if config == old.config else config


def superseded_files(old: DirectoryState, new: StagedCheckpoint) -> set[str]:
    """Find the files that the old checkpoint owned and the new one does not, strays, and this commit's placeholder."""
    outdated = set(old.owned | old.strays)
    has_others = (old.has_bins or old.has_hub_index) and not old.has_index and not old.has_single
    if new.is_sharded and has_others:
        outdated.add(old.names.placeholder)
    kept = {*new.shards, *new.kept_shards, *new.model_files, *new.companion_files}
    if new.is_sharded:
        kept.add(old.names.index)
    return outdated - kept


def compat_index(keys: Iterable[str], file: str) -> bytes:
    """Build an index that maps every name to one file, for readers that look for an index first."""
    return CheckpointIndex(weight_map=dict.fromkeys(keys, file)).to_json()


def content_digest(parts: Iterable[bytes]) -> str:
    """Compute hex digits that depend on some bytes; they are part of names that exist only during a commit."""
    return sha256_of(b"\0".join(parts))
