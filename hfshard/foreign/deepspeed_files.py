"""DeepSpeed's files, described and not run: shapes, weights and masters by name, and where their bytes are."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch

from hfshard.errors import DamagedCheckpointError, HfshardError, InvalidArgumentError, UnsafePickleError
from hfshard.foreign.byte_runs import ByteRun, ForeignTensor, StoredRecord
from hfshard.pickles.described_file import DescribedFile, DescribedTensor, described_file, meaning
from hfshard.pickles.pickle_opcodes import DescribedObject, GlobalReference

Value = TypeVar("Value")
Shapes = Mapping[str, tuple[int, ...]]
"""Name of a parameter -> its shape."""

_OBJECTS: Final = frozenset(
    {
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
        "torch.Size",
        "torch.device",
        "torch.Tensor",
        "torch._tensor._rebuild_from_type_v2",
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
        "torch.storage.UntypedStorage",
        "argparse.Namespace",
        "types.SimpleNamespace",
    }
)
"""DeepSpeed's own classes, and plain data in a user's `client_state`, a scheduler's state and the settings."""

_KINDS: Final = re.compile(
    r"torch\.[A-Za-z0-9]+Storage|torch\._utils\._rebuild_(?:tensor|parameter)\w*"
    r"|collections\.(?:OrderedDict|defaultdict|Counter|deque)|_codecs\.encode"
    r"|builtins\.(?:dict|list|set|frozenset|bytearray|complex|int|float|bool|str|slice|range|getattr)"
    r"|torch\.optim\.lr_scheduler\.[\w.]+"
    r"|numpy\.(?:ndarray|dtype|(?:_core|core)\.multiarray\.(?:_reconstruct|scalar))"
    r"|pathlib\.(?:_local\.)?(?:Pure)?(?:Posix|Windows)?Path"
)
"""The same, of which there are many; `getattr` and the scheduler are what a bound method of OneCycleLR is saved as."""

_STAGE_CLASS: Final = "deepspeed.runtime.zero.config.ZeroStageEnum"
_STAGES: Final = {"optimizer_states": 1, "gradients": 2, "weights": 3}
"""Names by which Python 3.11 saves the class's members; other versions save their numbers."""
_MOST_DIMENSIONS: Final = 64
"""As many as torch allows."""
_NUMBER_BITS: Final = 63
"""Of a size; a file may have numbers of any length."""
_MALFORMED: Final = (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of one file."""

    file: str
    """Name relative to the checkpoint's directory."""
    tensor: DescribedTensor

    def run(self, first: int, count: int, start: int) -> ByteRun:
        """Return a range of its elements as a run.

        Args:
            first: Its first element.
            count: Number of elements, at least one.
            start: Byte in the complete tensor where they begin.
        """
        itemsize = self.tensor.dtype.itemsize
        return ByteRun(self.file, self.tensor.offset + first * itemsize, count * itemsize, start)

    def complete(self) -> ForeignTensor:
        """Return the tensor that has no other pieces."""
        runs = (self.run(0, self.tensor.numel, 0),) if self.tensor.numel else ()
        return ForeignTensor(self.tensor.dtype, self.tensor.shape, runs)


@dataclass(frozen=True, slots=True)
class ModelStates:
    """A file with a model's weights, or what is left of them under ZeRO-3."""

    file: str
    version: str | None
    """DeepSpeed's version."""
    weights: Mapping[str, Piece] | None
    """All names of the state dict; under ZeRO-3, parameters have no elements. None: a pipeline has files per layer."""
    buffers: frozenset[str]
    groups: tuple[Shapes, ...] | None
    """Parameters of each flat group, in the order of their elements there. None: they are not partitioned."""
    frozen_shapes: Shapes
    frozen: Mapping[str, Piece]
    """Frozen parameters: complete, or under ZeRO-3 one rank's part."""
    shared: Mapping[str, str]
    """Tied name -> name of the parameter with the data."""
    settings: Mapping[str, Any]
    """DeepSpeed's "zero_optimization"."""
    model_ranks: int | None
    """Number of pipeline stages times tensor parallel ranks."""
    tensor_ranks: int


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """A rank's file with its partition of the float32 masters."""

    file: str
    version: str | None
    stage: int | None
    """ZeRO's stage; None: `BF16_Optimizer`, whose partitions are those of stage 1."""
    counts: tuple[int, ...]
    """Ranks that share each group; under ZeRO-3 one number for all."""
    masters: tuple[Piece, ...]
    """A flat tensor per group, or per sub-group under ZeRO-3."""
    gaps: tuple[Any, ...] | None
    """Per group: a list of the elements of padding after each parameter, not checked. None: there is no padding."""
    slices: tuple[Mapping[str, tuple[int, int]], ...]
    """Per group: parameter -> number of its elements in this partition, and the first one's position there."""
    has_experts: bool
    steps: Mapping[tuple[str, Any], Any]
    """Place in the optimizer's state -> the step there: a number, or what identifies the bytes of a tensor."""


class StateFiles:
    """Reader of one checkpoint's files, which remembers their sizes and the records with tensors."""

    def __init__(self, directory: str) -> None:
        """Begin without a file.

        Args:
            directory: It must contain them, and what they link to.
        """
        self.directory = directory
        self.sizes: dict[str, int] = {}
        """File -> bytes."""
        self._records: dict[tuple[str, int], StoredRecord] = {}

    @property
    def records(self) -> tuple[StoredRecord, ...]:
        """Records with a checksum of the tensors that were found, sorted."""
        return tuple(record for _, record in sorted(self._records.items()))

    def read_model(self, name: str) -> ModelStates:
        """Read a file of weights.

        Args:
            name: The file, relative to the directory.

        Raises:
            UnsafePickleError: It names something that no DeepSpeed checkpoint needs.
            DamagedCheckpointError: It is incomplete, or not as DeepSpeed writes it.
        """
        with self._described(name) as (file, pieces):
            value = file.value
            groups = value.get("param_shapes")
            config = value.get("ds_config")
            settings = config.get("zero_optimization") if isinstance(config, dict) else None
            parallel = value.get("checkpoint_parallel_dimensions")
            return ModelStates(
                file=name,
                version=_text(value.get("ds_version")),
                weights=None if value.get("module") is None else pieces(_named(value["module"])),
                buffers=frozenset(_text(one) or "" for one in value.get("buffer_names") or ()),
                groups=None if groups is None else _distinct(_shapes, groups),
                frozen_shapes=_shapes(value.get("frozen_param_shapes") or {}),
                frozen=pieces(_named(value.get("frozen_param_fragments") or {})),
                shared={name: str(_text(one)) for name, one in _named(value.get("shared_params") or {}).items()},
                settings=settings if isinstance(settings, dict) else {},
                model_ranks=_count(value["mp_world_size"]) if type(value.get("mp_world_size")) is int else None,
                tensor_ranks=_count(parallel["tp_degree"]) if isinstance(parallel, dict) else 1,
            )

    def read_optimizer(self, name: str) -> OptimizerStates:
        """Read a rank's file of masters; see `read_model`."""
        with self._described(name) as (file, pieces):
            value = _named(file.value["optimizer_state_dict"])
            stage = None if value.get("zero_stage") is None else _stage(value["zero_stage"])
            flat = value["fp32_flat_groups"] if stage == 3 else value["single_partition_of_fp32_groups"]
            counts = value["partition_count"]
            gaps = value.get("param_alignment_paddings")
            return OptimizerStates(
                file=name,
                version=_text(file.value.get("ds_version", value.get("ds_version"))),
                stage=stage,
                counts=tuple(map(_count, _list(counts))) if isinstance(counts, list) else (_count(counts),),
                masters=tuple(pieces(dict(enumerate(_list(flat)))).values()),
                gaps=None if gaps is None else tuple(_list(gaps)),
                slices=_distinct(_slices, value.get("param_slice_mappings") or []),
                has_experts=bool(value.get("ds_zero_partition_groups")),
                steps=_steps(file, value.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")),
            )

    def read_layer(self, name: str) -> Mapping[str, Piece]:
        """Read the file of a pipeline's layer: names in the layer -> tensors; see `read_model`."""
        with self._described(name) as (file, pieces):
            return pieces(_named(file.value))

    def read_universal(self, name: str) -> tuple[Piece, bool]:
        """Read a parameter of a universal checkpoint, and whether padding of its vocabulary was cut off."""
        with self._described(name) as (file, pieces):
            is_bare = isinstance(file.value, DescribedObject) and file.find(file.value) is not None
            value = {"param": file.value} if is_bare else _named(file.value)
            return pieces({"param": value["param"]})["param"], bool(value.get("vocab_tensor"))

    @contextmanager
    def _described(self, name: str) -> Iterator[tuple[DescribedFile, Callable[[Mapping[Any, Any]], dict[Any, Piece]]]]:
        """Describe a file; yield it, and the function that finds the tensors of a dict in it."""
        path = os.path.join(self.directory, name)
        with described_file(path, self.directory) as file:
            _reject_other_names(file.names, path)
            self.sizes[name] = file.size

            def pieces(value: Mapping[Any, Any]) -> dict[Any, Piece]:
                found = {}
                for key, one in value.items():
                    tensor = file.find(one) if isinstance(one, DescribedObject) else None
                    if tensor is None:
                        raise damaged(path, f"its entry {key!r:.200} is not a dense tensor", str(key))
                    if not tensor.is_contiguous:
                        raise InvalidArgumentError(
                            f"'{path}' has tensor {key!r:.200} in another order than row-major, which hfshard cannot "
                            "read. Nothing was loaded. Make it contiguous() in the program that saves it.",
                            path=path,
                            fqn=str(key),
                        )
                    found[key] = Piece(name, tensor)
                    record = tensor.storage
                    if record.crc32 is not None and record.size:
                        stored = StoredRecord(name, record.offset, record.size, record.crc32)
                        self._records[name, record.offset] = stored
                return found

            try:
                yield file, pieces
            except HfshardError:
                raise
            except _MALFORMED as error:
                raise damaged(path, f"it is not as DeepSpeed writes it ({error!r:.200})") from error


def damaged(
    path: str, problem: str, fqn: str | None = None, *, hint: str = "Copy it again from where it was saved."
) -> DamagedCheckpointError:
    """Build the error for a file or directory that is not as DeepSpeed writes it."""
    return DamagedCheckpointError(
        f"'{path}' cannot be read: {problem}. Nothing was loaded. {hint}",
        path=path,
        fqn=fqn,
    )


def _reject_other_names(names: frozenset[str], path: str) -> None:
    for name in sorted(names):
        is_dtype = isinstance(meaning(GlobalReference(name)), torch.dtype)
        if name not in _OBJECTS and not _KINDS.fullmatch(name) and not is_dtype:
            raise UnsafePickleError(
                f"'{path}' asks for '{name}', which is nothing a DeepSpeed checkpoint needs. Nothing of it was run, "
                "and nothing was loaded. If it is an object of your own in client_state, save without it; otherwise do "
                "not use the file.",
                path=path,
                actual=name,
            )


def _named(value: Any) -> dict[str, Any]:
    found = meaning(value) if isinstance(value, DescribedObject) else value
    if not isinstance(found, dict):
        raise TypeError(f"a {type(found).__name__} in place of a dict")
    if not all(isinstance(name, str) for name in found):
        raise TypeError("a name that is not text")
    return found


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a {type(value).__name__} in place of a list")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0 or value.bit_length() > _NUMBER_BITS:
        raise TypeError("a number that is not an int, or negative, or too large")
    return value


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} in place of text")
    return value


def _shapes(value: Any) -> Shapes:
    shapes = {}
    for name, one in _named(value).items():
        numbers = one.arguments[0] if isinstance(one, DescribedObject) and one.name == "torch.Size" else one
        if not isinstance(numbers, tuple | list) or len(numbers) > _MOST_DIMENSIONS:
            raise TypeError(f"a {type(numbers).__name__} in place of a shape")
        shapes[name] = tuple(map(_count, numbers))
    return shapes


def _distinct(parse: Callable[[Any], Mapping[str, Value]], groups: Any) -> tuple[Mapping[str, Value], ...]:
    """Parse a list of dicts, one per group of parameters.

    A pickle can have one dict in a list a million times, so the first name that comes again is an error.
    """
    found = []
    names: set[str] = set()
    for one in _list(groups):
        parsed = parse(one)
        if not names.isdisjoint(parsed):
            raise ValueError(f"parameter {min(names & set(parsed))!r:.200} is in two groups")
        names |= set(parsed)
        found.append(parsed)
    return tuple(found)


def _stage(value: Any) -> int:
    if isinstance(value, DescribedObject) and value.name == _STAGE_CLASS:
        (value,) = value.arguments
    elif isinstance(value, DescribedObject) and value.name == "builtins.getattr":
        owner, name = value.arguments
        value = _STAGES[_text(name) or ""] if owner == GlobalReference(_STAGE_CLASS) else None
    if _count(value) not in _STAGES.values():
        raise ValueError(f"stage {value} of ZeRO")
    return int(value)


def _slices(value: Any) -> Mapping[str, tuple[int, int]]:
    return {name: (_count(one.state["numel"]), _count(one.state["start"])) for name, one in _named(value).items()}


def _steps(file: DescribedFile, optimizer: Any) -> dict[tuple[str, Any], Any]:
    """Return the steps in an optimizer's state, without reading tensors: those of one number have a checksum."""
    state = optimizer.get("state") if isinstance(optimizer, dict) else None
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    by_number = {("state", key): one for key, one in state.items()} if isinstance(state, dict) else {}
    by_group = {("group", key): one for key, one in enumerate(groups)} if isinstance(groups, list) else {}
    found: dict[tuple[str, Any], Any] = {}
    for place, one in (by_number | by_group).items():
        step = one.get("step") if isinstance(one, dict) else None
        tensor = file.find(step) if isinstance(step, DescribedObject) else None
        if isinstance(step, int | float):
            found[place] = step
        elif tensor is not None and tensor.storage.crc32 and tensor.storage.size == tensor.dtype.itemsize:
            found[place] = tensor.dtype, tensor.storage.crc32
    return found
