"""Recovery of the parameter names of a Trainer's optimizer, with a model that is built on the meta device."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, Trainer

from hfshard.constants import CONFIG_NAME
from hfshard.tensors.state_dict import parameter_names
from hfshard.training.interop.foreign_checkpoint import ForeignCheckpoint
from hfshard.training.interop.foreign_optimizer import LIKE_THEIR_PARAMETER, check_positions
from hfshard.training.interop.foreign_readers import is_optimizer_state
from hfshard.training.state.optimizer import names_of_positions

logger = logging.getLogger(__name__)

_LAYERS: Final = re.compile(r"(?:num_|n_)?(?:hidden_|encoder_|decoder_)?layers?")
"""Keys of configs that state a number of layers."""

_MOST_EXPERTS: Final = 65_536
"""The most experts of a layer; they may share a tensor."""


def reorder_by_model(foreign: ForeignCheckpoint) -> ForeignCheckpoint:
    """Put the weights of a Trainer's checkpoint into the order of its model, and name its optimizer's parameters.

    The model is the transformers one that config.json names; it is built on the meta device, and without remote code.
    Names are given if the optimizer has the two groups that Trainer creates, with the same numbers of parameters.

    Args:
        foreign: It is not changed.

    Raises:
        DamagedCheckpointError: The optimizer's state is not valid.

    Returns:
        The checkpoint in that order; unchanged if it is not Trainer's, or its model is not transformers'.
    """
    weights = foreign.components.get("model")
    model = _built_model(foreign.path, len(weights)) if isinstance(weights, Mapping) else None
    if model is None or weights is None:
        return foreign
    order = {name: number for number, name in enumerate(model.state_dict())}
    if not weights.keys() <= order.keys():
        return foreign
    components = {**foreign.components, "model": dict(sorted(weights.items(), key=lambda one: order[one[0]]))}
    optimizer: Any = foreign.components.get("optimizer")
    if not is_optimizer_state(optimizer) or foreign.named is not None:  # it has names
        return replace(foreign, components=components, has_order=True)
    check_positions(optimizer, "optimizer", foreign.path)
    names = _trainers_groups(model)
    if _are_trainers(optimizer, names, weights):
        named = [{**group, "param_names": own} for group, own in zip(optimizer["param_groups"], names)]
        components["optimizer"] = {**optimizer, "param_groups": named}
    return replace(foreign, components=components, has_order=True)


def _are_trainers(
    optimizer: Mapping[str, Any], names: Sequence[Sequence[str]], weights: Mapping[str, torch.Tensor]
) -> bool:
    """Return whether an optimizer's groups are those that Trainer creates, by their sizes and the states' shapes."""
    if [len(group["params"]) for group in optimizer["param_groups"]] != [len(own) for own in names]:
        return False
    owners = names_of_positions(optimizer, names)
    known = {position: tuple(weights[name].shape) for position, name in owners.items() if name in weights}
    return all(
        tuple(value.shape) == known[position]
        for position in known.keys() & optimizer["state"].keys()
        for slot, value in optimizer["state"][position].items()
        if slot in LIKE_THEIR_PARAMETER and isinstance(value, torch.Tensor)
    )


def _trainers_groups(model: PreTrainedModel) -> list[list[str]]:
    """Return the parameter names in the groups that Trainer creates."""
    # The method uses nothing of its Trainer.
    with_decay = set(Trainer.get_decay_parameter_names(cast(Any, None), model))
    kept = parameter_names(model)
    names = [(name in with_decay, kept[id(one)]) for name, one in model.named_parameters()]
    return [[name for is_decayed, name in names if is_decayed], [name for is_decayed, name in names if not is_decayed]]


def _built_model(path: str, most_layers: int) -> PreTrainedModel | None:
    """Build the model of a directory on the meta device; None if it is not one of transformers' own.

    Args:
        path: The directory.
        most_layers: Each layer has at least one tensor, so a config that asks for more is not that of these weights.
    """
    if not os.path.isfile(os.path.join(path, CONFIG_NAME)):
        return None
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        architecture: Any = getattr(transformers, (config.architectures or [""])[0], None)
        is_own = isinstance(architecture, type) and issubclass(architecture, PreTrainedModel)
        if not is_own or _is_too_large(config, most_layers):
            return None
        with torch.device("meta"):
            return cast(PreTrainedModel, architecture(config))
    except Exception as error:  # noqa: BLE001 - of any class or library; the names are an extra, and it is logged
        logger.warning("Cannot build the model of '%s', so its parameters have no names: %s", path, error)
        return None


def _is_too_large(config: PreTrainedConfig, most_layers: int) -> bool:
    """Return whether a config asks for more modules than a model with these weights has."""
    waiting: list[Any] = [config.to_dict()]
    while waiting:
        for key, value in waiting.pop().items():
            if isinstance(value, dict):
                waiting.append(value)
            elif type(value) is int and (
                (_LAYERS.fullmatch(key) and value > most_layers) or (key.endswith("experts") and value > _MOST_EXPERTS)
            ):
                return True
    return False
