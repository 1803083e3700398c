"""Assignment of tensors to files: a pure function of names, dtypes, shapes and the size limit."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from hfshard._util.arguments import parse_size
from hfshard.constants import DATA_ALIGNMENT, DEFAULT_MAX_SHARD_SIZE, MAX_HEADER_BYTES
from hfshard.errors import InvalidArgumentError
from hfshard.format.file_names import WeightNames
from hfshard.format.header import LENGTH_BYTES, entry_bytes, name_bytes
from hfshard.tensors.stored_tensor import TensorSpec, tensor_specs
from hfshard.tensors.tied import find_shared_tensors

if TYPE_CHECKING:
    from torch import Tensor

Packing = Literal["greedy", "balanced"]

_SHARD_METADATA_BYTES: Final = 256
"""Room for a shard's `__metadata__`: hfshard's has 45 bytes; callers with more pass a larger size."""


def check_packing(packing: str) -> None:
    """Reject an unknown packing method.

    Raises:
        InvalidArgumentError: `packing` is neither "greedy" nor "balanced".
    """
    if packing not in ("greedy", "balanced"):
        raise InvalidArgumentError(f"packing must be 'greedy' or 'balanced', got {packing!r}.")


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """One file of a plan."""

    file: str
    tensors: tuple[TensorSpec, ...]
    """In state dict order."""

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data, without the header."""
        return sum(spec.nbytes for spec in self.tensors)

    @property
    def names(self) -> tuple[str, ...]:
        """FQNs of the tensors, in state dict order."""
        return tuple(spec.name for spec in self.tensors)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Assignment of each tensor to a file.

    Attributes:
        shards: The files in order; one file is named `model.safetensors`, several `model-0000i-of-0000n.safetensors`.
        tied_names: Name -> the name that is stored for it (see `hfshard.tensors.tied`).
        max_shard_size: The limit in bytes, header included.
        needs_index: Whether a single file gets an index, too, as in an object store.
    """

    shards: tuple[PlannedShard, ...]
    tied_names: dict[str, str]
    max_shard_size: int
    needs_index: bool = False

    @property
    def is_sharded(self) -> bool:
        """Return whether there are several files, or one that needs an index, and so an index."""
        return self.needs_index or len(self.shards) > 1

    @property
    def weight_map(self) -> dict[str, str]:
        """FQN -> file, for every stored tensor."""
        return {spec.name: shard.file for shard in self.shards for spec in shard.tensors}

    @property
    def total_size(self) -> int:
        """Bytes of tensor data in all files."""
        return sum(shard.nbytes for shard in self.shards)


def plan_shards(
    state_dict: Mapping[str, Tensor],
    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
    *,
    packing: Packing = "greedy",
    variant: str | None = None,
) -> ShardPlan:
    """Plan the files of a state dict without touching the disk.

    Args:
        state_dict: FQN -> tensor, any device; not mutated. Names that share a tensor are stored once.
        max_shard_size: Bytes, or a string such as "5GB" or "500MiB". No file is larger, header included, unless it
            contains exactly one tensor.
        packing: "greedy" fills files in the order of the state dict, as transformers does; "balanced" uses the fewest
            files that best-fit-decreasing finds, and evens out their sizes.
        variant: As in `save_pretrained`.

    Returns:
        The plan, which assigns each tensor to a file.

    Raises:
        InvalidSizeError: The size does not match the grammar of `parse_size`.
        InvalidArgumentError: `packing` or `variant` is not valid.
        UnstorableTensorError: The format cannot store a value.

    Example:
        plan = hfshard.plan_shards(state_dict, max_shard_size="2MB")
        print(len(plan.shards), plan.weight_map)
    """
    limit = parse_size(max_shard_size)
    if not isinstance(state_dict, Mapping):
        raise InvalidArgumentError(
            f"state_dict must map names to tensors, got a {type(state_dict).__name__}. "
            "Of a module, pass its state_dict()."
        )
    tied_names = find_shared_tensors(state_dict)
    specs = tensor_specs(state_dict)
    stored = [spec for spec in specs if spec.name not in tied_names]
    return plan_specs(stored, limit, packing=packing, names=WeightNames(variant), tied_names=tied_names)


def plan_specs(
    specs: Sequence[TensorSpec],
    max_shard_bytes: int,
    *,
    packing: Packing = "greedy",
    names: WeightNames,
    tied_names: Mapping[str, str] | None = None,
    single_metadata_bytes: int = 1024,
    shard_metadata_bytes: int = _SHARD_METADATA_BYTES,
    separate_names: Collection[str] = (),
    headers_count: bool = True,
) -> ShardPlan:
    """Plan the files of tensors whose specs are known; none of `separate_names` shares a file with the others.

    If headers do not count, the limit applies to a file's tensors only, as in transformers.
    """
    check_packing(packing)
    sizes = _entry_sizes(specs)
    data_bytes = sum(spec.nbytes for spec in specs)
    whole = _file_bytes(sum(sizes) + single_metadata_bytes, data_bytes) if headers_count else data_bytes
    groups = [list(range(len(specs)))]
    separate = set(separate_names)
    together = [i for i, spec in enumerate(specs) if spec.name not in separate]
    parts = [together, [i for i, spec in enumerate(specs) if spec.name in separate]]
    if all(parts) or (whole > max_shard_bytes and len(specs) > 1):
        pack = _pack_greedy if packing == "greedy" else _pack_balanced
        room = _Room(max_shard_bytes, shard_metadata_bytes, headers_count)
        groups = []
        for part in parts:
            packed = pack([specs[i].nbytes for i in part], [sizes[i] for i in part], room)
            groups += [[part[i] for i in group] for group in packed]
    if len(groups) == 1 and whole > max_shard_bytes and len(specs) > 1:
        groups = [groups[0][:1], groups[0][1:]]  # it fits as a shard, but not with a single file's metadata
    files = [names.single] if len(groups) == 1 else names.shards(len(groups))
    shards = tuple(
        PlannedShard(file, tuple(specs[i] for i in sorted(group))) for file, group in zip(files, groups, strict=True)
    )
    return ShardPlan(shards, dict(tied_names or {}), max_shard_bytes)


def with_one_more_shard(plan: ShardPlan, names: WeightNames) -> ShardPlan:
    """Split the smallest divisible file of a plan in two, so that the other files keep their bytes.

    The smallest is split because a push has to send only the two halves again. If no file has two tensors, an empty one
    is added. A save uses this plan if the checkpoint that it replaces still uses the file names of the original plan
    (see `hfshard.commit`).
    """
    groups = [shard.tensors for shard in plan.shards]
    divisible = [i for i, tensors in enumerate(groups) if len(tensors) > 1]
    if divisible:
        smallest = min(divisible, key=lambda i: (plan.shards[i].nbytes, i))
        groups[smallest : smallest + 1] = _halves(groups[smallest])
    else:
        groups.append(())
    files = names.shards(len(groups))
    shards = tuple(PlannedShard(file, tensors) for file, tensors in zip(files, groups, strict=True))
    return replace(plan, shards=shards)


_END_BOUND: Final = 10**15
"""An offset that no file reaches. Entries are planned with its digits, so that no header is longer than planned."""


def _entry_sizes(specs: Sequence[TensorSpec]) -> list[int]:
    """Compute the most bytes that each tensor's entry takes in a header."""
    nameless: dict[tuple[str, tuple[int, ...]], int] = {}  # a model has few dtypes and shapes
    sizes = []
    for name, dtype, shape, _ in specs:
        size = nameless.get((dtype, shape))
        if size is None:
            size = nameless[dtype, shape] = entry_bytes("", dtype, list(shape), _END_BOUND)
        sizes.append(size + name_bytes(name))
    return sizes


@dataclass(frozen=True, slots=True)
class _Room:
    max_shard_bytes: int
    metadata_bytes: int
    headers_count: bool

    @property
    def certain_bytes(self) -> int:
        """Bytes of data and entries together that always fit, regardless of rounding."""
        return self.max_shard_bytes - self.metadata_bytes - LENGTH_BYTES - DATA_ALIGNMENT

    @property
    def entries_bytes(self) -> int:
        """The most bytes of entries in a header."""
        return MAX_HEADER_BYTES - DATA_ALIGNMENT - self.metadata_bytes - 1

    def holds(self, data_bytes: int, header_bytes: int) -> bool:
        file_bytes = data_bytes
        if self.headers_count:
            file_bytes = _file_bytes(header_bytes + self.metadata_bytes, data_bytes)
        return header_bytes <= self.entries_bytes and file_bytes <= self.max_shard_bytes


def _file_bytes(header_bytes: int, data_bytes: int) -> int:
    return -(-(LENGTH_BYTES + header_bytes) // DATA_ALIGNMENT) * DATA_ALIGNMENT + data_bytes


def _pack_greedy(nbytes: Sequence[int], sizes: Sequence[int], room: _Room) -> list[list[int]]:
    # As in transformers: a tensor that is too large gets its own file, and the file being filled stays open.
    groups: list[list[int]] = []
    current: list[int] = []
    data = header = 0
    certain_bytes, entries_bytes = room.certain_bytes, room.entries_bytes
    for i, (tensor_bytes, entry) in enumerate(zip(nbytes, sizes, strict=True)):
        if data + tensor_bytes + header + entry <= certain_bytes and header + entry <= entries_bytes:
            current.append(i)
            data += tensor_bytes
            header += entry
            continue
        if not room.holds(tensor_bytes, entry):
            groups.append([i])
            continue
        if current and not room.holds(data + tensor_bytes, header + entry):
            groups.append(current)
            current = []
            data = header = 0
        current.append(i)
        data += tensor_bytes
        header += entry
    return groups + [current] if current else groups


def _pack_balanced(nbytes: Sequence[int], sizes: Sequence[int], room: _Room) -> list[list[int]]:
    costs = [data + entry for data, entry in zip(nbytes, sizes, strict=True)]
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    oversized = [i for i in order if not room.holds(nbytes[i], sizes[i])]
    fitting = [i for i in order if room.holds(nbytes[i], sizes[i])]
    groups = _best_fit(fitting, costs, room.certain_bytes)
    levelled = _level(fitting, costs, len(groups))
    if all(sum(costs[i] for i in group) <= room.certain_bytes for group in levelled):
        groups = levelled
    return sorted([[i] for i in oversized] + [sorted(group) for group in groups if group])


def _best_fit(order: Iterable[int], costs: Sequence[int], capacity: int) -> list[list[int]]:
    groups: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free bytes, group), sorted
    for i in order:
        at = bisect_left(rooms, (costs[i], -1))
        if at == len(rooms):
            groups.append([i])
            insort(rooms, (max(0, capacity - costs[i]), len(groups) - 1))
        else:
            free, group = rooms.pop(at)
            groups[group].append(i)
            insort(rooms, (free - costs[i], group))
    return groups


def _level(order: Iterable[int], costs: Sequence[int], count: int) -> list[list[int]]:
    groups: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, group) for group in range(count)]
    for i in order:
        load, group = heapq.heappop(heap)
        groups[group].append(i)
        heapq.heappush(heap, (load + costs[i], group))
    return groups


def _halves(tensors: tuple[TensorSpec, ...]) -> list[tuple[TensorSpec, ...]]:
    half, passed = sum(spec.nbytes for spec in tensors) / 2, 0
    for at, spec in enumerate(tensors[:-1], start=1):
        passed += spec.nbytes
        if passed >= half:
            return [tensors[:at], tensors[at:]]
    return [tensors[:-1], tensors[-1:]]
