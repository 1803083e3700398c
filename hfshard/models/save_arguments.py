"""Arguments of `save_pretrained` and `push_to_hub` that transformers models and plain modules share."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, Final

from hfshard._util.arguments import reject_pickle_request, reject_unknown_arguments
from hfshard.constants import DEFAULT_MAX_SHARD_SIZE
from hfshard.places.place import Place

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
    """Convert any finite number, as transformers accepts, to 1 or more bytes; at 1, each tensor has its own file."""
    is_number = (isinstance(given, float) and math.isfinite(given)) or type(given) is int
    return max(1, int(given)) if is_number else given


def check_save_arguments(
    place: Place, token: str | bool | None, kwargs: dict[str, Any], known: frozenset[str], *, push_to_hub: bool
) -> None:
    """Check the arguments of `save_pretrained` that it does not name, and remove those of older code.

    Args:
        place: Where to save.
        token: For the Hub.
        kwargs: The keyword arguments that `save_pretrained` does not name; some are for `push_to_hub`.
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
    """Check the arguments of `push_to_hub` that it does not name, and remove those of older code.

    Args:
        kwargs: Their names and values; each left is unknown.
        known: The accepted names, of which the error suggests one.

    Raises:
        UnknownArgumentError: One is left.
        InvalidArgumentError: A pickle is asked for.
    """
    reject_pickle_request(kwargs)
    reject_unknown_arguments(kwargs, known - kwargs.keys(), "push_to_hub")


def take_repo_id(kwargs: dict[str, Any], directory: str) -> Any:
    """Remove the repo from the arguments of a save that also pushes; its default is the name of the directory.

    The path may end in "..", which names the directory above.
    """
    return kwargs.pop("repo_id", None) or os.path.basename(os.path.abspath(directory))
