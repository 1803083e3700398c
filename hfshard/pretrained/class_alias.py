"""The class that upstream knows a model by: weight conversion, loss and custom code go by its name and module."""

from __future__ import annotations

import re
import threading
from typing import Any, Final, TypeVar, cast

import torch
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING

MIXIN_MARK: Final = "_is_hfshard_model"
"""The attribute by which `ShardedModelMixin` marks its subclasses; upstream's classes lack it."""

_TWIN: Final = "_hfshard_twin"
"""The attribute of a class that keeps its twin."""

_making = threading.Lock()
"""Two threads that load the first models of a class must build them by one twin."""

Model = TypeVar("Model", bound=PreTrainedModel)


def architecture_of(model_class: type) -> type:
    """The class that the saved checkpoint names: upstream's, not the user's that only adds the mixin.

    It is the first class in the order of resolution that is not one of ours and can be called as the model can; a
    user's model that was written on the mixin itself is its own architecture.
    """
    for candidate in model_class.__mro__:
        is_upstreams = not hasattr(candidate, MIXIN_MARK) and issubclass(candidate, PreTrainedModel)
        if is_upstreams and candidate is not PreTrainedModel and _has_forward(candidate) == _has_forward(model_class):
            return candidate
    return model_class


def _has_forward(model_class: Any) -> bool:
    return model_class.forward is not torch.nn.Module.forward


def alias_class(model_class: type[Model]) -> type[Model]:
    """A subclass that adds nothing, and has the name and the module of the upstream class.

    Upstream takes a class of any other name for custom code, for which it knows no weight conversion (experts would
    not be fused, ViT's and LLaVA's names not be translated) and no loss. So it builds and saves by the twin, and nobody
    else sees one.
    """
    architecture = architecture_of(model_class)
    if architecture is model_class:
        return model_class
    with _making:
        if _TWIN not in vars(model_class):
            names = {"__module__": architecture.__module__, "__qualname__": architecture.__qualname__}
            setattr(model_class, _TWIN, type(architecture.__name__, (model_class,), names))
    return cast(type[Model], vars(model_class)[_TWIN])


def view_as_alias(model: Model) -> Model:
    """The same model, with all that it has, as an object of its twin."""
    twin = alias_class(type(model))
    if twin is type(model):
        return model
    view = twin.__new__(twin)
    object.__setattr__(view, "__dict__", vars(model))
    return view


def delegate_to_base(model_class: type, mixin: type, question: str) -> bool:
    """What the upstream class answers to one of upstream's questions, a class method without arguments.

    Args:
        model_class: The class that was asked.
        mixin: The class that passes the question on: where the class is its own architecture, the next one answers.
        question: The method's name.
    """
    architecture: Any = architecture_of(model_class)
    asked = super(mixin, model_class) if architecture is model_class else architecture
    return bool(getattr(asked, question)())


def loss_type_of(class_name: str) -> str | None:
    """The loss that upstream's constructor chooses for a class of this name.

    Source: transformers `PreTrainedModel.__init__`.
    """
    if class_name in LOSS_MAPPING:
        return class_name
    found = re.search("|".join(LOSS_MAPPING), class_name)
    return found[0] if found else None


def restore_class(model: Any, model_class: type) -> None:
    """Make a model of the twin one of the class that it is the twin of."""
    if type(model) is not model_class and vars(model_class).get(_TWIN) is type(model):
        model.__class__ = model_class
