"""Arguments of transformers' from_pretrained, sorted into those for the files, the config and the model."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping
from typing import Any, Final, cast

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.integrations.accelerate import check_and_set_device_map
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model
from transformers.utils.hub import cached_files
from transformers.utils.import_utils import is_peft_available

from hfshard._util.arguments import reject_unknown_arguments
from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.constants import CONFIG_NAME, WEIGHTS_OVERRIDE_KEY
from hfshard.errors import CheckpointNotFoundError
from hfshard.models.model_classes import has_override
from hfshard.places.place import ResolvedSource
from hfshard.places.source import CheckpointSource
from hfshard.tensors.stored_tensor import TORCH_DTYPES

_SPARE_DEVICE_BYTES: Final = 2 * 1024**3
"""GPU memory left free next to the model and what transformers reserves for it (it leaves 1.2 GiB itself)."""

_PLACED_BY_TRANSFORMERS: Final = ("quantization_config", "tp_plan", "distributed_config")
"""Arguments that make transformers itself decide where tensors go."""

SOURCE_ARGUMENTS: Final = {
    "cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies",
}  # fmt: skip
"""Arguments that select the files' source; the config and the generation config are loaded with them too."""

MODEL_ARGUMENTS: Final = SOURCE_ARGUMENTS | {
    "_commit_hash", "_fast_init", "_from_auto", "_from_pipeline", "adapter_kwargs", "adapter_name", "allow_all_kernels",
    "config", "device_map", "device_mesh", "disable_mmap", "distributed_config", "dtype", "from_flax", "from_tf",
    "fusion_config", "generation_config", "gguf_file", "ignore_mismatched_sizes", "kernel_config", "key_mapping",
    "low_cpu_mem_usage", "max_memory", "mirror", "offload_buffers", "offload_folder", "offload_state_dict",
    "output_loading_info", "quantization_config", "state_dict", "torch_dtype", "tp_plan", "tp_size", "tqdm_class",
    "trust_remote_code", "use_kernels", "use_safetensors", "variant", "weights_only",
}  # fmt: skip
"""Arguments that transformers' from_pretrained uses itself; all others go to the config, and then to the model."""

CONFIG_ATTRIBUTES: Final = {"attn_implementation", "experts_implementation"}
"""Arguments that transformers sets on the config and does not pass to the model."""


def source_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the arguments that select the files' source."""
    return {key: kwargs[key] for key in SOURCE_ARGUMENTS if key in kwargs}


def source_of(
    name: str, kwargs: Mapping[str, Any], *, needs_signature: bool = False, takes_oddities: bool = False
) -> CheckpointSource:
    """Create the source that these arguments describe, including all that a signature covers if that is needed."""
    query = CheckpointQuery(
        subfolder=kwargs.get("subfolder") or "",
        variant=kwargs.get("variant"),
        use_safetensors=kwargs.get("use_safetensors"),
        revision=_resolved(name, kwargs.get("revision")),
        token=kwargs.get("token"),
        cache_dir=kwargs.get("cache_dir"),
        local_files_only=bool(kwargs.get("local_files_only")),
        force_download=bool(kwargs.get("force_download")),
        needs_code=bool(kwargs.get("trust_remote_code")),
        accepts_adapter=bool(is_peft_available()),
        needs_signature=needs_signature,
        takes_oddities=takes_oddities,
    )
    return CheckpointSource(name, query, takes_files=True)


def _resolved(name: str, revision: Any) -> str | None:
    """Return the commit if the caller has resolved it for this repo, else the revision.

    Auto classes resolve it, and read the config from that commit.

    Source: huggingface_hub 2 `ResolvedRevision`, a string that equals the branch.
    """
    commit: str | None = getattr(revision, "resolved", None)
    is_of_this_repo = getattr(revision, "repo_id", None) in (None, name)
    return commit if commit is not None and is_of_this_repo else revision


def pin_to_commit(kwargs: Mapping[str, Any], local: ResolvedSource) -> dict[str, Any]:
    """Change the arguments so that transformers finds the pulled files in the cache and sends no request."""
    if local.commit is None:
        return dict(kwargs)
    return {**kwargs, "revision": local.commit, "force_download": False}


def commit_argument(local: ResolvedSource) -> dict[str, str]:
    """Return the argument that makes transformers before 5.20 trust the cache that a commit lacks a file."""
    if local.commit is None or "_commit_hash" not in inspect.signature(cached_files).parameters:
        return {}
    return {"_commit_hash": local.commit}


def config_of(
    model_class: type[PreTrainedModel], local: ResolvedSource, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Load the config and return it with the remaining arguments, which are for the model's constructor."""
    rest = {key: value for key, value in kwargs.items() if key not in MODEL_ARGUMENTS}
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        model_kwargs = {key: value for key, value in rest.items() if key not in CONFIG_ATTRIBUTES}
        _reject_unknown_model_arguments(model_class, config, model_kwargs)
        if hasattr(config, WEIGHTS_OVERRIDE_KEY):  # an Auto class has read it during a commit
            config = copy.deepcopy(config)
            _forget_weights_override(config)
        return config, model_kwargs
    config_class = cast(Any, model_class).config_class
    config, model_kwargs = config_class.from_pretrained(
        config if config is not None else local.path,
        return_unused_kwargs=True,
        **_config_source_arguments(kwargs, local),
        **rest,
    )
    model_kwargs = {key: value for key, value in model_kwargs.items() if key in rest and key not in CONFIG_ATTRIBUTES}
    _forget_weights_override(config)
    _reject_unknown_model_arguments(model_class, config, model_kwargs)
    return config, model_kwargs


def reject_file_without_config(local: ResolvedSource, kwargs: Mapping[str, Any]) -> None:
    """Reject building a model from one file of weights without a config, either next to it or given."""
    beside = os.path.join(local.directory, CONFIG_NAME)
    if local.weights_name is not None and kwargs.get("config") is None and not os.path.lexists(beside):
        raise CheckpointNotFoundError(
            f"The file '{local.folder.path_of(local.weights_name)}' has no config next to it, so no model can be "
            "built from it. Pass config=, or load it into a model that you have built: load_model(model, path).",
            path=beside,
        )


def _forget_weights_override(config: Any) -> None:
    override = getattr(config, WEIGHTS_OVERRIDE_KEY, None)
    if isinstance(override, str) and "-hfshard-" in override:
        delattr(config, WEIGHTS_OVERRIDE_KEY)  # of a commit in progress


def _config_source_arguments(kwargs: Mapping[str, Any], local: ResolvedSource) -> dict[str, Any]:
    """Select the config's source; a config of another repo has the caller's revision, not the resolved commit."""
    where = source_arguments(kwargs)
    if kwargs.get("config") is not None and local.commit is not None:
        where["revision"] = local.revision
        if local.revision is None:
            del where["revision"]
    return where


def _reject_unknown_model_arguments(model_class: type, config: Any, model_kwargs: Mapping[str, Any]) -> None:
    parameters = inspect.signature(cast(Any, model_class).__init__).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    unknown = set(model_kwargs) - set(parameters)
    if unknown:
        hfshard_arguments = {"strict", "verify", "read", "progress"}
        known = set(parameters) | MODEL_ARGUMENTS | CONFIG_ATTRIBUTES | hfshard_arguments | set(config.to_dict())
        reject_unknown_arguments(unknown, known - set(model_kwargs), "from_pretrained")


def device_of(checkpoint: OpenCheckpoint, config: Any, kwargs: Mapping[str, Any]) -> torch.device:
    """Choose the device that tensors are read to: a GPU that takes all of them as they are stored, else the CPU.

    1. Tensors that transformers casts, quantizes or spreads over devices are read to the CPU. It takes them one by
       one, so that the device need not hold them twice.
    2. The device needs room for twice the model: given a device_map, transformers reserves the model's size there
       before it reads the tensors (`caching_allocator_warmup`).
    """
    cpu = torch.device("cpu")
    device_map = check_and_set_device_map(kwargs.get("device_map"))
    if not isinstance(device_map, dict) or set(device_map) != {""} or getattr(config, "quantization_config", None):
        return cpu
    device = torch.device(device_map[""])
    if device.type != "cuda":  # of another device, torch cannot say how much room it has
        return cpu
    if any(kwargs.get(key) is not None for key in _PLACED_BY_TRANSFORMERS):
        return cpu
    if not _is_stored_as_loaded(checkpoint, config, kwargs):
        return cpu
    stored_bytes = sum(shard.data_bytes for shard in checkpoint.shards.values())
    free_bytes, _ = torch.cuda.mem_get_info(device)
    free_bytes += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return device if 2 * stored_bytes + _SPARE_DEVICE_BYTES <= free_bytes else cpu


def _is_stored_as_loaded(checkpoint: OpenCheckpoint, config: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether all floating-point tensors are stored in the model's target dtype."""
    dtypes = [kwargs[key] for key in ("dtype", "torch_dtype") if kwargs.get(key) not in (None, "auto")]
    model_dtype = dtypes[0] if dtypes else config.dtype
    if isinstance(model_dtype, str):
        model_dtype = getattr(torch, model_dtype, None)
    infos = (info for shard in checkpoint.shards.values() for info in shard.header.tensors.values())
    stored = {TORCH_DTYPES.get(dtype) for dtype in {info.dtype for info in infos}}
    floats = {dtype for dtype in stored if dtype is None or dtype.is_floating_point}
    return isinstance(model_dtype, torch.dtype) and floats == {model_dtype}


def class_of_auto(
    auto: Any, local: ResolvedSource, kwargs: dict[str, Any]
) -> tuple[type[PreTrainedModel], dict[str, Any]]:
    """Find the class that an Auto class would build, by building it without weights.

    Returns:
        The class, and the arguments of its `from_pretrained`. They include the config if the class overrides
        `from_pretrained`, since the override may use it. Otherwise the config is read again, along with the open
        weights.
    """
    unused = {key: value for key, value in kwargs.items() if key not in MODEL_ARGUMENTS | CONFIG_ATTRIBUTES}
    given = set(unused)
    config = kwargs.get("config")
    if not isinstance(config, PreTrainedConfig):
        config, unused = AutoConfig.from_pretrained(
            config or local.path,
            trust_remote_code=kwargs.get("trust_remote_code"),
            return_unused_kwargs=True,
            **_config_source_arguments(kwargs, local),
            **unused,
        )
        _forget_weights_override(config)
    config.name_or_path = local.path
    from_auto = {**kwargs, "_from_auto": True}
    from_auto.pop("code_revision", None)
    model_class: Any = _custom_class(auto, config, local.path, kwargs)
    if model_class is None:
        with torch.device("meta"):
            model: nn.Module = auto.from_config(
                copy.deepcopy(config), trust_remote_code=kwargs.get("trust_remote_code")
            )
        model_class = type(model)
    if has_override(model_class, "from_pretrained") and isinstance(config, model_class.config_class):
        from_auto = {key: value for key, value in from_auto.items() if key not in given or key in unused}
        from_auto["config"] = config
    return model_class, from_auto


def _custom_class(auto: Any, config: Any, name: str, kwargs: Mapping[str, Any]) -> type[PreTrainedModel] | None:
    """Find the class that a checkpoint's own code defines as transformers would, with its revision and cache.

    Source: transformers `_BaseAutoModelClass.from_pretrained`; its `from_config` would take the code of main from the
    default cache.
    """
    reference = (getattr(config, "auto_map", None) or {}).get(auto.__name__)
    if not reference or not kwargs.get("trust_remote_code") or type(config) in auto._model_mapping:
        return None
    where = {key: value for key, value in source_arguments(kwargs).items() if key != "subfolder"}
    where |= {key: kwargs[key] for key in ("code_revision",) if key in kwargs}
    custom: Any = get_class_from_dynamic_module(reference, name, **where)
    auto.register(type(config), custom, exist_ok=True)
    custom.register_for_auto_class(auto_class=auto)
    return cast("type[PreTrainedModel]", add_generation_mixin_to_remote_model(custom))
