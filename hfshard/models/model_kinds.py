"""What a save of any model holds; transformers is imported only where the model is one of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from hfshard.constants import MIXIN_MARK
from hfshard.saving.save_request import SaveOptions, SaveRequest, request_from_module
from hfshard.tensors.parameter_names import unwrap


def is_pretrained(model: object) -> bool:
    """Whether it is a transformers model; transformers is not imported to find out."""
    return is_pretrained_class(type(model))


def is_pretrained_class(model_class: type) -> bool:
    """Whether it is the class of transformers models; transformers is not imported to find out."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return base is not None and issubclass(model_class, base)


def is_plain_class(model_class: object) -> bool:
    """Whether it is a class with `ShardedModelMixin` that is not of transformers."""
    return isinstance(model_class, type) and hasattr(model_class, MIXIN_MARK) and not is_pretrained_class(model_class)


def request_from_model(model: nn.Module, state_dict: Mapping[str, Any] | None, options: SaveOptions) -> SaveRequest:
    """Request the save of a model; of a transformers model with its config, generation config and custom code.

    Args:
        model: Wrappers around it are looked through.
        state_dict: What to save in place of the model's own; not mutated.
        options: How.
    """
    model = unwrap(model)
    if not is_pretrained(model):
        return request_from_module(model, state_dict, options)
    from hfshard.models.collect import request_from_pretrained

    return request_from_pretrained(model, state_dict, options)  # type: ignore[arg-type]


def below_mixin(target: Any) -> Any:
    """What has the methods of a model or its class behind the mixin, without those of huggingface_hub's mixins.

    A class that has one of those by itself, behind that of transformers, keeps it there.

    Args:
        target: The model or the class.
    """
    order = target.__mro__ if isinstance(target, type) else type(target).__mro__
    mixin = next(number for number, base in enumerate(order) if MIXIN_MARK in vars(base))
    skipped = (mixin for mixin in order[mixin + 1 : mixin + 3] if mixin.__module__ == "huggingface_hub.hub_mixin")
    return super([order[mixin], *skipped][-1], target)
