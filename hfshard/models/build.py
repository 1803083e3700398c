"""Build a transformers model from a checkpoint: hfshard checks and opens the files, transformers does the rest."""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed import utils as their_utils
from transformers.distributed.configuration_utils import DistributedConfig

from hfshard._util.arguments import checked_path_text, is_meant_as_address
from hfshard._util.threads import bound
from hfshard.checkpoint.check_files import ReplacedMeanwhile
from hfshard.checkpoint.load_options import LoadOptions, SignatureCheck
from hfshard.checkpoint.locate import read_config
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.constants import ADAPTER_CONFIG_NAME, CONFIG_NAME, MAX_CONFIG_BYTES
from hfshard.disk.safe_open import read_small
from hfshard.distributed.load_on_ranks import (
    all_agree,
    attempt_together,
    attribute_collective_failure,
    confirm_same,
    current_load,
    fetch_together,
    load_together,
)
from hfshard.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    HubError,
    InvalidArgumentError,
    SignatureError,
    UnsafePickleError,
)
from hfshard.models.load_arguments import class_of_auto, config_of, pin_to_commit, reject_file_without_config, source_of
from hfshard.models.model_builder import ModelBuilder, building_lock
from hfshard.models.model_classes import (
    alias_class,
    call_with_overrides,
    has_override,
    has_separate_adapter,
    holds_adapter,
    needs_transformers_loader,
    restore_class,
)
from hfshard.models.patching import OverrideCall, active_call, upstream
from hfshard.places.place import ResolvedSource, is_same_directory
from hfshard.places.source import CheckpointSource, signed_files

logger = logging.getLogger(__name__)


def load_class(
    model_class: Any, path: Any, model_args: tuple[Any, ...], kwargs: dict[str, Any], options: LoadOptions
) -> Any:
    """Build a model of a transformers class, concrete or Auto, with the arguments of its `from_pretrained`.

    Raises:
        InvalidArgumentError: `model_class` is not a transformers class.
        Everything that `load_with_overrides` raises.
    """
    if not (isinstance(model_class, type) and hasattr(model_class, "from_pretrained")):
        raise InvalidArgumentError(f"load_model takes a module or a transformers class, got {model_class!r}.")
    if issubclass(model_class, PreTrainedModel):
        return load_with_overrides(model_class, model_class, path, model_args, kwargs, options)
    _reject_other_class(model_class)
    name = checked_path_text(path, "pretrained_model_name_or_path")
    with load_on_ranks(options, kwargs):
        source = source_of(name, kwargs, needs_signature=options.signature is not None)
        local = fetch_together(current_load(), source, options.progress)
        # Before the checkpoint's code runs and its config is read.
        signed = _check_signature(local, source, kwargs, options)
        if local.weights_name is None and holds_adapter(local.directory):  # its base may be another repo
            _require_directory(local, "an adapter")
            if signed is not None:
                if not hasattr(model_class, "_model_mapping"):
                    raise InvalidArgumentError(
                        f"'{local.directory}' is an adapter, and {model_class.__name__} finds its base model by "
                        "itself, without checking the signature. Load it with an Auto class of transformers, such as "
                        "AutoModelForCausalLM.",
                        path=local.directory,
                    )

                def load_base(base: str, kwargs: dict[str, Any]) -> Any:
                    return load_class(model_class, base, model_args, kwargs, options)

                return load_adapter_on_signed_base(load_base, local, signed, kwargs, options)
            return cast(Any, model_class).from_pretrained(local.path, *model_args, **kwargs)
        reject_file_without_config(local, kwargs)
        before = read_config(local.directory)
        concrete, kwargs = class_of_auto(model_class, local, pin_to_commit(kwargs, local))
        built = load_with_overrides(concrete, concrete, name, model_args, kwargs, options, local)
        if has_override(concrete, "from_pretrained") and read_config(local.directory) != before:
            raise CheckpointChangedError(
                f"'{name}' was replaced while it was loaded. Retry when no save is running.", path=name
            )
        if signed is not None:
            signed.confirm()
        return built


def _reject_other_class(model_class: type) -> None:
    """Reject a class that is neither a transformers model, nor an Auto class, nor a PEFT class."""
    if not (hasattr(model_class, "_model_mapping") or model_class.__module__.startswith("peft.")):
        raise InvalidArgumentError(
            f"load_model builds transformers models, but {model_class.__name__} of {model_class.__module__} is not "
            "one. Build the module from its own config, and load the weights into it: hfshard.load_model(module, "
            f"path), where the path may be a single file of weights; or call {model_class.__name__}.from_pretrained."
        )


def load_with_overrides(
    start: Any,
    model_class: type[PreTrainedModel],
    path: str | os.PathLike[str] | None,
    model_args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: LoadOptions,
    local: ResolvedSource | None = None,
) -> Any:
    """Call a class's `from_pretrained` with all its overrides; hfshard handles what reaches transformers' own.

    Args:
        start: The object with the first method of the chain: the class, or `super()`.
        path: With None, transformers does everything.
        local: The resolved checkpoint, if it is known.

    Raises:
        RankFailedError: The model is to be spread over ranks, and another rank refused, failed, died, or never joined.
        InvalidArgumentError: Checks were requested, but an override builds the model without transformers' loader.
        StateDictMismatchError: No tensor of the checkpoint fits, or strict and any name differs.
        Everything that `open_checkpoint` raises, transformers, and the overrides.
    """
    outer = active_call("from_pretrained", model_class)
    if outer is not None and not _asks_for_checks(options):
        # load_model has reached the mixin's method: its options apply.
        return start.from_pretrained(path, *model_args, **kwargs)

    def answer(pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        name = pretrained_model_name_or_path
        if is_mirrored and name == shown:
            name = path
        known = local if _source(name, kwargs) == asked else None
        with load_on_ranks(options, kwargs):
            built = handle_from_pretrained(model_class, name, model_args, kwargs, options, known)
        call.answers.append(built)
        return built

    asked = _source(path, kwargs)
    call = OverrideCall("from_pretrained", model_class, answer, [] if outer is None else outer.answers)
    shown: Any = path
    is_mirrored = False
    if has_override(model_class, "from_pretrained") and asked is not None and asked.is_for_hfshard_only:
        local = local or asked.fetch(options.progress)
        shown, is_mirrored = local.path, local.mirror is not None
    with load_on_ranks(options, kwargs):
        built = call_with_overrides(call, start, shown, *model_args, **kwargs)
    if not call.answers and _asks_for_checks(options):
        raise InvalidArgumentError(
            f"{model_class.__name__}.from_pretrained built the model without transformers' loader, so strict, "
            "verify, public_key and parallelize had no effect. Leave them out."
        )
    return built


def _asks_for_checks(options: LoadOptions) -> bool:
    is_checked = options.verify != LoadOptions().verify or options.signature is not None
    return options.strict is not None or is_checked or options.parallelize is not None


def _source(path: Any, kwargs: Mapping[str, Any]) -> CheckpointSource | None:
    """Return the source of the files, or None if an override takes something other than a path."""
    return source_of(os.fspath(path), kwargs) if isinstance(path, str | os.PathLike) else None


def handle_from_pretrained(
    model_class: type[PreTrainedModel],
    path: str | os.PathLike[str] | None,
    model_args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: LoadOptions,
    local: ResolvedSource | None = None,
) -> Any:
    """Build a model as PreTrainedModel's own `from_pretrained` does, from files that hfshard has checked and opened.

    Takes the arguments of `load_with_overrides` and raises the same errors, below all overrides.
    """
    alias = alias_class(model_class)
    build = partial(_call_alone, upstream("from_pretrained", alias), alias)
    built = _build(build, alias, path, model_args, kwargs, options, local)
    restore_class(built[0] if isinstance(built, tuple) else built, model_class)
    return built


def _call_alone(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with building_lock.held():
        return method(*args, **kwargs)


def _build(
    build: Callable[..., Any],
    model_class: type[PreTrainedModel],
    path: str | os.PathLike[str] | None,
    model_args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: LoadOptions,
    local: ResolvedSource | None,
) -> Any:
    if options.parallelize is not None:
        _reject_with_parallelize(path, kwargs)
    if path is None or kwargs.get("state_dict") is not None or kwargs.get("gguf_file") is not None:
        if options.signature is not None:
            raise InvalidArgumentError("public_key covers the files of a path. Leave out state_dict and gguf_file.")
        return build(path, *model_args, **kwargs)
    if cast(Any, model_class).config_class is None and not isinstance(kwargs.get("config"), PreTrainedConfig):
        return build(path, *model_args, **kwargs)  # which reports that it is required
    ranks = current_load()
    try:
        name = checked_path_text(path, "pretrained_model_name_or_path")
        needs_signature = options.signature is not None
        source = source_of(name, kwargs, needs_signature=needs_signature, takes_oddities=options.is_lenient)
        local = local or fetch_together(ranks, source, options.progress)
        signed = _check_signature(local, source, kwargs, options)
        reject_file_without_config(local, kwargs)
    except (InvalidArgumentError, CheckpointNotFoundError, HubError):
        if not options.is_lenient or is_meant_as_address(path):
            raise
        return build(path, *model_args, **kwargs)  # which raises its own error, or knows more than hfshard
    if local.weights_name is None and holds_adapter(local.directory):  # its base may be a repo without this commit
        _require_directory(local, "an adapter")
        if signed is not None:

            def load_base(base: str, kwargs: dict[str, Any]) -> Any:
                return _build(build, model_class, base, model_args, kwargs, options, None)

            return load_adapter_on_signed_base(load_base, local, signed, kwargs, options)
        return _check_then_delegate(build, path, local, model_args, kwargs, source, options)
    kwargs = pin_to_commit(kwargs, local)
    if needs_transformers_loader(local.directory, model_class, kwargs):
        if local.weights_name is not None and options.is_lenient:
            return build(path, *model_args, **kwargs)
        _require_directory(local, "a checkpoint that transformers reads itself (quantized ...)")
        if local.weights_name is not None or options.parallelize is not None:
            what = "it cannot be loaded in parts" if local.weights_name is None else "pass a directory, not a file"
            raise InvalidArgumentError(
                f"'{name}' is read by transformers itself (quantized, offloaded ...): {what}.", path=name
            )
        return _check_then_delegate(build, path, local, model_args, kwargs, source, options)
    known = _own_text(path, local) if local.weights_name is None else path
    takes_any_pickle = options.is_lenient and kwargs.get("weights_only") is False
    is_again = False

    def open_and_build(open_checkpoint: Callable[[], OpenCheckpoint]) -> Any:
        nonlocal is_again
        if is_again:
            gc.collect()  # cycles keep the previous attempt's model, and memory may suffice for one only
        is_again = True
        try:
            checkpoint = open_checkpoint()
        except (CheckpointNotFoundError, UnsafePickleError) as error:
            is_theirs = options.is_lenient if isinstance(error, CheckpointNotFoundError) else takes_any_pickle
            if not is_theirs or not local.traits.is_directory:
                raise
            return build(known, *model_args, **kwargs)
        if checkpoint.pickles and takes_any_pickle:
            return build(known, *model_args, **kwargs)
        _reject_full_pickle(checkpoint, kwargs)
        config, model_kwargs = config_of(model_class, local, kwargs)
        if not all_agree(ranks, "unchanged", is_so=checkpoint.is_of_one_save()):
            raise ReplacedMeanwhile  # a save came between the config and the weights
        return ModelBuilder(build, model_class, name, local, checkpoint, options).build(
            model_args, config, model_kwargs, kwargs
        )

    return attempt_together(ranks, source, options, local, open_and_build, name, check_beside=True)


def _reject_with_parallelize(path: Any, kwargs: Mapping[str, Any]) -> None:
    """Reject arguments that specify in another way where tensors come from or go to."""
    others = ("state_dict", "gguf_file", "device_map", "distributed_config", "tp_plan", "device_mesh")
    given = [name for name in others if kwargs.get(name) is not None]
    if path is None:
        given.append("a model built without a path")
    if given:
        raise InvalidArgumentError(f"Cannot combine parallelize with {given[0]}. Pass only one of them.")


def _require_directory(local: ResolvedSource, what: str) -> None:
    """Reject a checkpoint that is not in a directory, where other code would read its files."""
    if not local.traits.is_directory:
        address = local.folder.path
        raise InvalidArgumentError(
            f"'{address}' has {what}, whose files must be on disk. Download them: hfshard pull {address} DIR",
            path=address,
        )


def _own_text(path: str | os.PathLike[str], local: ResolvedSource) -> str | os.PathLike[str]:
    """Return the caller's own text where transformers finds the checkpoint by it: the model is named after it."""
    return path if is_same_directory(os.fspath(path), local.path) else local.path


def _check_then_delegate(
    build: Callable[..., Any],
    path: str | os.PathLike[str],
    local: ResolvedSource,
    model_args: tuple[Any, ...],
    kwargs: dict[str, Any],
    source: CheckpointSource,
    options: LoadOptions,
) -> Any:
    ranks = current_load()

    def check(open_checkpoint: Callable[[], OpenCheckpoint]) -> None:
        confirm_same(ranks, open_checkpoint(), read_config(local.directory))

    try:
        attempt_together(ranks, source, options, local, check, source.path)
    except CheckpointNotFoundError:
        logger.debug("'%s' has no weights that hfshard knows; transformers looks for others.", local.directory)
    signed = signed_files(local, source, options)
    if signed is not None:
        signed.check_all(options.progress)  # every file, since other code reads them by name
    built = build(_own_text(path, local), *model_args, **kwargs)
    if signed is not None:
        signed.confirm()
    return built


def _check_signature(
    local: ResolvedSource, source: CheckpointSource, kwargs: Mapping[str, Any], options: LoadOptions
) -> SignatureCheck | None:
    """Check the requested signature, and config and code, before anything reads them; None: none is required."""
    if options.signature is None:
        return None
    if kwargs.get("code_revision") is not None:
        raise InvalidArgumentError(
            "public_key covers one revision, but code_revision names another. Pass only one of them."
        )
    if isinstance(kwargs.get("config"), str | os.PathLike):
        raise InvalidArgumentError(
            f"public_key covers the files of a path, but config={os.fspath(kwargs['config'])!r:.200} names another. "
            "Leave out config, or pass one that you have loaded."
        )
    if has_separate_adapter(kwargs):
        raise InvalidArgumentError(
            "public_key covers the files of a path, but adapter_kwargs names another. Pass only one of them."
        )
    return signed_files(local, source, options)


def _reject_full_pickle(checkpoint: OpenCheckpoint, kwargs: Mapping[str, Any]) -> None:
    if checkpoint.pickles and kwargs.get("weights_only") is False:
        raise InvalidArgumentError(
            f"'{checkpoint.directory}' has pickled weights, which hfshard reads only with weights_only=True: "
            "anything else may run code on your machine. Leave the argument out."
        )


# Loads that all ranks make together, so that either all of them build the model or none does.


@contextmanager
def load_on_ranks(options: LoadOptions, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Build a model that is spread over ranks on all of them or on none; any other, each rank builds alone.

    Raises:
        RankFailedError: Another rank refused, failed, died, or never joined.
    """
    is_spread = options.parallelize is not None
    if _is_spread_by_transformers(kwargs.get("distributed_config")):
        is_spread = True
        _join_process_group()
    with (
        load_together("from_pretrained", is_collective=is_spread) as ranks,
        attribute_collective_failure(ranks),
    ):
        yield


def _is_spread_by_transformers(given: Any) -> bool:
    """Return whether a `distributed_config` asks for several ranks; transformers rejects an invalid one."""
    config = DistributedConfig.from_dict(given) if isinstance(given, dict) else given
    sizes = (getattr(config, name, None) for name in ("tp_size", "fsdp_size", "dp_replicate_size", "pp_size"))
    return any((size or 1) > 1 for size in sizes)


def _join_process_group() -> None:
    """Join the launcher's group, as transformers would a moment later, so that the ranks can agree first."""
    if not torch.distributed.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        their_utils._ensure_torch_distributed()


# PEFT adapters that must be signed: the base model is loaded first, and must be signed too.


_OF_THE_ADAPTER: Final = ("revision", "subfolder", "adapter_name", "adapter_kwargs", "output_loading_info")
"""Arguments that are not passed to the base model."""

_whose_base: ContextVar[str | None] = ContextVar("whose_base", default=None)
"""The adapter whose base model is being loaded."""


def load_adapter_on_signed_base(
    load_base: Callable[[str, dict[str, Any]], Any],
    local: ResolvedSource,
    signed: SignatureCheck,
    kwargs: Mapping[str, Any],
    options: LoadOptions,
) -> Any:
    """Load the base model that an adapter names, require the same signer, and add the adapter to it.

    Args:
        load_base: Loads a model from a path or a repo with keyword arguments, and checks the signature.
        signed: The adapter's files, which have been compared.

    Returns:
        The model; with output_loading_info, also transformers' report on the adapter.

    Raises:
        SignatureError: The base model is not signed by the required signer, or a file of the adapter was changed.
        InvalidArgumentError: The directory contains a model too, or the model is to be spread over ranks.
        DamagedCheckpointError: The adapter names no base model, or names another adapter, which PEFT never does.
    """
    directory = local.directory
    above = _whose_base.get()
    if above is not None:
        raise DamagedCheckpointError(
            f"The adapter '{above}' names '{directory}' as its base model, which is also an adapter. Correct "
            f"'base_model_name_or_path' in its '{ADAPTER_CONFIG_NAME}', and sign it again.",
            path=above,
        )
    if os.path.lexists(os.path.join(directory, CONFIG_NAME)):
        raise InvalidArgumentError(
            f"'{directory}' has both an adapter and a model, whose signatures cannot be checked together. Load the "
            f"model with public_key from a folder without '{ADAPTER_CONFIG_NAME}', and the adapter from a folder of "
            "its own.",
            path=directory,
        )
    if options.parallelize is not None:
        raise InvalidArgumentError("Cannot combine parallelize with public_key for an adapter. Pass only one of them.")
    base = _base_of(directory)
    try:
        with bound(_whose_base, directory):
            model = load_base(base, {name: value for name, value in kwargs.items() if name not in _OF_THE_ADAPTER})
    except SignatureError as error:
        raise SignatureError(
            f"The base model of the adapter '{directory}' cannot be trusted: {error.message} Or load '{base}' "
            "without the key, check the adapter with hfshard verify, and add it with model.load_adapter.",
            path=error.path,
        ) from error
    info = model.load_adapter(directory, adapter_name=kwargs.get("adapter_name") or "default")
    signed.confirm()
    return (model, info.to_dict()) if kwargs.get("output_loading_info") else model


def _base_of(directory: str) -> str:
    path = os.path.join(directory, ADAPTER_CONFIG_NAME)
    raw, _ = read_small(path, directory, MAX_CONFIG_BYTES)
    try:
        base = json.loads(raw)["base_model_name_or_path"]
    except (ValueError, RecursionError, KeyError, TypeError):
        base = None
    if not isinstance(base, str) or not base:
        raise DamagedCheckpointError(
            f"'{path}' names no base model: it has no 'base_model_name_or_path'. Save the adapter again, with a "
            "model that was loaded from a path or a repo.",
            path=path,
        )
    return base
