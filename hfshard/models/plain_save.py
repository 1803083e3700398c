"""Save or push a plain module: weights, config.json and model card as one checkpoint or one Hub commit."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from huggingface_hub import ModelHubMixin, PyTorchModelHubMixin
from torch import nn

from hfshard._util.call_ranks import together_if
from hfshard._util.threads import bound
from hfshard.commit.directory_state import reject_hub_directory
from hfshard.constants import CONFIG_NAME, README
from hfshard.disk.byte_source import BytesSource
from hfshard.disk.fsops import rename, unlink_if_exists, write_file
from hfshard.disk.safe_open import Identity, identity_of
from hfshard.distributed.push_together import push_together
from hfshard.errors import InvalidArgumentError
from hfshard.hub.push_files import PushOptions
from hfshard.models.module_weights import (
    PUSH_ARGUMENTS,
    check_push_arguments,
    check_save_arguments,
    is_spread,
    save_module,
    take_repo_id,
    without_defaults,
)
from hfshard.models.push_model import begin_push, merge_tags
from hfshard.places.place import SavePlace, place_to_save
from hfshard.saving.save_request import SaveOptions, SaveRequest, request_from_module

_PUSH_ARGUMENTS: Final = PUSH_ARGUMENTS | {"branch", "config", "model_card_kwargs"}
"""Arguments of a plain module's `push_to_hub`."""

_SAVE_ARGUMENTS: Final = _PUSH_ARGUMENTS | {"is_main_process", "state_dict", "push_to_hub", "checksum"}
"""Arguments of a plain module's `save_pretrained`."""

_UNTAKEN: Final = {"save_peft_format": True, "save_original_format": True, "distributed_checkpoint": False}
"""Arguments of transformers' `save_pretrained` that do not apply to a plain module, with their defaults."""


@dataclass(frozen=True, slots=True)
class ModuleFiles:
    """Config and model card values to save with a plain module's weights."""

    config: Any = None
    """Replaces the config that the model has recorded."""
    card_values: Mapping[str, Any] = field(default_factory=dict)
    """Values for the model card's template."""

    @classmethod
    def taken_from(cls, kwargs: dict[str, Any]) -> ModuleFiles:
        """Remove them from a call's keyword arguments."""
        return cls(kwargs.pop("config", None), kwargs.pop("model_card_kwargs", None) or {})

    def config_of(self, model: PyTorchModelHubMixin) -> bytes | None:
        """Return the contents of config.json, or None if the model has no config.

        Raises:
            InvalidArgumentError: The config cannot be written as JSON.
        """
        config = recorded_config(model) if self.config is None else self.config
        return None if config is None else config_json(config)

    def card_of(self, model: PyTorchModelHubMixin) -> bytes:
        """Return the contents of README.md."""
        return str(model.generate_model_card(**self.card_values)).encode()


@dataclass(slots=True)
class _ModuleSave:
    """One save of a plain module, done by its class's or the mixin's `_save_pretrained`."""

    model: Any
    place: SavePlace
    options: SaveOptions
    is_main_process: bool
    state_dict: Mapping[str, Any] | None
    config: bytes | None
    card: bytes | None
    config_before: Identity | None
    is_answered: bool = False
    """Whether the mixin's `_save_pretrained` has saved everything."""

    @property
    def directory(self) -> str:
        """The path or address of the place."""
        return self.place.address

    @property
    def is_config_written(self) -> bool:
        """True if an override has written config.json by itself."""
        return _identity_of_config(self.directory) not in (None, self.config_before)


_under_way: ContextVar[_ModuleSave | None] = ContextVar("hfshard_module_save", default=None)


def save_plain(
    model: Any,
    save_directory: str | os.PathLike[str],
    options: SaveOptions,
    given: Mapping[str, Any],
    kwargs: dict[str, Any],
    *,
    is_overridden: bool,
) -> Any:
    """Implement `ShardedModelMixin.save_pretrained` for a plain module.

    Args:
        options: hfshard's own.
        given: Arguments of transformers' `save_pretrained`.
        kwargs: All others.
        is_overridden: Whether the class or the model has its own `_save_pretrained`.

    Returns:
        The result of `push_to_hub` if it is called, else None.
    """
    place = place_to_save(save_directory)
    directory = place.address
    reject_hub_directory(directory)
    extras = ModuleFiles.taken_from(kwargs)
    check_save_arguments(place, given["token"], kwargs, _SAVE_ARGUMENTS, push_to_hub=given["push_to_hub"])
    for name, default in _UNTAKEN.items():
        if given[name] != default:
            raise InvalidArgumentError(f"{name} is for transformers models. Leave it out.")
    save = _ModuleSave(
        model=model,
        place=place,
        options=options,
        is_main_process=given["is_main_process"],
        state_dict=given["state_dict"],
        config=extras.config_of(model),
        card=None if place.is_read_from_disk and _has_card(directory) else extras.card_of(model),
        config_before=_identity_of_config(directory),
    )
    _run(save, is_overridden=is_overridden)
    if not given["push_to_hub"]:
        return None
    token = {} if given["token"] is None else {"token": given["token"]}
    config = as_dict(recorded_config(model) if extras.config is None else extras.config)
    return _push(model, directory, options, {**kwargs, **token}, replace(extras, config=config))


def handle_plain_save(model: Any, save_directory: str | os.PathLike[str]) -> None:
    """Save the weights and what `save_pretrained` adds to them; implements the mixin's `_save_pretrained`.

    Into another directory than that of the `save_pretrained` in progress, only weights are saved.
    """
    place = place_to_save(save_directory)
    save = _under_way.get()
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(
            f"{type(model).__name__} is not an nn.Module. Give it its own _save_pretrained, or derive it from "
            "nn.Module."
        )
    if save is None or save.model is not model or save.place.address != place.address:
        save_module(model, place, None, SaveOptions())
        return
    save_module(model, place, save.state_dict, save.options, save.is_main_process, _files_of(save))
    save.is_answered = True


def module_request(model: nn.Module, extras: ModuleFiles, options: SaveOptions) -> SaveRequest:
    """Build the request to save a plain module into an empty directory, without its card."""
    config = extras.config_of(model)  # type: ignore[arg-type]
    return replace(request_from_module(model, None, options), config=config, drops_config=config is None)


def _run(save: _ModuleSave, *, is_overridden: bool) -> None:
    """Call `_save_pretrained`, and write what an override that saves by itself has left out.

    A store has no path to pass to `_save_pretrained`, so a save to a store does not call it.
    """
    if not save.place.is_read_from_disk:
        if is_overridden:
            raise InvalidArgumentError(
                f"{type(save.model).__name__} has its own _save_pretrained, which writes into directories, not to "
                f"'{save.directory}'. Save it into a directory, and copy that: hfshard push DIR {save.directory}",
                path=save.directory,
            )
        save_module(save.model, save.place, save.state_dict, save.options, save.is_main_process, _files_of(save))
        return
    if is_overridden and not os.path.isdir(save.directory):
        os.makedirs(save.directory)
    with bound(_under_way, save):
        save.model._save_pretrained(Path(save.directory))
    if save.is_answered or not save.is_main_process:
        return
    if not save.is_config_written:
        if save.config is not None:
            _put(save.directory, CONFIG_NAME, save.config)
        else:
            unlink_if_exists(os.path.join(save.directory, CONFIG_NAME))
    if save.card is not None and not _has_card(save.directory):
        _put(save.directory, README, save.card)


def _has_card(directory: str) -> bool:
    """Return whether there is a README.md; it is kept, since it may have been edited."""
    return os.path.lexists(os.path.join(directory, README))


def _files_of(save: _ModuleSave) -> dict[str, Any]:
    """Return the request's fields for config.json and README.md, unless an override has written them."""
    files: dict[str, Any] = {"model_files": {}}
    if save.card is not None and not save.place.is_read_from_disk:
        files["companion_files"] = {README: BytesSource(save.card)}  # written only if the store has none
    elif save.card is not None and not _has_card(save.directory):
        files["model_files"] = {README: save.card}
    if save.is_config_written:
        return files
    return {**files, "config": save.config, "drops_config": save.config is None, "hides_single": True}


def _put(directory: str, name: str, raw: bytes) -> None:
    """Write a small file atomically."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=".hfshard-") as folder:
        made = os.path.join(folder, name)
        write_file(made, raw)
        rename(made, os.path.join(directory, name))


def _identity_of_config(directory: str) -> Identity | None:
    try:
        return identity_of(os.stat(os.path.join(directory, CONFIG_NAME)))
    except FileNotFoundError:
        return None


def _push(model: Any, directory: str, options: SaveOptions, kwargs: dict[str, Any], extras: ModuleFiles) -> Any:
    """Push what was saved by the model's `push_to_hub`, with the arguments that huggingface_hub's mixin passes."""
    given = without_defaults(
        {name: getattr(options, name) for name in ("max_shard_size", "variant", "packing", "progress")}
    )
    config = {} if extras.config is None else {"config": extras.config}
    repo_id = take_repo_id(kwargs, directory)
    values = dict(extras.card_values)
    return model.push_to_hub(repo_id=repo_id, **config, model_card_kwargs=values, **given, **kwargs)


# Pushes of a plain module as one Hub commit: weights, config.json, and a model card if the repo has none.


_MESSAGE: Final = "Push model using huggingface_hub."
"""The default commit message, as in huggingface_hub."""

_PATTERNS: Final = ("allow_patterns", "ignore_patterns", "delete_patterns")
"""Arguments of huggingface_hub's `push_to_hub` that could push half a checkpoint."""


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
    """Implement `ShardedModelMixin.push_to_hub` for a plain module.

    Args:
        tags: Additional tags for a new card.
        saving: Options of `SaveOptions`.
        pushing: Options of `PushOptions`.
        kwargs: The other keyword arguments.
        is_overridden: Whether its class overrides saving.
    """
    with together_if(isinstance(model, nn.Module) and is_spread(model), push_together) as ranks:
        rest = dict(kwargs)
        extras = ModuleFiles.taken_from(rest)
        revision, branch = pushing["revision"], rest.pop("branch", None)
        if None not in (branch, revision) and branch != revision:
            raise InvalidArgumentError(
                f"branch={branch!r} and revision={revision!r} name the same thing. Pass only one of them."
            )
        for name in _PATTERNS:
            if rest.pop(name, None) is not None:
                raise InvalidArgumentError(
                    f"{name} could leave half a checkpoint on the hub. Save the model, and push the files that you "
                    "want: hfshard.push_checkpoint(directory, repo_id, ignore_patterns=...), which checks that. "
                    "Leftovers of hfshard's own pushes are always deleted."
                )
        check_push_arguments(rest, _PUSH_ARGUMENTS)
        options = PushOptions(**{**pushing, "revision": revision if branch is None else branch})
        push = begin_push(repo_id, partial(_card, model, extras, tags), options, _MESSAGE, ranks)
        if not is_overridden:
            return push.send(module_request(model, extras, SaveOptions(**saving)))
        config = {} if extras.config is None else {"config": extras.config}
        values = {"model_card_kwargs": dict(extras.card_values)} if extras.card_values else {}
        save: Callable[..., Any] = partial(model.save_pretrained, **without_defaults(saving), **config, **values)
        return push.send_by_directory(save, saving["variant"], keep_card=True)


def _card(
    model: Any, extras: ModuleFiles, tags: Sequence[str] | str | None, read_old: Callable[[], bytes] | None
) -> bytes | None:
    """Create the card of a repo that has none; an existing one is kept, since it may have been edited."""
    if read_old is not None:
        return None
    card = model.generate_model_card(**extras.card_values)
    if tags:
        card.data.tags = merge_tags(card.data.tags, tags)
    return str(card).encode()


# huggingface_hub's mixin: the config that it records, and the methods that a class overrides.


_HUB_MIXINS: Final = (PyTorchModelHubMixin, ModelHubMixin)


def recorded_config(model: ModelHubMixin) -> Any:
    """Return the constructor's arguments, or the config that it was given, or None if there is neither.

    Source: huggingface_hub's attribute `_hub_mixin_config`, which its tests and other libraries read too.
    """
    return model._hub_mixin_config


def config_json(config: Any) -> bytes:
    """Encode a config, a dict or a dataclass, as huggingface_hub writes it into config.json.

    Source: huggingface_hub `ModelHubMixin.save_pretrained`.
    """
    value = as_dict(config)
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"config must be a dict or a dataclass, got a {type(config).__name__}.")
    try:
        return json.dumps(value, sort_keys=True, indent=2).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"The config cannot be written as JSON: {error}. Pass coders= to the class for your own types."
        ) from error


def as_dict(config: Any) -> Any:
    """Convert a dataclass to a dict; return anything else as it is."""
    return asdict(config) if is_dataclass(config) and not isinstance(config, type) else config


def is_overridden(target: Any, method: str, mixin: type) -> bool:
    """Return whether a class or a model overrides a method of the mixin."""
    found = getattr(target, method)
    inherited = vars(mixin)[method]
    return getattr(found, "__func__", found) is not getattr(inherited, "__func__", inherited)


def reject_other_model(model_class: type, mixin: type) -> None:
    """Reject a class of another library (diffusers ...) behind the mixin if it has its own methods of this kind.

    What they save and load would be missing.
    """
    order = model_class.__mro__
    behind = [base for base in order[order.index(mixin) + 1 :] if base not in _HUB_MIXINS]
    for base in behind:
        if "save_pretrained" in vars(base) or "from_pretrained" in vars(base):
            raise InvalidArgumentError(
                f"{model_class.__name__} is not a transformers model, and {base.__name__} saves and loads its config "
                "with its own methods, which ShardedModelMixin does not know. Remove the mixin; save the weights "
                "with hfshard.save_model(model, directory), and load them into a module that you have built with "
                "hfshard.load_model(module, directory). Its own class saves its config."
            )
        if "_save_pretrained" in vars(base) or "_from_pretrained" in vars(base):
            raise InvalidArgumentError(
                f"{base.__name__} has its own _save_pretrained or _from_pretrained. Put ShardedModelMixin after it, "
                f"so that it is called: class {model_class.__name__}({base.__name__}, ShardedModelMixin): ..."
            )
