"""Histograms and summaries of tensors' numbers, computed block by block, the largest tensors first."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeVar

import torch

from hfshard._util.progress import ProgressCallback, byte_progress
from hfshard._util.threads import cancellable, run_in_threads
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.viewing.diff_tensors import ComparedTensor, side_of
from hfshard.viewing.inspection import open_for_viewing

MOST_TENSORS: Final = 10_000
"""The most tensors whose numbers are read: a page takes some 150 bytes for each, so it stays small in any case."""

_THREADS: Final = 2
_PIECE_BYTES: Final = 1024 * 1024
"""Bytes of a block that are converted at once: an 8-bit number then takes eight bytes, in several copies."""


@dataclass(frozen=True, slots=True)
class MeasuredValues:
    """Summaries of a checkpoint's numbers."""

    tensors: dict[str, ValueSummary]
    """By name, the largest tensors first."""
    left_out: int
    """The number of tensors that were not read because there are more than `MOST_TENSORS`."""
    unknown: int
    """The number of tensors that were not read because torch cannot convert their dtype: fewer than 8 bits."""


def measure_values(
    place: str | os.PathLike[str], query: CheckpointQuery, options: LoadOptions, *, most: int = MOST_TENSORS
) -> MeasuredValues:
    """Measure the numbers of a checkpoint's largest tensors.

    The bytes read are compared with their digests, if there are any.

    Raises:
        IntegrityError: A tensor differs from the one that was saved.
    """
    with open_for_viewing(place, query, options) as viewed:
        tensors = side_of(viewed).tensors
        known = [tensor for tensor in tensors if _is_known(tensor)]
        largest = sorted(known, key=lambda tensor: -tensor.facts.nbytes)[:most]
        jobs = [ReadJob((0, one.position), one.facts.nbytes, partial(_summarize, one)) for one in largest]
        summaries = do_jobs(jobs, _THREADS, options.progress, "Reading values")
        found = {tensor.facts.name: summary for tensor, summary in zip(largest, summaries, strict=True)}
        return MeasuredValues(found, len(known) - len(largest), len(tensors) - len(known))


def _is_known(tensor: ComparedTensor) -> bool:
    return tensor.torch_dtype is not None and tensor.torch_dtype != torch.float4_e2m1fn_x2


def _summarize(tensor: ComparedTensor, report: ProgressCallback) -> ValueSummary:
    assert tensor.torch_dtype is not None
    shape = tensor.facts.shape
    parts = 2 if tensor.torch_dtype.is_complex else 1
    running = RunningValues(parts * math.prod(shape[1:]) if len(shape) > 1 else 0)
    for block in tensor.blocks():
        report(len(block))
        for start in range(0, len(block), _PIECE_BYTES):
            piece = torch.frombuffer(block[start : start + _PIECE_BYTES], dtype=tensor.torch_dtype)
            running.add(torch.view_as_real(piece) if piece.is_complex() else piece)
    return running.summary()


# Histograms of numbers that are read in blocks, each once, without knowing the minimum and maximum in advance.


_BINS: Final = 2**16
"""Bins of equal width between -2**n and 2**n, a range that includes every number. Even norms, which are near 1 and
differ in the third digit, fill the bins that are shown."""
_SHOWN_BINS: Final = 64
_LEAST_EXPONENT: Final = -1000
"""Smaller numbers are all in the two middle bins; 2**1001 times one of them is still finite."""


@dataclass(frozen=True, slots=True)
class ValueSummary:
    """The numbers of one tensor; a complex one counts as two."""

    elements: int
    nan: int
    inf: int
    minimum: float | None
    """Of the finite numbers, like all that follows; None if there are none."""
    maximum: float | None
    mean: float | None
    std: float | None
    """The population's, not a sample's."""
    low: float
    """The start of the first bin."""
    high: float
    """The end of the last bin."""
    bins: tuple[int, ...]
    """The count in each of at most 64 bins of equal width; empty if there are no finite numbers."""
    zeros: int = 0
    norm: float | None = None
    """The 2-norm of the finite numbers; None if there are none, or it overflows."""
    dead_rows: int = 0
    """The rows that are all zero, of a tensor of two or more dimensions: output units, or tokens of an embedding."""


class RunningValues:
    """Accumulator for a `ValueSummary`.

    The bins are wide enough for the numbers so far. For a larger number, their width doubles as often as needed, and
    neighbors are merged. So the counts are those of one histogram, whatever the blocks were.

    Args:
        row_length: The numbers of a row, whose zeros are counted together; 0: there are no rows.
    """

    def __init__(self, row_length: int = 0) -> None:
        self._row_length = row_length
        self._dead_rows = 0
        self._begun = 0
        """The numbers seen of a row that ends in a later block."""
        self._is_alive = False
        """True if one of these is not zero."""
        self._zeros = 0
        self._elements = 0
        self._nan = 0
        self._inf = 0
        self._minimum = math.inf
        self._maximum = -math.inf
        self._finite = 0
        self._mean = 0.0
        self._squares = 0.0
        """The sum of the squared distances from the mean."""
        self._exponent = _LEAST_EXPONENT
        self._bins = torch.zeros(_BINS, dtype=torch.int64)

    def add(self, block: torch.Tensor) -> None:
        """Add the numbers of a block, in row-major order, of any real dtype that torch can convert."""
        numbers = block.flatten().to(torch.float64)
        self._elements += numbers.numel()
        self._zeros += numbers.numel() - int(torch.count_nonzero(numbers))
        if self._row_length:
            self._add_rows(numbers)
        if not math.isfinite(numbers.sum()):  # also on overflow: then all numbers are finite
            is_finite = torch.isfinite(numbers)
            self._nan += int(torch.isnan(numbers).sum())
            self._inf += int(torch.isinf(numbers).sum())
            numbers = numbers[is_finite]
        if numbers.numel():
            self._add_finite(numbers)

    def _add_rows(self, numbers: torch.Tensor) -> None:
        """Count the rows that end in a block and have only zeros; keep what is known of the one that does not end."""
        is_alive = numbers != 0
        if self._begun:
            rest = is_alive[: self._row_length - self._begun]
            is_alive = is_alive[len(rest) :]
            self._begun += len(rest)
            self._is_alive |= bool(rest.any())
            if self._begun < self._row_length:
                return
            self._dead_rows += not self._is_alive
        self._begun = len(is_alive) % self._row_length
        whole = len(is_alive) - self._begun
        rows = is_alive[:whole].view(-1, self._row_length).any(1)
        self._dead_rows += len(rows) - int(torch.count_nonzero(rows))
        self._is_alive = bool(is_alive[whole:].any())

    def _add_finite(self, numbers: torch.Tensor) -> None:
        least, greatest = (float(one) for one in torch.aminmax(numbers))
        self._minimum = min(self._minimum, least)
        self._maximum = max(self._maximum, greatest)
        self._add_moments(numbers)
        exponent = max(_LEAST_EXPONENT, math.frexp(max(-least, greatest))[1])
        if exponent > self._exponent:
            self._widen(exponent)
        middle = _BINS // 2
        places = numbers.mul(math.ldexp(1.0, -self._exponent)).add_(1.0).mul_(middle)
        self._bins += torch.bincount(places.to(torch.int64).clamp_(max=_BINS - 1), minlength=_BINS)

    def _add_moments(self, numbers: torch.Tensor) -> None:
        """Combine the moments of two sets by Chan's formula."""
        count = numbers.numel()
        mean = float(numbers.sum()) / count
        distances = numbers - mean
        together = self._finite + count
        apart = mean - self._mean
        self._squares += float(distances.dot(distances)) + apart * apart * self._finite * count / together
        self._mean += apart * count / together
        self._finite = together

    def _widen(self, exponent: int) -> None:
        if self._finite and self._bins.any():
            middle = _BINS // 2
            doublings = min(exponent - self._exponent, _BINS.bit_length())
            into = ((torch.arange(_BINS) - middle) >> doublings) + middle
            self._bins = torch.zeros(_BINS, dtype=torch.int64).index_add_(0, into, self._bins)
        self._exponent = exponent

    def summary(self) -> ValueSummary:
        """Summarize what was added so far."""
        if not self._finite:
            return ValueSummary(self._elements, self._nan, self._inf, None, None, None, None, 0.0, 0.0, ())
        low, high, bins = self._shown_bins()
        return ValueSummary(
            elements=self._elements,
            nan=self._nan,
            inf=self._inf,
            minimum=self._minimum,
            maximum=self._maximum,
            mean=_or_none(self._mean),
            std=_or_none(math.sqrt(self._squares / self._finite) if self._squares < math.inf else math.inf),
            low=min(low, self._minimum),  # rounding can move the smallest numbers to the other middle bin
            high=max(high, self._maximum),
            bins=bins,
            zeros=self._zeros,
            norm=self._norm(),
            dead_rows=self._dead_rows,
        )

    def _norm(self) -> float | None:
        total = self._squares + self._finite * self._mean * self._mean
        return math.sqrt(total) if math.isfinite(total) else None

    def _shown_bins(self) -> tuple[float, float, tuple[int, ...]]:
        """Return the bins from the first to the last nonempty one, merged if there are more than are shown."""
        used = self._bins.nonzero().flatten()
        first, last = int(used[0]), int(used[-1])
        together = -(-(last + 1 - first) // _SHOWN_BINS)
        last = first + together * -(-(last + 1 - first) // together)  # the last one may reach beyond all bins
        counts = torch.nn.functional.pad(self._bins, (0, together))[first:last].view(-1, together).sum(1)
        middle = _BINS // 2
        low, high = (_scaled((edge - middle) / middle, self._exponent) for edge in (first, last))
        return low, high, tuple(counts.tolist())


def _scaled(number: float, exponent: int) -> float:
    try:
        return math.ldexp(number, exponent)
    except OverflowError:  # the end of the last bin for the largest floats
        return math.copysign(1.7976931348623157e308, number)


def _or_none(number: float) -> float | None:
    return number if math.isfinite(number) else None


# Jobs that need bytes of tensors run in several threads, each in the order of the files, with a progress bar.


_RUN_BYTES: Final = 64 * 1024 * 1024
"""Bytes that one thread reads in a row: remote small tensors that follow each other are fetched in one request."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class ReadJob(Generic[_Result]):
    """Work on the bytes of one tensor or two."""

    order: tuple[int, int]
    """The sort key: tensors that are neighbors in a file get neighboring jobs."""
    nbytes: int
    """The most bytes that are read."""
    work: Callable[[ProgressCallback], _Result]
    """Called with the callback for the number of bytes of each block, which ends the work early by raising."""


def do_jobs(
    jobs: Sequence[ReadJob[_Result]], threads: int, progress: bool | None, title: str = "Comparing"
) -> list[_Result]:
    """Run all jobs; the first error ends the others.

    Args:
        jobs: In any order.
        threads: The number of threads that read at once.
        progress: Whether to show a bar on stderr; None: only on a terminal.
        title: The bar's title.
    """
    results: dict[int, _Result] = {}
    total = sum(job.nbytes for job in jobs)
    with byte_progress(title, total, progress if total else False) as progress_callback:

        def do_run(run: Sequence[int], cancelled: threading.Event) -> None:
            for number in run:
                results[number] = jobs[number].work(cancellable(progress_callback, cancelled))

        run_in_threads(do_run, list(_runs(jobs)), threads)
    return [results[number] for number in range(len(jobs))]


def _runs(jobs: Sequence[ReadJob[_Result]]) -> Iterator[list[int]]:
    run: list[int] = []
    run_bytes = 0
    for number in sorted(range(len(jobs)), key=lambda number: jobs[number].order):
        run.append(number)
        run_bytes += jobs[number].nbytes
        if run_bytes >= _RUN_BYTES:
            yield run
            run, run_bytes = [], 0
    if run:
        yield run
