"""Collect what one save writes: three sets of tensors, and one JSON file of everything else."""

from __future__ import annotations

import copy
import os
import re
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn

from hfshard.constants import ADAPTER_CONFIG_NAME
from hfshard.errors import InvalidArgumentError
from hfshard.format.file_names import MODEL_BASE
from hfshard.format.index import Checksum
from hfshard.format.strict_json import padded_json
from hfshard.models.module_weights import whole_tensors
from hfshard.models.patching import is_pretrained
from hfshard.saving.save_request import SaveOptions, SaveRequest, request_from_module, request_from_state_dict
from hfshard.tensors.parameter_names import unwrap
from hfshard.tensors.state_dict import collect_state_dict, has_parts, has_spread, parameter_names
from hfshard.tensors.stored_tensor import tensor_nbytes, tensor_specs
from hfshard.training.state.flat_optimizer import with_named_states
from hfshard.training.state.nested import encode
from hfshard.training.state.optimizer import encode_optimizer, reject_unsaved
from hfshard.training.state.rng import rng_state
from hfshard.training.state.scheduler import encode_scheduler
from hfshard.training.state.training_state import PartKind, TrainingState, collect_run_tensors
from hfshard.training.state.zero_runs import Masters

TRAINING_STATE_FORMAT: Final = 1
"""The format of `training_state.json`."""

STATE_BASE: Final = "state"

PARTS: Final = (MODEL_BASE, "optimizer", STATE_BASE)
"""The sets of tensors, by the first word of their files' names."""

_OF_A_RANK: Final = re.compile(r"rank\d+/")

_FROZEN_SHARE: Final = 0.1
"""The share of a model's bytes from which frozen weights get their own files; below it there is little to save."""


@dataclass(frozen=True, slots=True)
class SavePayload:
    """Everything that one save writes."""

    requests: dict[str, SaveRequest]
    """The requests by set of tensors; sets without tensors and config are left out."""
    training_state: bytes
    """The contents of `training_state.json`."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor_nbytes(tensor) for request in self.requests.values() for tensor in request.tensors.values())

    def without_adapter(self) -> SavePayload:
        """Return a payload without the files for PEFT, which cannot read the names in a store."""
        return replace(self, requests={base: one for base, one in self.requests.items() if base != ADAPTER_BASE})

    def of_one_process(self) -> SavePayload:
        """Return the payload for a process that stores all tensors itself; they are checked before anything is copied.

        Raises:
            UnstorableTensorError: A tensor cannot be stored.
            InvalidArgumentError: Other ranks have parts of a tensor, or other layers of the model.
        """
        model = self.requests.get(MODEL_BASE)
        if model is not None and model.name_order:
            raise InvalidArgumentError(
                "The model is one of several pipeline stages, but there is no process group to save the others with. "
                "Save before destroy_process_group(), on every rank."
            )
        spread = {base: request for base, request in self.requests.items() if has_spread(request.tensors)}
        whole = {base: replace(one, tensors=whole_tensors(one.tensors)) for base, one in spread.items()}
        requests = self.requests | whole
        for request in requests.values():
            tensor_specs(request.tensors)
        return replace(self, requests=requests)


@dataclass(frozen=True, slots=True)
class Components:
    """The parts of a state that all ranks share, or have parts of: encoded, and their tensors."""

    encoded: dict[str, dict[str, Any]]
    """Name -> its kind and state."""
    optimizer_tensors: dict[str, torch.Tensor]
    """The tensors of the component `optimizer`."""
    tensors: dict[str, torch.Tensor]
    """The tensors of all other components, except the model."""
    masters: Masters = field(default_factory=dict)
    """What the optimizers step on for the model's parameters."""
    model: dict[str, Any] = field(default_factory=dict)
    """What `collect_run_tensors` returned for the model."""


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank's contribution to a checkpoint: its random state and the positions of its loaders."""

    nested: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def rank_prefix(rank: int) -> str:
    """Return the prefix of the names of tensors that belong to one rank alone."""
    return f"rank{rank}/"


def is_rank_local(name: str) -> bool:
    """Return whether a tensor of the set `STATE_BASE` belongs to one rank alone."""
    return _OF_A_RANK.match(name) is not None


def collect_rank(
    state: TrainingState, rank: int, more: Collection[str] = (), stage: str = "", buffers: Collection[str] = ()
) -> RankState:
    """Collect what belongs to this rank alone; nothing is changed, drawn or copied.

    Args:
        state: The parts.
        rank: This rank.
        more: Parts that differ on each stage of a pipeline, or on each rank.
        stage: A digest that distinguishes this rank's stage from others; empty without a pipeline.
        buffers: Buffers of modules that differ on each rank, as `OfEachRank` names them.

    Raises:
        UnstorableTensorError: A value cannot be stored; the message says where it is.
    """
    tensors: dict[str, torch.Tensor] = {}
    prefix = rank_prefix(rank)
    components = {
        name: {"kind": kind, "state": encode_alone(name, kind, state, f"{prefix}{name}", tensors)}
        for name, kind in state.kinds.items()
        if kind == "loader" or name in more
    }
    nested: dict[str, Any] = {"rng": encode(rng_state(), f"{prefix}rng", tensors), "components": components}
    if buffers:
        own: dict[str, dict[str, Any]] = {}
        for component, module in state.of_kind("module").items():
            held = collect_state_dict(module)
            own[component] = {name: held[name] for name in held if f"{component}/{name}" in buffers}
        nested["buffers"] = encode(own, f"{prefix}buffers", tensors)
    return RankState({**nested, "stage": stage} if stage else nested, tensors)


def encode_components(state: TrainingState, left_out: Collection[str] = ()) -> Components:
    """Encode all parts that do not belong to each rank alone; nothing is changed, drawn or copied.

    Args:
        state: The parts.
        left_out: Parts that differ on each stage of a pipeline, or on each rank, and are in `collect_rank`.

    Raises:
        UnstorableTensorError: A value cannot be stored; the message says where it is. (Tensors are checked later.)
        InvalidArgumentError: An optimizer has a parameter without a name.
    """
    found = Components({}, {}, {}, state.masters)
    if state.is_flattened:
        state = with_named_states(state)
    for name, kind in state.kinds.items():
        if kind != "loader" and name not in left_out:
            found.encoded[name] = {"kind": kind, "state": _encode_component(name, kind, state, found)}
            if (order := state.order_digest(name)) is not None:
                found.encoded[name]["order"] = order
    return found


def collect(
    components: Components,
    model: torch.nn.Module | None,
    ranks: Sequence[RankState],
    extra: Any,
    options: SaveOptions,
    lacking: Sequence[str] = (),
) -> SavePayload:
    """Collect every part of a training state; nothing is changed, drawn or copied.

    Args:
        components: Those that all ranks share; receives the tensors of the rest.
        model: The state's model.
        ranks: The states that belong to each rank alone.
        extra: More to store: anything that `nested.encode` accepts.
        options: The options of each set of tensors.
        lacking: What was missing in the other program's checkpoint from which this one is created.

    Raises:
        UnstorableTensorError: A value cannot be stored; the message says where it is. (Tensors are checked later.)
    """
    tensors = components.tensors
    for rank in ranks:
        tensors |= rank.tensors
    extras = encode(extra, "extra", tensors)
    nested_ranks = [rank.nested for rank in ranks]
    state = {"format": TRAINING_STATE_FORMAT, "components": components.encoded, "ranks": nested_ranks, "extra": extras}
    raw = padded_json({**state, "lacking": list(lacking)} if lacking else state)
    requests = {}
    if model is not None:
        requests[MODEL_BASE] = _model_request(model, options, components)
        if "peft" in sys.modules and (adapter := adapter_request(model, options)) is not None:
            requests[ADAPTER_BASE] = adapter
    for base, part_tensors in (("optimizer", components.optimizer_tensors), (STATE_BASE, tensors)):
        if part_tensors:
            requests[base] = request_from_state_dict(part_tensors, replace(options, base=base, progress=None))
    return SavePayload(requests, raw)


def save_options(max_shard_size: int | str, checksum: Checksum | None, progress: bool | None) -> SaveOptions:
    """Return the options with which a checkpoint's files are written, for each set of tensors."""
    return SaveOptions(max_shard_size=max_shard_size, checksum=checksum, save_original_format=False, progress=progress)


def _encode_component(name: str, kind: PartKind, state: TrainingState, found: Components) -> Any:
    if kind == "module":
        tensors = collect_run_tensors(state.components[name], state.masters)
        if name == "model":  # its tensors are a set of their own; the rest is what `get_extra_state` returned
            found.model.update(tensors)
            tensors = {key: value for key, value in tensors.items() if not isinstance(value, torch.Tensor)}
        return encode(tensors, name, found.tensors)
    if kind == name == "optimizer":
        return encode_alone(name, kind, state, "", found.optimizer_tensors)
    return encode_alone(name, kind, state, name, found.tensors)


def encode_alone(name: str, kind: PartKind, state: TrainingState, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Encode a part that is not a module; `tensors` receives its tensors, named from `path`, if this is not empty."""
    part = state.components[name]
    if kind == "optimizer":
        reject_unsaved(part, name, state.components.values())
        return encode_optimizer(part, state.parameter_names(), name, tensors, f"{path}/" if path else "")
    return encode_scheduler(part, path, tensors) if kind == "scheduler" else encode(part.state_dict(), path, tensors)


def _model_request(model: torch.nn.Module, options: SaveOptions, components: Components) -> SaveRequest:
    # Under the model's own names, not those of the original checkpoint: transformers loads both, and a resume finds
    # each tensor where it was.
    own = None
    if not is_pretrained(unwrap(model)) or components.masters or has_parts(model):
        own = {name: value for name, value in components.model.items() if isinstance(value, torch.Tensor)}
    request = request_from_model(model, own, options)
    return replace(request, separate_names=_frozen(model, request))


def request_from_model(model: nn.Module, state_dict: Mapping[str, Any] | None, options: SaveOptions) -> SaveRequest:
    """Build the request to save a model; for a transformers model, with its config, generation config and custom code.

    Args:
        model: The model; wrappers around it are removed.
        state_dict: Tensors to save instead of the model's own; not mutated.
        options: How to save.
    """
    model = unwrap(model)
    if not is_pretrained(model):
        return request_from_module(model, state_dict, options)
    from hfshard.models.collect import request_from_pretrained

    return request_from_pretrained(model, state_dict, options)  # type: ignore[arg-type]


def _frozen(model: torch.nn.Module, request: SaveRequest) -> frozenset[str]:
    """Return the weights that are not trained, if they are a large part: their files are linked, not written again."""
    names = parameter_names(model)
    not_trained = {names[id(parameter)] for parameter in model.parameters() if not parameter.requires_grad}
    frozen = frozenset(not_trained & request.tensors.keys())
    total_bytes = sum(map(tensor_nbytes, request.tensors.values()))
    frozen_bytes = sum(tensor_nbytes(request.tensors[name]) for name in frozen)
    return frozen if frozen_bytes >= _FROZEN_SHARE * total_bytes else frozenset()


# The adapter of a model, as PEFT saves it.

ADAPTER_BASE: Final = "adapter_model"
"""The name that PEFT gives to the file of its weights."""

_PREFIX: Final = "base_model.model."
"""The prefix of names in that file; adapters that transformers adds to a model have none in the model."""

_LARGEST: Final = sys.maxsize
"""PEFT reads one file, however large."""

_NOT_ALONE: Final = frozenset({"XLORA"})
"""Kinds of adapters that PEFT builds from several, with their own files."""


def adapter_request(model: Any, options: SaveOptions) -> SaveRequest | None:
    """Request the files that PEFT, which is imported, would write for the active adapter. A restore does not need them.

    They repeat tensors of the model's files, under PEFT's names. There are none for learned prompts, of which PEFT
    saves the encoder's output; if several adapters are active at once; and for X-LoRA.

    Args:
        model: The model, with or without wrappers.
        options: The options of the model's files.

    Returns:
        The request; None if there are no such files.
    """
    peft: Any = sys.modules["peft"]
    model = unwrap(model)
    found = _active_adapter(model, peft.PeftModel)
    if found is None or found[1].is_prompt_learning or found[1].peft_type in _NOT_ALONE:
        return None
    name, config = found
    is_wrapped = isinstance(model, peft.PeftModel)
    base: Any = model.get_base_model() if is_wrapped else model
    as_it_is = dict(vars(config))
    try:
        tensors = peft.get_peft_model_state_dict(
            model,
            state_dict=collect_state_dict(model),
            adapter_name=name,
            save_embedding_layers=_holds_embeddings(peft, base, config),
        )
        config_file = _config_file(base, config)
    finally:
        vars(config).update(as_it_is)  # PEFT renames the ranks of AdaLoRA
    return SaveRequest(
        tensors={key if is_wrapped else f"{_PREFIX}{key}": tensor for key, tensor in tensors.items()},
        options=replace(options, base=ADAPTER_BASE, max_shard_size=_LARGEST, progress=None),
        model_files={ADAPTER_CONFIG_NAME: config_file},
    )


def _active_adapter(model: Any, wrapper_class: Any) -> tuple[str, Any] | None:
    """Return the name and the config of the one active adapter."""
    if isinstance(model, wrapper_class):
        names = model.active_adapters
    elif getattr(model, "_hf_peft_config_loaded", False):  # as transformers marks a model to which it added adapters
        names = model.active_adapters()
    else:
        return None
    return (names[0], model.peft_config[names[0]]) if len(names) == 1 else None


def _holds_embeddings(peft: Any, base: Any, config: Any) -> bool:
    """Return whether the file has the embeddings, too: they were adapted, or their number has changed.

    PEFT decides it in the same way, but would request the base model's config from the Hub at each save. This uses only
    what is on this machine.
    """
    adapted = {name.rpartition(".")[2] for name, module in base.named_modules() if hasattr(module, "base_layer")}
    has_new_tokens = config.peft_type == "TRAINABLE_TOKENS" or getattr(config, "trainable_token_indices", None)
    if not adapted.isdisjoint(peft.utils.constants.EMBEDDING_LAYER_NAMES) and not has_new_tokens:
        return True
    own: Any = getattr(base, "config", None)
    place = config.base_model_name_or_path
    find_config = getattr(type(own), "from_pretrained", None)  # a config of transformers
    if not place or find_config is None or not hasattr(own, "vocab_size") or not hasattr(base, "get_input_embeddings"):
        return False
    try:
        before = find_config(place, local_files_only=True)
    except OSError:  # the model was not loaded from there, and PEFT would find nothing to compare with, either
        return False
    return bool(before.vocab_size != own.vocab_size)


def _config_file(base: nn.Module, config: Any) -> bytes:
    """Return what PEFT writes for a config; the config itself is not changed."""
    config = copy.copy(config)
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or vars(base).get("name_or_path") or None
    names = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    with tempfile.TemporaryDirectory(prefix="hfshard-") as folder:
        config.save_pretrained(folder, auto_mapping_dict=names if config.task_type is None else None)
        with open(os.path.join(folder, ADAPTER_CONFIG_NAME), "rb") as file:
            return file.read()
