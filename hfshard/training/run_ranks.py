"""The ranks of a run: they meet, use the same place, and have states with the same parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import torch

from hfshard._util.call_ranks import Session
from hfshard.distributed.rendezvous import session
from hfshard.errors import InvalidArgumentError
from hfshard.format.index import sha256_of
from hfshard.places.place import place_to_save
from hfshard.tensors.state_dict import collect_state_dict
from hfshard.training.state.training_state import TrainingState


def names_of_place(path: str) -> list[str]:
    """Return the names of a place on this rank: ranks that have one of these names in common mean the same place."""
    return sorted({path, place_to_save(path, "path").key})


def reject_other_places(names: Mapping[int, Sequence[str]], does: str) -> None:
    """Reject ranks that do not mean the same place, although they make one call together.

    Args:
        names: Rank -> what `names_of_place` returned on it.
        does: A description of what they do with it.

    Raises:
        InvalidArgumentError: The places differ; the message names two ranks, and their places.
    """
    first, *others = names
    for rank in others:
        if not {*names[rank]} & {*names[first]}:
            raise InvalidArgumentError(
                f"Rank {rank} {does} '{names[rank][0]}', but rank {first} {does} '{names[first][0]}': all ranks of a "
                "process group must use the same place in one call. Pass the same one, on a file system that all of "
                "them see; or, for a separate run on each rank, a process group of that rank alone: "
                "CheckpointManager(..., process_group=...)."
            )


def agree_on_checkpoint(ranks: Session, path: str, step: str) -> None:
    """Reject ranks that do not restore the same checkpoint. Every rank must call.

    Args:
        ranks: Those that restore.
        path: The run, or the checkpoint, that this rank restores.
        step: What this rank restores of it, in a word.

    Raises:
        InvalidArgumentError: They differ; see `reject_other_places`.
    """
    names, steps = zip(*ranks.all_of((names_of_place(path), step)), strict=True)
    reject_other_places(dict(zip(ranks.ranks, names, strict=True)), "restores from")
    if any(one != steps[0] for one in steps):
        raise InvalidArgumentError(f"All ranks must restore the same step, got [{', '.join(steps)}].")


def all_ranks() -> AbstractContextManager[Session]:
    """Wait for all ranks of the call's process group, which run the block together: one such block at a time.

    It is the same for all runs, because ranks may name a directory differently.

    Raises:
        RankFailedError: A rank failed, died, or did not call.
    """
    return session("the run", needs_all=True)


@contextmanager
def meet_for(what: str) -> Iterator[Session]:
    """Run the block on all ranks of the call's process group, which do the same thing.

    Args:
        what: What they do; if another rank does something else, this raises.

    Raises:
        RankFailedError: A rank failed, died, or did not call.
    """
    with all_ranks() as ranks:
        ranks.meet(what)
        yield ranks


# What the states of all ranks must have in common.


_DIGEST_CHARACTERS: Final = 16


def shared_kinds(state: TrainingState) -> dict[str, str]:
    """Return the kinds, by name, of parts that all ranks must have: all but loaders, which each rank saves itself."""
    return {name: kind for name, kind in state.kinds.items() if kind != "loader"}


def reject_other_parts(kinds: Mapping[int, Mapping[str, str]]) -> None:
    """Reject a save by ranks whose states have different parts: only those of the first rank would be stored.

    Args:
        kinds: Rank -> what `shared_kinds` returned on it.

    Raises:
        InvalidArgumentError: The parts differ.
    """
    first = min(kinds)
    for rank, other in kinds.items():
        if other != kinds[first]:
            raise InvalidArgumentError(
                f"The state of rank {rank} has the parts {dict(other)}, but that of rank {first} has "
                f"{dict(kinds[first])}. Give the states of all ranks the same parts."
            )


def stage_digest(state: TrainingState) -> str:
    """Digest what distinguishes the modules of this rank from another's: the names and shapes of their tensors."""
    lines = [
        f"{component}/{name} {tuple(tensor.shape)}"
        for component, module in sorted(state.of_kind("module").items())
        for name, tensor in collect_state_dict(module).items()
        if isinstance(tensor, torch.Tensor)
    ]
    return short_digest("\n".join(lines))


def short_digest(text: str) -> str:
    """Digest a text to distinguish it from a few others; all ranks receive each other's digest."""
    return sha256_of(text.encode(errors="surrogateescape"))[:_DIGEST_CHARACTERS]
