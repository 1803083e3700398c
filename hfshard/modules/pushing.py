"""Pushes a plain module as one Hub commit: weights, config.json, and a model card where there is none."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from torch import nn

from hfshard._util.arguments import refuse_pickles, refuse_unknown
from hfshard.commit.hub_marker import absolute_address
from hfshard.distributed.push_together import push_together
from hfshard.distributed.spread_tensor import has_spread
from hfshard.errors import InvalidArgumentError
from hfshard.hub.push_files import PushOptions
from hfshard.modules.saving import PUSH_ARGUMENTS, ModuleExtras, module_request, told_options
from hfshard.pretrained.pushing.push import push_by_directory, push_model
from hfshard.saving.save_request import SaveOptions

_MESSAGE: Final = "Push model using huggingface_hub."
"""As in huggingface_hub."""

_PATTERNS: Final = ("allow_patterns", "ignore_patterns", "delete_patterns")
"""What huggingface_hub's `push_to_hub` takes, and would push half a checkpoint by."""


def push_plain(
    model: Any,
    repo_id: str | os.PathLike[str],
    tags: Sequence[str] | str | None,
    saving: Mapping[str, Any],
    pushing: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    *,
    is_overridden: bool,
) -> Any:
    """Do what `ShardedModelMixin.push_to_hub` says, for a plain module.

    Args:
        model: The module.
        repo_id: As there.
        tags: Further ones for a card that is made.
        saving: Options of `SaveOptions`.
        pushing: Options of `PushOptions`.
        kwargs: The other keywords.
        is_overridden: Whether its class saves in a way of its own.

    Raises:
        InvalidArgumentError: Patterns, which can't be kept from leaving half a checkpoint; or two revisions.
        UnknownArgumentError: A keyword that it does not take.
        Everything that `hfshard.push_checkpoint` raises, and overrides of the class.
    """
    rest = dict(kwargs)
    extras = ModuleExtras.taken_from(rest)
    revision = _revision_of(pushing["revision"], rest.pop("branch", None))
    _refuse_others(rest)
    message = pushing["commit_message"] or _MESSAGE
    options = PushOptions(**{**pushing, "revision": revision, "commit_message": message})
    repo_id = absolute_address(repo_id)
    make_card = partial(_card, model, extras, [tags] if isinstance(tags, str) else list(tags or ()))
    is_spread = isinstance(model, nn.Module) and has_spread(dict(model.named_parameters()))
    with push_together(is_collective=is_spread) as together:
        together.agree_on(repo_id)
        if not is_overridden:
            request = module_request(model, extras, SaveOptions(**saving))
            return push_model(request, repo_id, make_card, options, together)
        config = {} if extras.config is None else {"config": extras.config}
        values = {"model_card_kwargs": dict(extras.card_values)} if extras.card_values else {}
        save: Callable[..., Any] = partial(model.save_pretrained, **told_options(saving), **config, **values)
        return push_by_directory(save, saving["variant"], repo_id, make_card, options, together, keeps_card=True)


def _revision_of(revision: str | None, branch: str | None) -> str | None:
    """The one that is given, of two names for it."""
    if None not in (branch, revision) and branch != revision:
        raise InvalidArgumentError(f"branch={branch!r} and revision={revision!r} are two names for one thing.")
    return revision if branch is None else branch


def _refuse_others(kwargs: dict[str, Any]) -> None:
    refuse_pickles(kwargs)
    for name in _PATTERNS:
        if kwargs.pop(name, None) is not None:
            raise InvalidArgumentError(
                f"{name} could leave half a checkpoint on the hub. Save the model, and push what you want of the "
                "directory: hfshard.push_checkpoint(directory, repo_id, ignore_patterns=...), which checks that; "
                "what hfshard's own pushes have left is deleted in any case."
            )
    refuse_unknown(kwargs, PUSH_ARGUMENTS, "push_to_hub")


def _card(model: Any, extras: ModuleExtras, tags: Sequence[str], read_old: Callable[[], bytes] | None) -> bytes | None:
    """Make the card of a repo that has none; the one that is there may have been edited, and stays."""
    if read_old is not None:
        return None
    card = model.generate_model_card(**extras.card_values)
    if tags:
        card.data.tags = list(dict.fromkeys([*(card.data.tags or ()), *tags]))
    return str(card).encode()
