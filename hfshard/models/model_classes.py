"""Model classes as transformers identifies them, their overrides, and the cases that transformers handles itself."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final, TypeVar, cast

import torch
from huggingface_hub import ModelHubMixin, PyTorchModelHubMixin
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils.import_utils import is_peft_available

from hfshard._util.threads import ForkSafeLock, bound
from hfshard.checkpoint.locate import read_config, weights_bytes
from hfshard.constants import ADAPTER_CONFIG_NAME, MIXIN_MARK
from hfshard.errors import HfshardError
from hfshard.models.patching import Method, OverrideCall, current_call, patch_method

_ALIAS: Final = "_hfshard_alias"
"""The attribute of a class that keeps its alias class."""

_WRAPPED: Final = "_is_hfshard_wrapper"
"""The attribute that marks the PEFT method that `record_in_adapters` has wrapped."""

_alias_lock: Final = ForkSafeLock()
"""Two threads that load the first models of a class must build them with one alias class."""

Model = TypeVar("Model", bound=PreTrainedModel)


def architecture_of(model_class: type) -> type:
    """Find the class that a saved checkpoint names: transformers' class, not a user's class that only adds the mixin.

    It is the first class in the method resolution order that lacks the mixin and has the model's `forward`. A model
    written directly on the mixin is its own architecture.
    """
    model_class = class_before_fsdp(model_class)
    for candidate in model_class.__mro__:
        has_no_mixin = not hasattr(candidate, MIXIN_MARK) and issubclass(candidate, PreTrainedModel)
        if has_no_mixin and candidate is not PreTrainedModel and _has_forward(candidate) == _has_forward(model_class):
            return candidate
    return model_class


def class_before_fsdp(model_class: type) -> type:
    """Find the class that a model had before `fully_shard` gave it a class of torch: "FSDPLlama" was Llama.

    Source: torch `FSDPModule.__new__`, which finds it in the same position.
    """
    order = model_class.__mro__
    return order[order.index(FSDPModule) + 1] if FSDPModule in order else model_class


def adopt_class_name(model_class: type) -> None:
    """Give a class that adds the mixin the `__name__` of transformers' class, which transformers and others rely on.

    Its `__module__` and `__qualname__`, which pickle and `repr` use, stay. A class that torch derives from it (FSDP2,
    parametrizations) keeps the name that torch gave it.
    """
    architecture = architecture_of(model_class)
    if architecture is not model_class and not model_class.__module__.startswith("torch."):
        model_class.__name__ = architecture.__name__


def empty_custom_object(model_class: type) -> object:
    """Create an object without data from which transformers takes the class to save as custom code, and its file.

    That is transformers' class, unless the user has registered the class with the mixin, or a base of it that has the
    mixin. Then it is the user's class, under the name that it has in its file.
    """
    model_class = class_before_fsdp(model_class)
    if not is_registered_with_mixin(model_class):
        return object.__new__(architecture_of(model_class))
    names = {"__module__": model_class.__module__, "_auto_class": cast(Any, model_class)._auto_class}
    return type(model_class.__qualname__.rpartition(".")[2], (), names)()


def is_registered_with_mixin(model_class: type) -> bool:
    """Return whether the user has registered a class with the mixin as custom code, by `register_for_auto_class`."""
    registered: Any = next(one for one in model_class.__mro__ if "_auto_class" in vars(one))
    return registered._auto_class is not None and hasattr(registered, MIXIN_MARK)


def _has_forward(model_class: Any) -> bool:
    return model_class.forward is not torch.nn.Module.forward


def alias_class(model_class: type[Model]) -> type[Model]:
    """Create a subclass that adds nothing and has the name and the module of transformers' class.

    transformers treats a class of any other name as custom code, for which it has no weight conversion (experts would
    not be fused, the names of ViT and LLaVA not translated) and no loss. So it builds and saves with the alias class,
    which is visible to no other code. It also treats a class derived by `fully_shard` as custom code.
    """
    model_class = cast(type[Model], class_before_fsdp(model_class))
    architecture = architecture_of(model_class)
    if architecture is model_class:
        return model_class
    with _alias_lock.held():
        if _ALIAS not in vars(model_class):
            names = {"__module__": architecture.__module__, "__qualname__": architecture.__qualname__}
            setattr(model_class, _ALIAS, type(architecture.__name__, (model_class,), names))
    return cast(type[Model], vars(model_class)[_ALIAS])


def view_as_alias(model: Model) -> Model:
    """Return the same model, with all its attributes, as an object of its alias class."""
    alias = alias_class(type(model))
    if alias is type(model):
        return model
    view = object.__new__(alias)
    object.__setattr__(view, "__dict__", vars(model))
    return view


def delegate_to_base(model_class: type, below: Any, question: str) -> bool:
    """Ask transformers' class, not the user's; or `below`, behind the mixin, if that is its own architecture."""
    architecture: Any = architecture_of(model_class)
    base = below if architecture is model_class else architecture
    return bool(getattr(base, question)())


def class_of_alias(alias: type) -> type:
    """Find the class that `alias_class` derived this one from; any other class is returned as it is."""
    base = alias.__bases__[0]
    return base if vars(base).get(_ALIAS) is alias else alias


def restore_class(model: Any, model_class: type) -> None:
    """Turn a model of an alias class into one of the user's class."""
    if type(model) is not model_class and vars(model_class).get(_ALIAS) is type(model):
        model.__class__ = model_class


def record_architecture(model: object) -> None:
    """Make other libraries record a model whose class adds the mixin under the module of transformers' class.

    diffusers reads the model's attribute `__module__`, and its class's name, which `adopt_class_name` has set.
    """
    architecture = architecture_of(type(model))
    if architecture is not type(model):
        vars(model)["__module__"] = architecture.__module__
    record_in_adapters()


def record_in_adapters() -> None:
    """Make PEFT, if imported, write the name and module of transformers' class into an adapter's config.

    PEFT reads the class's own `__module__`, which pickle needs, not the model's. Nothing changes for other classes.
    """
    peft_class: Any = getattr(sys.modules.get("peft.peft_model"), "PeftModel", None)
    ask: Callable[..., type] | None = getattr(peft_class, "_get_base_model_class", None)
    if ask is None or hasattr(ask, _WRAPPED):
        return

    @wraps(ask)
    def wrapper(*args: Any, **kwargs: Any) -> type:
        return architecture_of(ask(*args, **kwargs))

    setattr(wrapper, _WRAPPED, True)
    peft_class._get_base_model_class = wrapper


# Cases in which transformers has to load or save by itself, because hfshard cannot do everything requested.


_TRANSFORMERS_ONLY: Final = {"offload_folder", "tp_plan", "tp_size", "device_mesh", "quantization_config"}
"""Arguments that make transformers read the files itself, after hfshard has checked them."""

_AUTO_DEVICE_MAPS: Final = {"auto", "balanced", "balanced_low_0", "sequential"}


def needs_transformers_loader(directory: str, model_class: type, kwargs: Mapping[str, Any]) -> bool:
    """Return whether the arguments or the directory's contents require transformers to read the files itself."""
    if any(kwargs.get(name) for name in _TRANSFORMERS_ONLY) or has_separate_adapter(kwargs):
        return True
    device_map = kwargs.get("device_map")
    if isinstance(device_map, dict) and "disk" in device_map.values():
        return True
    is_auto = isinstance(device_map, str) and device_map in _AUTO_DEVICE_MAPS
    if is_auto and (kwargs.get("max_memory") or _is_tight(directory)):
        return True  # some of it may go to the disk
    if getattr(getattr(model_class, "config_class", None), "extra_files", ()):
        return True
    return _is_quantized(directory) or is_deepspeed_zero3_enabled()


def has_separate_adapter(kwargs: Mapping[str, Any]) -> bool:
    """Return whether an adapter is sought anywhere but next to the weights, which is where Auto classes point."""
    places = dict(kwargs.get("adapter_kwargs") or {})
    places.pop("token", None)
    if places.get("revision") == kwargs.get("revision"):
        places.pop("revision", None)
    return any(value is not None for value in places.values())


def needs_transformers_saver(model: Any, *, distributed_checkpoint: bool) -> bool:
    """Return whether transformers has to save the model: it has adapters or offloaded weights, or it was requested."""
    return distributed_checkpoint or is_offloaded_by_map(model) or has_adapters(model)


def is_offloaded_by_map(model: Any) -> bool:
    """Return whether a device_map has placed weights on disk, or on the CPU along with another device."""
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    return "disk" in devices or ("cpu" in devices and len(devices) > 1)


def has_adapters(model: Any) -> bool:
    """Return whether adapters were added or loaded: then transformers saves only the active one."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def holds_adapter(directory: str) -> bool:
    """Return whether PEFT is installed and a directory contains an adapter, alone or along with a model."""
    return bool(is_peft_available() and os.path.isfile(os.path.join(directory, ADAPTER_CONFIG_NAME)))


def _is_tight(directory: str) -> bool:
    """Return whether the weights could exceed free memory, measured as Accelerate does on any system."""
    try:
        import psutil
    except ImportError:  # it comes with Accelerate, without which transformers rejects a device_map
        return True
    return weights_bytes(directory) > int(psutil.virtual_memory().available)


def _is_quantized(directory: str) -> bool:
    try:
        config = json.loads(read_config(directory) or b"{}")
    except (HfshardError, ValueError, RecursionError):
        return False  # reported when the checkpoint is opened
    return isinstance(config, dict) and config.get("quantization_config") is not None


# Override chains: a model's own from_pretrained or save_pretrained runs, and hfshard handles the call below it.
#
# A class may extend these methods, as Csm and Qwen2.5-Omni do in transformers, and users in their own classes. An
# override calls `super()`, and the last method reached is PreTrainedModel's. hfshard replaces it for the requested
# call only, in the calling thread only.


def call_with_overrides(call: OverrideCall, start: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the first method of a chain; hfshard handles the call at the bottom.

    Args:
        start: The object with the first method: the class, the model, or `super()`, which looks it up only now.
    """
    patch_method(PreTrainedModel, call.method)
    with bound(current_call, call):
        return getattr(start, call.method)(*args, **kwargs)


def has_override(model_class: type, method: Method) -> bool:
    """Return whether a class overrides PreTrainedModel's method, itself or in a base other than the mixins."""
    for base in model_class.__mro__:
        if base is PreTrainedModel:
            return False
        is_mixin = MIXIN_MARK in vars(base) or base in (PyTorchModelHubMixin, ModelHubMixin)
        if method in vars(base) and not is_mixin:
            return True
    return False


def is_pipeline_stage(model: Any) -> bool:
    """Return whether transformers has reduced the model to the layers of one pipeline stage."""
    config = getattr(model.config, "distributed_config", None)
    stage = getattr(model, "_pp_stage", None)
    return (getattr(config, "pp_size", None) or 1) > 1 or getattr(stage, "pp_size", 1) > 1
