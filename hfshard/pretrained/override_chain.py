"""Calls a model's own from_pretrained or save_pretrained: its overrides run, and hfshard answers below them.

A class may add to these methods, as Csm and Qwen2.5-Omni do in transformers, and users in their own classes; what it
adds ends with `super()`, and the last method that this reaches is PreTrainedModel's. For the one call that is asked
for, in the thread that asks, hfshard answers in its place. For everybody else it does what it always did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from transformers import PreTrainedModel

from hfshard.pretrained.class_alias import MIXIN_MARK

Method = Literal["from_pretrained", "save_pretrained"]
Answer = Callable[..., Any]

_MARK: Final = "_answers_for_hfshard"
"""The attribute by which our functions in PreTrainedModel are known."""


@dataclass(slots=True)
class ChainCall:
    """One call of a model's method, which hfshard answers where PreTrainedModel's own would run."""

    method: Method
    target: object
    """The class that is loaded, or the model that is saved; transformers answers for any other."""
    answer: Answer
    """Called with the arguments that the last override passes on."""
    answers: list[Any] = field(default_factory=list)
    """What hfshard answered; empty where no override has come to the bottom of the chain."""


_current: ContextVar[ChainCall | None] = ContextVar("hfshard_override_chain", default=None)
"""The call under way in this thread; None at its bottom, where transformers builds the model or saves it."""


def run_chain(call: ChainCall, start: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the first method of a chain, and let hfshard answer at the bottom.

    Args:
        call: What is asked for.
        start: What has the first method: the class, the model, or `super()`, which looks for it only now.
        args, kwargs: The method's arguments.

    Returns:
        What the method returns.
    """
    _put_in_place(call.method)
    token = _current.set(call)
    try:
        return getattr(start, call.method)(*args, **kwargs)
    finally:
        _current.reset(token)


def call_under_way(method: Method, target: object) -> ChainCall | None:
    """The call of this method that is under way in this thread for this class or model, if there is one."""
    call = _current.get()
    return call if call is not None and call.method == method and call.target is target else None


def has_override(model_class: type, method: Method) -> bool:
    """Whether the class or one of its bases, other than the mixin, has a method of its own above PreTrainedModel's."""
    for base in model_class.__mro__:
        if base is PreTrainedModel:
            return False
        if method in vars(base) and MIXIN_MARK not in vars(base):
            return True
    return False


def _put_in_place(method: Method) -> None:
    """Put our function in the place of PreTrainedModel's, unless it is there."""
    current: Any = vars(PreTrainedModel)[method]
    function = current.__func__ if isinstance(current, classmethod) else current
    if not hasattr(function, _MARK):
        ours = _answering(method, function)
        setattr(PreTrainedModel, method, classmethod(ours) if isinstance(current, classmethod) else ours)


def _answering(method: Method, theirs: Answer) -> Answer:
    """Wrap transformers' function: it is called, but for the call under way."""

    @functools.wraps(theirs)
    def answered(target: Any, *args: Any, **kwargs: Any) -> Any:
        call = call_under_way(method, target)
        if call is None:
            return theirs(target, *args, **kwargs)
        token = _current.set(None)
        try:
            return call.answer(*args, **kwargs)
        finally:
            _current.reset(token)

    setattr(answered, _MARK, True)
    return answered
