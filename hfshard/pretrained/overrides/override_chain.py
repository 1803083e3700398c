"""Calls a model's own from_pretrained or save_pretrained: its overrides run, and hfshard answers below them.

A class may add to these methods, as Csm and Qwen2.5-Omni do in transformers, and users in their own classes; what it
adds ends with `super()`, and the last method that this reaches is PreTrainedModel's. For the one call that is asked
for, in the thread that asks, hfshard answers in its place.
"""

from __future__ import annotations

from typing import Any

from huggingface_hub import ModelHubMixin, PyTorchModelHubMixin
from transformers import PreTrainedModel

from hfshard.constants import MIXIN_MARK
from hfshard.pretrained.overrides.bottom import ChainCall, Method, current_call, put_in_place


def run_chain(call: ChainCall, start: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the first method of a chain, and let hfshard answer at the bottom.

    Args:
        call: What is asked for.
        start: What has the first method: the class, the model, or `super()`, which looks for it only now.
        args, kwargs: The method's arguments.

    Returns:
        What the method returns.
    """
    put_in_place(PreTrainedModel, call.method)
    token = current_call.set(call)
    try:
        return getattr(start, call.method)(*args, **kwargs)
    finally:
        current_call.reset(token)


def has_override(model_class: type, method: Method) -> bool:
    """Whether a class has a method above PreTrainedModel's, of its own or of a base other than the mixins."""
    for base in model_class.__mro__:
        if base is PreTrainedModel:
            return False
        is_mixin = MIXIN_MARK in vars(base) or base in (PyTorchModelHubMixin, ModelHubMixin)
        if method in vars(base) and not is_mixin:
            return True
    return False
