"""Reads the tensors of a checkpoint to tell what their numbers are like, block by block, the largest tensors first."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

import torch

from hfshard._util.progress import ProgressCallback
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.hub.resolve import CheckpointQuery
from hfshard.viewing.diff.reading import ReadJob, do_jobs
from hfshard.viewing.diff.sides import ComparedTensor, side_of
from hfshard.viewing.opening import open_to_view
from hfshard.viewing.values.running import RunningValues, ValueSummary

MOST_TENSORS: Final = 10_000
"""Whose numbers are read: a page has some 150 bytes of each, so that it stays small whatever the checkpoint is."""

_THREADS: Final = 2
_PIECE_BYTES: Final = 1024 * 1024
"""Of a block, that is converted at once: an 8-bit number takes eight bytes then, and there are some copies."""


@dataclass(frozen=True, slots=True)
class MeasuredValues:
    """What the numbers of a checkpoint are like."""

    tensors: dict[str, ValueSummary]
    """By name, the largest tensors first."""
    left_out: int
    """Tensors that were not read, because there are more than `MOST_TENSORS`."""
    unknown: int
    """Tensors that were not read, because torch can't convert their dtype: numbers of fewer than 8 bits."""


def measure_values(
    place: str | os.PathLike[str], query: CheckpointQuery, options: LoadOptions, *, most: int = MOST_TENSORS
) -> MeasuredValues:
    """Read the largest tensors of a checkpoint.

    What is read is compared with its digests, where there are some.

    Args:
        place, query, options: As in `open_to_view`.
        most: How many tensors.

    Raises:
        IntegrityError: A tensor is not the one that was saved.
        Everything that `open_to_view` raises.
    """
    with open_to_view(place, query, options) as viewed:
        tensors = side_of(viewed).tensors
        known = [tensor for tensor in tensors if _is_known(tensor)]
        largest = sorted(known, key=lambda tensor: -tensor.facts.nbytes)[:most]
        jobs = [ReadJob((0, tensor.position), tensor.facts.nbytes, _Measuring(tensor)) for tensor in largest]
        summaries = do_jobs(jobs, _THREADS, options.progress, "Reading values")
        found = {tensor.facts.name: summary for tensor, summary in zip(largest, summaries, strict=True)}
        return MeasuredValues(found, len(known) - len(largest), len(tensors) - len(known))


def _is_known(tensor: ComparedTensor) -> bool:
    return tensor.torch_dtype is not None and tensor.torch_dtype != torch.float4_e2m1fn_x2


@dataclass(frozen=True, slots=True)
class _Measuring:
    """Measures one tensor."""

    tensor: ComparedTensor

    def __call__(self, report: ProgressCallback) -> ValueSummary:
        assert self.tensor.torch_dtype is not None
        running = RunningValues()
        for block in self.tensor.blocks():
            report(len(block))
            for start in range(0, len(block), _PIECE_BYTES):
                piece = torch.frombuffer(block[start : start + _PIECE_BYTES], dtype=self.tensor.torch_dtype)
                running.add(torch.view_as_real(piece) if piece.is_complex() else piece)
        return running.summary()
