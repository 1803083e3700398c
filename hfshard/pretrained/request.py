"""What a save of any model holds; transformers is imported only where the model is one of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from hfshard.saving.options import SaveOptions
from hfshard.saving.request import SaveRequest, request_from_module
from hfshard.state_dicts.wrappers import unwrap


def is_pretrained(model: object) -> bool:
    """Whether it is a transformers model; transformers is not imported to find out."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


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
    from hfshard.pretrained.collect import request_from_pretrained

    return request_from_pretrained(model, state_dict, options)  # type: ignore[arg-type]
