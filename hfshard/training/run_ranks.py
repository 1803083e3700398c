"""The processes of a run: values gathered and shared, one outcome for all, and checks for states that are spread."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from hfshard._util.addresses import is_store_address
from hfshard._util.call_ranks import has_other_ranks
from hfshard._util.text import describe_error
from hfshard.distributed.rendezvous import Session, session
from hfshard.errors import InvalidArgumentError, RankFailedError
from hfshard.format.digests import sha256_of
from hfshard.tensors.state_dict import RUN_REMEDY, collect_state_dict, is_dtensor, is_partitioned, reject_partitioned
from hfshard.training.state.training_state import TrainingState

_Value = TypeVar("_Value")


def names_of_place(path: str) -> list[str]:
    """Return the names of a place on this rank: ranks that have one of these names in common mean the same place."""
    return [path] if is_store_address(path) else sorted({path, os.path.realpath(path)})


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


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of its run. If it is alone, all calls are local."""

    rank: int = 0
    """The rank among those of the run, from 0; `number` returns the one in torch.distributed."""
    world_size: int = 1
    status: Session | None = None
    """The status of an operation of all ranks: its store carries values, and a dead rank is an error. None: alone."""

    @classmethod
    @contextmanager
    def meeting(cls, what: str) -> Iterator[Ranks]:
        """Provide the ranks of the call's process group while the block runs; all of them take part in one operation.

        Args:
            what: What they do; if another rank does something else, this raises.

        Raises:
            RankFailedError: A rank failed, died, or did not call.
        """
        if not has_other_ranks():
            yield ALONE
            return
        with all_ranks() as status:
            status.meet(what)
            yield cls.of(status)

    @classmethod
    def of(cls, status: Session) -> Ranks:
        """Return the ranks of an operation that is in progress."""
        return cls(status.position, len(status.ranks), status)

    def number(self, rank: int) -> int:
        """Return the number that a rank of the run has in torch.distributed, by which errors name it."""
        return rank if self.status is None else self.status.ranks[rank]

    @property
    def is_first(self) -> bool:
        """True for the process that writes."""
        return self.rank == 0

    def gather(self, value: _Value) -> list[_Value]:
        """Return the values of all ranks in order on the first rank, and an empty list on others.

        Every rank must call, once in an operation.
        """
        if self.status is None:
            return [value]
        self.status.tell("value", pickle.dumps(value))
        speakers = self.status.ranks if self.is_first else []
        return [pickle.loads(self.status.wait_for("value", rank)) for rank in speakers]

    def share(self, value: _Value) -> _Value:
        """Return the first rank's value, which JSON must support, on every rank. Every rank must call."""
        if self.status is None:
            return value
        told = self.status.meet("share", json.dumps(value if self.is_first else None).encode())
        return json.loads(told[self.status.leader])  # type: ignore[no-any-return]

    def all_of(self, value: _Value) -> list[_Value]:
        """Return the values of all ranks in order, on every rank; JSON must support them. Every rank must call."""
        if self.status is None:
            return [value]
        return [json.loads(raw) for raw in self.status.meet("gather", json.dumps(value).encode()).values()]

    def reject_other_places(self, path: str, does: str) -> None:
        """Reject ranks that do not mean the same place. Every rank must call."""
        names = self.all_of(names_of_place(path))
        reject_other_places({self.number(rank): one for rank, one in enumerate(names)}, does)

    def first(self, work: Callable[[], _Value]) -> _Value:
        """Call a function on the first rank, and return its result on every rank. Every rank must call.

        Raises:
            RankFailedError: The function failed; raised on the other ranks. The first rank raises its own error.
        """
        value: Any = None
        error: BaseException | None = None
        if self.is_first:
            try:
                value = work()
            except BaseException as caught:  # noqa: BLE001 - raised below: the other ranks wait for the outcome
                error = caught
        value, told = self.share([value, None if error is None else describe_error(error)])
        if error is not None:
            raise error
        if told is not None:
            raise self._failed(0, told)
        return value  # type: ignore[no-any-return]

    def last(self, work: Callable[[], str]) -> str:
        """Run the final step on the first rank. Once it is done, a rank that dies no longer matters."""
        if self.status is None:
            return self.first(work)
        if not self.is_first:
            return self.status.finish().decode()
        try:
            return self.status.finish(work().encode()).decode()
        except Exception:
            raise
        except BaseException:
            self.status.begin_step()  # Ctrl-C may come after the work
            raise

    def on_each(self, work: Callable[[], _Value]) -> _Value:
        """Call a function on every rank, and return each rank's own result if none failed. Every rank must call.

        Raises:
            RankFailedError: It failed on another rank. A rank where it failed raises its own error.
        """
        made: list[_Value] = []
        error: Exception | None = None
        try:
            made.append(work())
        except Exception as caught:  # noqa: BLE001 - raised by `agree`, when all ranks know
            error = caught
        self.agree(error)
        return made[0]

    def agree(self, error: BaseException | None) -> None:
        """Continue only if no rank has an error. Every rank must call.

        Raises:
            RankFailedError: Another rank has an error. A rank with its own error raises that.
        """
        if self.world_size > 1:
            told = _first_of(self.all_of(None if error is None else describe_error(error)))
            if error is None and told is not None:
                rank, text = told
                raise self._failed(rank, text)
        if error is not None:
            raise error

    def _failed(self, rank: int, text: str) -> RankFailedError:
        number = self.number(rank)
        return RankFailedError(f"Rank {number} failed, so all {self.world_size} ranks stop: {text}", rank=number)


ALONE: Final = Ranks()


@contextmanager
def all_ranks() -> Iterator[Session]:
    """Wait for all ranks of the call's process group, which run the block together: one such block at a time.

    It is the same for all runs, because ranks may name a directory differently.

    Raises:
        RankFailedError: A rank failed, died, or did not call.
    """
    with session("the run", needs_all=True) as ranks:
        yield ranks


def _first_of(errors: list[str | None]) -> tuple[int, str] | None:
    return next(((rank, text) for rank, text in enumerate(errors) if text is not None), None)


# Training states that are spread over ranks (FSDP2, tensor parallel), so that every rank must take part.


_DIGEST_CHARACTERS: Final = 16


def is_spread_state(state: TrainingState) -> bool:
    """Return whether a parameter or buffer is a DTensor, after releasing parameters that a forward pass has gathered.

    Args:
        state: Its modules under `fully_shard` are resharded; the next pass gathers them again.

    Raises:
        InvalidArgumentError: A module is wrapped by FSDP1; or DeepSpeed has partitioned a part.
    """
    _reject_deepspeed(state)
    modules = list(state.of_kind("module").values())
    for module in modules:
        _reshard(module)
    trained = (group["params"] for optimizer in state.of_kind("optimizer").values() for group in optimizer.param_groups)
    tensors = chain(*(chain(module.parameters(), module.buffers()) for module in modules), *trained)
    return any(is_dtensor(tensor) for tensor in tensors)


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


def _reject_deepspeed(state: TrainingState) -> None:
    """Reject parameters that ZeRO-3 has partitioned, and optimizers whose parts on each rank have no names.

    An optimizer that was passed to `deepspeed.initialize` has no parameters between two steps, and knows its state by
    the flat tensors in which DeepSpeed keeps them.
    """
    for name, part in state.components.items():
        if state.kinds[name] == "module":
            reject_partitioned(part, "run")
        trained = [part.state, *(group["params"] for group in part.param_groups)] if isinstance(part, Optimizer) else []
        is_of_deepspeed = any(base.__name__ == "ZeROOptimizer" for base in type(part).__mro__)
        if is_of_deepspeed or any(map(is_partitioned, chain(*trained))):
            raise InvalidArgumentError(
                f"Cannot save or restore a run with '{name}' ({type(part).__qualname__}): DeepSpeed ZeRO has "
                f"partitioned its state across the ranks. Nothing was changed. {RUN_REMEDY}"
            )


def _reshard(module: nn.Module) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for name, one in module.named_modules():
        if isinstance(one, fsdp.FullyShardedDataParallel):
            raise InvalidArgumentError(
                f"{f'{name!r} of the model' if name else 'The model'} is wrapped by FullyShardedDataParallel (FSDP1), "
                "whose flat parameters have no names and shapes of their own. Shard it with "
                "torch.distributed.fsdp.fully_shard instead."
            )
        if isinstance(one, fsdp.FSDPModule):
            with torch.no_grad():
                one.reshard()
