"""Resume from one checkpoint: the first rank chooses and checks it, and either all ranks restore it or none does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch

from hfshard._util.call_ranks import Session
from hfshard.checkpoint.check_files import check_files
from hfshard.checkpoint.folder import Folder
from hfshard.checkpoint.load_options import SignatureRequirement
from hfshard.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    HfshardError,
    InvalidArgumentError,
)
from hfshard.training.pipeline_stages import find_stage
from hfshard.training.restoring.part_planner import Restoration
from hfshard.training.restoring.restoration import plan_restoration
from hfshard.training.run.find_checkpoint import check_run_checkpoint
from hfshard.training.run.manifest import CheckpointManifest, RunCheckpoint, read_manifest
from hfshard.training.state.step import RestoredStep
from hfshard.training.state.training_state import TrainingState, is_spread_state

logger = logging.getLogger(__name__)

_TRIES: Final = 50
"""The number of times a checkpoint is chosen, if each one is replaced or found damaged while it is read."""

ChosenCheckpoint = tuple[RunCheckpoint, CheckpointManifest]

Choose = Callable[[Collection[str]], ChosenCheckpoint | None]
"""Chooses a checkpoint, except those of some paths; None if there is none."""


@torch.inference_mode(False)  # what is restored will be trained
def resume(
    state: TrainingState,
    choose: Choose,
    *,
    is_newest: bool,
    strict: bool,
    session: Session,
    signature: SignatureRequirement | None = None,
    without: Collection[str] = (),
) -> RestoredStep | None:
    """Restore a checkpoint. Every rank must call, and must see the checkpoint's directory or be able to fetch it.

    Args:
        state: It is changed if every rank can restore it.
        choose: Called on the first rank, with the paths of checkpoints that were found damaged when they were read.
        is_newest: Whether it is the newest one of the run; if it proves damaged, it is passed over.
        strict: Reject any difference.
        session: That of the ranks that restore.
        signature: The required signer of every file, which each rank checks; None: no signature is needed.
        without: Parts of the checkpoint that are not restored.

    Returns:
        The step; None if there is no checkpoint.

    Raises:
        StateDictMismatchError, DamagedCheckpointError, SignatureError: Nothing was changed.
        RankFailedError: Another rank has one of these errors; nothing was changed.
    """
    is_spread = session.each(lambda: is_spread_state(state))
    stage = None if session.is_alone else find_stage(state, session)
    own, names = (state, None) if stage is None else (stage.state, stage.names)
    passed_over: list[str] = []
    for _ in range(_TRIES):
        chosen_checkpoint = _choose_together(partial(choose, passed_over), session)
        if chosen_checkpoint is None:
            return None
        checkpoint, manifest = chosen_checkpoint
        restoration = Restoration()
        folder: Folder | None = None
        error = None
        try:
            if not session.is_leader:
                checkpoint, manifest = _local_checkpoint(checkpoint, manifest, partial(choose, passed_over))
            folder = checkpoint.folder()
            if folder.traits.verifies_reads:
                check_files(folder, manifest.files, "structure")
            with _all_signed(checkpoint, manifest, signature):
                restoration = plan_restoration(
                    own,
                    folder,
                    manifest,
                    strict=strict,
                    is_spread=is_spread,
                    session=session,
                    stage=names,
                    without=without,
                )
        except Exception as caught:  # noqa: BLE001 - raised by `agree`, when all ranks know
            error = caught
        # The first rank checks after the others have read: a replacement may be why one of them failed.
        session.all_of(error is None)
        is_replaced = (session.is_leader or error is None) and not checkpoint.is_current()
        if any(session.all_of(is_replaced)):
            continue  # a run that is saving has removed or replaced it
        is_found_by_reads = bool(folder and folder.traits.verifies_reads)
        is_damaged = is_newest and isinstance(error, DamagedCheckpointError) and is_found_by_reads
        if not any(session.all_of(is_damaged)):
            break
        passed_over.append(checkpoint.path)
        if is_damaged:
            logger.warning("Skipped the checkpoint '%s': %s", checkpoint.path, error)
    else:
        error = error or CheckpointChangedError(f"'{checkpoint.path}' was replaced while it was being read. Retry.")
    session.agree(error)
    restoration.apply(session)
    if session.is_leader:
        logger.info("Restored the checkpoint of step %d from '%s'.", manifest.step, checkpoint.path)
    return restoration.restored(manifest.step, checkpoint.path, manifest.metrics)


@contextmanager
def _all_signed(
    checkpoint: RunCheckpoint, manifest: CheckpointManifest, signature: SignatureRequirement | None
) -> Iterator[None]:
    """Compare every file with what was signed before it is read, and check all of them again afterwards."""
    if signature is None:
        yield
        return
    path = checkpoint.path
    if not checkpoint.folder().traits.is_directory:
        raise InvalidArgumentError(
            f"'{path}' is in a store, but a signature is checked only over files on disk. Download them with the "
            "service's tool, and restore from that directory.",
            path=path,
        )
    signed = signature.find(path)
    signed.check_all()
    if read_manifest(checkpoint.folder()).to_json() != manifest.to_json():
        raise CheckpointChangedError(f"'{path}' was replaced while its signature was being checked. Retry.", path=path)
    yield
    signed.confirm()


def _choose_together(choose: Callable[[], ChosenCheckpoint | None], session: Session) -> ChosenCheckpoint | None:
    """Have the first rank choose a checkpoint, and return it on every rank."""
    chosen: list[ChosenCheckpoint] = []

    def choose_and_describe() -> list[str] | None:
        found = choose()
        if found is None:
            return None
        chosen.append(found)
        checkpoint, manifest = found
        return [checkpoint.path, manifest.to_json().decode()]

    shared = session.first(choose_and_describe)
    if shared is None:
        _reject_others(choose, session)
    if shared is None or chosen:
        return chosen[0] if chosen else None
    path, raw = shared
    manifest = CheckpointManifest.from_json(raw.encode(), path)
    return RunCheckpoint.of(path, manifest), manifest


def _reject_others(choose: Callable[[], ChosenCheckpoint | None], session: Session) -> None:
    """Reject a checkpoint that another rank sees if the first one sees none: the run would restart from scratch."""
    own = None if session.is_leader else _own_choice(choose)
    for rank, path in zip(session.ranks, session.all_of(own), strict=True):
        if path is not None:
            raise CheckpointNotFoundError(
                f"Rank {rank} found the checkpoint '{path}', but rank {session.leader} found none "
                "there. Make all ranks see the run's directory, or copy it to each machine; to train from the "
                "beginning, pass the managers another directory.",
                path=path,
            )


def _own_choice(choose: Callable[[], ChosenCheckpoint | None]) -> str | None:
    """Return the path of the checkpoint that this rank would choose, intact or damaged."""
    try:
        found = choose()
    except HfshardError as error:
        return error.path or str(error)
    return None if found is None else found[0].path


def _local_checkpoint(
    checkpoint: RunCheckpoint,
    manifest: CheckpointManifest,
    choose: Callable[[], ChosenCheckpoint | None],
) -> ChosenCheckpoint:
    """Find the first rank's checkpoint from this rank: in the same directory, or fetched to this machine."""
    here: ChosenCheckpoint | None
    if checkpoint.folder().exists():
        local = checkpoint.reread()
        here = local, check_run_checkpoint(local, "structure", is_read_next=True)
    else:
        here = choose()
    if here is None or here[1].to_json() != manifest.to_json():  # compared as JSON, as NaN does not equal itself
        what = "no checkpoint" if here is None else f"another one, of step {here[1].step}, in '{here[0].path}'"
        raise CheckpointChangedError(
            f"The first rank restores '{checkpoint.path}', but this rank found {what}. Make all ranks see the run's "
            "directory; or name a commit: manager.restore(state, 'org/name@commit').",
            path=checkpoint.path,
        )
    return here
