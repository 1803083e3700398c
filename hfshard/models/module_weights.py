"""Saves of a model by this process or the ranks that have parts of it: of a plain module, and what all saves share."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, Final

from torch import nn

from hfshard._util.arguments import reject_pickle_request, reject_unknown_arguments, wraps_os_errors
from hfshard._util.call_ranks import has_other_ranks
from hfshard.constants import DEFAULT_MAX_SHARD_SIZE
from hfshard.errors import InvalidArgumentError
from hfshard.format.index import CheckpointIndex
from hfshard.places.place import Place, SavePlace
from hfshard.saving.pipeline import save_request
from hfshard.saving.save_request import SaveOptions, SaveRequest, request_from_module
from hfshard.tensors.state_dict import fully_sharded_modules, has_parts, has_spread, reject_sharded_tensors
from hfshard.tensors.stored_tensor import TensorLike, is_torch_tensor_type
from hfshard.tensors.zero3 import has_partitioned


@wraps_os_errors("place")
def save_module(
    model: nn.Module,
    place: SavePlace,
    state_dict: Mapping[str, Any] | None,
    options: SaveOptions,
    is_main_process: bool = True,
    files: Mapping[str, Any] | None = None,
) -> CheckpointIndex | None:
    """Save a module that is not a transformers model, alone or together with other ranks that have parts of it.

    Args:
        model: The module; wrappers around it are removed.
        state_dict: Tensors to save instead of the module's own; not mutated.
        is_main_process: False saves nothing, unless the model is spread over ranks or the save is collective.
        files: Fields of the request for the files other than weights.

    Returns:
        The index, or None if nothing was saved.
    """
    is_part = partial(is_spread, model, state_dict)
    if not is_main_process and has_partitioned(model):
        is_part = partial(has_spread, state_dict or {})
    elif not (is_main_process or options.is_collective or has_parts(model)):
        tensors = model.state_dict() if state_dict is None else state_dict
        reject_sharded_tensors(tensors)
        is_part = partial(has_spread, tensors)
    if leaves_save(place, options, is_part, is_main_process=is_main_process):
        return None
    with abort_peers_on_error(place, lambda: options.is_collective or is_part()):
        request = replace(request_from_module(model, state_dict, options), **(files or {}))
    return save_here_or_on_ranks(request, place)


def is_spread(model: nn.Module, state_dict: Mapping[str, Any] | None = None) -> bool:
    """Return whether the model, or the tensors given in its place, are spread over ranks, so that all must call.

    After a forward pass, parameters of `fully_shard` may be full until they are saved.
    """
    if state_dict is not None:
        return has_spread(state_dict)
    return has_spread(dict(model.named_parameters())) or has_parts(model) or bool(fully_sharded_modules(model))


# Where other ranks make the same call, they save together; a process alone enters nothing of `distributed`.


def save_here_or_on_ranks(request: SaveRequest, place: SavePlace) -> CheckpointIndex:
    """Save a request alone, or together with the other ranks of the call's process group.

    If a tensor is spread over ranks, or the ranks have different names, every rank must call. If all tensors are
    replicated, every rank has all of them: the ranks that call at about the same time make one save, which the first of
    them writes; a rank that comes later awaits its outcome.

    Args:
        request: Of this rank; its tensors may be DTensors and `SpreadTensor`s. Options, config and other files are
            those of the first rank.
        place: The same on all ranks that save together.

    Returns:
        The index, the same on every rank.

    Raises:
        RankFailedError: Another rank failed, died, or did not come: the old checkpoint stays, unless the message says
            that the outcome is unknown.
        Everything that `save_request` raises.
    """
    if not has_other_ranks():
        return save_request(require_whole_tensors(request), place)
    from hfshard.distributed.save_on_ranks import save_together

    return save_together(request, place)


def abort_peers_on_error(place: Place, is_part: Callable[[], bool]) -> AbstractContextManager[None]:
    """Abort the other ranks if this one fails or dies before it joins the save.

    `is_part` returns whether this rank has a part of what is saved, so that the others wait; called only after an
    error.
    """
    if not has_other_ranks():
        return nullcontext()
    from hfshard.distributed.save_on_ranks import prepare_to_save

    return prepare_to_save(place, is_part)


def leaves_save(place: Place, options: SaveOptions, is_part: Callable[[], bool], *, is_main_process: bool) -> bool:
    """Return whether this rank leaves a save to others, which then do not wait for it: `is_part` is then false."""
    if is_main_process or options.is_collective or is_part():
        return False
    if has_other_ranks():
        from hfshard.distributed.save_on_ranks import leave_to_others

        leave_to_others(place)
    return True


def require_whole_tensors(request: SaveRequest) -> SaveRequest:
    """Return the request of a rank that saves alone, with complete tensors; reject it if other ranks had the rest."""
    if request.name_order:
        raise InvalidArgumentError(
            "This model is part of one whose rest is on other ranks, but there is no process group to save it with. "
            "Save before destroy_process_group(), on every rank."
        )
    return replace(request, tensors=whole_tensors(request.tensors))


def whole_tensors(tensors: Mapping[str, Any]) -> dict[str, TensorLike]:
    """Return the tensors of a rank that saves alone: its part of a spread one must be all of it.

    Raises:
        InvalidArgumentError: A part is not.
    """
    if all(map(is_torch_tensor_type, tensors.values())):
        return dict(tensors)
    if not has_spread(tensors):
        reject_sharded_tensors(tensors)
        return dict(tensors)
    from hfshard.distributed.spread_tensor import SpreadTensor, with_spread_tensors

    found: dict[str, TensorLike] = {}
    for name, tensor in with_spread_tensors(tensors).items():
        if isinstance(tensor, SpreadTensor):
            part = tensor.part()
            if part.numel() != prod(tensor.shape):
                raise InvalidArgumentError(
                    f"'{name}' is spread over ranks {list(tensor.mesh.ranks)}, but there is no process group to save "
                    "it with. Save before destroy_process_group(), on every rank.",
                    fqn=name,
                )
            found[name] = part.reshape(tensor.shape)
        else:
            found[name] = tensor
    return found


# Arguments of `save_pretrained` and `push_to_hub` that transformers models and plain modules share.


PUSH_ARGUMENTS: Final = frozenset(
    ("repo_id", "commit_message", "commit_description", "private", "revision", "create_pr", "tags", "path_in_repo",
     "token", "max_shard_size", "variant", "packing", "progress")
)  # fmt: skip
"""Arguments of hfshard's `push_to_hub`."""


SAVE_ARGUMENTS: Final = PUSH_ARGUMENTS | frozenset(
    ("save_directory", "is_main_process", "state_dict", "push_to_hub", "save_peft_format", "save_original_format",
     "distributed_checkpoint", "safe_serialization", "checksum")
)  # fmt: skip
"""Arguments of hfshard's `save_pretrained`; some are passed on to `push_to_hub`."""


_DEFAULTS: Final[dict[str, Any]] = {
    "is_main_process": True,
    "state_dict": None,
    "push_to_hub": False,
    "max_shard_size": DEFAULT_MAX_SHARD_SIZE,
    "variant": None,
    "token": None,
    "save_peft_format": True,
    "save_original_format": True,
    "distributed_checkpoint": False,
    "packing": "greedy",
    "progress": None,
}


def without_defaults(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the arguments that have their default values: an override of the class may not know them."""
    return {name: value for name, value in arguments.items() if name not in _DEFAULTS or value != _DEFAULTS[name]}


def stock_shard_size(given: Any) -> Any:
    """Convert what transformers also compares with sizes, any number, to 1 or more bytes; at 1, each tensor has a file.

    Numbers are also those of numpy and torch. Infinity and NaN, which nothing exceeds, are no limit.
    """
    if isinstance(given, str):
        return given.strip()
    if not hasattr(given, "__float__"):
        return given
    return int(max(given, 1)) if given < math.inf else sys.maxsize


def check_save_arguments(
    place: Place, token: str | bool | None, kwargs: dict[str, Any], known: frozenset[str], *, push_to_hub: bool
) -> None:
    """Check the arguments of `save_pretrained` that it does not name, and remove those of older code.

    Args:
        kwargs: Changed; some are for `push_to_hub`.
        known: The accepted names.
        push_to_hub: Whether the saved files are also pushed, so that a revision and a token apply.

    Raises:
        UnknownArgumentError: A name is not known.
        InvalidArgumentError: A pickle is asked for, or a revision or a token is given with an address.
    """
    reject_pickle_request(kwargs)
    kwargs.pop("save_function", None)  # of accelerate's older examples; transformers ignores it too
    reject_unknown_arguments(kwargs, known, "save_pretrained")
    if not push_to_hub:
        place.reject_hub_arguments(revision=kwargs.get("revision"), token=token)


def check_push_arguments(kwargs: dict[str, Any], known: frozenset[str]) -> None:
    """Remove the arguments of older code that `push_to_hub` does not name; reject any left, suggesting a known one."""
    reject_pickle_request(kwargs)
    reject_unknown_arguments(kwargs, known - kwargs.keys(), "push_to_hub")


def take_repo_id(kwargs: dict[str, Any], directory: str) -> Any:
    """Remove the repo from the arguments of a save that also pushes; its default is the name of the directory.

    The path may end in "..", which names the directory above.
    """
    return kwargs.pop("repo_id", None) or os.path.basename(os.path.abspath(directory))
