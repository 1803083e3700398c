"""Handlers for every transformers model once hfshard is installed: the mixin's methods with transformers' behavior.

hfshard rejects only damaged files. transformers decides the rest: it accepts, reports or rejects arguments that
hfshard does not know, checkpoints that hfshard cannot read, and names that do not fit.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any, Final

from huggingface_hub import HfApi
from transformers import PreTrainedModel

from hfshard.checkpoint.load_options import LoadOptions
from hfshard.hub.push_files import PushOptions
from hfshard.models.build import handle_from_pretrained, load_on_ranks
from hfshard.models.collect import update_config
from hfshard.models.install_settings import Settings
from hfshard.models.module_weights import SAVE_ARGUMENTS, stock_shard_size
from hfshard.models.patching import Method, upstream
from hfshard.models.saver import handle_save_pretrained, push_pretrained_model
from hfshard.saving.save_request import SaveOptions

MAX_SHARD_SIZE: Final = "50GB"
"""transformers' default, so that the files have the same names as without hfshard."""

_IGNORED: Final = frozenset(("safe_serialization", "save_function"))
"""Arguments of older code that transformers accepts and ignores."""

_SAVING: Final = inspect.signature(handle_save_pretrained)
"""The parameters of transformers' `save_pretrained`, in their order, after the model and the options."""

_PUSHING: Final = frozenset(inspect.signature(PushOptions).parameters)
"""The options of a push."""


def _load(
    settings: Settings,
    model_class: type[PreTrainedModel],
    /,
    pretrained_model_name_or_path: str | os.PathLike[str] | None,
    *model_args: Any,
    **kwargs: Any,
) -> Any:
    """Load in place of PreTrainedModel's `from_pretrained`."""
    options = LoadOptions(verify=settings.verify, disable_mmap=kwargs.get("disable_mmap"), is_lenient=True)
    with load_on_ranks(options, kwargs):
        return handle_from_pretrained(model_class, pretrained_model_name_or_path, model_args, kwargs, options)


def _save(settings: Settings, model: PreTrainedModel, /, *args: Any, **kwargs: Any) -> None:
    """Save in place of PreTrainedModel's `save_pretrained`."""
    options = SaveOptions(checksum=settings.checksum, headers_count=False)
    given = _SAVING.bind(model, options, *args, **kwargs).arguments
    del given["model"], given["options"]  # positional: keywords of these names are others
    named = {name: value for name, value in given.pop("kwargs", {}).items() if name not in _IGNORED}
    unknown = named.keys() - SAVE_ARGUMENTS
    if not given.get("push_to_hub"):
        named = {name: value for name, value in named.items() if name not in unknown}
    elif not unknown.isdisjoint(inspect.signature(HfApi.create_repo).parameters):  # transformers creates such a repo
        upstream("save_pretrained", type(model))(model, *args, **kwargs)
        return
    if not given.get("is_main_process", True) and not os.path.isfile(given["save_directory"]):
        os.makedirs(given["save_directory"], exist_ok=True)  # every process may write more into it
        update_config(model)
    given["max_shard_size"] = stock_shard_size(given.get("max_shard_size", MAX_SHARD_SIZE))
    handle_save_pretrained(model, options, **given, **named)


def _push(
    settings: Settings,
    model: PreTrainedModel,
    /,
    repo_id: str | os.PathLike[str],
    *,
    tags: list[str] | str | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    **kwargs: Any,
) -> Any:
    """Push in place of PreTrainedModel's `push_to_hub`."""
    saving = {"max_shard_size": stock_shard_size(max_shard_size), "checksum": settings.checksum, "headers_count": False}
    pushing = {name: value for name, value in kwargs.items() if name in _PUSHING}
    unknown = {name: value for name, value in kwargs.items() if name not in _PUSHING | _IGNORED}
    return push_pretrained_model(model, repo_id, tags, saving, pushing, unknown)


HANDLERS: Final[dict[Method, Callable[..., Any]]] = {
    "from_pretrained": _load,
    "save_pretrained": _save,
    "push_to_hub": _push,
}
"""The handler of each method."""
