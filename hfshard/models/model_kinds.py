"""Save requests for any kind of model; transformers is imported only for transformers models."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from torch import nn

from hfshard.constants import MIXIN_MARK
from hfshard.saving.save_request import SaveOptions, SaveRequest, request_from_module
from hfshard.tensors.parameter_names import unwrap


def is_pretrained(model: object) -> bool:
    """Return whether a model is a transformers model; transformers is not imported to find out."""
    return is_pretrained_class(type(model))


def is_pretrained_class(model_class: type) -> bool:
    """Return whether a class is a transformers model class; transformers is not imported to find out."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return base is not None and issubclass(model_class, base)


def is_plain_class(model_class: object) -> bool:
    """Return whether the object is a class with `ShardedModelMixin` that is not a transformers class."""
    return isinstance(model_class, type) and hasattr(model_class, MIXIN_MARK) and not is_pretrained_class(model_class)


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


def without_mixin(target: Any) -> Any:
    """Return a `super()` of a model or class that skips this mixin and huggingface_hub's mixins.

    A huggingface_hub mixin that the class itself has behind transformers' class stays there.

    Args:
        target: The model or the class.
    """
    order = target.__mro__ if isinstance(target, type) else type(target).__mro__
    mixin = next(number for number, base in enumerate(order) if MIXIN_MARK in vars(base))
    skipped = takewhile(lambda base: base.__module__ == "huggingface_hub.hub_mixin", order[mixin + 1 :])
    return super([order[mixin], *skipped][-1], target)
