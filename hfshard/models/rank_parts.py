"""Models spread over ranks: a rank's parts of the tensors that transformers would store, and how to load them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.distributed.layout import Box, Interval, MeshLayout, Placement, box_elements, held_box
from hfshard.distributed.load_on_ranks import current_load, device_of_meshes, meet_unchanged
from hfshard.distributed.read_parts import PartMapper, Target, prepare_reads
from hfshard.distributed.spread_tensor import SpreadTensor, with_spread_tensors
from hfshard.errors import InvalidArgumentError, UnstorableTensorError
from hfshard.models.model_classes import alias_class, view_as_alias
from hfshard.shards.read_tensors import ReadMode
from hfshard.tensors.state_dict import is_dtensor
from hfshard.tensors.stored_tensor import storage_id

_COPIES: Final = frozenset(("contiguous", "clone", "detach"))
"""Functions that change no element and no order; the tracer returns their argument, so that a view stays a view."""


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """A stored tensor: a tensor of the model, a rectangle of one, or computed from one or more."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[str, ...]
    """Names in the model: one for a rectangle, all inputs for a computed tensor."""
    window: tuple[Interval, ...] | None
    """The rectangle whose row-major elements are stored, as an interval per source dimension; None: computed."""


def trace_reverted(model: PreTrainedModel, tensors: Mapping[str, Any]) -> dict[str, ConvertedTensor]:
    """Trace what transformers' `revert_weight_conversion` makes of a model's tensors, without touching their data.

    Fused experts are rectangles of one tensor; permuted or transposed tensors are computed.

    Args:
        tensors: The model's names -> anything with the shape and dtype of the full tensor.

    Returns:
        Stored name -> its description, in transformers' order.
    """
    metas = _without_data(tensors)
    tracer = _Tracer(metas)
    with tracer:
        reverted = revert_weight_conversion(view_as_alias(model), dict(metas))
    return {name: tracer.describe(result) for name, result in reverted.items()}


def _without_data(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(tuple(one.shape), dtype=one.dtype, device="meta") for name, one in tensors.items()}


class _Tracer(TorchFunctionMode):
    """Tracer of meta tensors through torch functions; the storage of each identifies its sources."""

    def __init__(self, metas: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._metas = metas
        self._order = {name: number for number, name in enumerate(metas)}
        self._sources: dict[int, frozenset[str]] = {}
        self._computed: set[int] = set()
        self._kept: list[torch.UntypedStorage] = []  # the address of a freed storage may be reused
        for name, meta in metas.items():
            self._know(meta, frozenset((name,)))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _COPIES:
            return args[0]
        result = func(*args, **(kwargs or {}))
        read = [self._sources.get(storage_id(tensor), frozenset()) for tensor in _tensors_in((args, kwargs))]
        sources = frozenset[str]().union(*read)
        if sources:
            for tensor in _tensors_in((result, kwargs.get("out") if kwargs else None)):
                self._know_new(tensor, sources)
            if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
                self._know_written(args[0], sources)
        return result

    def describe(self, result: torch.Tensor) -> ConvertedTensor:
        """Describe a result in terms of its sources."""
        sources = self._sources.get(storage_id(result), frozenset())
        window = None
        if len(sources) == 1 and storage_id(result) not in self._computed:
            window = _rectangle(self._metas[next(iter(sources))], result)
        in_order = tuple(sorted(sources, key=self._order.__getitem__))
        return ConvertedTensor(tuple(result.shape), result.dtype, in_order, window)

    def _know_new(self, tensor: torch.Tensor, sources: frozenset[str]) -> None:
        if storage_id(tensor) not in self._sources:
            self._know_written(tensor, sources)

    def _know_written(self, tensor: torch.Tensor, sources: frozenset[str]) -> None:
        self._know(tensor, sources)
        self._computed.add(storage_id(tensor))

    def _know(self, tensor: torch.Tensor, sources: frozenset[str]) -> None:
        self._kept.append(tensor.untyped_storage())
        self._sources[storage_id(tensor)] = sources


def _rectangle(source: torch.Tensor, result: torch.Tensor) -> tuple[Interval, ...] | None:
    """Find the rectangle of a contiguous source that a view shows in order; None if it shows another order."""
    if result.dtype != source.dtype:
        return None
    if result.numel() == 0:
        return tuple((0, size) for size in source.shape) if source.numel() == 0 else None
    first = int(result.storage_offset())
    last = first + sum((size - 1) * step for size, step in zip(result.shape, result.stride(), strict=True))
    window = tuple(
        (start, stop + 1) for start, stop in zip(_coordinate(source, first), _coordinate(source, last), strict=True)
    )
    try:
        expected = source[tuple(slice(*interval) for interval in window)].view(result.shape)
    except (RuntimeError, IndexError):
        return None
    return window if _steps(expected) == _steps(result) else None


def _coordinate(source: torch.Tensor, offset: int) -> Iterator[int]:
    """Yield the indices of an element of a contiguous tensor."""
    for step in source.stride():
        index, offset = divmod(offset, step)
        yield index


def _steps(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of dimensions larger than one."""
    return tuple(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the meta tensors in an argument or a result, including nested lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        if value.is_meta and type(value) is torch.Tensor:
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)


# Saving: this rank's part of each tensor that transformers would store, by its name on disk.


_GATHERED_BYTES: Final = 256 * 1024**2
"""The most that each rank gathers in full at a time, unless one conversion's sources are larger."""


def stored_parts(model: PreTrainedModel, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Revert transformers' weight conversion of tensors of which each rank has a part.

    A rectangle of a tensor needs no other rank. All ranks compute the other tensors (permuted for RoPE, transposed,
    interleaved) from the full sources, a few at a time, and each keeps some rows. In that case every rank that has a
    part of the sources must call this.

    Args:
        tensors: Name -> tensor; DTensors are spread. Not changed.

    Returns:
        Stored name -> the tensor itself, or a `SpreadTensor` for a converted DTensor, in transformers' order.
    """
    parts = with_spread_tensors(tensors)
    traced = trace_reverted(model, tensors)
    stored: dict[str, Any] = dict.fromkeys(traced)
    computed = {}
    for name, tensor in traced.items():
        if tensor.window is None:
            computed[name] = tensor
        else:
            source = tensor.sources[0]
            stored[name] = tensors[source] if _is_all_of(tensors[source], tensor) else _view_of(parts[source], tensor)
    for batch in _batches(computed, tensors):
        stored.update(_computed_parts(model, tensors, batch))
    return stored


def _is_all_of(source: Any, tensor: ConvertedTensor) -> bool:
    return tensor.window == tuple((0, size) for size in source.shape) and tuple(source.shape) == tensor.shape


def _view_of(source: Any, tensor: ConvertedTensor) -> Any:
    window = tensor.window or ()
    if isinstance(source, SpreadTensor):
        return source.view(window, tensor.shape)
    return source[tuple(slice(*interval) for interval in window)].reshape(tensor.shape)


def _batches(
    computed: Mapping[str, ConvertedTensor], tensors: Mapping[str, Any]
) -> Iterator[dict[str, ConvertedTensor]]:
    """Group the computed tensors so that each group has few sources; tensors that share sources stay together."""
    batch: dict[str, ConvertedTensor] = {}
    sources: set[str] = set()
    for names, more in _with_common_sources({name: tensor.sources for name, tensor in computed.items()}):
        if batch and _nbytes(tensors, sources.union(more)) > _GATHERED_BYTES:
            yield batch
            batch = {}
            sources = set()
        batch |= {name: computed[name] for name in names}
        sources.update(more)
    if batch:
        yield batch


def _with_common_sources(sources_of: Mapping[str, Iterable[str]]) -> list[tuple[list[str], list[str]]]:
    """Group names that are computed from a common source, with all sources of each group; the same on every rank."""
    by_name: dict[str, dict[str, None]] = {}
    by_source: dict[str, dict[str, None]] = {}
    for name, sources in sources_of.items():
        touched = [by_source[source] for source in sources if source in by_source]
        merged = {one: None for group in touched for one in group} | {name: None}
        for one in merged:
            by_name[one] = merged
            by_source.update(dict.fromkeys(sources_of[one], merged))
    groups = {id(names): list(names) for names in by_name.values()}.values()
    return [(names, list(dict.fromkeys(source for name in names for source in sources_of[name]))) for names in groups]


def _nbytes(tensors: Mapping[str, Any], names: Iterable[str]) -> int:
    return sum(prod(tensors[name].shape) * tensors[name].dtype.itemsize for name in names)


def _computed_parts(
    model: PreTrainedModel, tensors: Mapping[str, Any], batch: Mapping[str, ConvertedTensor]
) -> dict[str, Any]:
    """Compute some stored tensors from their full sources, and keep this rank's rows."""
    needed = {source: None for tensor in batch.values() for source in tensor.sources}
    values = _without_data(tensors)
    spread = {name: SpreadTensor.of(tensors[name], name).mesh for name in needed if is_dtensor(tensors[name])}
    for name in needed:
        source = tensors[name]
        values[name] = (source.full_tensor() if is_dtensor(source) else source).detach()
    results = revert_weight_conversion(view_as_alias(model), values)
    parts: dict[str, Any] = {}
    for name, tensor in batch.items():
        mesh = next((spread[source] for source in tensor.sources if source in spread), None)
        if results[name].is_meta:
            raise UnstorableTensorError(
                f"Cannot store {name!r}: transformers computes it from tensors that are spread over ranks, and it is "
                "unknown from which ones. Save with save_original_format=False.",
                fqn=name,
            )
        parts[name] = results[name] if mesh is None else _own_rows(results[name], mesh.ranks)
    return parts


def _own_rows(whole: torch.Tensor, ranks: tuple[int, ...]) -> SpreadTensor:
    """Keep this rank's rows of a tensor that all ranks have computed."""
    shape = tuple(whole.shape)
    layout = MeshLayout((len(ranks),), ranks, (Placement(0 if shape else None),))
    coordinate = (ranks.index(torch.distributed.get_rank()),)
    rows = _part_of(whole, held_box(shape, layout, coordinate)).clone()
    return SpreadTensor(shape, whole.dtype, layout, shape, None, coordinate, rows)


# Loading: the model is built without data and spread over ranks, and each rank reads its parts from the checkpoint.


Parallelize = Callable[[Any], Any]
"""Function that spreads a model without data over ranks (`fully_shard`, `parallelize_module` ...) and returns it."""


class ParallelizedLoad:
    """Replacement of transformers' `_load_pretrained_model` for one `from_pretrained`.

    1. transformers loads tensors without data. This determines the missing names, the conversions and the parameters'
       dtypes, and transformers ties and renames as usual.
    2. The user's function spreads the model, or transformers does so only now, following a `distributed_config`.
    3. Parameters that can be mapped are mapped, the others get memory, and each rank reads its parts of them, once all
       ranks are ready. Afterwards transformers initializes what is missing, and the buffers that are not stored.
    """

    def __init__(
        self, parallelize: Parallelize | None, model_class: type, checkpoint: OpenCheckpoint, read: ReadMode
    ) -> None:
        self._parallelize = parallelize
        self._model_class = model_class
        self._checkpoint = checkpoint
        self._mapper = PartMapper(checkpoint, read)
        self.stored_names: Mapping[str, str] = {}
        """Name that transformers is given -> name in the checkpoint."""
        self.tie: Callable[[Any], None] = lambda model: None
        """Function that restores ties that the config does not declare."""
        self.parallelized: Any = None
        """The spread model: the result of the user's function or of transformers."""
        self._distribute: Parallelize = lambda model: model

    def load_class(self, alias: type[PreTrainedModel]) -> type[PreTrainedModel]:
        """Create the class whose `from_pretrained` loads this way."""
        names = {"__module__": alias.__module__, "__qualname__": alias.__qualname__}
        methods: dict[str, Any] = {"_load_pretrained_model": staticmethod(self._load)}
        if self._parallelize is None:
            methods["maybe_distribute_model"] = staticmethod(self._distribute_later)
        return type(alias.__name__, (alias,), {**names, **methods})

    def _distribute_later(self, model: Any, *args: Any) -> Any:
        """Replace transformers' `maybe_distribute_model`, which is called later."""
        self._distribute = lambda model: type(model).maybe_distribute_model(model, *args)
        return model

    def _load(self, model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *rest: Any) -> Any:
        load_weights: Any = PreTrainedModel._load_pretrained_model
        result = load_weights(model, state_dict, checkpoint_files, replace(load_config, device_map={"": "meta"}), *rest)
        info = result[0]
        passed_over = set(info.missing_keys) | {one[0] for one in info.mismatched_keys}
        plan = _ReadPlan(model, passed_over, state_dict)
        shell = copy.deepcopy(model) if plan.computed else None
        model.__class__ = self._model_class
        ranks = current_load()
        meet_unchanged(ranks, "ready to spread")
        self.parallelized = self._spread(model, set(info.missing_keys))
        device = device_of_meshes(model.parameters())
        mapped = self._map_parts(plan, model, device)
        _give_memory(model, device, {id(tensor): new for tensor, new in mapped.values()})
        own = model.state_dict(keep_vars=True)
        info.missing_keys &= own.keys()  # a pipeline stage has less
        targets = ((self.stored_names[stored], target) for stored, target in plan.targets(own, mapped))
        read_parts = prepare_reads(self._checkpoint, targets)
        meet_unchanged(ranks, "ready to read")
        self._mapper.start_read_ahead()
        read_parts()
        for names, stored in plan.computed:
            read = self._checkpoint.read([self.stored_names[name] for name in stored])
            whole: Any = copy.deepcopy(shell)
            load_weights(whole, {name: read[self.stored_names[name]] for name in stored}, None, load_config, *rest)
            _fill(own, whole.state_dict(), names)
        meet_unchanged(ranks, "read")
        for name, tensor in own.items():
            if name not in passed_over:
                tensor._is_hf_initialized = True
        return result

    def _map_parts(
        self, plan: _ReadPlan, model: nn.Module, device: torch.device
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Map parameters and buffers without data that are stored as they are: name -> such a one, its replacement."""
        replaceable = {id(tensor) for tensor in chain(model.parameters(), model.buffers()) if tensor.is_meta}
        found = {}
        for name, stored, tensor in plan.unconverted(model.state_dict(keep_vars=True)):
            if id(tensor) in replaceable:
                new = self._mapper.map_like(self.stored_names[stored], tensor.detach(), tensor.dtype, device)
                if new is not None:
                    found[name] = tensor, new
        return found

    def _spread(self, model: Any, missing: set[str]) -> Any:
        if self._parallelize is None:
            return self._distribute(model)  # which expects ties to be made later
        self.tie(model)
        _tie_declared(model, missing)
        spread = self._parallelize(model)
        if not isinstance(spread, nn.Module):
            raise InvalidArgumentError("parallelize must return the model that it was given, spread over ranks.")
        _forget_absent_ties(model)
        return spread


class _ReadPlan:
    """Plan of which stored tensors fill which tensors of the model."""

    def __init__(self, model: Any, passed_over: set[str], given: Mapping[str, torch.Tensor]) -> None:
        """Plan the reads.

        Args:
            model: Without data, as transformers has loaded it.
            passed_over: The names that nothing is loaded into.
            given: Stored name -> meta tensor.
        """
        state = model.state_dict()
        wanted = {name: tensor for name, tensor in state.items() if name not in passed_over}
        traced = trace_reverted(model, wanted)
        self._given = given
        self._prefix = f"{model.base_model_prefix}."
        self._pieces: dict[str, list[tuple[str, ConvertedTensor]]] = {name: [] for name in wanted}
        computed: dict[str, dict[str, None]] = {}
        for name, tensor in traced.items():
            stored = self._stored_name(name)
            for source in tensor.sources if stored is not None else ():
                self._pieces[source].append((stored or "", tensor))
        for name, tensor in wanted.items():
            pieces = self._pieces[name]
            if not pieces:
                pieces.append((self._own_name(name, tensor), _unconverted(name, tensor)))
            elif not self._are_all_of(tensor, pieces):
                computed[name] = dict.fromkeys(stored for stored, _ in pieces)
        self.computed = _with_common_sources(computed)
        """Groups of the model's names, with the stored names that they are computed from."""
        for names, _ in self.computed:
            for name in names:
                self._pieces.pop(name)

    def unconverted(self, own: Mapping[str, Any]) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield the model's tensors that are stored as they are: the name, the stored name, and the tensor."""
        for name, tensor, pieces in self._filled(own):
            stored, piece = pieces[0]
            if len(pieces) == 1 and piece.shape == tuple(tensor.shape):
                yield name, stored, tensor

    def targets(self, own: Mapping[str, Any], exclude: Container[str]) -> Iterator[tuple[str, Target]]:
        """Yield each stored tensor's name and the part of the model's tensor that it fills, but for excluded names."""
        for name, tensor, pieces in self._filled(own):
            if name in exclude:
                continue
            spread = SpreadTensor.of(tensor, name) if is_dtensor(tensor) else None
            for stored, piece in pieces:
                window = piece.window or ()
                if spread is not None:
                    yield stored, spread.view(window, piece.shape)
                else:
                    yield stored, tensor.detach()[tuple(slice(*one) for one in window)].view(piece.shape)

    def _filled(self, own: Mapping[str, Any]) -> Iterator[tuple[str, Any, list[tuple[str, ConvertedTensor]]]]:
        """Yield each tensor that stored ones fill, under its first name, with those."""
        filled: set[int] = set()
        for name, pieces in self._pieces.items():
            tensor = own.get(name)
            if tensor is not None and id(tensor) not in filled:  # on another pipeline stage; or tied
                filled.add(id(tensor))
                yield name, tensor, pieces

    def _stored_name(self, name: str) -> str | None:
        """Find the stored name, which may have or lack the base model's prefix."""
        forms = (name, f"{self._prefix}{name}", name.removeprefix(self._prefix))
        return next((form for form in forms if form in self._given), None)

    def _own_name(self, name: str, tensor: torch.Tensor) -> str:
        stored = self._stored_name(name)
        if stored is None or self._given[stored].shape != tensor.shape:
            raise InvalidArgumentError(
                f"Cannot load '{name}' in parts: it is unknown which tensors of the checkpoint it is built from. "
                "Save the checkpoint again in one process, with save_pretrained, and load that.",
                fqn=name,
            )
        return stored

    def _are_all_of(self, tensor: torch.Tensor, pieces: list[tuple[str, ConvertedTensor]]) -> bool:
        """Return whether the pieces are rectangles, stored as such, that make up the whole tensor."""
        elements = 0
        for stored, piece in pieces:
            if piece.window is None or tuple(self._given[stored].shape) != piece.shape:
                return False
            elements += box_elements(tuple((interval,) for interval in piece.window))
        return elements == tensor.numel()


def _unconverted(name: str, tensor: torch.Tensor) -> ConvertedTensor:
    shape = tuple(tensor.shape)
    return ConvertedTensor(shape, tensor.dtype, (name,), tuple((0, size) for size in shape))


def _tie_declared(model: Any, missing: set[str]) -> None:
    """Tie what the config declares, unless the checkpoint has both names: transformers compares their values later."""
    if not any(missing.isdisjoint(pair) for pair in model.all_tied_weights_keys.items()):
        model.tie_weights(missing_keys=missing, recompute_mapping=False)


def _forget_absent_ties(model: Any) -> None:
    """Drop ties to parameters on other pipeline stages: transformers needs both parameters of each declared tie."""
    model.all_tied_weights_keys = {
        name: kept
        for name, kept in model.all_tied_weights_keys.items()
        if _has_parameter(model, name) and _has_parameter(model, kept)
    }


def _has_parameter(model: nn.Module, name: str) -> bool:
    try:
        model.get_parameter(name)
    except AttributeError:
        return False
    return True


def _give_memory(model: nn.Module, device: torch.device, mapped: Mapping[int, torch.Tensor]) -> None:
    """Replace a model's parameters and buffers without memory; shared ones stay shared.

    `mapped` has existing replacements by the id of the tensor; for the others, memory is allocated.
    """
    made: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for module in model.modules():
            for owned in (module._parameters, module._buffers):
                for name, tensor in owned.items():
                    if tensor is None or not tensor.is_meta:
                        continue
                    if id(tensor) not in made:
                        memory = mapped.get(id(tensor))
                        memory = torch.empty_like(tensor, device=device) if memory is None else memory
                        is_buffer = owned is module._buffers
                        made[id(tensor)] = memory if is_buffer else nn.Parameter(memory, tensor.requires_grad)
                    owned[name] = made[id(tensor)]  # type: ignore[assignment]


def _fill(own: Mapping[str, Any], whole: Mapping[str, torch.Tensor], names: list[str]) -> None:
    """Copy this rank's parts of full tensors."""
    with torch.no_grad():
        for name in names:
            if name not in own:  # on another pipeline stage
                continue
            if is_dtensor(own[name]):
                spread = SpreadTensor.of(own[name], name)
                spread.part().copy_(_part_of(whole[name], spread.stored_box))
            else:
                own[name].copy_(whole[name])


def _part_of(whole: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, intervals in enumerate(box):
        pieces = [whole.narrow(dim, start, stop - start) for start, stop in intervals]
        whole = pieces[0] if len(pieces) == 1 else torch.cat([*pieces, whole.narrow(dim, 0, 0)], dim)
    return whole


# The full model of a pipeline stage.


def build_meta_model(part: PreTrainedModel) -> PreTrainedModel | None:
    """Build the full model of a pipeline stage without data; None if its class cannot be built from a config alone."""
    config: Any = copy.deepcopy(part.config)
    config.distributed_config = None
    try:
        with torch.device("meta"):
            whole = alias_class(type(part))(config)
    except TypeError:
        return None
    if "_weight_conversions" in vars(part):  # the conversions with which transformers has loaded it
        vars(whole)["_weight_conversions"] = vars(part)["_weight_conversions"]
    return whole
