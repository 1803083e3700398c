"""Parts of `ShardedModelMixin` that apply to transformers models only, and what is behind it."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from transformers import PreTrainedModel

from hfshard.constants import MIXIN_MARK
from hfshard.errors import InvalidArgumentError
from hfshard.models.model_classes import (
    adopt_class_name,
    architecture_of,
    delegate_to_base,
    record_architecture,
    record_in_adapters,
)


def prepare_class(model_class: type, mixin: type) -> None:
    """Reject an order of bases in which transformers' methods come first, and take the name of transformers' class."""
    order = model_class.__mro__
    if order.index(PreTrainedModel) < order.index(mixin):
        raise InvalidArgumentError(
            f"Class {model_class.__name__} must have ShardedModelMixin before the model's class, or transformers "
            "saves and loads it: class Mine(ShardedModelMixin, TheModel): ..."
        )
    adopt_class_name(model_class)


def without_mixin(target: Any) -> Any:
    """Return a `super()` of a model or class that skips this mixin and huggingface_hub's mixins.

    A huggingface_hub mixin that the class itself has behind transformers' class stays there.
    """
    order = target.__mro__ if isinstance(target, type) else type(target).__mro__
    mixin = next(number for number, base in enumerate(order) if MIXIN_MARK in vars(base))
    skipped = takewhile(lambda base: base.__module__ == "huggingface_hub.hub_mixin", order[mixin + 1 :])
    return super([order[mixin], *skipped][-1], target)


class TransformersMethods:
    """Methods of a model with the mixin through which transformers and others obtain a class's name or module.

    They return those of transformers' class.
    """

    def _get_name(self) -> str:
        # Trainer shifts labels for the names of causal language models, under FSDP2 too.
        return architecture_of(type(self)).__name__

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return whether transformers' class is custom code; a subclass that adds the mixin is not."""
        return delegate_to_base(cls, without_mixin(cls), "is_custom_code")

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return delegate_to_base(cls, without_mixin(cls), "_can_set_attn_implementation")

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return delegate_to_base(cls, without_mixin(cls), "_can_set_experts_implementation")

    def post_init(self) -> None:
        """Finish the model's constructor as transformers does, and make other libraries record transformers' class."""
        record_architecture(self)
        without_mixin(self).post_init()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Collect the tensors as torch does; patch PEFT first, which calls this on saving and may be newly imported."""
        record_in_adapters()
        return without_mixin(self).state_dict(*args, **kwargs)
