"""Compare two checkpoints, wherever they are: tensors that are the same, changed, cast, renamed, or in one only."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

import torch

from hfshard._util.arguments import wraps_os_errors
from hfshard._util.progress import ProgressCallback
from hfshard.checkpoint.check_files import retry_if_replaced
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.checkpoint.ranged_folder import RangedFolder
from hfshard.errors import InvalidArgumentError
from hfshard.format.index import Verify, tensor_digest
from hfshard.places.place import place_to_load
from hfshard.viewing.describe import PEFT_FRONT
from hfshard.viewing.diff_tensors import ComparedTensor, Side, TensorPair, pair_by_contents, pair_by_name, side_of
from hfshard.viewing.diff_values import RoundingCheck, ValueMeasure, is_numeric_dtype, numbers_in
from hfshard.viewing.inspection import OpenRequest, open_for_viewing, open_with_one_key
from hfshard.viewing.model_summary import ModelSummary, read_model_summary
from hfshard.viewing.results import CheckpointDiff, DiffKind, TensorDiff, ValueDiff
from hfshard.viewing.tensor_values import ReadJob, do_jobs

logger = logging.getLogger(__name__)

_THREADS: Final = 2
"""Threads that read and compare; each reads both checkpoints."""

_NETWORK_THREADS: Final = 4
"""The same for remote reads, which wait for requests: a thread buffers some 32 MiB of responses of two checkpoints."""

_Result = TypeVar("_Result")


@wraps_os_errors("a")
def diff_checkpoints(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    values: bool = False,
    variant: str | None = None,
    key: str | tuple[str | None, str | None] | None = None,
    subfolder: str | tuple[str, str] = "",
    verify: Verify = "structure",
    token: str | bool | None = None,
    progress: bool | None = None,
) -> CheckpointDiff:
    """Compare two checkpoints tensor by tensor, however they are sharded.

    Tensors are paired by name. If both checkpoints have digests of a tensor, which hfshard writes, or if the sha256 of
    its file is known to be the same, none of its bytes are read. If one lacks a digest, that one is read; if both do,
    both are. From the Hub and from stores, only headers and those bytes are fetched, unless weights are pickled.

    Digests are trusted: an index or a file with wrong digests of its own bytes is detected by `verify="full"`, or by
    `verify_checkpoint`.

    Args:
        a: A directory, one file of weights, a store address, "org/name" on the Hub or a directory hub (either with an
            optional "@revision"), a run (its latest checkpoint), also of transformers' Trainer, or one of its
            checkpoints ("run/checkpoint-30"). Each may contain a PEFT adapter instead of a model.
        b: The other checkpoint, in the same forms.
        values: Whether to measure how much the values of a changed, cast or reshaped tensor differ; both are read for
            it, block by block.
        variant: As in `from_pretrained`; for both.
        key: For files of torch.save with several sets of weights: the set to use, as in `load_state_dict`; for
            whichever of the two is such a file. A pair: one for a and one for b.
        subfolder: As in `from_pretrained`; for both, or a pair: one for a and one for b.
        verify: "none": check only what reading needs; "structure": check what `load_state_dict` checks before it
            reads, including the first bytes of tensors in local files; "full": trust no digest, read every byte of
            both, and compare them with each other and with the digests.
        token: As in `from_pretrained`.
        progress: Whether to show a bar on stderr while tensors are read; None: only on a terminal.

    Returns:
        The report.

    Raises:
        CheckpointNotFoundError: There are no weights in one of the places.
        DamagedCheckpointError, UnsafePathError, UnsafePickleError: A file is damaged, or not safe to read.
        InvalidArgumentError: `key` does not select weights of a file, or neither is such a file.
        UnstorableTensorError: A pickle has a tensor that is sparse or quantized.
        CheckpointChangedError: One of them kept being replaced in a store.
        HubError, StoreError: The Hub or the store refuses access, or cannot be reached.

    Example:
        report = hfshard.diff_checkpoints("base", "fine-tuned")
        trained = [tensor.name for tensor in report.tensors if tensor.kind == "changed"]
    """
    load_options = LoadOptions(verify="structure" if verify in ("full", "sha256") else verify, progress=progress)
    options = DiffOptions(values, trust_digests=verify not in ("full", "sha256"))
    # A token is for hubs; it is an error only if there is none.
    are_on_disk = [place_to_load(place).is_read_from_disk for place in (a, b)]
    tokens = [token if is_on_disk or not any(are_on_disk) else None for is_on_disk in are_on_disk]
    folders, keys = _pair("subfolder", subfolder), _pair("key", key)
    requests = [
        OpenRequest(
            place,
            CheckpointQuery(variant=variant, subfolder=folders[side] or "", token=tokens[side]),
            replace(load_options, key=keys[side]),
        )
        for side, place in enumerate((a, b))
    ]
    once = partial(_diff_once, requests, options, has_one_key=isinstance(key, str))
    return retry_if_replaced(once, RangedFolder.traits, str(a))


def _diff_once(requests: Sequence[OpenRequest], options: DiffOptions, *, has_one_key: bool) -> CheckpointDiff:
    with ExitStack() as stack:
        if has_one_key:
            viewed = open_with_one_key(stack, requests)
        else:
            viewed = [stack.enter_context(open_for_viewing(*one)) for one in requests]
        side_a, side_b = map(side_of, viewed)
        model_a, model_b = (read_model_summary(one.checkpoint.folder, one.checkpoint.weights.name) for one in viewed)
        comparison = _Comparison(side_a, side_b, options, requests[0].options.progress)
        found = replace(comparison.run(), models=(model_a, model_b))
        if options.values and (merged := comparison.merged(model_a, model_b)) is not None:
            read_bytes, read_tensors = comparison.read_bytes, comparison.read_tensors
            found = replace(found, merged=merged, read_bytes=read_bytes, read_tensors=read_tensors)
        return found


def diff_by_digests(a: Side, b: Side) -> CheckpointDiff | None:
    """Compare two open checkpoints by names, digests and places of bytes alone.

    Returns:
        The report, without renamed tensors; None if the bytes of a tensor would have to be read for it.
    """
    named = pair_by_name(a, b)
    diffs = []
    for pair in named.pairs:
        comparison = known_comparison(pair, DiffOptions())
        if comparison is None:
            return None
        diffs.append(_diff_of(pair, comparison))
    diffs += [TensorDiff("only_in_b", None, tensor.facts) for tensor in named.only_in_b]
    diffs += [TensorDiff("only_in_a", tensor.facts, None) for tensor in named.only_in_a]
    return CheckpointDiff(a.place, b.place, tuple(diffs), a.ties, b.ties, read_bytes=0, retied=named.retied)


def _pair(name: str, value: str | tuple[str | None, ...] | None) -> tuple[str | None, str | None]:
    """Return the values for a and b from one value for both, or a pair."""
    if not isinstance(value, tuple | list):
        return value, value
    if len(value) != 2:
        raise InvalidArgumentError(
            f"{name} must be one value for both checkpoints, or a pair, got {len(value)} values."
        )
    return value[0], value[1]


class _Comparison:
    """The comparison of two open checkpoints."""

    def __init__(self, a: Side, b: Side, options: DiffOptions, progress: bool | None) -> None:
        self.a, self.b = a, b
        self.options, self.progress = options, progress
        self.read_bytes = self.read_tensors = 0

    def run(self) -> CheckpointDiff:
        """Pair the tensors and compare each pair."""
        named = pair_by_name(self.a, self.b)
        renamed = self._renamed(named.only_in_a, named.only_in_b)
        found = dict(zip(named.pairs, self._compared(named.pairs), strict=True))
        diffs: dict[int, list[TensorDiff]] = {id(tensor): [] for tensor in self.b.tensors}
        for pair, comparison in found.items():
            diffs[id(pair.b)].append(_diff_of(pair, comparison))
        for pair in renamed:
            diffs[id(pair.b)].append(_diff_of(pair, TensorComparison("renamed")))
        paired = {id(pair.a) for pair in renamed}
        for tensor in named.only_in_b:
            if not diffs[id(tensor)]:
                diffs[id(tensor)].append(TensorDiff("only_in_b", None, tensor.facts))
        left = [TensorDiff("only_in_a", one.facts, None) for one in named.only_in_a if id(one) not in paired]
        return CheckpointDiff(
            a=self.a.place,
            b=self.b.place,
            tensors=(*(diff for some in diffs.values() for diff in some), *left),
            ties_a=self.a.ties,
            ties_b=self.b.ties,
            read_bytes=self.read_bytes,
            retied=named.retied,
            read_tensors=self.read_tensors,
        )

    def merged(self, model_a: ModelSummary | None, model_b: ModelSummary | None) -> CheckpointDiff | None:
        """Compare a base with itself and the adapter that the other side is; None if neither is one of the other."""
        sides = ((self.a, self.b, model_a, model_b), (self.b, self.a, model_b, model_a))
        for base, adapter, model_of_base, model in sides:
            plan = plan_merge(base, adapter, model)
            if plan is not None:
                found = self._merged(base, adapter, plan)
                return replace(found, models=(model_of_base, model))
        return None

    def _merged(self, base: Side, adapter: Side, plan: AdapterMerge) -> CheckpointDiff:
        jobs = [ReadJob((0, one.weight.position), one.nbytes, one.measure) for one in plan.updates]
        measured = zip(plan.updates, self._done(jobs), strict=True)
        read_before = self.read_bytes
        self.read_bytes += sum(job.nbytes for job in jobs)
        diffs = {
            id(one.weight): TensorDiff(
                "changed" if values.changed else "same", one.weight.facts, one.weight.facts, values
            )
            for one, values in measured
        }
        for pair, comparison in zip(plan.replaced, self._compared(plan.replaced), strict=True):
            diffs[id(pair.a)] = _diff_of(pair, comparison)
        every = [diffs.get(id(one), TensorDiff("same", one.facts, one.facts)) for one in base.tensors]
        added = [TensorDiff("only_in_b", None, one.facts) for one in plan.added]
        read_bytes = self.read_bytes - read_before
        return CheckpointDiff(base.place, adapter.place, (*every, *added), base.ties, base.ties, read_bytes)

    def _compared(self, pairs: Sequence[TensorPair]) -> list[TensorComparison]:
        known = [known_comparison(pair, self.options) for pair in pairs]
        jobs = [
            ReadJob((0, pair.a.position), pair.nbytes, partial(compare_tensors, pair, self.options))
            for pair, comparison in zip(pairs, known, strict=True)
            if comparison is None
        ]
        read = iter(self._done(jobs))
        comparisons = [next(read) if comparison is None else comparison for comparison in known]
        self.read_bytes += sum(comparison.read_bytes for comparison in comparisons)
        return comparisons

    def _renamed(self, only_in_a: Sequence[ComparedTensor], only_in_b: Sequence[ComparedTensor]) -> list[TensorPair]:
        forms = {one.form for one in only_in_a} & {one.form for one in only_in_b}
        in_a = [one for one in only_in_a if one.form in forms]
        in_b = [one for one in only_in_b if one.form in forms]
        unread = [
            (side, one)
            for side, tensors in enumerate((in_a, in_b))
            for one in tensors
            if one.digest is None or not self.options.trust_digests
        ]
        jobs = [ReadJob((side, one.position), one.facts.nbytes, partial(digest_of_bytes, one)) for side, one in unread]
        digests = {id(one): digest for (_, one), digest in zip(unread, self._done(jobs), strict=True)}
        self.read_bytes += sum(job.nbytes for job in jobs)
        return pair_by_contents(in_a, in_b, lambda one: (one.form, digests.get(id(one), one.digest)))

    def _done(self, jobs: Sequence[ReadJob[_Result]]) -> list[_Result]:
        self.read_tensors += len(jobs)
        is_networked = self.a.is_networked or self.b.is_networked
        return do_jobs(jobs, _NETWORK_THREADS if is_networked else _THREADS, self.progress)


def _diff_of(pair: TensorPair, comparison: TensorComparison) -> TensorDiff:
    facts_a = replace(pair.a.facts, name=pair.name_a)
    facts_b = replace(pair.b.facts, name=pair.name_b)
    return TensorDiff(comparison.kind, facts_a, facts_b, comparison.values)


# Comparing two tensors: by their digests if both have one, else by their bytes, read once.


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """Relation of two tensors."""

    kind: DiffKind
    values: ValueDiff | None = None
    read_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """Options of a comparison."""

    values: bool = False
    """Whether to measure values that differ."""
    trust_digests: bool = True
    """False: tensors are read instead of relying on their digests."""


def known_comparison(pair: TensorPair, options: DiffOptions) -> TensorComparison | None:
    """Determine how two tensors differ without reading them; None if that is not possible."""
    kind = _known_kind(pair, options)
    if kind is None or (kind != "same" and options.values and _is_measurable(pair)):
        return None
    return TensorComparison(kind)


def _known_kind(pair: TensorPair, options: DiffOptions) -> DiffKind | None:
    a, b = pair.a, pair.b
    if a.facts.dtype != b.facts.dtype:
        if a.facts.shape != b.facts.shape or not (is_numeric_dtype(a.torch_dtype) and is_numeric_dtype(b.torch_dtype)):
            return "changed"
        return None if a.facts.nbytes else "cast"
    if a.facts.nbytes != b.facts.nbytes:
        return "changed"
    has_digests = a.digest is not None and b.digest is not None
    if a.facts.nbytes == 0 or (
        options.trust_digests and (a.places & b.places or (has_digests and a.digest == b.digest))
    ):
        return _kind_of_equal(pair)
    return "changed" if has_digests and options.trust_digests else None


def _kind_of_equal(pair: TensorPair) -> DiffKind:
    return "same" if pair.a.facts.shape == pair.b.facts.shape else "reshaped"


def _is_measurable(pair: TensorPair) -> bool:
    """Return whether the values of two tensors can be compared one by one."""
    has_numbers = is_numeric_dtype(pair.a.torch_dtype) and is_numeric_dtype(pair.b.torch_dtype)
    return has_numbers and pair.a.facts.parameters == pair.b.facts.parameters


def compare_tensors(pair: TensorPair, options: DiffOptions, report: ProgressCallback) -> TensorComparison:
    """Determine how two tensors differ by reading them.

    Args:
        pair: Two tensors for which `known_comparison` returns None.
        options: The options of the comparison.
        report: Called with the number of bytes of each block; ends the comparison early by raising.

    Raises:
        IntegrityError: The bytes read do not match their digest.
    """
    known = _known_kind(pair, options)
    measures = options.values and _is_measurable(pair)
    has_one_dtype = pair.a.facts.dtype == pair.b.facts.dtype
    unread = [one for one in pair[:2] if one.digest is None]
    if options.trust_digests and has_one_dtype and not measures and len(unread) == 1:
        digests = [one.digest or digest_of_bytes(one, report) for one in pair[:2]]
        return TensorComparison(
            _kind_of_equal(pair) if digests[0] == digests[1] else "changed", read_bytes=unread[0].facts.nbytes
        )
    checks = _Checks(pair, is_known=known is not None, measures=measures)
    read_bytes = 0
    for block_a, block_b in paired_blocks(pair, report):
        read_bytes += len(block_a) + len(block_b)
        checks.add(block_a, block_b)
        if not checks.holds and not measures and options.trust_digests:
            break
    kind = checks.kind(pair) if known is None else known
    values = checks.measure.result() if checks.measure is not None and kind != "same" else None
    return TensorComparison(kind, values, read_bytes)


class _Checks:
    """State of the comparison of two tensors while their blocks are read."""

    def __init__(self, pair: TensorPair, *, is_known: bool, measures: bool) -> None:
        dtype_a, dtype_b = pair.a.torch_dtype, pair.b.torch_dtype
        has_one_dtype = pair.a.facts.dtype == pair.b.facts.dtype
        self.are_equal = has_one_dtype and not is_known
        self.rounding = self.measure = None
        if dtype_a is not None and dtype_b is not None:
            self.rounding = RoundingCheck(dtype_a, dtype_b) if not (has_one_dtype or is_known) else None
            self.measure = ValueMeasure(dtype_a, dtype_b) if measures else None

    @property
    def holds(self) -> bool:
        """True if they may still be the same, except for their dtype or shape."""
        return self.are_equal or (self.rounding is not None and self.rounding.holds)

    def add(self, block_a: memoryview, block_b: memoryview) -> None:
        """Add the bytes of the same elements of both."""
        if self.are_equal:
            raw_a, raw_b = (torch.frombuffer(block, dtype=torch.uint8) for block in (block_a, block_b))
            self.are_equal = torch.equal(raw_a, raw_b)
        if self.rounding is not None and self.rounding.holds:
            self.rounding.add(block_a, block_b)
        if self.measure is not None:
            self.measure.add(block_a, block_b)

    def kind(self, pair: TensorPair) -> DiffKind:
        """Return how they differ, after all blocks were added."""
        if self.rounding is not None and self.rounding.holds:
            return "cast"
        return _kind_of_equal(pair) if self.are_equal else "changed"


def digest_of_bytes(tensor: ComparedTensor, report: ProgressCallback) -> str:
    """Compute the digest of a tensor's bytes; `report` and the error are those of `compare_tensors`."""
    return tensor_digest(_reported(tensor.blocks(), report))


def paired_blocks(pair: TensorPair, report: ProgressCallback) -> Iterator[tuple[memoryview, memoryview]]:
    """Read two tensors in step.

    Args:
        pair: The two, with the same number of elements, or of bytes.
        report: Called with the number of bytes of each block; ends the reads early by raising.

    Yields:
        Blocks of the same elements; valid until the next ones.
    """
    unit_a = pair.a.torch_dtype.itemsize if pair.a.torch_dtype is not None else 1
    unit_b = pair.b.torch_dtype.itemsize if pair.b.torch_dtype is not None else 1
    blocks_a, blocks_b = pair.a.blocks(), pair.b.blocks()
    rest_a = rest_b = memoryview(b"")
    while True:
        if not rest_a:
            rest_a = next(blocks_a, rest_a)
        if not rest_b:
            rest_b = next(blocks_b, rest_b)
        count = min(len(rest_a) // unit_a, len(rest_b) // unit_b)
        if count == 0:
            return
        report(count * (unit_a + unit_b))
        yield rest_a[: count * unit_a], rest_b[: count * unit_b]
        rest_a, rest_b = rest_a[count * unit_a :], rest_b[count * unit_b :]


def _reported(blocks: Iterator[memoryview], report: ProgressCallback) -> Iterator[memoryview]:
    for block in blocks:
        report(len(block))
        yield block


# What a LoRA adapter changes in its base.

_DOWN: Final = ".lora_A.weight"
_UP: Final = ".lora_B.weight"
_MOST_DROPPED: Final = 2
"""The most parts that only one of the two names has in front: "bert.encoder..." is "encoder..."."""


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """A weight of the base, and the factors of what is added to it: scale x up x down."""

    weight: ComparedTensor
    down: ComparedTensor
    """Rank x columns of the weight."""
    up: ComparedTensor
    """Rows of the weight x rank."""
    scale: float

    @property
    def nbytes(self) -> int:
        """Bytes that are read to measure it."""
        return sum(one.facts.nbytes for one in (self.weight, self.down, self.up))

    def measure(self, report: ProgressCallback) -> ValueDiff:
        """Measure how much the weight would change, in float64 and block by block."""
        assert self.weight.torch_dtype is not None
        down = _matrix(self.down, report)
        up = _matrix(self.up, report) * self.scale
        columns = down.shape[1]
        measure = ValueMeasure(self.weight.torch_dtype, torch.float64)
        at = 0
        for block in self.weight.blocks():
            report(len(block))
            numbers = numbers_in(block, self.weight.torch_dtype)
            first, end = at // columns, math.ceil((at + len(numbers)) / columns)
            added = (up[first:end] @ down).flatten()[at - first * columns :][: len(numbers)]
            measure.add(block, (numbers.double() + added).numpy().data.cast("B"))
            at += len(numbers)
        return measure.result()


@dataclass(frozen=True, slots=True)
class AdapterMerge:
    """What an adapter changes in its base."""

    updates: tuple[LowRankUpdate, ...]
    replaced: tuple[TensorPair, ...]
    """Tensors that were trained as a whole, with those of the base in their place."""
    added: tuple[ComparedTensor, ...]
    """Tensors trained as a whole that the base lacks, such as a head."""


def plan_merge(base: Side, adapter: Side, model: ModelSummary | None) -> AdapterMerge | None:
    """Find what each tensor of an adapter changes in another checkpoint, the base.

    Returns:
        None if this is not a LoRA of plain matrices with one scale, or if it is not one of this base.
    """
    if model is None or model.scale is None:
        return None
    found = _by_tail(base.tensors)
    factors: dict[str, dict[str, ComparedTensor]] = {}
    replaced, added = [], []
    for tensor in adapter.tensors:
        name = tensor.facts.name.removeprefix(PEFT_FRONT)
        ending = next((one for one in (_DOWN, _UP) if name.endswith(one)), None)
        if ending is not None:
            factors.setdefault(name.removesuffix(ending), {})[ending] = tensor
        elif ".lora_" in name:
            return None
        elif (other := _find(found, name)) is not None:
            replaced.append(TensorPair(other, tensor, other.facts.name, other.facts.name))
        else:
            added.append(tensor)
    updates = []
    for module, pair in factors.items():
        weight = _find(found, f"{module}.weight")
        if weight is None or len(pair) != 2 or not _fits(weight, pair[_DOWN], pair[_UP]):
            return None
        updates.append(LowRankUpdate(weight, pair[_DOWN], pair[_UP], model.scale))
    return AdapterMerge(tuple(updates), tuple(replaced), tuple(added)) if updates else None


def _by_tail(tensors: Iterable[ComparedTensor]) -> dict[str, ComparedTensor | None]:
    """Map names, and their ends without the first parts, to tensors; None where several have the same end."""
    found: dict[str, ComparedTensor | None] = {}
    tails: dict[str, ComparedTensor | None] = {}
    for tensor in tensors:
        found[tensor.facts.name] = tensor
        for tail in _tails(tensor.facts.name):
            tails[tail] = None if tail in tails else tensor
    return tails | found


def _tails(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[count:]) for count in range(1, min(_MOST_DROPPED, len(parts) - 2) + 1)]


def _find(found: Mapping[str, ComparedTensor | None], name: str) -> ComparedTensor | None:
    return next((tensor for one in (name, *_tails(name)) if (tensor := found.get(one)) is not None), None)


def _fits(weight: ComparedTensor, down: ComparedTensor, up: ComparedTensor) -> bool:
    if not all(len(one.facts.shape) == 2 and _is_float(one) for one in (weight, down, up)):
        return False
    (rows, rank), (other_rank, columns) = up.facts.shape, down.facts.shape
    return rank == other_rank and weight.facts.shape == (rows, columns) and columns > 0


def _is_float(tensor: ComparedTensor) -> bool:
    dtype = tensor.torch_dtype
    return dtype is not None and is_numeric_dtype(dtype) and dtype.is_floating_point


def _matrix(tensor: ComparedTensor, report: ProgressCallback) -> torch.Tensor:
    assert tensor.torch_dtype is not None
    numbers = torch.empty(tensor.facts.parameters, dtype=torch.float64)
    at = 0
    for block in tensor.blocks():
        report(len(block))
        some = numbers_in(block, tensor.torch_dtype)
        numbers[at : at + len(some)] = some  # a copy: the next block may be in the same memory
        at += len(some)
    return numbers.reshape(tensor.facts.shape)
