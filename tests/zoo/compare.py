"""What can be seen of a loaded model and of a saved directory, in values that compare with ==."""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.logging import warning_once

import hfshard
from tests.zoo.mixin_classes import with_mixin

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

Bits = tuple[str, tuple[int, ...], bytes]
"""A tensor's dtype, shape and bytes."""
Facts = dict[str, Any]
"""Aspect -> what is seen of it."""

_ABSENT = object()


@dataclass(slots=True)
class Loaded:
    """What a `from_pretrained` gave."""

    model: PreTrainedModel
    info: dict[str, Any]
    log: list[str]
    """What transformers warned of."""


def load(model_class: Any, *arguments: Any, **options: Any) -> Loaded:
    """Call `from_pretrained` with a fixed seed, so that weights which are missing are drawn alike."""
    torch.manual_seed(0)
    warning_once.cache_clear()
    options = {"output_loading_info": True, **options}
    with transformers_warnings() as log:
        model, info = model_class.from_pretrained(*arguments, **options)
    # Once each: `load_model` reads a config once to find the class of an Auto class, and once with the weights.
    return Loaded(
        model, info, [re.sub(r"\w+ LOAD REPORT", "CLASS LOAD REPORT", message) for message in dict.fromkeys(log)]
    )


class Through:
    """`hfshard.load_model(target, ...)` in the shape of a class with `from_pretrained`."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def from_pretrained(self, *arguments: Any, **options: Any) -> Any:
        return hfshard.load_model(self.target, *arguments, **options)


@contextmanager
def transformers_warnings() -> Iterator[list[str]]:
    """Collect what transformers logs at WARNING and above."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def bits(tensor: torch.Tensor) -> Bits:
    """A tensor as bytes, so that NaN equals itself and -0.0 is not 0.0."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), data.numpy().tobytes()


def bits_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Bits]:
    """The same of each tensor of a state dict."""
    return {name: bits(tensor) for name, tensor in tensors.items()}


def facts_of_load(loaded: Loaded, path: Any = "") -> Facts:
    """Everything that must be alike after two loads; `path` is where from, and is taken out of what is seen."""
    info = {key: sorted(map(str, value)) for key, value in loaded.info.items()}
    facts = {**facts_of_model(loaded.model), "loading info": info, "log": loaded.log}
    return _without_path(facts, str(path)) if path else facts


def facts_of_model(model: PreTrainedModel) -> Facts:
    """Everything that must be alike of two models."""
    generation = getattr(model, "generation_config", None)
    names = ("name_or_path", "loss_type", "dtype", "all_tied_weights_keys", "hf_device_map", "_tp_size", "use_kernels")
    internals = ("_name_or_path", "_commit_hash", "_attn_implementation", "_experts_implementation", "auto_map")
    return {
        **_weights_facts(model),
        "training": {name: module.training for name, module in model.named_modules()},
        "modules": {name: type(module).__name__ for name, module in model.named_modules() if name},
        "model": {name: getattr(model, name, None) for name in names},
        "config": model.config.to_dict(),
        "config internals": {name: getattr(model.config, name, None) for name in internals},
        "config class": type(model.config).__name__,
        "generation config": generation and generation.to_dict(),
        "generation commit": getattr(generation, "_commit_hash", None),
        "keep in fp32": sorted(model._keep_in_fp32_modules or []),
    }


def _weights_facts(model: nn.Module) -> Facts:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return {
        "state dict": bits_of(model.state_dict()),
        "state dict order": list(model.state_dict()),
        "buffers": bits_of(buffers),
        "parameters": {name: (p.dtype, p.requires_grad, str(p.device)) for name, p in parameters.items()},
        "parameter types": {name: type(p).__name__ for name, p in parameters.items()},
        "contiguous": {name: p.is_contiguous() for name, p in parameters.items()},
        "ties": ties(parameters | buffers),
        "hooks": sorted(name for name, module in model.named_modules() if hasattr(module, "_hf_hook")),
    }


def ties(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """The names that are one and the same object, in groups."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        groups[id(tensor)].append(name)
    return sorted(sorted(names) for names in groups.values() if len(names) > 1)


def _without_path(value: Any, path: str) -> Any:
    if isinstance(value, str):
        return value.replace(path, "PATH")
    if isinstance(value, dict):
        return {key: _without_path(item, path) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_path(item, path) for item in value]
    return value


def loads_alike(stock_class: type[PreTrainedModel], *arguments: Any, **options: Any) -> Facts:
    """Check that a class with the mixin loads what its stock class loads; gives what is seen of it."""
    theirs, ours = (
        facts_of_load(load(model_class, *arguments, **options))
        for model_class in (stock_class, with_mixin(stock_class))
    )
    found = differences(ours, theirs)
    assert found == [], found
    return ours


def fails_alike(stock_class: type[PreTrainedModel], *arguments: Any, **options: Any) -> tuple[Exception, Exception]:
    """Check that a class with the mixin refuses, with the same kind of error, what its stock class refuses."""
    theirs, ours = (
        failure_of(partial(model_class.from_pretrained, *arguments, **options))
        for model_class in (stock_class, with_mixin(stock_class))
    )
    kind = next(kind for kind in type(theirs).__mro__ if kind.__module__ == "builtins")
    assert isinstance(ours, kind), (ours, theirs)
    return ours, theirs


def failure_of(call: Callable[[], Any]) -> Exception:
    """The error that a call raises."""
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def differences(ours: Facts, theirs: Facts) -> list[str]:
    """Every aspect, and every name in it, that differs, in words."""
    found = []
    for aspect in [*theirs, *(key for key in ours if key not in theirs)]:
        mine, other = ours.get(aspect, _ABSENT), theirs.get(aspect, _ABSENT)
        if isinstance(mine, dict) and isinstance(other, dict):
            names = [*other, *(name for name in mine if name not in other)]
            pairs = [(f"{aspect} {name}", mine.get(name, _ABSENT), other.get(name, _ABSENT)) for name in names]
        else:
            pairs = [(aspect, mine, other)]
        found += [f"{name}: ours {_shown(a)}, theirs {_shown(b)}" for name, a, b in pairs if a != b]
    return found


def file_differences(ours: Path, theirs: Path, variant: str | None = None) -> list[str]:
    """How two saves differ, in tensors and in small files."""
    tensors = differences({"file": raw_tensors(ours, variant)}, {"file": raw_tensors(theirs, variant)})
    return tensors + differences(small_files(ours), small_files(theirs))


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], bytes):
        return f"{value[0]}{list(value[1])} {value[2][:8].hex()}…"
    return repr(value)[:400]


def raw_tensors(directory: Path, variant: str | None = None) -> dict[str, Bits]:
    """Every tensor of a safetensors checkpoint, read by plain safetensors through its index or single file."""
    index, single = (with_variant(name, variant) for name in (INDEX, SINGLE_FILE))
    names = {single} if (directory / single).exists() else set(read_json(directory / index)["weight_map"].values())
    tensors: dict[str, Bits] = {}
    for name in sorted(names):
        with safe_open(directory / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # it is no dict
                assert key not in tensors, f"{key} lies in two files"
                tensors[key] = bits(file.get_tensor(key))
    return tensors


def with_variant(name: str, variant: str | None) -> str:
    """model.safetensors -> model.fp16.safetensors, and its index likewise."""
    if variant is None:
        return name
    stem, suffix = name.rsplit(".", 1)
    return f"{stem}.{variant}.{suffix}"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file."""
    content: dict[str, Any] = json.loads(path.read_bytes())
    return content


def small_files(directory: Path) -> dict[str, bytes]:
    """Every file that is neither weights nor their index."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not path.name.endswith((".safetensors", ".bin")) and ".index." not in path.name
    }


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a directory, in which there must be nothing else."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}
