"""The processes of a run: values gathered and shared, and one outcome for all."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from hfshard._util.text import error_words
from hfshard.distributed.participants import gather_participants, has_other_ranks
from hfshard.distributed.status import SaveStatus
from hfshard.errors import RankFailedError

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of its run. Where it is alone, all calls are local."""

    rank: int = 0
    world_size: int = 1
    status: SaveStatus | None = None
    """Of an operation of all ranks: values go by its store, and a rank that dies is an error. None: it is alone."""

    @classmethod
    @contextmanager
    def meeting(cls, what: str) -> Iterator[Ranks]:
        """The ranks of torch.distributed's default group while the block runs, all of which take part in one operation.

        Args:
            what: They do; where another rank does something else, this raises.

        Raises:
            RankFailedError: A rank failed, died, or did not come.
        """
        if not has_other_ranks():
            yield ALONE
            return
        with all_ranks() as status:
            status.meet(what)
            yield cls.of(status)

    @classmethod
    def of(cls, status: SaveStatus) -> Ranks:
        """The ranks of an operation that is under way."""
        return cls(status.rank, len(status.ranks), status)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def gather(self, value: _Value) -> list[_Value]:
        """Return the values of all ranks in order on the first rank, an empty list on others.

        Every rank must call, once in an operation.
        """
        if self.status is None:
            return [value]
        self.status.tell("value", pickle.dumps(value))
        speakers = self.status.ranks if self.is_first else []
        return [pickle.loads(self.status.wait_for("value", rank)) for rank in speakers]

    def share(self, value: _Value) -> _Value:
        """Return the first rank's value, of those that JSON has, on every rank. Every rank must call."""
        if self.status is None:
            return value
        told = self.status.meet("share", json.dumps(value if self.is_first else None).encode())
        return json.loads(told[0])  # type: ignore[no-any-return]

    def all_of(self, value: _Value) -> list[_Value]:
        """Return the values of all ranks in order, of those that JSON has, on every rank. Every rank must call."""
        if self.status is None:
            return [value]
        return [json.loads(raw) for raw in self.status.meet("gather", json.dumps(value).encode()).values()]

    def first(self, work: Callable[[], _Value]) -> _Value:
        """Call a function on the first rank, and return its result on every rank. Every rank must call.

        Raises:
            RankFailedError: On the other ranks, when the function failed. On the first rank its own error.
        """
        value: Any = None
        error: BaseException | None = None
        if self.is_first:
            try:
                value = work()
            except BaseException as caught:  # noqa: BLE001 - raised below: the other ranks wait for the outcome
                error = caught
        value, told = self.share([value, None if error is None else error_words(error)])
        if error is not None:
            raise error
        if told is not None:
            raise _failed(0, self.world_size, told)
        return value  # type: ignore[no-any-return]

    def last(self, work: Callable[[], str]) -> str:
        """As `first`, at the end of what the ranks do: where the function is done, a rank that dies does not matter."""
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
        """Go on only if no rank has an error. Every rank must call.

        Raises:
            RankFailedError: Another rank has an error. A rank with an error of its own raises that.
        """
        if self.world_size > 1:
            told = _first_of(self.all_of(None if error is None else error_words(error)))
            if error is None and told is not None:
                rank, text = told
                raise _failed(rank, self.world_size, text)
        if error is not None:
            raise error


ALONE: Final = Ranks()


@contextmanager
def all_ranks() -> Iterator[SaveStatus]:
    """Wait for all ranks of the default process group, which do the block together: one such block at a time.

    It is the same for all runs, as ranks that need not see one directory may name it differently.

    Raises:
        RankFailedError: A rank failed, died, or did not come.
    """
    with gather_participants("the run", needs_all=True) as participation:
        status = participation.status
        assert status is not None  # that of a rank that takes part
        yield status


def _first_of(errors: list[str | None]) -> tuple[int, str] | None:
    return next(((rank, text) for rank, text in enumerate(errors) if text is not None), None)


def _failed(rank: int, world_size: int, text: str) -> RankFailedError:
    return RankFailedError(f"Rank {rank} of {world_size} failed, so all ranks stop: {text}", rank=rank)
