"""Exchange of tensor bytes: in rounds, they are sent to the ranks that write them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from datetime import timedelta
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from hfshard._util.call_ranks import Session
from hfshard._util.threads import start_worker
from hfshard.constants import COPY_BYTES
from hfshard.distributed.liveness import PEER_TIMEOUT_SECONDS
from hfshard.distributed.spread_tensor import ByteArray, Positions, SpreadTensor, scatter_into
from hfshard.distributed.tensor_owners import LocalTensor, TensorOwners
from hfshard.errors import RankFailedError
from hfshard.tensors.stored_tensor import INTEGER_OF_SIZE, RawTensor, TensorLike, bytes_view, iter_blocks, tensor_nbytes

WINDOW_BYTES: Final = 4 * 1024 * 1024
"""Bytes of one owner's files in one round: large for a network, and a few windows are small compared with a model."""
SOURCE_BYTES: Final = 64 * 1024 * 1024
"""About the most bytes that one rank sends in a round: they are in its memory."""


class Stretch(NamedTuple):
    """Some consecutive bytes of a stored tensor, or of a rank's part of it."""

    name: str
    start: int
    stop: int


Window = list[Stretch]
"""The bytes that one owner gets in a round."""


def cut_windows(sizes: Sequence[tuple[str, int]], window_bytes: int) -> Iterator[Window]:
    """Cut consecutive tensors into windows of `window_bytes`; the last one may be shorter.

    Args:
        sizes: (name, bytes).
        window_bytes: The size of each window.
    """
    window: Window = []
    room = window_bytes
    for name, nbytes in sizes:
        start = 0
        while start < nbytes:
            stop = min(nbytes, start + room)
            window.append(Stretch(name, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield window
                window, room = [], window_bytes
    if window:
        yield window


def schedule(
    streams: Mapping[int, Sequence[tuple[str, int]]],
    holders: TensorOwners,
    *,
    window_bytes: int = WINDOW_BYTES,
    source_bytes: int = SOURCE_BYTES,
) -> Iterator[dict[int, Window]]:
    """Yield the windows of each round, by owner.

    Normally every owner gets its next window. But the files of many owners begin alike, and one rank has the first rows
    of all of them. So an owner whose window would make a rank send too much waits for the next round, in which it comes
    first. Owners that began together soon need different windows.

    Args:
        streams: Owner -> (name, bytes), in the order in which the owner wants them.
        holders: Which rank has what.
        window_bytes: The size of a window.
        source_bytes: The most that a rank sends in a round, unless all of it goes to one owner.
    """
    left = {owner: cut_windows(sizes, window_bytes) for owner, sizes in streams.items()}
    # A window that comes from more parts than this makes no rank send too much, even if all owners' windows are alike:
    # the parts are equal, though the first one and the last one may be cut.
    most_parts = len(streams) * window_bytes // source_bytes + 2
    is_crowded = len(streams) * window_bytes > source_bytes
    waiting: dict[int, tuple[Window, dict[int, int]]] = {}
    order = sorted(streams)
    while True:
        for owner in order:
            if owner not in waiting and (window := next(left[owner], None)) is not None:
                waiting[owner] = window, _sent_by(window, owner, holders, most_parts) if is_crowded else {}
        order = [owner for owner in order if owner in waiting]
        if not order:
            return
        given: dict[int, Window] = {}
        load: dict[int, int] = {}
        for owner in order:
            window, sent = waiting[owner]
            if not given or all(load.get(rank, 0) + count <= source_bytes for rank, count in sent.items()):
                load |= {rank: load.get(rank, 0) + count for rank, count in sent.items()}
                given[owner] = window
                del waiting[owner]
        order = [owner for owner in order if owner not in given] + list(given)
        yield given


def _sent_by(window: Window, owner: int, holders: TensorOwners, most_parts: int) -> dict[int, int]:
    """Estimate the bytes of a window that each rank sends, for tensors with at most `most_parts` parts in it."""
    sent: dict[int, int] = {}
    for name, start, stop in window:
        parts = holders.parts[name]
        numbers = parts.between(start, stop)
        if len(numbers) <= most_parts:
            for number in numbers:
                source = parts.source(number, owner)
                if source != owner:
                    sent[source] = sent.get(source, 0) + parts.count_between(number, start, stop)
    return sent


# Exchange: in each round, the owners of files each get one window of their bytes.
#
# All ranks derive from `TensorOwners` alone which bytes go where, so that nothing else is sent. A rank that fails
# completes its round, and reports the failure by one byte to each of the others. Then all leave the rounds together, no
# collective is half done, and the same process group can save again.


logger = logging.getLogger(__name__)


class _Received(NamedTuple):
    """The positions of one rank's bytes in this owner's window."""

    name: str
    starts: Positions
    lengths: Positions
    nbytes: int
    local_start: int
    """Their start in the bytes of the rank's part."""


class Exchange:
    """The rounds of one save.

    Args:
        holders: Which rank has what.
        held: This rank's tensors.
        session: Of the save. All of its ranks call `run`, and `close` at the end; see `connect`.

    Attributes:
        rounds: The number of rounds so far.
        sent_bytes: The number of bytes that this rank has sent to others.
    """

    def __init__(self, holders: TensorOwners, held: Mapping[str, LocalTensor], session: Session) -> None:
        self._holders, self._held, self._session = holders, held, session
        self._group: Any = None
        self._addresses: GroupAddresses
        self._work: Any = None
        self._rank, self._ranks = session.rank, list(session.ranks)
        self._place = {rank: place for place, rank in enumerate(self._ranks)}
        self._others: Positions = np.delete(np.arange(len(self._ranks)), self._place[self._rank])
        self.rounds = 0
        self.sent_bytes = 0
        self._outbox = np.empty(0, np.uint8)
        self._inbox = np.empty(0, np.uint8)

    def run(
        self,
        streams: Mapping[int, Sequence[tuple[str, int]]],
        take: Callable[[ByteArray], object],
        failure: Callable[[], BaseException | None],
        tell_progress: Callable[[int], object],
    ) -> None:
        """Exchange all bytes. Every rank calls this with the same streams.

        Args:
            streams: Owner -> (name, number of its first bytes), in the order in which the owner wants them.
            take: Called with the next bytes of this rank's stream.
            failure: Called in each round; returns why this rank cannot go on, or None.
            tell_progress: Called with the bytes that all owners got in a round.

        Raises:
            RankFailedError: Another rank failed.
            BaseException: What `failure` returned, or sending raised.
        """
        if self._group is None:
            self._group, self._addresses = connect(self._session)
        try:
            for windows in schedule(streams, self._holders):
                window = self._round(windows, failure)
                if window is not None:
                    take(window)
                tell_progress(sum(stretch.stop - stretch.start for window in windows.values() for stretch in window))
        except BaseException:
            self.close()
            raise
        logger.debug("Sent %d bytes to other ranks in %d rounds.", self.sent_bytes, self.rounds)

    def close(self) -> None:
        """Leave the group, in a thread: its end takes 5 ms for each rank, or awaits a rank that holds up a round."""
        if self._group is not None:
            groups, self._group = [self._group], None
            is_stuck = self._work is not None and not self._work.is_completed()
            start_worker(groups.clear, "hfshard-leave", daemon=is_stuck)

    def _round(
        self, windows: Mapping[int, Sequence[Stretch]], failure: Callable[[], BaseException | None]
    ) -> ByteArray | None:
        sent = {owner: self._sent_to(owner, window) for owner, window in windows.items()}
        received = self._received(windows.get(self._rank, ()))
        out_sizes = self._sizes({rank: sum(one.stop - one.start for one in pieces) for rank, pieces in sent.items()})
        in_sizes = self._sizes({rank: sum(one.nbytes for one in pieces) for rank, pieces in received.items()})
        out_ends: Positions = np.cumsum(out_sizes)
        in_ends: Positions = np.cumsum(in_sizes)
        self._outbox = _at_least(self._outbox, int(out_ends[-1]))
        self._inbox = _at_least(self._inbox, int(in_ends[-1]))
        error = failure()
        window: ByteArray | None = None
        try:
            if error is None:
                self._fill(sent, out_ends - out_sizes)
                window = self._own_window(windows, received)
        except BaseException as raised:  # noqa: BLE001 - raised after the round
            error = raised
        self._outbox[out_ends[self._others] - 1] = error is not None
        self._swap(out_sizes.tolist(), in_sizes.tolist())
        self.rounds += 1
        self.sent_bytes += int(out_ends[-1])
        if error is not None:
            raise error
        self._reject_failed(in_ends)
        if window is not None:
            self._unpack(window, received, in_ends - in_sizes)
        return window

    def _sizes(self, by_rank: Mapping[int, int]) -> Positions:
        """Return the bytes from or to each rank: those of tensors and then a status byte; none from or to itself."""
        sizes: Positions = np.ones(len(self._ranks), np.int64)
        for rank, nbytes in by_rank.items():
            sizes[self._place[rank]] += nbytes
        sizes[self._place[self._rank]] = 0
        return sizes

    def _sent_to(self, owner: int, stretches: Sequence[Stretch]) -> list[Stretch]:
        """List what this rank sends of its parts for another one's window."""
        found: list[Stretch] = []
        if owner == self._rank:
            return found
        for name, start, stop in stretches:
            parts = self._holders.parts[name]
            number = parts.number_of(self._rank)
            if number is None or parts.source(number, owner) != self._rank:
                continue
            runs = parts.clip(number, start, stop)
            if runs is not None:
                # The runs of a range follow each other in the bytes of the part.
                begin, end = int(runs.positions[0]), int(runs.positions[-1] + runs.lengths[-1])
                found.append(Stretch(name, begin, end))
        return found

    def _received(self, stretches: Sequence[Stretch]) -> dict[int, list[_Received]]:
        """Find what each rank has for this one's window, this one included."""
        found: dict[int, list[_Received]] = {}
        passed = 0
        for name, start, stop in stretches:
            parts = self._holders.parts[name]
            for number in parts.between(start, stop):
                runs = parts.clip(number, start, stop)
                if runs is not None:
                    starts = runs.offsets + (passed - start)
                    source = parts.source(number, self._rank)
                    one = _Received(name, starts, runs.lengths, runs.total, int(runs.positions[0]))
                    found.setdefault(source, []).append(one)
            passed += stop - start
        return found

    def _fill(self, sent: Mapping[int, Sequence[Stretch]], begins: Positions) -> None:
        for rank, pieces in sent.items():
            at = int(begins[self._place[rank]])
            for name, start, stop in pieces:
                self._outbox[at : at + stop - start] = self._bytes_of(name, start, stop)
                at += stop - start

    def _own_window(
        self, windows: Mapping[int, Sequence[Stretch]], received: Mapping[int, Sequence[_Received]]
    ) -> ByteArray | None:
        """Create this rank's window, with what it has itself; None if it gets no window."""
        if self._rank not in windows:
            return None
        window = np.empty(sum(stretch.stop - stretch.start for stretch in windows[self._rank]), np.uint8)
        for one in received.get(self._rank, ()):
            content = self._bytes_of(one.name, one.local_start, one.local_start + one.nbytes)
            scatter_into(window, one.starts, one.lengths, content)
        return window

    def _unpack(self, window: ByteArray, received: Mapping[int, Sequence[_Received]], begins: Positions) -> None:
        for rank, pieces in received.items():
            if rank == self._rank:
                continue
            at = int(begins[self._place[rank]])
            for one in pieces:
                scatter_into(window, one.starts, one.lengths, self._inbox[at : at + one.nbytes])
                at += one.nbytes

    def _swap(self, out_sizes: list[int], in_sizes: list[int]) -> None:
        inbox = torch.from_numpy(self._inbox[: sum(in_sizes)])
        outbox = torch.from_numpy(self._outbox[: sum(out_sizes)])
        self._work = self._group.alltoall_base(inbox, outbox, in_sizes, out_sizes)
        self._session.await_work(self._work)

    def _reject_failed(self, ends: Positions) -> None:
        failed = self._others[self._inbox[ends[self._others] - 1] != 0]
        if len(failed):
            rank = self._ranks[int(failed[0])]
            self._session.wait_for("what went wrong", rank)  # raises once that rank has reported
            raise RankFailedError(f"Rank {rank} failed to save its part. Check its output.", rank=rank)

    def _bytes_of(self, name: str, start: int, stop: int) -> ByteArray:
        held: Any = self._held[name]
        return byte_range(held.part() if isinstance(held, SpreadTensor) else held, start, stop)


def _at_least(buffer: ByteArray, nbytes: int) -> ByteArray:
    return buffer if len(buffer) >= nbytes else np.empty(nbytes, np.uint8)


# The process group of a session.


_LOOK_SECONDS: Final = 0.3
"""Between two checks for a failed rank, while the ranks connect."""
_Store: Any = getattr(dist, "Store", object)
"""torch's; a torch that was built without torch.distributed has none."""


class GroupAddresses(_Store):  # type: ignore[misc]
    """The store by which gloo's ranks find each other: all set their addresses, and meet when they get the others'."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._own: dict[str, str] = {}
        self._all: dict[str, str] = {}

    @property
    def is_known(self) -> bool:
        """True if the ranks have met."""
        return bool(self._all)

    def set(self, key: str, value: bytes) -> None:
        """Set an address of this rank."""
        self._own[key] = bytes(value).hex()

    def get(self, key: str) -> bytes:
        """Return an address of any rank."""
        self.wait([key])
        return bytes.fromhex(self._all[key])

    def wait(self, keys: list[str], timeout: object = None) -> None:
        """Wait for addresses, as long as the session waits."""
        if not self._all.keys() >= set(keys):
            self.meet()

    def meet(self) -> None:
        """Exchange the addresses that were set. Every rank must call."""
        for of_rank in self._session.all_of(self._own):
            self._all |= of_rank


def connect(session: Session) -> tuple[Any, GroupAddresses]:
    """Create a gloo group for a session, whose collectives mix with no others: those of the training, or other saves.

    Every rank of the session calls this. With 4 ranks it takes some 10 ms; torch's `new_group`, as a collective of the
    default group, would hang if a rank fails, or if two threads call it.

    Returns:
        The group, and its addresses, which must live as long.

    Raises:
        RankFailedError: A rank failed or died.
    """
    addresses = GroupAddresses(session)

    def create() -> Any:
        timeout = timedelta(seconds=PEER_TIMEOUT_SECONDS)
        group = dist.ProcessGroupGloo(addresses, session.position, session.world_size, timeout)
        if not addresses.is_known:  # TORCH_GLOO_LAZY_INIT=1: it connects when it is used
            addresses.meet()
        return group

    connecting = start_worker(create, "hfshard-connect", daemon=True)
    if connecting is None:
        return create(), addresses
    while not wait([connecting], timeout=_LOOK_SECONDS).done:
        if addresses.is_known:  # until then, that thread watches the ranks
            session.look()
    try:
        return connecting.result(), addresses
    except RankFailedError:
        raise
    except RuntimeError as error:
        raise session.find_failed_rank(error) from error


# Byte ranges of a tensor that this rank has, with no copy of more than is asked for.


def byte_range(tensor: TensorLike, start: int, stop: int) -> ByteArray:
    """Return a range of a tensor's row-major bytes.

    Args:
        tensor: On any device, with any strides.
        start: The first byte.
        stop: The byte after the last one.

    Returns:
        A view if the tensor is contiguous and on the CPU, else a copy of little more than the range.
    """
    if isinstance(tensor, RawTensor):
        return _stretch_of_blocks(iter_blocks(tensor, COPY_BYTES), start, stop)
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor, start, stop = _rows_around(tensor, start, stop)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor.view(INTEGER_OF_SIZE.get(tensor.element_size(), tensor.dtype)).contiguous()
    if tensor.device.type == "cpu":
        return np.frombuffer(bytes_view(tensor), np.uint8)[start:stop]
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return np.frombuffer(bytes_view(flat[start:stop].cpu()), np.uint8)


def _stretch_of_blocks(blocks: Iterable[memoryview], start: int, stop: int) -> ByteArray:
    """Copy a range of the bytes that come in blocks, which are read from the beginning."""
    found = np.empty(stop - start, np.uint8)
    passed = 0
    for block in blocks:
        first, last = max(start, passed), min(stop, passed + len(block))
        if first < last:
            found[first - start : last - start] = block[first - passed : last - passed]
        passed += len(block)
        if passed >= stop:
            break
    return found


def _rows_around(tensor: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, int, int]:
    """Return the rows that a range touches, with as few elements as the strides allow, and the range within them."""
    while tensor.dim():
        row_bytes = tensor_nbytes(tensor) // tensor.shape[0]
        first, last = start // row_bytes, -(-stop // row_bytes)
        start, stop = start - first * row_bytes, stop - first * row_bytes
        if last - first > 1 or tensor.dim() == 1:
            return tensor[first:last], start, stop
        tensor = tensor[first]
    return tensor, start, stop
