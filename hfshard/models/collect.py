"""Collect what transformers would save of a model: weights under their names on disk, configs and custom code."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from hfshard.constants import CONFIG_NAME, WEIGHTS_OVERRIDE_KEY
from hfshard.errors import InvalidArgumentError
from hfshard.format.index import without_weights_override
from hfshard.models.model_classes import architecture_of, empty_custom_object, is_pipeline_stage, view_as_alias
from hfshard.models.rank_parts import build_meta_model, stored_parts, trace_reverted
from hfshard.saving.save_request import SaveOptions, SaveRequest, WholeModel, has_tensors, with_parts
from hfshard.tensors.state_dict import (
    collect_state_dict,
    count_parameters,
    has_parts,
    has_spread,
    may_be_divided,
)
from hfshard.tensors.stored_tensor import is_torch_tensor_type, tensor_specs
from hfshard.tensors.tied import find_shared_tensors
from hfshard.tensors.zero3 import is_partitioned, reject_partitioned

logger = logging.getLogger(__name__)

_SHARED_MEMORY: Final = "/dev/shm"
"""A file system in memory, on Linux; in containers it is small, and often full."""
_ROOM_BYTES: Final = 16 * 2**20
"""Room for configs, custom code, and what others write there meanwhile."""


def request_from_pretrained(
    model: PreTrainedModel, state_dict: Mapping[str, Any] | None, options: SaveOptions, place: str = "model"
) -> SaveRequest:
    """Build the request to save what transformers' `save_pretrained` would write of this model.

    For a model that is spread over ranks, this is one rank's part of the request: every rank must build its own.

    Args:
        model: Unwrapped.
        state_dict: Tensors to save instead of the model's own; not mutated.
        options: `save_original_format` selects whether converted weights (fused experts ...) are saved under their
            original names.
        place: Path, address or repo_id of the target, whose last part a config's own `save_pretrained` sees.

    Raises:
        InvalidArgumentError: Its quantization cannot be saved.
        UnstorableTensorError: It has a DTensor, or another tensor, that cannot be stored, or a tensor that DeepSpeed
            has partitioned in a way that hfshard does not know.

    Source: transformers `PreTrainedModel.save_pretrained`.
    """
    if state_dict is None and getattr(model, "hf_quantizer", None) is not None:
        reject_partitioned(model)
    quantized, metadata = _quantized_state(model)
    state_dict = quantized if quantized is not None else state_dict
    kept, ties = _kept_and_tied(model, collect_state_dict(model) if state_dict is None else state_dict)
    tensor_specs({name: value for name, value in kept.items() if is_torch_tensor_type(value)})  # before any is touched
    stored: Mapping[str, Any] = kept
    if options.save_original_format:
        view = view_as_alias(model)
        stored = stored_parts(model, kept) if has_spread(kept) else revert_weight_conversion(view, dict(kept))
    tied_names, undeclared_ties = _stored_ties(model, ties, kept, stored)
    files = _model_files(model, place)
    look = partial(_look_at_whole, model, options) if state_dict is None else None
    whole = look() if look is not None and is_pipeline_stage(model) else None
    if whole is None and look is not None and is_pipeline_stage(model):
        raise InvalidArgumentError(
            f"Cannot save {type(model).__name__}: it is one of several pipeline stages, and the full model, which "
            "defines the order of its names, cannot be built from its config. Save the model before it is split."
        )
    return SaveRequest(
        tensors=stored,
        options=options,
        tied_names=tied_names,
        undeclared_ties=undeclared_ties,
        file_metadata={key: str(value) for key, value in metadata.items()},
        total_parameters=_parameters_of(model) if whole is None else whole.total_parameters,
        config=files.pop(CONFIG_NAME),
        model_files=files,
        needs_tensors=state_dict is not None and has_tensors(model),
        name_order=() if whole is None else whole.names,
        describe_full_model=look,
    )


def _kept_and_tied(model: PreTrainedModel, state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Select the tensors of a state dict to save, and map each tied name to the name that is saved.

    Text, as bitsandbytes has next to its tensors, is left out, as by huggingface_hub's `split_state_dict_into_shards`.
    """
    ignored = model._keys_to_ignore_on_save or ()
    saved = {name: value for name, value in state_dict.items() if name not in ignored and not isinstance(value, str)}
    saved = with_parts(saved)
    ties = find_shared_tensors(saved, droppable_patterns=_droppable_patterns(model))
    return {name: value for name, value in saved.items() if name not in ties}, ties


def _parameters_of(model: PreTrainedModel) -> int:
    """Return a model's parameter count, also if ranks have parts of it: then transformers would miscount."""
    is_miscounted = may_be_divided(model) and (has_parts(model) or any(map(is_partitioned, model.parameters())))
    return count_parameters(model) if is_miscounted else model.num_parameters()


def _look_at_whole(part: PreTrainedModel, options: SaveOptions) -> WholeModel | None:
    """Return the full model's names on disk, in their order, or None if it cannot be built from its config."""
    whole = build_meta_model(part)
    if whole is None:
        return None
    kept, _ = _kept_and_tied(whole, whole.state_dict())
    names = trace_reverted(whole, kept) if options.save_original_format else kept
    return WholeModel(tuple(names), whole.num_parameters())


def _quantized_state(model: PreTrainedModel) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the state dict that the model's quantizer saves, if it has a quantizer, and metadata for every file."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        return None, {}
    if not quantizer.is_serializable():
        method = getattr(quantizer.quantization_config, "quant_method", "this method")
        raise InvalidArgumentError(f"Cannot save a model that is quantized with {method}. Dequantize it first.")
    state_dict, metadata = quantizer.get_state_dict_and_metadata(model)
    return state_dict, metadata


def _model_files(model: PreTrainedModel, place: str) -> dict[str, bytes]:
    """Build config.json, generation_config.json and custom code, as transformers writes them for its own class.

    Configs of other code may write more, into folders, too.
    """
    update_config(model)
    config = cast(Any, model.config)
    with tempfile.TemporaryDirectory(prefix="hfshard-", dir=_directory_in_memory()) as above, _unsaid(above):
        folder = os.path.join(above, os.path.basename(os.path.abspath(f"/{place}")))  # it may end in ".."
        os.makedirs(folder, exist_ok=True)
        if model.is_remote_code():
            custom_object_save(empty_custom_object(type(model)), folder, config=config)
        config.save_pretrained(folder)
        if model.can_generate():
            cast(Any, model).generation_config.save_pretrained(folder)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    files[CONFIG_NAME] = _under_usual_names(files[CONFIG_NAME])
    return files


def _directory_in_memory() -> str | None:
    """Return a directory in memory, if one has room: a save into a store does not write to disk."""
    try:
        has_room = shutil.disk_usage(_SHARED_MEMORY).free >= _ROOM_BYTES
    except OSError:
        return None
    return _SHARED_MEMORY if has_room and os.access(_SHARED_MEMORY, os.W_OK | os.X_OK) else None


def update_config(model: PreTrainedModel) -> None:
    """Set the dtype and the class in a model's config, as transformers does in a save on each rank."""
    config = cast(Any, model.config)
    config.dtype = str(model.dtype).split(".")[1]
    config.architectures = [architecture_of(type(model)).__name__.removeprefix("FSDP")]


@contextmanager
def _unsaid(folder: str) -> Iterator[None]:
    """Suppress transformers' INFO messages about files saved in this temporary folder."""
    loggers = [logging.getLogger(f"transformers.{name}configuration_utils") for name in ("", "generation.")]

    def is_of_others(record: logging.LogRecord) -> bool:
        return folder not in record.getMessage()

    for one in loggers:
        one.addFilter(is_of_others)
    try:
        yield
    finally:
        for one in loggers:
            one.removeFilter(is_of_others)


def _under_usual_names(config: bytes) -> bytes:
    # A model that was loaded during a commit, or by an override, is saved under the usual names.
    return without_weights_override(config) if WEIGHTS_OVERRIDE_KEY in json.loads(config) else config


def _droppable_patterns(model: PreTrainedModel) -> list[str]:
    """List the patterns of tied names that need not be stored, as declared by the model and the models in it."""
    patterns = []
    for path, module in model.named_modules():
        declared = getattr(module, "_tied_weights_keys", None) or {}
        patterns += [f"{path}.{key}" if path else key for key in declared]
    return patterns


def _stored_ties(
    model: PreTrainedModel, ties: Mapping[str, str], kept: Mapping[str, Any], stored: Mapping[str, Any]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Translate ties into the file's names, and list the ones that no config declares.

    Ties whose stored name was converted into something else are omitted: the config restores them on load.
    """
    tied_names: dict[str, str] = {}
    undeclared_ties: list[str] = []
    declared = getattr(model, "all_tied_weights_keys", None) or {}
    renamed = {id(value): name for name, value in stored.items()}
    for tied_name, name in ties.items():
        file_name = name if name in stored else renamed.get(id(kept[name]))
        file_tied_name: str | None = tied_name
        if file_name != name:
            file_tied_name = next(iter(trace_reverted(model, {tied_name: kept[name]})), None)
        is_declared = _declared_source(declared, tied_name) == _declared_source(declared, name)
        if file_name is None or file_tied_name is None or file_tied_name in stored or file_tied_name in tied_names:
            if not is_declared:
                logger.warning(
                    "'%s' and '%s' share a tensor, but the saved checkpoint cannot record that.", tied_name, name
                )
            continue
        tied_names[file_tied_name] = file_name
        if not is_declared:
            undeclared_ties.append(file_tied_name)
    if undeclared_ties:
        logger.warning(
            "%s share a tensor with another name, which the config does not declare: hfshard ties them again on "
            "load, but stock transformers does not.",
            ", ".join(undeclared_ties),
        )
    return tied_names, tuple(undeclared_ties)


def _declared_source(declared: Mapping[str, str], name: str) -> str:
    """Return the name whose tensor the config gives to this one; ties may be chained."""
    passed = set()
    while name in declared and name not in passed:
        passed.add(name)
        name = declared[name]
    return name
