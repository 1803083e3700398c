"""Brings together what each rank of a run adds to a checkpoint, so that the first rank can write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hfshard._util.text import error_words
from hfshard.errors import HfshardError, InvalidArgumentError, RankFailedError
from hfshard.training.collecting import RankState, collect_rank
from hfshard.training.ranks import Ranks
from hfshard.training.spread.replicas import SAME, OfEachRank
from hfshard.training.state import TrainingState
from hfshard.training.step import checked_step


@dataclass(frozen=True, slots=True)
class RankContribution:
    """What one rank sends to the first one when a checkpoint is saved."""

    step: int = -1
    state: RankState | None = None
    """None where the rank could not collect it."""
    problem: str = ""
    """Why it could not, in words."""
    number: int = 0
    """That of the rank in torch.distributed."""


def save_on_all_ranks(
    step: int,
    state: TrainingState,
    write: Callable[[Sequence[RankContribution]], str],
    ranks: Ranks,
    own: OfEachRank = SAME,
) -> str:
    """Collect every rank's own state, and have the first rank write the checkpoint. Every rank must call.

    Args:
        step: The step of the run.
        state: What to save.
        write: Called on the first rank, with the contributions of all ranks in their order.
        ranks: Those that save together.
        own: What is not the same on all of them.

    Returns:
        What `write` returned, on every rank.

    Raises:
        RankFailedError: A rank failed; each rank raises its own error if it has one.
    """
    number = ranks.number(ranks.rank)
    contribution = RankContribution(number=number)
    error: Exception | None = None
    try:
        of_rank = collect_rank(state, ranks.rank, own.objects, buffers=own.buffers)
        contribution = RankContribution(checked_step(step), of_rank, number=number)
    except Exception as caught:  # noqa: BLE001 - raised below, when the first rank knows
        error = caught
        contribution = RankContribution(problem=error_words(error), number=number)
    gathered = ranks.gather(contribution)
    try:
        return ranks.last(lambda: write(gathered))
    except HfshardError:
        if error is not None:
            raise error from None
        raise


def agreed_step(contributions: Sequence[RankContribution]) -> tuple[int, list[RankState]]:
    """The step that all ranks save, and what each of them adds.

    Raises:
        RankFailedError: A rank could not collect its state.
        InvalidArgumentError: The ranks save different steps.
    """
    states: list[RankState] = []
    for contribution in contributions:
        if contribution.state is None:
            number = contribution.number
            raise RankFailedError(f"Rank {number} can't save: {contribution.problem}", rank=number)
        states.append(contribution.state)
    steps = [contribution.step for contribution in contributions]
    if any(other != steps[0] for other in steps):
        raise InvalidArgumentError(f"All ranks must save the same step, got {steps}.")
    return steps[0], states
