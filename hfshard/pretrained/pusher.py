"""Pushes a transformers model: straight from memory, or by what its own save_pretrained writes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from hfshard._util.arguments import refuse_pickles, refuse_unknown
from hfshard.commit.hub_marker import absolute_address
from hfshard.distributed.push_together import push_together
from hfshard.hub.push_files import PushOptions
from hfshard.pretrained.arguments import PUSH_ARGUMENTS
from hfshard.pretrained.class_alias import class_before_fsdp
from hfshard.pretrained.fallback import needs_transformers_saver
from hfshard.pretrained.overrides.override_chain import has_override
from hfshard.pretrained.pushing.model_card import tagged_card
from hfshard.pretrained.pushing.push import push_by_directory, push_model, tags_of, with_message
from hfshard.pretrained.ranks.stages import is_part_of_push
from hfshard.pretrained.request import request_from_model
from hfshard.pretrained.saver import without_defaults
from hfshard.saving.save_request import SaveOptions


def push_pretrained_model(
    model: PreTrainedModel,
    repo_id: str | os.PathLike[str],
    tags: list[str] | str | None,
    saving: Mapping[str, Any],
    pushing: Mapping[str, Any],
    unknown: Mapping[str, Any],
) -> Any:
    """Push a model as one Hub commit; with other ranks, where each of them has a part of it.

    Args:
        model: The model.
        repo_id: As in `push_to_hub`.
        tags: Of the model card, beside the model's own.
        saving: Options of `SaveOptions`.
        pushing: Options of `PushOptions`.
        unknown: Keywords that `push_to_hub` does not name.

    Returns:
        As `push_to_hub`.

    Raises:
        UnknownArgumentError: A keyword is none that older code gives.
        Everything that `push_model` and the model's `save_pretrained` raise.
    """
    with push_together(is_collective=is_part_of_push(model)) as together:
        repo_id = absolute_address(repo_id)
        rest = dict(unknown)
        refuse_pickles(rest)
        refuse_unknown(rest, PUSH_ARGUMENTS - rest.keys(), "push_to_hub")
        options = SaveOptions(**saving)
        push_options = with_message(class_before_fsdp(type(model)), PushOptions(**pushing))
        make_card = partial(tagged_card, tags=tags_of(model, tags))
        together.agree_on(repo_id)
        if needs_transformers_saver(model, distributed_checkpoint=False) or has_override(
            type(model), "save_pretrained"
        ):
            given = {name: value for name, value in saving.items() if name in ("max_shard_size", "variant", "packing")}
            save = partial(model.save_pretrained, **without_defaults(given))
            return push_by_directory(save, options.variant, repo_id, make_card, push_options, together)
        return push_model(request_from_model(model, None, options), repo_id, make_card, push_options, together)
