"""Where a Trainer resumes from: a checkpoint on a hub is brought to this machine before Trainer looks for its files."""

from __future__ import annotations

import os

from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hfshard.storage.disk.hub_place import has_hub_marker
from hfshard.training.manager import CheckpointManager
from hfshard.training.pushing.hubs import checked_at
from hfshard.training.ranks import Ranks

Place = str | os.PathLike[str] | bool
"""What `Trainer.train` takes as `resume_from_checkpoint`; True: the newest checkpoint."""


def bring_here(place: Place, manager: CheckpointManager, args: TrainingArguments) -> str | None:
    """Download a checkpoint, and compare every byte with its checksum; every rank must call.

    The first rank does both, and so does each other one that does not see the directory which it used.

    Args:
        place: A directory, "org/name" on the Hub, or a directory hub, these two with "@revision" for one other than
            main. True: of the run; if that has none, of the hub that the manager pushes to.
        manager: The run's.
        args: The Trainer's, for its directory and token.

    Returns:
        The checkpoint's directory; None where the place is for Trainer to find: a directory, or what True means to it.

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
    checkpoint, _ = checked_at(address, "full", token=args.hub_token, progress=manager.progress)
    return checkpoint.path


def _newest(manager: CheckpointManager, args: TrainingArguments) -> str | None:
    """What True means, where Trainer does not find it by itself."""
    root = str(args.output_dir)
    if os.path.isdir(root) and get_last_checkpoint(root) is not None:
        return None
    return manager.push_to_hub if manager.latest_step() is None else None
