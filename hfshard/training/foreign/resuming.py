"""Resumes a run from another program's checkpoint: on all ranks, or on none."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from hfshard._util.text import list_some
from hfshard.errors import CheckpointChangedError, InvalidArgumentError
from hfshard.training.foreign.checkpoint import ForeignCheckpoint, ForeignRequest
from hfshard.training.foreign.directories.data_position import with_positions
from hfshard.training.foreign.planning import plan_foreign
from hfshard.training.foreign.readers import Reader, reader_of
from hfshard.training.ranks import Ranks
from hfshard.training.restoring.part_planner import Restoration
from hfshard.training.run.finding import Level
from hfshard.training.spread.stages import find_stage
from hfshard.training.spread.states import is_spread_state
from hfshard.training.state import TrainingState
from hfshard.training.step import RestoredStep

logger = logging.getLogger(__name__)

_SHOWN = 20


def resume_foreign(
    state: TrainingState,
    place: Any,
    *,
    keys: Mapping[str, str] | None,
    strict: bool,
    verify: Level,
    ranks: Ranks,
    must_be_signed: bool = False,
) -> RestoredStep | None:
    """Restore another program's checkpoint. Every rank must call, and must see the same files.

    Args:
        state: It is changed if every rank can restore it.
        place: What was asked for; the first rank's decides whether it is another program's.
        keys: Name of a part -> where its state lies; None: under the usual keys.
        strict, verify: As in `CheckpointManager.restore`.
        ranks: This process among those that restore.
        must_be_signed: Refuse it, as such files are not held to a signature.

    Returns:
        The step; None where the place is none of another program's.

    Raises:
        InvalidArgumentError: The state is spread over ranks; or what is restored must be signed.
        UnsafePickleError, StateDictMismatchError, DamagedCheckpointError: Nothing was changed.
        RankFailedError: Another rank has one of these errors; nothing was changed.
    """
    reader = reader_of(place)
    is_foreign = ranks.all_of(reader is not None)
    if not any(is_foreign):
        if keys is not None:
            raise InvalidArgumentError("keys is for what other programs have saved: a checkpoint of hfshard has names.")
        return None
    differing = InvalidArgumentError(
        f"All ranks must restore the same place, and this one is asked for {place!r:.500}."
    )
    ranks.agree(None if all(is_foreign) else differing)
    if must_be_signed:
        raise InvalidArgumentError(
            f"public_key is for checkpoints of hfshard, and {place!r:.500} is another program's. Check it by "
            "model_signing verify, and leave the key out."
        )
    with torch.inference_mode(False):  # what is restored will be trained
        return _resume(state, place, reader, keys or {}, ranks, strict=strict, verify=verify)


def _resume(
    state: TrainingState,
    path: str,
    reader: Reader | None,
    keys: Mapping[str, str],
    ranks: Ranks,
    *,
    strict: bool,
    verify: Level,
) -> RestoredStep:
    assert reader is not None  # as on every rank
    is_spread = any(ranks.all_of(ranks.on_each(lambda: is_spread_state(state))))
    stage = find_stage(state, ranks)
    is_stage = stage is not None and stage.names.own != stage.names.everywhere
    if any(ranks.all_of(is_spread or is_stage)):
        raise InvalidArgumentError(
            f"'{path}' is of another program, and the model is spread over ranks. Restore it in one process, with "
            "the whole model: manager.restore(state, path); manager.save(step, state). Then restore that step on all "
            "ranks.",
            path=path,
        )
    request = ForeignRequest(state.kinds, keys, strict, verify, ranks.rank, ranks.world_size)

    def planned() -> tuple[ForeignCheckpoint, Restoration, str]:
        foreign = with_positions(reader(path, request), state)
        restoration = plan_foreign(state, foreign, strict=strict)
        foreign.confirm()
        return foreign, restoration, foreign.fingerprint()

    foreign, restoration, fingerprint = ranks.on_each(planned)
    if len(set(ranks.all_of(fingerprint))) > 1:
        raise CheckpointChangedError(
            f"The ranks see different files in '{path}', and nothing was restored. Let all ranks see the same ones.",
            path=path,
        )
    for difference in restoration.differences:
        logger.warning("%s", difference)
    if restoration.lacking:
        logger.warning("'%s' lacks %s.", path, list_some(restoration.lacking, _SHOWN))
    restoration.apply(ranks)
    return _restored(foreign, restoration)


def _restored(foreign: ForeignCheckpoint, restoration: Restoration) -> RestoredStep:
    restored = RestoredStep(foreign.step or 0)
    restored.path = foreign.path
    restored.extra = foreign.extra
    restored.metrics = {}
    restored.differences = tuple(restoration.differences)
    restored.lacking = restoration.lacking
    return restored
