"""Finds the weights in what a program saved: under which key they lie, never by a guess where there are several."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, Final

import torch

from hfshard._util.text import list_some
from hfshard.errors import AmbiguousWeightsError, DamagedCheckpointError, InvalidArgumentError, remedy
from hfshard.format.parts_of_ranks import refuse_partitioned_file

logger = logging.getLogger(__name__)

_WEIGHTS: Final = re.compile(
    r"(^|[_.])(model|state_?dict|net|network|module|weights|params|ema|teacher|student|generator|discriminator)\d*($|_)",
    re.IGNORECASE,
)
"""Keys under which programs save weights: timm, Lightning, torchvision's references, mmcv, fairseq, DINO, GANs."""

_OTHERS: Final = re.compile(
    r"optim|(^|_)opt(_|$)|sched|scaler|rng|random|seed|callback|loop|hparam|hyper|metric|meter|history|args|config|cfg"
    r"|meta$|param_groups|param_shapes",
    re.IGNORECASE,
)
"""Keys under which a run keeps what is no weight, tensors too. They are taken only where `key` names them."""

_SHOWN: Final = 12
"""Candidates, or keys, in a message."""


def choose_weights(value: Any, path: str, key: str | None) -> tuple[str | None, dict[str, torch.Tensor]]:
    """Take the weights out of what a program saved.

    1. Where `key` says which, those.
    2. A dict of names and tensors is itself the weights.
    3. Else they are in a dict of it, or in one of such a dict: one whose key is a usual one, or that has nothing but
       names and tensors. A run's optimizer and random states are none.

    Args:
        value: What `read_pickle` gave.
        path: The file's, for messages.
        key: The key of the weights, with a dot before each deeper one; None: there must be only one candidate.

    Returns:
        The key under which they were found, or None where the whole value is the weights; FQN -> tensor.

    Raises:
        AmbiguousWeightsError: There are several candidates; it lists them.
        InvalidArgumentError: Nothing lies under `key`.
        DamagedCheckpointError: There are no weights, or something among them is no plain tensor.
        CheckpointNotFoundError: The weights are in other files, in parts.
    """
    if not isinstance(value, Mapping):
        raise DamagedCheckpointError(
            f"'{path}' holds a {type(value).__name__}, not a state dict. {remedy(path)}", path=path, expected="dict"
        )
    refuse_partitioned_file(value, path)
    if key is None and not _is_pure(value):
        key = _only_candidate(value, path)
        if key is not None:
            logger.info("The weights of '%s' are those under its key '%s'.", path, key)
    chosen = value if key is None else _at_key(value, key, path)
    _check_entries(chosen, path, key)
    return key, dict(chosen)


def find_candidates(value: Mapping[Any, Any]) -> dict[str, Mapping[Any, Any]]:
    """Find what may be weights in a dict that is no state dict itself.

    Returns:
        Key, with a dot before a deeper one -> dict; each dict once, under its first key.
    """
    found: dict[str, Mapping[Any, Any]] = {}
    for key, part in _parts(value):
        if _may_be_weights(key, part):
            found.setdefault(key, part)
        elif not _has_tensors(part):
            inner = {f"{key}.{name}": one for name, one in _parts(part)}
            found |= {name: one for name, one in inner.items() if _may_be_weights(name, one)}
    if not found:  # the state dict of a module without parameters
        found = {key: part for key, part in _parts(value) if not part and _WEIGHTS.search(key)}
    kept = {id(part): key for key, part in reversed(found.items())}
    return {key: part for key, part in found.items() if kept[id(part)] == key}


def _only_candidate(value: Mapping[Any, Any], path: str) -> str | None:
    candidates = find_candidates(value)
    named = {key: part for key, part in candidates.items() if _WEIGHTS.search(key)}
    if not candidates or (not named and _has_weights(value)):
        if value and not _has_weights(value):
            keys = list_some([key for key in value if isinstance(key, str)], _SHOWN, quote=True)
            raise DamagedCheckpointError(
                f"'{path}' holds no weights that are known as such: its entries are {keys}. If one of them holds "
                "weights, pass it: key=, or --key on the command line.",
                path=path,
            )
        return None  # a state dict with something else in it, which is named
    if len(candidates) == 1:
        return next(iter(candidates))
    first = next(iter(named or candidates))
    raise AmbiguousWeightsError(
        f"'{path}' holds several sets of weights, and nothing was loaded: {_described(candidates)}. Pass one "
        f"by hfshard.load_model or load_state_dict(..., key={first!r}), or by --key {first} on the command line.",
        path=path,
        keys=tuple(candidates),
    )


def _at_key(value: Mapping[Any, Any], key: str, path: str) -> Mapping[Any, Any]:
    found = _lookup(value, key)
    if isinstance(found, Mapping):
        return found
    what = "has nothing" if found is None else f"has a {type(found).__name__}"
    candidates = {} if _is_pure(value) else find_candidates(value)
    there = f"Its weights: {_described(candidates)}" if candidates else "Leave key out, if the whole file is weights"
    raise InvalidArgumentError(f"'{path}' {what} under key={key!r:.200}. {there}.", path=path)


def _lookup(value: Any, key: str) -> Any:
    """What lies under a key, whose dots may be its own or before a deeper one; the first is as long as may be."""
    if not isinstance(value, Mapping):
        return None
    if key in value:
        return value[key]
    dots = [at for at in reversed(range(len(key))) if key[at] == "."]
    found = (_lookup(value[key[:at]], key[at + 1 :]) for at in dots if key[:at] in value)
    return next((one for one in found if one is not None), None)


def _check_entries(chosen: Mapping[Any, Any], path: str, key: str | None) -> None:
    where = "is not a state dict" if key is None else f"has no state dict under {key!r:.200}"
    for name, tensor in chosen.items():
        problem = _problem_of(tensor)
        if not isinstance(name, str):
            problem = f"has a {type(name).__name__} for a name"
        if problem:
            shown = name[:200] if isinstance(name, str) else type(name).__name__
            raise DamagedCheckpointError(
                f"'{path}' {where}: its entry {shown!r} {problem}. {remedy(path)}", path=path, fqn=shown
            )


def _problem_of(tensor: Any) -> str | None:
    """What is wrong with a value among weights; None: it is a plain tensor with its data."""
    if not isinstance(tensor, torch.Tensor):
        return f"is a {type(tensor).__name__}, not a tensor"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"is a {type(tensor).__name__}, not a plain tensor"
    if tensor.device.type == "meta":
        return "is a tensor without data, on the device meta"
    if tensor.is_nested or tensor.layout != torch.strided:
        return "is a sparse or nested tensor: torch.load reads it, hfshard only dense ones"
    return None


def _may_be_weights(key: str, part: Mapping[Any, Any]) -> bool:
    if _OTHERS.search(key):
        return False
    return _has_tensors(part) if _WEIGHTS.search(key) else _is_pure(part) and _has_weights(part)


def _parts(value: Mapping[Any, Any]) -> list[tuple[str, Mapping[Any, Any]]]:
    return [(key, part) for key, part in value.items() if isinstance(key, str) and isinstance(part, Mapping)]


def _is_pure(value: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, str) and isinstance(one, torch.Tensor) for key, one in value.items())


def _has_tensors(value: Mapping[Any, Any]) -> bool:
    return any(isinstance(one, torch.Tensor) for one in value.values())


def _has_weights(value: Mapping[Any, Any]) -> bool:
    """Whether there is a tensor that looks like a weight: not a metric, nor a random state."""
    return any(
        isinstance(one, torch.Tensor) and one.dim() > 0 and (one.is_floating_point() or one.is_complex())
        for one in value.values()
    )


def _described(candidates: Mapping[str, Mapping[Any, Any]]) -> str:
    return list_some([f"{key!r:.200} ({_size_of(part)})" for key, part in candidates.items()], _SHOWN)


def _size_of(part: Mapping[Any, Any]) -> str:
    tensors = [one for one in part.values() if isinstance(one, torch.Tensor)]
    nbytes = sum(one.numel() * one.itemsize for one in tensors)
    return f"{len(tensors):,} tensor{'s' if len(tensors) != 1 else ''}, {nbytes:,} bytes"
