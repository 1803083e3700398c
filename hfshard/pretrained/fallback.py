"""When transformers has to load or save by itself, because hfshard can't do all that is asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final

from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils.import_utils import is_peft_available

from hfshard.checkpoint.locate import read_config, weights_bytes
from hfshard.constants import ADAPTER_CONFIG_NAME
from hfshard.errors import HfshardError

_TRANSFORMERS_ONLY: Final = {
    "offload_folder", "tp_plan", "tp_size", "device_mesh",
    "quantization_config",
}  # fmt: skip
"""Arguments with which transformers reads the files itself, after hfshard has checked them."""

_AUTO_DEVICE_MAPS: Final = {"auto", "balanced", "balanced_low_0", "sequential"}


def needs_transformers_loader(directory: str, model_class: type, kwargs: Mapping[str, Any]) -> bool:
    """Whether transformers has to read the files itself, because of the arguments or of what the directory holds."""
    if any(kwargs.get(name) for name in _TRANSFORMERS_ONLY) or seeks_adapter_elsewhere(kwargs):
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
    if getattr(getattr(model_class, "config_class", None), "extra_files", ()):
        return True
    return (
        _is_quantized(directory) or is_deepspeed_zero3_enabled() or os.path.isfile(os.path.join(directory, ".metadata"))
    )


def seeks_adapter_elsewhere(kwargs: Mapping[str, Any]) -> bool:
    """Whether an adapter is sought in another place than beside the weights, which is what Auto classes name."""
    places = dict(kwargs.get("adapter_kwargs") or {})
    places.pop("token", None)
    if places.get("revision") == kwargs.get("revision"):
        places.pop("revision", None)
    return any(value is not None for value in places.values())


def needs_transformers_saver(model: Any, *, distributed_checkpoint: bool) -> bool:
    """Whether transformers has to save the model: it has adapters, or weights that are offloaded."""
    return distributed_checkpoint or is_offloaded_by_map(model) or has_adapters(model)


def is_offloaded_by_map(model: Any) -> bool:
    """Whether a device_map has put weights of a model on the disk, or on the CPU beside another device."""
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    return "disk" in devices or ("cpu" in devices and len(devices) > 1)


def has_adapters(model: Any) -> bool:
    """Whether adapters were added or loaded: then transformers saves the active one, and nothing else."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def is_adapter(directory: str) -> bool:
    """Whether PEFT is installed and a directory holds an adapter, alone or beside a model."""
    return bool(is_peft_available() and os.path.isfile(os.path.join(directory, ADAPTER_CONFIG_NAME)))


def _is_tight(directory: str) -> bool:
    """Whether the weights could be too large for the free memory, which Accelerate measures so, on any system."""
    try:
        import psutil
    except ImportError:  # it came with Accelerate, without which transformers takes no device_map: it says so
        return True
    return weights_bytes(directory) > int(psutil.virtual_memory().available)


def _is_quantized(directory: str) -> bool:
    try:
        config = json.loads(read_config(directory) or b"{}")
    except (HfshardError, ValueError, RecursionError):
        return False  # reported when the checkpoint is opened
    return isinstance(config, dict) and config.get("quantization_config") is not None
