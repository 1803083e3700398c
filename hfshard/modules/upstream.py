"""What hfshard knows of huggingface_hub's mixin: the config that it notes, and what a class has in its place."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, is_dataclass
from typing import Any, Final

from huggingface_hub import ModelHubMixin, PyTorchModelHubMixin

from hfshard.errors import InvalidArgumentError

_HUB_MIXINS: Final = (PyTorchModelHubMixin, ModelHubMixin)


def noted_config(model: ModelHubMixin) -> Any:
    """The constructor's arguments, or the config that it was given; None where there is neither.

    Source: huggingface_hub's attribute `_hub_mixin_config`, which its tests and other libraries read, too.
    """
    return model._hub_mixin_config


def config_json(config: Any) -> bytes:
    """Encode a config as huggingface_hub writes it into config.json.

    Args:
        config: A dict or a dataclass.

    Raises:
        InvalidArgumentError: It is something else, or holds what JSON has not.

    Source: huggingface_hub `ModelHubMixin.save_pretrained`.
    """
    value = as_dict(config)
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"config must be a dict or a dataclass, got a {type(config).__name__}.")
    try:
        return json.dumps(value, sort_keys=True, indent=2).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"The config can't be written as JSON: {error}. Give the class coders= for types of your own."
        ) from error


def as_dict(config: Any) -> Any:
    """A dataclass as a dict; anything else as it is."""
    return asdict(config) if is_dataclass(config) and not isinstance(config, type) else config


def constructor_names(model_class: type) -> frozenset[str]:
    """The names of the constructor's arguments."""
    return frozenset(inspect.signature(model_class.__init__).parameters)  # type: ignore[misc]


def is_overridden(target: Any, method: str, mixin: type) -> bool:
    """Whether a class, or a model, has a method of its own in the place of the mixin's.

    Args:
        target: The class or the model.
        method: The method's name.
        mixin: hfshard's.
    """
    found = getattr(target, method)
    ours = vars(mixin)[method]
    return getattr(found, "__func__", found) is not getattr(ours, "__func__", ours)


def refuse_other_model(model_class: type, mixin: type) -> None:
    """Refuse a class of another library (diffusers ...) behind the mixin, which has such methods of its own.

    Args:
        model_class: The class with the mixin.
        mixin: hfshard's.

    Raises:
        InvalidArgumentError: What its own methods save and load would be missing.
    """
    order = model_class.__mro__
    behind = [base for base in order[order.index(mixin) + 1 :] if base not in _HUB_MIXINS]
    for base in behind:
        if "save_pretrained" in vars(base) or "from_pretrained" in vars(base):
            raise InvalidArgumentError(
                f"{model_class.__name__} is not a transformers model, and {base.__name__} saves and loads its config "
                "by methods of its own, which ShardedModelMixin does not know. Take the mixin away; save the weights "
                "with hfshard.save_model(model, directory), and load them into a module that you have built with "
                "hfshard.load_model(module, directory). Its config is saved by its own class."
            )
        if "_save_pretrained" in vars(base) or "_from_pretrained" in vars(base):
            raise InvalidArgumentError(
                f"{base.__name__} has a _save_pretrained or _from_pretrained of its own: put ShardedModelMixin behind "
                f"it, so that it is called: class {model_class.__name__}({base.__name__}, ShardedModelMixin): ..."
            )
