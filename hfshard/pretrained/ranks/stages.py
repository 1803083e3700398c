"""Models that are parts of one: spread tensors, or the layers of a pipeline stage."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from hfshard.distributed.group_store import has_other_ranks
from hfshard.distributed.spread_tensor import has_spread
from hfshard.errors import InvalidArgumentError
from hfshard.pretrained.class_alias import alias_class
from hfshard.pretrained.fallback import has_adapters
from hfshard.tensors.parameter_names import strip_compiled


def is_part(model: Any, state_dict: Mapping[str, Any] | None) -> bool:
    """Whether a save needs what other ranks have: of the model, or of the tensors that are given in its place."""
    if state_dict is not None:
        return has_spread(state_dict)
    return is_stage(model) or has_spread(dict(model.named_parameters())) or _is_fully_sharded(model)


def _is_fully_sharded(model: Any) -> bool:
    """Whether `fully_shard` was called: right after a forward pass parameters may be whole, until they are saved."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())


def is_part_of_push(model: Any) -> bool:
    """Whether a push needs what other ranks have: of a part as a save knows it, or of a stage that a user has made.

    Such a stage has plain tensors. What tells it from a whole model is that there are other ranks, and that it has no
    parameter of some module of which the model of its config has some.
    """
    if is_part(model, None):
        return True
    if not has_other_ranks() or has_adapters(model):
        return False
    whole = whole_model(model)
    if whole is None:
        return False
    names = [strip_compiled(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    there = {name[:at] for name in names for at, letter in enumerate(name) if letter == "."}
    return any(
        name.rpartition(".")[0] not in there
        for name, _ in whole.named_parameters(remove_duplicate=False)
        if "." in name
    )


def refuse_ungathered(model: Any) -> None:
    """Refuse to let transformers save a part of a model that it does not gather.

    Raises:
        InvalidArgumentError: It is a pipeline stage, which would be saved as the whole; or the user has spread it.

    Source: transformers `PreTrainedModel.gather_sharded_state_dict_for_save`, which gathers no stages, and nothing
    without a `distributed_config`.
    """
    if is_stage(model):
        raise InvalidArgumentError(
            "The model is one of several pipeline stages, with an adapter, offloaded weights, or to be saved with "
            "distributed_checkpoint=True: transformers saves that, and would save this stage as the whole. Save a "
            "model that was loaded without pp_size, which has all layers."
        )
    if has_other_ranks() and getattr(model.config, "distributed_config", None) is None and is_part(model, None):
        raise InvalidArgumentError(
            "The model is spread over ranks, with an adapter, offloaded weights, or to be saved with "
            "distributed_checkpoint=True: transformers saves that, and gathers only what it has spread itself. Load "
            "it with from_pretrained(..., distributed_config=...), or merge the adapter before you spread the model."
        )


def is_stage(model: Any) -> bool:
    """Whether transformers has left the model the layers of one pipeline stage."""
    config = getattr(model.config, "distributed_config", None)
    stage = getattr(model, "_pp_stage", None)
    return (getattr(config, "pp_size", None) or 1) > 1 or getattr(stage, "pp_size", 1) > 1


def whole_model(part: PreTrainedModel) -> PreTrainedModel | None:
    """Build the model that a pipeline stage is a part of, from its config, without any data.

    Returns:
        The model; None: its class can't be built from its config alone.
    """
    config: Any = copy.deepcopy(part.config)
    config.distributed_config = None
    try:
        with torch.device("meta"):
            whole = alias_class(type(part))(config)
    except TypeError:
        return None
    if "_weight_conversions" in vars(part):  # those with which transformers has loaded it
        vars(whole)["_weight_conversions"] = vars(part)["_weight_conversions"]
    return whole
