"""DeepSpeed's files, described and not run: shapes, weights and masters by name, and where their bytes are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch

from hfshard.disk.safe_open import Identity
from hfshard.errors import HfshardError, InvalidArgumentError
from hfshard.foreign.byte_runs import ByteRun, ForeignTensor, StoredRecord
from hfshard.foreign.described_values import (
    MALFORMED,
    damaged,
    parse_count,
    parse_dict,
    parse_shape,
    parse_text,
    pattern_of,
    reject_other_names,
)
from hfshard.pickles.described_file import DescribedFile, DescribedTensor, described_file
from hfshard.pickles.pickle_opcodes import DescribedObject, GlobalReference
from hfshard.pickles.plain_values import PlainValues

Value = TypeVar("Value")
Shapes = Mapping[str, tuple[int, ...]]
"""Name of a parameter -> its shape."""

_ADMITTED: Final = pattern_of(
    (
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
    ),
    r"torch\.[A-Za-z0-9]+Storage|torch\._utils\._rebuild_(?:tensor|parameter)\w*"
    r"|collections\.(?:OrderedDict|defaultdict|Counter|deque)|_codecs\.encode"
    r"|builtins\.(?:dict|list|set|frozenset|bytearray|complex|int|float|bool|str|slice|range|getattr)"
    r"|torch\.optim\.lr_scheduler\.[\w.]+"
    r"|numpy\.(?:ndarray|dtype|(?:_core|core)\.multiarray\.(?:_reconstruct|scalar))"
    r"|pathlib\.(?:_local\.)?(?:Pure)?(?:Posix|Windows)?Path",
)
"""DeepSpeed's own classes, and plain data in a user's `client_state`, a scheduler's state and the settings. A
scheduler and `getattr` are what a bound method of OneCycleLR is saved as."""

_STAGE_CLASS: Final = "deepspeed.runtime.zero.config.ZeroStageEnum"
_STAGES: Final = {"optimizer_states": 1, "gradients": 2, "weights": 3}
"""Names by which Python 3.11 saves the class's members; other versions save their numbers."""


@dataclass(frozen=True, slots=True)
class TensorInFile:
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
    weights: Mapping[str, TensorInFile] | None
    """All names of the state dict; under ZeRO-3, parameters have no elements. None: a pipeline has files per layer."""
    buffers: frozenset[str]
    groups: tuple[Shapes, ...] | None
    """Parameters of each flat group, in the order of their elements there. None: they are not partitioned."""
    frozen_shapes: Shapes
    frozen: Mapping[str, TensorInFile]
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
    masters: tuple[TensorInFile, ...]
    """A flat tensor per group, or per sub-group under ZeRO-3."""
    gaps: tuple[Any, ...] | None
    """Per group: a list of the elements of padding after each parameter, not checked. None: there is no padding."""
    slices: tuple[Mapping[str, tuple[int, int]], ...]
    """Per group: parameter -> number of its elements in this partition, and the first one's position there."""
    has_experts: bool
    steps: Mapping[tuple[str, Any], Any]
    """Place in the optimizer's state -> the step there: a number, or what identifies the bytes of a tensor."""


@dataclass(frozen=True, slots=True)
class BaseState:
    """A rank's part of the state of the optimizer that ZeRO partitions."""

    file: str
    tensors: Mapping[int, Mapping[str, TensorInFile]]
    """Number of a flat tensor of masters -> slot -> tensor."""
    counts: Mapping[int, Mapping[str, Any]]
    """The same for numbers, and tensors of no dimension: one for all elements."""
    groups: tuple[Mapping[str, Any], ...]
    """Options of each group; `params` are the numbers of its flat tensors."""
    scaler: Mapping[str, Any]
    """State of the `GradScaler` that would go on like the loss scaler; empty if the scale is fixed."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a file of weights has of the run."""

    step: int | None
    scheduler: Any
    client: Mapping[str, Any]
    """The user's `client_state`."""
    has_optimizer: bool
    """True without ZeRO: an optimizer's state by position."""


_OF_ENGINE: Final = frozenset(
    ("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "lr_scheduler")
    + ("frozen_param_fragments", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps")
    + ("csr_tensor_module_names", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config")
    + ("ds_version", "checkpoint_parallel_dimensions", "universal_checkpoint_info", "num_experts")
)
"""Entries of DeepSpeed's own in a file of weights, beside which the user's are."""


class StateFiles:
    """Reader of one checkpoint's files, which remembers their sizes and the records with tensors."""

    def __init__(self, directory: str) -> None:
        """Begin without a file.

        Args:
            directory: It must contain them, and what they link to.
        """
        self.directory = directory
        self.identities: dict[str, Identity] = {}
        """File -> what it was when it was described."""
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
                weights=None if value.get("module") is None else pieces(parse_dict(value["module"])),
                buffers=frozenset(_text(one) or "" for one in value.get("buffer_names") or ()),
                groups=None if groups is None else _distinct(_shapes, groups),
                frozen_shapes=_shapes(value.get("frozen_param_shapes") or {}),
                frozen=pieces(parse_dict(value.get("frozen_param_fragments") or {})),
                shared={name: str(_text(one)) for name, one in parse_dict(value.get("shared_params") or {}).items()},
                settings=settings if isinstance(settings, dict) else {},
                model_ranks=parse_count(value["mp_world_size"]) if type(value.get("mp_world_size")) is int else None,
                tensor_ranks=parse_count(parallel["tp_degree"]) if isinstance(parallel, dict) else 1,
            )

    def read_optimizer(self, name: str) -> OptimizerStates:
        """Read a rank's file of masters; see `read_model`."""
        with self._described(name) as (file, pieces):
            value = parse_dict(file.value["optimizer_state_dict"])
            stage = None if value.get("zero_stage") is None else _stage(value["zero_stage"])
            flat = value["fp32_flat_groups"] if stage == 3 else value["single_partition_of_fp32_groups"]
            counts = value["partition_count"]
            gaps = value.get("param_alignment_paddings")
            return OptimizerStates(
                file=name,
                version=_text(file.value.get("ds_version", value.get("ds_version"))),
                stage=stage,
                counts=tuple(map(parse_count, _list(counts))) if isinstance(counts, list) else (parse_count(counts),),
                masters=tuple(pieces(dict(enumerate(_list(flat)))).values()),
                gaps=None if gaps is None else tuple(_list(gaps)),
                slices=_distinct(_slices, value.get("param_slice_mappings") or []),
                has_experts=bool(value.get("ds_zero_partition_groups")),
                steps=_steps(file, value.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")),
            )

    def read_layer(self, name: str) -> Mapping[str, TensorInFile]:
        """Read the file of a pipeline's layer: names in the layer -> tensors; see `read_model`."""
        with self._described(name) as (file, pieces):
            return pieces(parse_dict(file.value))

    def read_universal(self, name: str) -> tuple[TensorInFile, bool]:
        """Read a parameter of a universal checkpoint, and whether padding of its vocabulary was cut off."""
        with self._described(name) as (file, pieces):
            is_bare = isinstance(file.value, DescribedObject) and file.find(file.value) is not None
            value = {"param": file.value} if is_bare else parse_dict(file.value)
            return pieces({"param": value["param"]})["param"], bool(value.get("vocab_tensor"))

    def read_state(self, name: str, stage: int | None) -> BaseState:
        """Read where a rank's part of the optimizer's state is; see `read_model`.

        Args:
            name: The file, relative to the directory.
            stage: ZeRO's.

        Raises:
            InvalidArgumentError: The state has something other than one value for each element, and counts.
        """
        with self._described(name) as (file, pieces):
            value = parse_dict(file.value["optimizer_state_dict"])
            base = value["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
            if isinstance(base, list):
                raise self._unreadable(name, "was saved with elastic_checkpoint")
            plain = PlainValues(os.path.join(self.directory, name), file)
            tensors: dict[int, dict[str, TensorInFile]] = {}
            counts: dict[int, dict[str, Any]] = {}
            for number, slots in base["state"].items():
                flat = {slot: one for slot, one in parse_dict(slots).items() if _is_flat(file, one)}
                tensors[parse_count(number)] = pieces(flat)
                counts[number] = self._counts(name, {key: one for key, one in slots.items() if key not in flat}, plain)
            groups = [parse_dict(plain.of(one, "param_groups")) for one in _list(base["param_groups"])]
            return BaseState(name, tensors, counts, tuple(groups), _scaler(value.get("loss_scaler"), plain))

    def _counts(self, name: str, slots: Mapping[str, Any], plain: PlainValues) -> dict[str, Any]:
        """Return slots that are one number for all elements."""
        found = {slot: plain.of(one, slot) for slot, one in slots.items()}
        for slot, one in found.items():
            if not (isinstance(one, int | None) or (isinstance(one, torch.Tensor) and not one.dim())):
                raise self._unreadable(name, f"has '{slot}' in the optimizer's state, a {type(one).__name__}")
        return found

    def read_universal_state(self, name: str) -> BaseState:
        """Read the groups and counts of a universal checkpoint's optimizer, without tensors; see `read_model`.

        ZeRO-3's has the counts in rank 0's state, the others' have them with the parameters.
        """
        with self._described(name) as (file, _):
            value = parse_dict(file.value)
            plain = PlainValues(os.path.join(self.directory, name), file)
            groups = [parse_dict(plain.of(one, "param_groups")) for one in _list(value["param_groups"])]
            state = parse_dict(value.get("optimizer_state_dict") or {}).get("state") or {}
            counts = {
                parse_count(number): {slot: one for slot, one in parse_dict(slots).items() if not _is_flat(file, one)}
                for number, slots in state.items()
            }
            counts = {number: self._counts(name, slots, plain) for number, slots in counts.items()}
            return BaseState(name, {}, counts, tuple(groups), _scaler(value.get("loss_scaler"), plain))

    def read_universal_slot(self, name: str) -> TensorInFile | Any:
        """Read one slot of a parameter of a universal checkpoint: a tensor, or a number; see `read_model`."""
        with self._described(name) as (file, pieces):
            value = file.value["param"] if isinstance(file.value, dict) else file.value
            if _is_flat(file, value):
                return pieces({"param": value})["param"]
            return PlainValues(os.path.join(self.directory, name), file).of(value)

    def read_progress(self, name: str) -> Progress:
        """Read what a file of weights has besides them; see `read_model`."""
        with self._described(name) as (file, _):
            value = parse_dict(file.value)
            plain = PlainValues(os.path.join(self.directory, name), file)
            step = value.get("global_steps")
            return Progress(
                step=None if step is None else parse_count(step),
                scheduler=plain.of(value.get("lr_scheduler"), "lr_scheduler"),
                client={key: plain.of(one, key) for key, one in value.items() if key not in _OF_ENGINE},
                has_optimizer=value.get("optimizer") is not None,
            )

    def _unreadable(self, name: str, what: str) -> InvalidArgumentError:
        path = os.path.join(self.directory, name)
        return InvalidArgumentError(
            f"'{path}' {what}: it does not have one value for each element of the parameters, so that hfshard cannot "
            "restore it. Nothing was loaded. For the weights alone, run: hfshard convert --weights.",
            path=path,
        )

    @contextmanager
    def _described(
        self, name: str
    ) -> Iterator[tuple[DescribedFile, Callable[[Mapping[Any, Any]], dict[Any, TensorInFile]]]]:
        """Describe a file; yield it, and the function that finds the tensors of a dict in it."""
        path = os.path.join(self.directory, name)
        with described_file(path, self.directory) as file:
            reject_other_names(file.names, _ADMITTED, path, "a DeepSpeed checkpoint")
            self.identities[name] = file.identity

            def pieces(value: Mapping[Any, Any]) -> dict[Any, TensorInFile]:
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
                    found[key] = TensorInFile(name, tensor)
                    record = tensor.storage
                    if record.crc32 is not None and record.size:
                        stored = StoredRecord(name, record.offset, record.size, record.crc32)
                        self._records[name, record.offset] = stored
                return found

            try:
                yield file, pieces
            except HfshardError:
                raise
            except MALFORMED as error:
                raise damaged(path, f"it is not as DeepSpeed writes it ({error!r:.200})") from error


def _is_flat(file: DescribedFile, value: Any) -> bool:
    """Return whether a value is a tensor with dimensions."""
    tensor = file.find(value) if isinstance(value, DescribedObject) else None
    return tensor is not None and len(tensor.shape) > 0


def _scaler(value: Any, plain: PlainValues) -> Mapping[str, Any]:
    """Return the state of the `GradScaler` that would go on like a loss scaler; empty if its scale is fixed."""
    if not isinstance(value, DescribedObject) or not value.name.endswith(".DynamicLossScaler"):
        return {}
    own = parse_dict(plain.of(value.state, "loss_scaler"))
    steps = own["cur_iter"] - own["last_overflow_iter"] - 1
    return {
        "scale": float(own["cur_scale"]),
        "growth_factor": float(own["scale_factor"]),
        "backoff_factor": 1 / own["scale_factor"],
        "growth_interval": own["scale_window"],
        "_growth_tracker": (steps - 1) % own["scale_window"] if steps > 0 else 0,  # it grows a step after a full window
    }


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a {type(value).__name__} in place of a list")
    return value


def _text(value: Any) -> str | None:
    return None if value is None else parse_text(value)


def _shapes(value: Any) -> Shapes:
    return {name: parse_shape(one) for name, one in parse_dict(value).items()}


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
        value = _STAGES[parse_text(name)] if owner == GlobalReference(_STAGE_CLASS) else None
    if parse_count(value) not in _STAGES.values():
        raise ValueError(f"stage {value} of ZeRO")
    return int(value)


def _slices(value: Any) -> Mapping[str, tuple[int, int]]:
    return {
        name: (parse_count(one.state["numel"]), parse_count(one.state["start"]))
        for name, one in parse_dict(value).items()
    }


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
