"""Patches of methods of PreTrainedModel, diffusers' ModelMixin, Trainer and Accelerator, below every override.

Each is placed once and stays. It handles the call that hfshard has in progress in this thread, and every call if
hfshard is installed; otherwise it calls the original. This file imports neither torch nor transformers nor diffusers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from hfshard._util.threads import ForkSafeLock, bound
from hfshard.constants import MIXIN_MARK

Method = Literal["from_pretrained", "save_pretrained", "push_to_hub", "save_model"]
METHODS: Final[tuple[Method, ...]] = ("from_pretrained", "save_pretrained", "push_to_hub")
"""Those of models."""
HandlerLookup = Callable[..., Any]
"""Replacement of a method: it gets the base, the method's name, the class or the model, and the arguments."""

_MARK: Final = "_answers_for_hfshard"
"""The attribute that marks hfshard's functions; `functools.wraps` copies it to wrappers of other libraries."""
_THEIRS: Final = "_before_hfshard"
"""The attribute of a base that keeps the original functions by method name."""
_placing: Final = ForkSafeLock()


@dataclass(slots=True)
class OverrideCall:
    """One call of a model's method, which hfshard handles where PreTrainedModel's own would run."""

    method: Method
    target: object
    """The class that is loaded, or the model that is saved; transformers handles any other."""
    answer: Callable[..., Any]
    """Called with the arguments that the last override passes on."""
    answers: list[Any] = field(default_factory=list)
    """hfshard's results; empty if no override has reached the bottom of the chain."""


current_call: Final[ContextVar[OverrideCall | None]] = ContextVar("hfshard_override_chain", default=None)
"""The call in progress in this thread; None at its bottom, where transformers builds or saves the model."""

_find_stand_in: list[Callable[[], HandlerLookup | None]] = []
"""The function that returns the current replacement for every model; empty before it is registered."""


def active_call(method: Method, target: object) -> OverrideCall | None:
    """Return this thread's call in progress of this method for this class or model, if there is one."""
    call = current_call.get()
    return call if call is not None and call.method == method and call.target is target else None


def set_global_handler(find: Callable[[], HandlerLookup | None]) -> None:
    """Register a function that returns the handler of each call not started by hfshard; None: transformers."""
    _find_stand_in[:] = [find]


def patch_method(base: Any, method: Method) -> None:
    """Replace a base's function with hfshard's, unless it is in place already, even below others' patches."""
    with _placing.held():
        current: Any = vars(base)[method]
        function = getattr(current, "__func__", current)
        if _THEIRS not in vars(base):
            setattr(base, _THEIRS, {})
        originals = vars(base)[_THEIRS]
        if hasattr(function, _MARK) or originals.get(method, function) is not function:
            return
        originals[method] = function
        wrapper = _answering(base, method, function)
        setattr(base, method, classmethod(wrapper) if isinstance(current, classmethod) else wrapper)


def upstream(method: Method, model_class: type) -> Callable[..., Any]:
    """Return the original function of a class's base, which hfshard's own calls use."""
    base: Any = next(one for one in model_class.__mro__ if _THEIRS in vars(one))
    function: Callable[..., Any] = vars(base)[_THEIRS][method]
    return function


def _standing_in(base: type, method: Method, target: Any) -> Callable[..., Any] | None:
    stand_in = _find_stand_in[0]() if _find_stand_in else None
    if stand_in is None or not issubclass(target if isinstance(target, type) else type(target), base):
        return None  # or the function was called with an object that is not a model
    return functools.partial(stand_in, base, method, target)


def _answering(base: type, method: Method, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a base's function, which runs unless hfshard has this call in progress or replaces all calls."""

    @functools.wraps(original)
    def answered(target: Any, /, *args: Any, **kwargs: Any) -> Any:
        call = active_call(method, target)
        answer = _standing_in(base, method, target) if call is None else call.answer
        if answer is None:
            return original(target, *args, **kwargs)
        with bound(current_call, None):
            return answer(*args, **kwargs)

    setattr(answered, _MARK, True)
    return answered


# Kinds of models: transformers' and others, found out without importing transformers.


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
