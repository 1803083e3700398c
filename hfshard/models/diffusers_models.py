"""Handlers for every model of diffusers once hfshard is installed: diffusers' file names, config and behavior.

Saves are hfshard's own. Loads are diffusers': hfshard checks the files that it reads. This file imports diffusers only
where a model of it is pushed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from huggingface_hub import create_repo, try_to_load_from_cache

from hfshard._util.arguments import is_meant_as_address
from hfshard.checkpoint.check_files import ReplacedMeanwhile, retry_if_replaced
from hfshard.checkpoint.folder import LocalFolder
from hfshard.checkpoint.open_checkpoint import open_checkpoint, warn_of_others_files
from hfshard.commit.directory_state import reject_hub_directory
from hfshard.constants import CONFIG_NAME, README
from hfshard.errors import InvalidArgumentError
from hfshard.format.file_names import DIFFUSERS_BASE, WeightNames
from hfshard.format.index import Verify
from hfshard.models.install_settings import Settings
from hfshard.models.module_weights import save_module, stock_shard_size
from hfshard.models.patching import Method, upstream
from hfshard.places.place import place_to_save
from hfshard.saving.save_request import SaveOptions
from hfshard.tensors.state_dict import collect_state_dict
from hfshard.tensors.tied import find_shared_tensors

_PUSH_ARGUMENTS: Final = ("commit_message", "create_pr")
"""Arguments of a push, except for those of the repo's creation."""


def _save(
    settings: Settings,
    model: Any,
    /,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    save_function: Callable[..., Any] | None = None,
    safe_serialization: bool = True,
    variant: str | None = None,
    max_shard_size: int | str = "10GB",
    push_to_hub: bool = False,
    use_flashpack: bool = False,
    **kwargs: Any,
) -> None:
    """Save in place of ModelMixin's `save_pretrained`."""
    _reject_store(save_directory, "save_directory")
    if not safe_serialization or use_flashpack or _is_saved_by_diffusers(model) or os.path.isfile(save_directory):
        upstream("save_pretrained", type(model))(
            model,
            save_directory,
            is_main_process=is_main_process,
            save_function=save_function,
            safe_serialization=safe_serialization,
            variant=variant,
            max_shard_size=max_shard_size,
            push_to_hub=push_to_hub,
            use_flashpack=use_flashpack,
            **kwargs,
        )
        return
    place = place_to_save(save_directory)
    reject_hub_directory(place.address)
    if not is_main_process:
        os.makedirs(place.address, exist_ok=True)  # every process may write more into it
    options = SaveOptions(
        max_shard_size=stock_shard_size(max_shard_size),
        variant=variant,
        base=DIFFUSERS_BASE,
        checksum=settings.checksum,
        headers_count=False,
    )
    save_module(model, place, _untied(model), options, is_main_process, {"config": model.to_json_string().encode()})
    if push_to_hub:
        _push(model, place.address, kwargs)


def _reject_store(path: Any, argument: str) -> None:
    """Reject an address, which diffusers would take for a directory or a repo."""
    if is_meant_as_address(path):
        raise InvalidArgumentError(
            f"{argument}={os.fspath(path)!r:.200} is an address, but models of diffusers are saved into directories "
            "and loaded from them. Save into a directory and copy it with the service's tool; or save the weights "
            "alone: hfshard.save_model(model, address).",
            path=os.fspath(path),
        )


def _is_saved_by_diffusers(model: Any) -> bool:
    """Return whether a model is quantized, or split by diffusers' tensor parallelism, whose save diffusers rejects."""
    parallel = getattr(model, "_parallel_config", None)
    is_split = getattr(parallel, "tensor_parallel_config", None) is not None
    return is_split or getattr(model, "hf_quantizer", None) is not None


def _untied(model: Any) -> dict[str, Any] | None:
    """Return the tensors of a model with a copy for each tied name, since diffusers ties none; None if none is tied."""
    tensors = collect_state_dict(model)
    tied = find_shared_tensors(tensors)
    return {name: tensor.clone() if name in tied else tensor for name, tensor in tensors.items()} if tied else None


def _push(model: Any, directory: str, kwargs: dict[str, Any]) -> None:
    """Push a saved directory with a model card, as diffusers does."""
    from diffusers.utils.hub_utils import load_or_create_model_card, populate_model_card

    token = kwargs.get("token")
    name = kwargs.get("repo_id", os.path.basename(directory))
    repo_id = create_repo(name, exist_ok=True, private=kwargs.get("private"), token=token).repo_id
    populate_model_card(load_or_create_model_card(repo_id, token=token)).save(os.path.join(directory, README))
    given = {argument: kwargs[argument] for argument in _PUSH_ARGUMENTS if argument in kwargs}
    model._upload_folder(directory, repo_id, token=token, **given)


def _load(
    settings: Settings,
    model_class: type,
    /,
    pretrained_model_name_or_path: str | os.PathLike[str] | None,
    **kwargs: Any,
) -> Any:
    """Load in place of ModelMixin's `from_pretrained`.

    A directory is checked before diffusers reads it. A repo is checked once diffusers has downloaded it, before the
    model is returned.
    """
    path = pretrained_model_name_or_path
    _reject_store(path, "pretrained_model_name_or_path")
    build = partial(upstream("from_pretrained", model_class), model_class, path, **kwargs)
    is_other = kwargs.get("use_flashpack") or kwargs.get("use_safetensors") is False
    if path is None or is_other or os.path.isfile(path):
        return build()
    if os.path.isdir(path):
        return _load_checked(build, _entry_in(os.fspath(path), kwargs), kwargs, settings.verify)
    model = build()
    config = os.path.join(kwargs.get("subfolder") or "", CONFIG_NAME)
    known = {name: kwargs.get(name) for name in ("cache_dir", "revision")}
    found = try_to_load_from_cache(os.fspath(path), config, **known)
    entry = _entry_in(os.path.dirname(found), {**kwargs, "subfolder": None}) if isinstance(found, str) else None
    return _load_checked(lambda: model, entry, kwargs, settings.verify)


def _entry_in(directory: str, kwargs: dict[str, Any]) -> tuple[str, str] | None:
    """Find the file by which diffusers enters the weights, as (directory, name); None if it reads other weights."""
    names = WeightNames(kwargs.get("variant"), DIFFUSERS_BASE)
    folder = os.path.join(directory, kwargs.get("subfolder") or "")
    candidates = ((folder, names.index), (directory, names.single), (folder, names.single))
    return next((one for one in candidates if os.path.isfile(os.path.join(*one))), None)


def _load_checked(
    build: Callable[[], Any], entry: tuple[str, str] | None, kwargs: dict[str, Any], verify: Verify
) -> Any:
    """Build a model while its files are open and checked; start again if a save replaces them meanwhile."""
    if entry is None:
        return build()
    directory, name = entry
    folder = LocalFolder(directory)

    def build_once() -> Any:
        with open_checkpoint(
            folder.as_stock(), variant=kwargs.get("variant"), base=DIFFUSERS_BASE, weights_name=name, verify=verify
        ) as checkpoint:
            warn_of_others_files(checkpoint, verify)
            try:
                built = build()
            except Exception as error:
                if checkpoint.is_unchanged():
                    raise
                raise ReplacedMeanwhile from error
            if not checkpoint.is_unchanged():
                raise ReplacedMeanwhile
            return built

    return retry_if_replaced(build_once, folder.traits, directory)


DIFFUSERS_HANDLERS: Final[dict[Method, Callable[..., Any]]] = {"from_pretrained": _load, "save_pretrained": _save}
"""The handler of each method."""
