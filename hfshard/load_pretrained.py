"""Builds a transformers model from a checkpoint: hfshard checks and opens the bytes, upstream does all the rest."""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hfshard.constants import (
    ADAPTER_CONFIG_NAME,
    CHANGED_RETRIES,
    CONFIG_NAME,
    EXPLICIT_WEIGHTS_KEY,
)
from hfshard.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    StateDictMismatchError,
)
from hfshard.load import Source, opened, refuse_unknown
from hfshard.state_dict import Mismatch, has_wrapper_prefix, match_prefixes, strip_wrappers
from hfshard.storage.checkpoint import OpenCheckpoint, Verify

logger = logging.getLogger(__name__)

_SOURCE_ARGUMENTS: Final = {
    "cache_dir",
    "force_download",
    "local_files_only",
    "token",
    "revision",
    "subfolder",
    "proxies",
}
"""Arguments that say where files come from: the config and the generation config are loaded with them too."""

_MODEL_ARGUMENTS: Final = _SOURCE_ARGUMENTS | {
    "_commit_hash", "_fast_init", "_from_auto", "_from_pipeline", "adapter_kwargs", "adapter_name", "allow_all_kernels",
    "config", "device_map", "device_mesh", "disable_mmap", "distributed_config", "dtype", "from_flax", "from_tf",
    "fusion_config", "generation_config", "gguf_file", "ignore_mismatched_sizes", "kernel_config", "key_mapping",
    "low_cpu_mem_usage", "max_memory", "mirror", "offload_buffers", "offload_folder", "offload_state_dict",
    "output_loading_info", "quantization_config", "state_dict", "torch_dtype", "tp_plan", "tp_size", "tqdm_class",
    "trust_remote_code", "use_kernels", "use_safetensors", "variant", "weights_only",
}  # fmt: skip
"""What upstream's from_pretrained takes for itself; everything else goes to the config, and then to the model."""

_ALSO_FOR_THE_MODEL: Final = {"attn_implementation", "experts_implementation"}
"""Arguments that upstream sets on the config, and does not hand to the model."""

_HANDED_OVER: Final = {
    "gguf_file", "state_dict", "offload_folder", "distributed_config", "tp_plan", "tp_size", "device_mesh",
    "quantization_config", "adapter_kwargs",
}  # fmt: skip
"""Arguments with which upstream reads the files itself, after hfshard has checked them."""

_AUTO_DEVICE_MAPS: Final = {"auto", "balanced", "balanced_low_0", "sequential"}


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """hfshard's own arguments of from_pretrained."""

    strict: bool | None = None
    verify: Verify = "structure"
    progress: bool | None = None


def load_class(model_class: Any, path: Any, *model_args: Any, **kwargs: Any) -> Any:
    """`load_model` for a transformers class, concrete or Auto."""
    options = LoadOptions(kwargs.pop("strict", None), kwargs.pop("verify", "structure"), kwargs.pop("progress", None))
    if not (isinstance(model_class, type) and hasattr(model_class, "from_pretrained")):
        raise InvalidArgumentError(
            f"load_model takes a module or a transformers class, and {model_class!r} is neither."
        )
    if not issubclass(model_class, PreTrainedModel):
        model_class, kwargs = _class_of_auto(model_class, os.fspath(path), kwargs)
    return load_pretrained(model_class.from_pretrained, model_class, path, model_args, kwargs, options)


def load_pretrained(
    build: Callable[..., Any],
    model_class: type[PreTrainedModel],
    path: str | os.PathLike[str] | None,
    model_args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: LoadOptions,
) -> Any:
    """Build a model as upstream's `from_pretrained` does, from bytes that hfshard has located, checked and opened.

    Args:
        build: Upstream's `from_pretrained` of the class.
        model_class: The class to build.
        path: A directory or a repo; None: all is handed to upstream.
        model_args: Positional arguments for the model.
        kwargs: Keyword arguments of `from_pretrained`.
        options: hfshard's own.

    Returns:
        What `build` returns.

    Raises:
        StateDictMismatchError: No tensor of the checkpoint fits, or strict and any name differs.
        Everything that `open_checkpoint` raises, and upstream.
    """
    kwargs = dict(kwargs)
    if path is None or kwargs.get("state_dict") is not None or kwargs.get("gguf_file") is not None:
        return build(path, *model_args, **kwargs)
    name = os.fspath(path)
    source = _source(name, kwargs)
    try:
        directory = source.directory()
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
        return build(path, *model_args, **kwargs)  # about the repo itself, upstream says it best
    if _reads_itself(directory, model_class, kwargs):
        return _checked_then_handed_over(build, name, model_args, kwargs, source, options)
    for _ in range(CHANGED_RETRIES):
        with opened(source, options.verify, options.progress) as checkpoint:
            _refuse_full_pickle(checkpoint, kwargs)
            config, model_kwargs = _config_of(model_class, name, kwargs)
            if not checkpoint.is_unchanged():
                continue  # a save came between the config and the weights
            return _Building(build, model_class, name, checkpoint, options).build(
                model_args, config, model_kwargs, kwargs
            )
    raise CheckpointChangedError(f"The checkpoint in '{name}' kept changing. Load it when the save is done.", path=name)


class _Building:
    """One call of upstream's from_pretrained, with an open checkpoint in place of its files."""

    def __init__(
        self,
        build: Callable[..., Any],
        model_class: type[PreTrainedModel],
        name: str,
        checkpoint: OpenCheckpoint,
        options: LoadOptions,
    ) -> None:
        self.call, self.model_class, self.name = build, model_class, name
        self.checkpoint, self.options = checkpoint, options

    def build(
        self, model_args: tuple[Any, ...], config: Any, model_kwargs: dict[str, Any], kwargs: dict[str, Any]
    ) -> Any:
        tensors = self._tensors(config, mapped=not kwargs.get("disable_mmap"))
        upstream = {key: value for key, value in kwargs.items() if key in _MODEL_ARGUMENTS | _ALSO_FOR_THE_MODEL}
        for key in ("config", "output_loading_info", "use_safetensors", "variant", "disable_mmap", *_SOURCE_ARGUMENTS):
            upstream.pop(key, None)
        model, info = self.call(
            None, *model_args, config=config, state_dict=tensors, output_loading_info=True, **upstream, **model_kwargs
        )
        self._check(model, info, len(tensors))
        self._name(model)
        self._tie(model)
        self._load_generation_config(model, kwargs)
        return (model, info) if kwargs.get("output_loading_info") else model

    def _tensors(self, config: Any, *, mapped: bool) -> dict[str, torch.Tensor]:
        index = self.checkpoint.index
        tensors = {name: self.checkpoint.tensor(name, mapped=mapped) for name in self.checkpoint.keys}
        # What the config ties, upstream ties by itself; handing it twice would cost a comparison of the values.
        tensors |= {alias: tensors[index.aliases[alias]] for alias in index.undeclared}
        if has_wrapper_prefix(tensors):
            names = _names_for(self.model_class, config, tensors)
            tensors = {names[name]: tensor for name, tensor in tensors.items()}
        return tensors

    def _check(self, model: PreTrainedModel, info: dict[str, Any], given: int) -> None:
        missing, unexpected = info["missing_keys"], info["unexpected_keys"]
        own = model.state_dict().keys()
        difference = Mismatch(tuple(sorted(missing)), tuple(sorted(unexpected)), tuple(info["mismatched_keys"]))
        nothing = bool(own) and (len(unexpected) >= given or set(missing) >= set(own))
        if nothing or (self.options.strict and (missing or unexpected or info["mismatched_keys"])):
            raise StateDictMismatchError(
                f"The checkpoint '{self.name}' does not fit {type(model).__name__}: {difference.described()}. "
                f"Compare the names with: hfshard inspect --tensors {self.name}",
                path=self.name,
                missing_keys=difference.missing,
                unexpected_keys=difference.unexpected,
                mismatched_keys=difference.mismatched,
            )

    def _name(self, model: PreTrainedModel) -> None:
        # Upstream was given no name, and wrote "None" where it goes.
        for module in model.modules():
            if getattr(module, "name_or_path", None) == "None":
                module.name_or_path = self.name  # type: ignore[assignment]
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig) and config.name_or_path == "None":
                config.name_or_path = self.name

    def _tie(self, model: PreTrainedModel) -> None:
        index = self.checkpoint.index
        modules = dict(model.named_modules(remove_duplicate=False))
        for alias in index.undeclared:
            (alias_path, _, alias_name), (path, _, name) = alias.rpartition("."), index.aliases[alias].rpartition(".")
            target, origin = modules.get(alias_path), modules.get(path)
            if target is not None and origin is not None and hasattr(target, alias_name) and hasattr(origin, name):
                setattr(target, alias_name, getattr(origin, name))

    def _load_generation_config(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
        if not (model.can_generate() and hasattr(model, "adjust_generation_fn")):
            return
        where = {key: kwargs.get(key) for key in _SOURCE_ARGUMENTS}
        rest = {key: value for key, value in kwargs.items() if key not in _MODEL_ARGUMENTS | _ALSO_FOR_THE_MODEL}
        where["force_download"] = bool(where["force_download"])
        where["local_files_only"] = bool(where["local_files_only"])
        where["revision"] = where["revision"] or "main"
        where["subfolder"] = where["subfolder"] or ""
        cast(Any, model).adjust_generation_fn(
            kwargs.get("generation_config"),
            kwargs.get("_from_auto", False),
            kwargs.get("_from_pipeline"),
            self.name,
            **where,
            trust_remote_code=kwargs.get("trust_remote_code"),
            **rest,
        )


def _source(name: str, kwargs: Mapping[str, Any]) -> Source:
    return Source(
        name,
        subfolder=kwargs.get("subfolder") or "",
        variant=kwargs.get("variant"),
        use_safetensors=kwargs.get("use_safetensors"),
        revision=kwargs.get("revision"),
        token=kwargs.get("token"),
        cache_dir=kwargs.get("cache_dir"),
        local_files_only=bool(kwargs.get("local_files_only")),
        force_download=bool(kwargs.get("force_download")),
    )


def _config_of(model_class: type[PreTrainedModel], name: str, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The config, and what is left of the arguments for the model's constructor."""
    rest = {key: value for key, value in kwargs.items() if key not in _MODEL_ARGUMENTS}
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        model_kwargs = {key: value for key, value in rest.items() if key not in _ALSO_FOR_THE_MODEL}
        _refuse_unknown_model_arguments(model_class, config, model_kwargs)
        return config, model_kwargs
    where = {key: kwargs[key] for key in _SOURCE_ARGUMENTS if key in kwargs}
    config_class = cast(Any, model_class).config_class
    config, model_kwargs = config_class.from_pretrained(
        config if config is not None else name, return_unused_kwargs=True, **where, **rest
    )
    model_kwargs = {key: value for key, value in model_kwargs.items() if key in rest and key not in _ALSO_FOR_THE_MODEL}
    explicit = getattr(config, EXPLICIT_WEIGHTS_KEY, None)
    if isinstance(explicit, str) and "-hfshard-" in explicit:
        delattr(config, EXPLICIT_WEIGHTS_KEY)  # of a commit under way
    _refuse_unknown_model_arguments(model_class, config, model_kwargs)
    return config, model_kwargs


def _refuse_unknown_model_arguments(model_class: type, config: Any, model_kwargs: Mapping[str, Any]) -> None:
    parameters = inspect.signature(cast(Any, model_class).__init__).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    own = {"strict", "verify", "progress"}
    known = set(parameters) | _MODEL_ARGUMENTS | _ALSO_FOR_THE_MODEL | own | set(config.to_dict())
    refuse_unknown(set(model_kwargs) - set(parameters), known - set(model_kwargs), "from_pretrained")


def _reads_itself(directory: str, model_class: type, kwargs: Mapping[str, Any]) -> bool:
    """Whether upstream has to read the files itself: what hfshard can't do as well, it does not do by half."""
    if any(kwargs.get(name) for name in _HANDED_OVER):
        return True
    device_map = kwargs.get("device_map")
    if isinstance(device_map, dict) and "disk" in device_map.values():
        return True
    if (
        isinstance(device_map, str)
        and device_map in _AUTO_DEVICE_MAPS
        and (kwargs.get("max_memory") or _is_tight(directory))
    ):
        return True  # some of it may go to the disk
    if os.path.isfile(os.path.join(directory, ADAPTER_CONFIG_NAME)) and _has_peft():
        return True
    if getattr(getattr(model_class, "config_class", None), "extra_files", ()):
        return True
    return _is_quantized(directory) or _is_deepspeed() or os.path.isfile(os.path.join(directory, ".metadata"))


def _checked_then_handed_over(
    build: Callable[..., Any],
    name: str,
    model_args: tuple[Any, ...],
    kwargs: dict[str, Any],
    source: Source,
    options: LoadOptions,
) -> Any:
    try:
        with opened(source, options.verify, options.progress):
            pass
    except CheckpointNotFoundError:
        logger.debug("'%s' holds no weights that hfshard knows; upstream looks for others.", name)
    return build(name, *model_args, **kwargs)


def _refuse_full_pickle(checkpoint: OpenCheckpoint, kwargs: Mapping[str, Any]) -> None:
    if checkpoint.pickles and kwargs.get("weights_only") is False:
        raise InvalidArgumentError(
            f"'{checkpoint.directory}' holds pickled weights, and hfshard reads them only with weights_only=True: "
            "anything else may run code on your machine. Leave the argument out."
        )


def _names_for(model_class: type[PreTrainedModel], config: Any, names: Mapping[str, Any]) -> dict[str, str]:
    """Foreign names without wrappers' prefixes, where that makes them this model's."""
    with torch.device("meta"):
        expected = set(model_class(config).state_dict())
    prefix = model_class.base_model_prefix
    expected |= {f"{prefix}.{name}" for name in expected} | {name.removeprefix(f"{prefix}.") for name in expected}
    result = match_prefixes(names, expected)
    if any(name != stripped for name, stripped in result.items()) or not expected & set(names):
        # The rest has names of before a conversion: it came out of the same wrapper.
        result = {name: name if name in expected else strip_wrappers(name) for name in names}
    return result


def _class_of_auto(auto: Any, name: str, kwargs: dict[str, Any]) -> tuple[type[PreTrainedModel], dict[str, Any]]:
    """The class that an Auto class would build, found by building it without weights."""
    if not isinstance(kwargs.get("config"), PreTrainedConfig):
        where = {key: kwargs[key] for key in _SOURCE_ARGUMENTS if key in kwargs}
        rest = {key: value for key, value in kwargs.items() if key not in _MODEL_ARGUMENTS | _ALSO_FOR_THE_MODEL}
        config = AutoConfig.from_pretrained(
            kwargs.get("config") or name, trust_remote_code=kwargs.get("trust_remote_code"), **where, **rest
        )
    else:
        config = kwargs["config"]
    config.name_or_path = name
    with torch.device("meta"):
        model: nn.Module = auto.from_config(config, trust_remote_code=kwargs.get("trust_remote_code"))
    return type(model), {**kwargs, "_from_auto": True}  # type: ignore[return-value]


def _is_tight(directory: str) -> bool:
    """Whether the weights could be too large for the memory that is there."""
    weights = sum(
        entry.stat().st_size for entry in os.scandir(directory) if entry.name.endswith((".safetensors", ".bin"))
    )
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return weights > free


def _has_peft() -> bool:
    from transformers.utils.import_utils import is_peft_available

    return bool(is_peft_available())


def _is_deepspeed() -> bool:
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    return bool(is_deepspeed_zero3_enabled())


def _is_quantized(directory: str) -> bool:
    path = os.path.join(directory, CONFIG_NAME)
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        try:
            config = json.loads(file.read())
        except (ValueError, RecursionError):
            return False  # reported when the checkpoint is opened
    return isinstance(config, dict) and config.get("quantization_config") is not None
