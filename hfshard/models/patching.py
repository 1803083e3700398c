"""Our functions in the place of PreTrainedModel's own: the bottom of every class's chain of overrides.

Each stands there once and stays. It answers for the call that hfshard has under way in this thread, and for everybody
where hfshard is installed; else it does what was there before. This file imports neither torch nor transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from hfshard._util.threads import ProcessLock

Method = Literal["from_pretrained", "save_pretrained", "push_to_hub"]
METHODS: Final[tuple[Method, ...]] = ("from_pretrained", "save_pretrained", "push_to_hub")
Answer = Callable[..., Any]
StandIn = Callable[..., Any]
"""Does what a method is called for: it gets the method's name, the class or the model, and the arguments."""

_MARK: Final = "_answers_for_hfshard"
"""The attribute by which our functions are known; `functools.wraps` hands it on to what others put around them."""
_THEIRS: Final = "_before_hfshard"
"""The attribute of PreTrainedModel that keeps, by the method's name, the functions that were there before ours."""
_placing: Final = ProcessLock()


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


current_call: Final[ContextVar[ChainCall | None]] = ContextVar("hfshard_override_chain", default=None)
"""The call under way in this thread; None at its bottom, where transformers builds the model or saves it."""

_find_stand_in: list[Callable[[], StandIn | None]] = []
"""Who says what stands in, at this moment, for every model."""


def call_under_way(method: Method, target: object) -> ChainCall | None:
    """The call of this method that is under way in this thread for this class or model, if there is one."""
    call = current_call.get()
    return call if call is not None and call.method == method and call.target is target else None


def stand_in_for_all(find: Callable[[], StandIn | None]) -> None:
    """Let a function say, at each call that hfshard does not have under way, what answers it; None: transformers."""
    _find_stand_in[:] = [find]


def put_in_place(base: Any, method: Method) -> None:
    """Put our function in the place of PreTrainedModel's, unless it is there, or below what others have put there.

    Args:
        base: PreTrainedModel.
        method: Which.
    """
    with _placing.held():
        current: Any = vars(base)[method]
        function = getattr(current, "__func__", current)
        if _THEIRS not in vars(base):
            setattr(base, _THEIRS, {})
        theirs = vars(base)[_THEIRS]
        if hasattr(function, _MARK) or theirs.get(method, function) is not function:
            return
        theirs[method] = function
        ours = _answering(base, method, function)
        setattr(base, method, classmethod(ours) if isinstance(current, classmethod) else ours)


def upstream(method: Method, model_class: type) -> Answer:
    """PreTrainedModel's function that was there before ours: what our own calls go to.

    Args:
        method: Which.
        model_class: The class that it is called for.
    """
    base: Any = next(one for one in model_class.__mro__ if _THEIRS in vars(one))
    function: Answer = vars(base)[_THEIRS][method]
    return function


def _standing_in(base: type, method: Method, target: Any) -> Answer | None:
    stand_in = _find_stand_in[0]() if _find_stand_in else None
    if stand_in is None or not issubclass(target if isinstance(target, type) else type(target), base):
        return None  # or somebody has called the function with an object that is no model
    return functools.partial(stand_in, method, target)


def _answering(base: type, method: Method, theirs: Answer) -> Answer:
    """Wrap transformers' function: it is called, but for the call under way, and where something stands in for all."""

    @functools.wraps(theirs)
    def answered(target: Any, *args: Any, **kwargs: Any) -> Any:
        call = call_under_way(method, target)
        answer = _standing_in(base, method, target) if call is None else call.answer
        if answer is None:
            return theirs(target, *args, **kwargs)
        token = current_call.set(None)
        try:
            return answer(*args, **kwargs)
        finally:
            current_call.reset(token)

    setattr(answered, _MARK, True)
    return answered
