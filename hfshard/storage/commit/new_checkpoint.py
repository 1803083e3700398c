"""What a save is about to commit, and what becomes of the config and of the old files, whatever the place is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from hfshard.constants import CONFIG_NAME
from hfshard.format.digests import sha256_of
from hfshard.format.index import CheckpointIndex, with_weights_override, without_weights_override
from hfshard.storage.commit.directory_state import DirectoryState, weights_override_of
from hfshard.storage.commit.steps import CommitPlan

NO_CONFIG: Final = b"{}"
"""What stands in for a config that goes, while it has to lead to the new weights."""


@dataclass(frozen=True, slots=True)
class NewCheckpoint:
    """What a save has written into the staging directory, and what belongs to it."""

    shards: Mapping[str, str]
    """Name in the directory -> name in the staging directory."""
    keys: Sequence[str]
    """FQNs of the stored tensors."""
    index: bytes | None
    """The bytes of the index; None for a single file."""
    config: bytes | None
    """The bytes of config.json; None where the save has none and keeps the one that is there."""
    model_files: Mapping[str, bytes]
    """The other small files of the model: generation_config.json, custom code. Name -> bytes."""
    digest: str
    """Hex digits that depend on the content: part of the names that exist only during the commit."""
    companion_files: Mapping[str, str] = field(default_factory=dict)
    """Files that go along with the model, such as a tokenizer or a README. Name -> name in the staging directory."""
    kept_shards: frozenset[str] = frozenset()
    """Shards of the old checkpoint that belong to the new one too, and stay where they are."""
    drops_config: bool = False
    """Whether a config.json that is there goes, because the new checkpoint has none."""
    hides_single: bool = False
    """Whether readers that know nothing but config.json and `model.safetensors` are to find an error between old and
    new, not the config of one and the weights of the other. It takes hard links."""

    @property
    def is_sharded(self) -> bool:
        """Whether it has an index."""
        return self.index is not None


def put_config(plan: CommitPlan, new: NewCheckpoint, config: bytes) -> None:
    """Write the config as it was given, or remove the one of a checkpoint that had one."""
    if new.drops_config:
        plan.remove([CONFIG_NAME])
    else:
        plan.write_small(CONFIG_NAME, config)


def changed_config(old: DirectoryState, new: NewCheckpoint) -> bytes | None:
    """The config to commit; None where the one in the directory is right already."""
    config = new.config
    if new.drops_config and old.config is not None and not old.shares_config:
        return NO_CONFIG
    if old.shares_config:
        # An override there belongs to a killed commit of the weights beside this variant, which is not ours to end.
        if config is not None and old.weights_override is not None:
            config = with_weights_override(config, old.weights_override)
    elif config is None and old.config is not None and weights_override_of(old.config) is not None:
        config = without_weights_override(old.config)
    return None if config == old.config else config


def outdated_files(old: DirectoryState, new: NewCheckpoint) -> set[str]:
    """What the old checkpoint owned and the new one does not, strays, and the placeholder of this commit."""
    outdated = set(old.owned | old.strays)
    has_others = (old.has_bins or old.has_hub_index) and not old.has_index and not old.has_single
    if new.is_sharded and has_others:
        outdated.add(old.names.placeholder)
    kept = {*new.shards, *new.kept_shards, *new.model_files, *new.companion_files}
    if new.is_sharded:
        kept.add(old.names.index)
    return outdated - kept


def compat_index(keys: Iterable[str], file: str) -> bytes:
    """An index that maps every name to one file, for readers that look for an index first."""
    return CheckpointIndex(weight_map=dict.fromkeys(keys, file)).to_json()


def content_digest(parts: Iterable[bytes]) -> str:
    """Hex digits that depend on some bytes: part of the names that exist only during a commit."""
    return sha256_of(b"\0".join(parts))
