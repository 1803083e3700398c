"""Where a Trainer resumes from: a checkpoint on a hub is brought to this machine before Trainer looks for its files."""

from __future__ import annotations

import os
import re
from typing import Final

from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hfshard._util.addresses import is_address
from hfshard.commit.hub_marker import directory_of, has_hub_marker, split_address
from hfshard.errors import CheckpointNotFoundError
from hfshard.hub.repo import RepoTree
from hfshard.hub.resolve import CheckpointQuery
from hfshard.training.integrations.trainer_files import STATE_FILE
from hfshard.training.manager import CheckpointManager
from hfshard.training.pushing.hubs import checked_at
from hfshard.training.ranks import Ranks

_STOCK_FOLDER: Final = re.compile(r"|last-checkpoint|checkpoint-\d+")
"""Where Trainer pushes checkpoints, by `hub_strategy`; or at the top, if somebody has uploaded one."""

Place = str | os.PathLike[str] | bool
"""What `Trainer.train` takes as `resume_from_checkpoint`; True: the newest checkpoint."""


def bring_here(place: Place, manager: CheckpointManager, args: TrainingArguments) -> str | None:
    """Download a checkpoint, and compare every byte with its checksum; every rank must call.

    The first rank does both, and so does each other one that does not see the directory which it used. What Trainer
    alone has pushed has the Hub's checksums only.

    Args:
        place: A directory, an address of a store, "org/name" on the Hub, or a directory hub, the last two with
            "@revision" for one other than main. True: of the run; if that has none, of the hub that the manager pushes
            to.
        manager: The run's.
        args: The Trainer's, for its directory and token.

    Returns:
        The checkpoint's directory, or its address, from which nothing is downloaded yet; None where the place is for
        Trainer to find: a directory, or what True means to it.

    Raises:
        CheckpointNotFoundError: There is no training checkpoint.
        HubError: It could not be downloaded.
        DamagedCheckpointError: It is damaged.
        RankFailedError: Another rank has one of these errors.
    """
    with Ranks.meeting("resume_from_checkpoint") as ranks:
        path = ranks.first(lambda: _fetched(place, manager, args))
        if path is None:
            return None
        return ranks.on_each(lambda: path if os.path.isdir(path) else _fetched(place, manager, args))


def _fetched(place: Place, manager: CheckpointManager, args: TrainingArguments) -> str | None:
    address = _newest(manager, args) if isinstance(place, bool) else place
    if address is None or (os.path.isdir(address) and not has_hub_marker(os.fspath(address))):
        return None
    try:
        token = None if is_address(address) else args.hub_token  # of a store, it is for pushes
        checkpoint, _ = checked_at(address, "full", token=token, progress=manager.progress, is_read_next=True)
    except CheckpointNotFoundError:
        if is_address(address):
            raise
        stock = _fetched_from_trainer(address, args.hub_token, manager.progress)
        if stock is None:
            raise
        return stock
    return checkpoint.path


def _fetched_from_trainer(address: str | os.PathLike[str], token: str | None, progress: bool | None) -> str | None:
    """Download what Trainer alone has pushed, which it then resumes as it always does; None where there is no such."""
    repo_id, revision = split_address(address)
    tree = _tree(repo_id, revision, token)
    if tree is None:
        return None
    folders = [path.rpartition("/")[0] for path in tree.files if os.path.basename(path) == STATE_FILE]
    found = [folder for folder in folders if _STOCK_FOLDER.fullmatch(folder)]
    if not found:
        return None
    from hfshard.places.fetch import pull_from_hub

    newest = max(found, key=_order)
    query = CheckpointQuery(
        revision=tree.commit, subfolder=newest, token=token, allow_patterns=["*"], needs_companions=True
    )
    return pull_from_hub(repo_id, None, query, progress=progress)


def _tree(repo_id: str, revision: str | None, token: str | None) -> RepoTree | None:
    """Ask a hub for its files; None where it can't be asked."""
    from hfshard.hub.download import fetch_tree_for_reading, is_offline  # huggingface_hub's import takes time

    if has_hub_marker(repo_id):
        from hfshard.hub.directory.directory_hub import DirectoryHub

        return DirectoryHub.open(repo_id).tree(revision)
    if directory_of(repo_id) is not None or is_offline(local_files_only=False):
        return None
    return fetch_tree_for_reading(repo_id, revision, token)


def _order(folder: str) -> tuple[bool, bool, int]:
    """What is at the top comes before `last-checkpoint`, and that before those with numbers."""
    number = folder.rpartition("-")[2]
    return not folder, folder == "last-checkpoint", int(number) if number.isdecimal() else 0


def _newest(manager: CheckpointManager, args: TrainingArguments) -> str | None:
    """What True means, where Trainer does not find it by itself."""
    if is_address(manager.root) and (step := manager.latest_step()) is not None:
        return manager.path_of(step)
    root = str(args.output_dir)
    if os.path.isdir(root) and get_last_checkpoint(root) is not None:
        return None
    return manager.push_to_hub if manager.latest_step() is None else None
