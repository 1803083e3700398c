"""The arguments of upstream's from_pretrained: which are for the files, which for the config, which for the model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, Final, cast

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model
from transformers.utils.hub import cached_files
from transformers.utils.import_utils import is_peft_available

from hfshard._util.arguments import refuse_unknown
from hfshard.constants import WEIGHTS_OVERRIDE_KEY
from hfshard.hub.resolve import CheckpointQuery
from hfshard.loading.source import CheckpointSource, LocalCheckpoint
from hfshard.storage.checkpoint.checkpoint import OpenCheckpoint
from hfshard.storage.tensors.dtypes import TORCH_DTYPES

_SPARE_DEVICE_BYTES: Final = 2 * 1024**3
"""Of a GPU's memory: left free beside the model and what upstream reserves for it (it leaves 1.2 GiB itself)."""

SOURCE_ARGUMENTS: Final = {
    "cache_dir",
    "force_download",
    "local_files_only",
    "token",
    "revision",
    "subfolder",
    "proxies",
}
"""Arguments that say where files come from: the config and the generation config are loaded with them too."""

MODEL_ARGUMENTS: Final = SOURCE_ARGUMENTS | {
    "_commit_hash", "_fast_init", "_from_auto", "_from_pipeline", "adapter_kwargs", "adapter_name", "allow_all_kernels",
    "config", "device_map", "device_mesh", "disable_mmap", "distributed_config", "dtype", "from_flax", "from_tf",
    "fusion_config", "generation_config", "gguf_file", "ignore_mismatched_sizes", "kernel_config", "key_mapping",
    "low_cpu_mem_usage", "max_memory", "mirror", "offload_buffers", "offload_folder", "offload_state_dict",
    "output_loading_info", "quantization_config", "state_dict", "torch_dtype", "tp_plan", "tp_size", "tqdm_class",
    "trust_remote_code", "use_kernels", "use_safetensors", "variant", "weights_only",
}  # fmt: skip
"""What upstream's from_pretrained takes for itself; everything else goes to the config, and then to the model."""

CONFIG_ATTRIBUTES: Final = {"attn_implementation", "experts_implementation"}
"""Arguments that upstream sets on the config, and does not hand to the model."""


def where_of(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments that say where files come from."""
    return {key: kwargs[key] for key in SOURCE_ARGUMENTS if key in kwargs}


def source_of(name: str, kwargs: Mapping[str, Any]) -> CheckpointSource:
    """Where these arguments say that the files come from."""
    query = CheckpointQuery(
        subfolder=kwargs.get("subfolder") or "",
        variant=kwargs.get("variant"),
        use_safetensors=kwargs.get("use_safetensors"),
        revision=kwargs.get("revision"),
        token=kwargs.get("token"),
        cache_dir=kwargs.get("cache_dir"),
        local_files_only=bool(kwargs.get("local_files_only")),
        force_download=bool(kwargs.get("force_download")),
        needs_code=bool(kwargs.get("trust_remote_code")),
        accepts_adapter=bool(is_peft_available()),
    )
    return CheckpointSource(name, query)


def pinned(kwargs: Mapping[str, Any], local: LocalCheckpoint) -> dict[str, Any]:
    """The same arguments, by which upstream finds in the cache what was pulled, and asks nobody."""
    if local.commit is None:
        return dict(kwargs)
    return {**kwargs, "revision": local.commit, "force_download": False}


def commit_argument(local: LocalCheckpoint) -> dict[str, str]:
    """The argument by which transformers before 5.20 believes the cache that a repo's commit has no such file."""
    takes = "_commit_hash" in inspect.signature(cached_files).parameters
    return {"_commit_hash": local.commit} if takes and local.commit is not None else {}


def config_of(
    model_class: type[PreTrainedModel], local: LocalCheckpoint, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The config, and what is left of the arguments for the model's constructor."""
    rest = {key: value for key, value in kwargs.items() if key not in MODEL_ARGUMENTS}
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        model_kwargs = {key: value for key, value in rest.items() if key not in CONFIG_ATTRIBUTES}
        _refuse_unknown_model_arguments(model_class, config, model_kwargs)
        return config, model_kwargs
    config_class = cast(Any, model_class).config_class
    config, model_kwargs = config_class.from_pretrained(
        config if config is not None else local.path,
        return_unused_kwargs=True,
        **_where_config_is(kwargs, local),
        **rest,
    )
    model_kwargs = {key: value for key, value in model_kwargs.items() if key in rest and key not in CONFIG_ATTRIBUTES}
    explicit = getattr(config, WEIGHTS_OVERRIDE_KEY, None)
    if isinstance(explicit, str) and "-hfshard-" in explicit:
        delattr(config, WEIGHTS_OVERRIDE_KEY)  # of a commit under way
    _refuse_unknown_model_arguments(model_class, config, model_kwargs)
    return config, model_kwargs


def _where_config_is(kwargs: Mapping[str, Any], local: LocalCheckpoint) -> dict[str, Any]:
    """Where the config comes from; one of another repo is of the revision that the caller gave, not of our commit."""
    where = where_of(kwargs)
    if kwargs.get("config") is not None and local.commit is not None:
        where["revision"] = local.revision
        if local.revision is None:
            del where["revision"]
    return where


def _refuse_unknown_model_arguments(model_class: type, config: Any, model_kwargs: Mapping[str, Any]) -> None:
    parameters = inspect.signature(cast(Any, model_class).__init__).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    own = {"strict", "verify", "read", "progress"}
    known = set(parameters) | MODEL_ARGUMENTS | CONFIG_ATTRIBUTES | own | set(config.to_dict())
    refuse_unknown(set(model_kwargs) - set(parameters), known - set(model_kwargs), "from_pretrained")


def device_of(checkpoint: OpenCheckpoint, config: Any, kwargs: Mapping[str, Any]) -> torch.device:
    """Where the tensors are to be read to: a GPU that takes all of them as they are stored, else the CPU.

    What upstream casts, quantizes or spreads over devices, it takes from the CPU tensor by tensor: the device need not
    hold it twice. So it is where the device has not room for twice the model: upstream, which is given a device_map,
    reserves the model's size there before it looks at the tensors (`caching_allocator_warmup`).
    """
    cpu, device_map = torch.device("cpu"), kwargs.get("device_map")
    name = device_map[""] if isinstance(device_map, dict) and set(device_map) == {""} else device_map
    name = f"cuda:{name}" if isinstance(name, int) else str(name)
    others = ("quantization_config", "tp_plan", "distributed_config")
    if re.fullmatch(r"cuda(:\d+)?", name) is None:
        return cpu
    if getattr(config, "quantization_config", None) or any(kwargs.get(key) is not None for key in others):
        return cpu
    given = [kwargs[key] for key in ("dtype", "torch_dtype") if kwargs.get(key) not in (None, "auto")]
    wanted = given[0] if given else config.dtype
    wanted = getattr(torch, wanted, None) if isinstance(wanted, str) else wanted
    slots = (slot for shard in checkpoint.shards.values() for slot in shard.header.tensors.values())
    stored = {TORCH_DTYPES.get(dtype) for dtype in {slot.dtype for slot in slots}}
    floats = {dtype for dtype in stored if dtype is None or dtype.is_floating_point}
    if not isinstance(wanted, torch.dtype) or floats != {wanted}:
        return cpu
    device = torch.device(name)
    stored_bytes = sum(shard.data_bytes for shard in checkpoint.shards.values())
    free_bytes, _ = torch.cuda.mem_get_info(device)
    free_bytes += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return device if 2 * stored_bytes + _SPARE_DEVICE_BYTES <= free_bytes else cpu


def class_of_auto(
    auto: Any, local: LocalCheckpoint, kwargs: dict[str, Any]
) -> tuple[type[PreTrainedModel], dict[str, Any]]:
    """The class that an Auto class would build, found by building it without weights."""
    if not isinstance(kwargs.get("config"), PreTrainedConfig):
        rest = {key: value for key, value in kwargs.items() if key not in MODEL_ARGUMENTS | CONFIG_ATTRIBUTES}
        config = AutoConfig.from_pretrained(
            kwargs.get("config") or local.path,
            trust_remote_code=kwargs.get("trust_remote_code"),
            **_where_config_is(kwargs, local),
            **rest,
        )
    else:
        config = kwargs["config"]
    config.name_or_path = local.path
    from_auto = {**kwargs, "_from_auto": True}
    from_auto.pop("code_revision", None)
    if (custom := _custom_class(auto, config, local.path, kwargs)) is not None:
        return custom, from_auto
    with torch.device("meta"):
        model: nn.Module = auto.from_config(config, trust_remote_code=kwargs.get("trust_remote_code"))
    return type(model), from_auto  # type: ignore[return-value]


def _custom_class(auto: Any, config: Any, name: str, kwargs: Mapping[str, Any]) -> type[PreTrainedModel] | None:
    """The class that a checkpoint's own code defines, where upstream takes it: of the same revision and cache.

    Source: transformers `_BaseAutoModelClass.from_pretrained`; its `from_config` would take the code of main, from
    the default cache.
    """
    reference = (getattr(config, "auto_map", None) or {}).get(auto.__name__)
    if not reference or not kwargs.get("trust_remote_code") or type(config) in auto._model_mapping:
        return None
    where = {key: value for key, value in where_of(kwargs).items() if key != "subfolder"}
    where |= {key: kwargs[key] for key in ("code_revision",) if key in kwargs}
    custom: Any = get_class_from_dynamic_module(reference, name, **where)
    auto.register(type(config), custom, exist_ok=True)
    custom.register_for_auto_class(auto_class=auto)
    return cast("type[PreTrainedModel]", add_generation_mixin_to_remote_model(custom))
