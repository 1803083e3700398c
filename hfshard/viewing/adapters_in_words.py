"""What PEFT makes of names, in words: an adapter and the modules that are saved with it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hfshard.viewing.parts_in_words import describe_tensors

_LORA = ".lora_"
"""How the parts of names begin that PEFT gives to what it adds to a module."""
_FRONT = "base_model.model."
"""Before all names of a model that PEFT wraps."""
_SAVED = ".modules_to_save."
"""Behind the name of a module that is trained as a whole; a file of an adapter alone leaves it out."""
_WRAPPED = (".base_layer", ".original_module")
"""Behind the name of a module that has an adapter, or a trained one in its place."""


def adapter_in_words(names: Collection[str], *, is_alone: bool) -> str | None:
    """Say what an adapter is for, and which modules are trained with it.

    Args:
        names: FQNs; at least one.
        is_alone: Whether they may be those of a file of an adapter, in which a trained module has its own name.

    Returns:
        None where these are not the tensors of an adapter.

    Example:
        >>> names = [f"base_model.model.{name}" for name in ("q.lora_A.weight", "q.lora_B.weight", "head.bias")]
        >>> adapter_in_words(names, is_alone=True)
        'adapter (LoRA) for q, with head'
    """
    adapted = {f"{name.removeprefix(_FRONT).split(_LORA)[0]}.weight" for name in names if _LORA in name}
    others = [name for name in names if _LORA not in name]
    if not adapted or not all(_is_trained_with(name, is_alone=is_alone) for name in others):
        return None
    text = f"adapter (LoRA) for {describe_tensors(adapted, adapted, names_kinds=True)}"
    if others:
        trained = {_trained_name(name) for name in others}
        text = f"{text}, with {describe_tensors(trained, trained, names_kinds=True)}"
    return text


def is_wrapping(pairs: Iterable[tuple[str, str]]) -> bool:
    """Whether each second name is the first one in a model that PEFT wraps, and one at least has a module wrapped."""
    wraps = False
    for plain, wrapped in pairs:
        bare = wrapped.removeprefix(_FRONT)
        for part in _WRAPPED:
            bare = f"{bare}.".replace(f"{part}.", ".").removesuffix(".")
        if bare != plain or bare == wrapped:
            return False
        wraps = wraps or f"{_FRONT}{bare}" != wrapped
    return wraps


def _is_trained_with(name: str, *, is_alone: bool) -> bool:
    if _SAVED in name:
        return True
    return is_alone and name.startswith(_FRONT) and not any(f"{part}." in name for part in _WRAPPED)


def _trained_name(name: str) -> str:
    module, found, rest = name.removeprefix(_FRONT).partition(_SAVED)
    return f"{module}.{rest.partition('.')[2]}" if found else module
