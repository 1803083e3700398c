"""Plan the steps from one checkpoint in a store to the next: new shards are in place, and one conditional put decides.

A store has no locks, and no renames: every step puts one small object whole, or removes some. Three rules follow.

- A checkpoint in a store always has an index, also with a single shard: every save puts it on the condition that
  it is the one which that save has read. So of two writers one wins, whatever each of them saves.
- Shards get names that no object ever had. So whoever loses, or gives up, removes its own and nobody else's.
- What replaces other small files follows the index, because only the winner may put it.
  Beside no weights, a config goes before it: weights without one load with the class's own.

README.md in `saving/stores/` shows each path as a table.
"""

from __future__ import annotations

from hfshard.constants import CONFIG_NAME
from hfshard.storage.commit.directory_state import DirectoryState
from hfshard.storage.commit.new_checkpoint import (
    NewCheckpoint,
    changed_config,
    compat_index,
    outdated_files,
    put_config,
)
from hfshard.storage.commit.steps import HUB, TRANSFORMERS, CommitPlan
from hfshard.storage.format.weights_override import with_mark, with_weights_override


def plan_protection(old: DirectoryState) -> CommitPlan:
    """Plan what comes before the first new shard: huggingface_hub must not take it for the whole checkpoint.

    It takes the only `*.safetensors` file where there is no index.
    """
    plan = CommitPlan()
    keys = old.single_keys() if old.has_single and not old.has_index else []
    if keys:
        plan.write_small(old.names.index, compat_index(keys, old.names.single))
    elif not old.has_index:
        plan.write_small(old.names.placeholder, b"")  # a second file; the one that is there is put once more
    return plan


def plan_store_commit(
    old: DirectoryState, new: NewCheckpoint, *, claim: bytes | None, is_contested: bool = False, mark: str | None = None
) -> CommitPlan:
    """Plan the commit of a new checkpoint, whose shards lie in the store under names that nobody reads.

    A pure function. Of `new`, `shards` is empty, `kept_shards` names all, and `model_files` and `companion_files` are
    those that the store lacks, or has with other bytes.

    Args:
        old: What was there before, with what `plan_protection` has put.
        new: What is to be there.
        claim: The index that is there; None: there is none.
        is_contested: Whether somebody else's claim was found: they have been killed, or are about to put config.json,
            which must fail then.
        mark: 16 hex digits of this save's own, where a claim was found once: whoever made it may wake up much later,
            so config.json must never have its old bytes again, which would have the old ETag.
    """
    config = changed_config(old, new)
    if is_contested and config is None and old.config is not None and not old.shares_config:
        config = old.config
    # Beside no weights, a config that is not there yet goes first. One that is there would lead to the new weights.
    is_first = not old.has_weights and old.config is None
    if config is None or old.shares_config or is_first:
        return _commit_by_index(old, new, config, mark, is_first=is_first)
    return _commit_by_config(old, new, config, claim, mark)


def _commit_by_index(
    old: DirectoryState, new: NewCheckpoint, config: bytes | None, mark: str | None, *, is_first: bool
) -> CommitPlan:
    """Commit by the put of the index: the config stays as it is, is shared with other weights, or was not there."""
    plan = CommitPlan()
    small = set(new.model_files) | set(new.companion_files)
    first = small.difference(old.files) if is_first else set()

    # Prepare: beside no weights, what replaces no file; transformers takes the class's own config where there is none,
    # so that weights without theirs could load as another model.
    _put_small_files(plan, new, first)
    if config is not None and is_first:
        put_config(plan, new, config)
        plan.sync()

    # Commit: the index. For transformers, a single file outranks it: then its removal is the commit.
    plan.write_small(
        old.names.index, new.index or b"", is_commit=not old.has_single, moves=HUB if old.has_single else ""
    )
    plan.sync()
    if old.has_single:
        plan.remove([old.names.single], is_commit=True)
        plan.sync()

    # Settle: the other small files.
    _put_small_files(plan, new, small - first)
    _stop_bringing(plan, old, new, small - first)
    if config is not None and not is_first:
        put_config(plan, new, _marked(config, mark))
        plan.sync()

    plan.remove(outdated_files(old, new) - {old.names.single})
    return plan


def _commit_by_config(
    old: DirectoryState, new: NewCheckpoint, config: bytes, claim: bytes | None, mark: str | None
) -> CommitPlan:
    """Commit weights and a changed config by the put of config.json, which names the new index for a while."""
    plan = CommitPlan()
    unique = old.names.unique_index(new.digest)
    changed = set(new.model_files) | set(new.companion_files)
    absent = changed.difference(old.files)

    # Claim: another index that says the same as the old one. Who has read the old one can't commit any more. (Beside
    # pickles, the placeholder is the claim.)
    if claim is not None:
        plan.write_small(old.names.index, claim)
        plan.sync()
    elif not old.has_weights:
        plan.write_small(old.names.index, compat_index(new.keys, old.names.placeholder))  # loads nowhere, as before
        plan.sync()

    # Prepare: the new index under a name that nothing reads yet, and small files that replace none.
    plan.write_small(unique, new.index or b"")
    _put_small_files(plan, new, absent)
    plan.sync()

    # Commit: the new config leads transformers to the new index; the conventional index moves huggingface_hub.
    plan.write_small(CONFIG_NAME, with_weights_override(config, unique), moves=TRANSFORMERS)
    plan.sync()
    plan.write_small(old.names.index, new.index or b"", is_commit=True)
    plan.sync()

    # Settle: the conventional files lead where the override did.
    _put_small_files(plan, new, changed - absent)
    _stop_bringing(plan, old, new, changed - absent)
    if old.has_single:  # it outranks the index once the override is gone
        plan.remove([old.names.single])
        plan.sync()
    put_config(plan, new, _marked(config, mark))
    plan.sync()

    plan.remove((outdated_files(old, new) | {unique}) - {old.names.single})
    return plan


def _stop_bringing(plan: CommitPlan, old: DirectoryState, new: NewCheckpoint, names: set[str]) -> None:
    """Put the index once more where it brings small files, which are in place now: what changes there later counts."""
    if not names.isdisjoint(new.model_files):
        plan.write_small(old.names.index, new.index or b"")
        plan.sync()


def _marked(config: bytes, mark: str | None) -> bytes:
    return config if mark is None else with_mark(config, mark)


def _put_small_files(plan: CommitPlan, new: NewCheckpoint, names: set[str]) -> None:
    for name, content in new.model_files.items():
        if name in names:
            plan.write_small(name, content)
    plan.rename({name: source for name, source in new.companion_files.items() if name in names})
    plan.sync()
