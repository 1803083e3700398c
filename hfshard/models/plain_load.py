"""Build a plain module from a checkpoint, with config.json and weights of the same save."""

from __future__ import annotations

import inspect
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import nn

from hfshard._util.arguments import checked_path_text
from hfshard._util.text import shorten_list
from hfshard._util.threads import bound
from hfshard.checkpoint.check_files import ReplacedMeanwhile, retry_if_replaced
from hfshard.checkpoint.folder import LocalFolder
from hfshard.checkpoint.load_options import LoadOptions, checked_device
from hfshard.checkpoint.locate import CheckpointQuery, read_config
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.constants import CONFIG_NAME, WEIGHTS_OVERRIDE_KEY
from hfshard.distributed.load_on_ranks import load_opened
from hfshard.errors import InvalidArgumentError
from hfshard.format.index import without_weights_override
from hfshard.places.place import ResolvedSource
from hfshard.places.source import CheckpointSource, open_source
from hfshard.signing.check_signature import required_signature

logger = logging.getLogger(__name__)

_SHOWN: Final = 10
"""The number of names in a warning."""

_WHICH: Final = ("variant", "subfolder")
"""hfshard's arguments for choosing a checkpoint, in addition to huggingface_hub's."""

_HUB_ARGUMENTS: Final = ("revision", "token", "cache_dir", "local_files_only", "force_download")
"""Arguments that huggingface_hub's `from_pretrained` passes on to `_from_pretrained`."""


@dataclass(slots=True)
class _ModuleLoad:
    """One load of a plain module, done by its class's or the mixin's `_from_pretrained`."""

    model_class: type
    options: LoadOptions
    query: CheckpointQuery
    checkpoint: OpenCheckpoint | None = None
    mirrored: tuple[CheckpointSource, ResolvedSource] | None = None
    """The store checkpoint that the local directory represents, if the class loads by itself."""
    config: bytes | None = None
    """The directory's config before the load, if the class loads by itself."""
    is_under_way: bool = True
    """Whether huggingface_hub's `from_pretrained` has been called for it."""
    is_answered: bool = False
    """Whether the mixin's `_from_pretrained` has loaded it."""


_under_way: ContextVar[_ModuleLoad | None] = ContextVar("hfshard_module_load", default=None)


def load_plain(
    model_class: Any,
    start: Any,
    path: str | os.PathLike[str] | None,
    model_args: tuple[Any, ...],
    kwargs: dict[str, Any],
    own: dict[str, Any],
    *,
    is_overridden: bool,
) -> Any:
    """Implement `ShardedModelMixin.from_pretrained` for a plain module.

    Args:
        start: The object with huggingface_hub's `from_pretrained`, which reads the config and calls `_from_pretrained`.
        model_args: Must be empty.
        kwargs: Keyword arguments for huggingface_hub and the constructor.
        own: hfshard's own arguments.
        is_overridden: Whether the class has its own `_from_pretrained`.

    Raises:
        InvalidArgumentError: An argument is not valid for a plain module; or checks were requested, but an override
            loads the weights by itself.
        CheckpointChangedError: The checkpoint kept changing.
    """
    if model_args or path is None:
        raise InvalidArgumentError(
            f"{model_class.__name__} takes a path or a repo_id, and keyword arguments for its constructor."
        )
    name = checked_path_text(path, "pretrained_model_name_or_path")
    options, query, kwargs = _split(model_class, kwargs, own)
    call = _ModuleLoad(model_class, options, query)
    source = CheckpointSource(name, query, takes_files=True)
    if is_overridden:
        return _build_by_override(call, start, source, path, kwargs)
    return _build_unchanged(call, start, source, kwargs)


def build_module(
    model_class: Any, source: CheckpointSource, model_kwargs: dict[str, Any], map_location: Any, *, strict: bool
) -> Any:
    """Build a module and load its weights; implements the mixin's `_from_pretrained`.

    Args:
        source: The source that huggingface_hub passes; if a load is in progress, its checkpoint may be open already.
        model_kwargs: For the constructor.
        map_location: A device with data. As in huggingface_hub, weights are copied from there into the module, whatever
            its device.
        strict: Reject missing and unexpected names.

    Returns:
        The module, in evaluation mode.
    """
    if checked_device(map_location).type == "meta":
        raise InvalidArgumentError(
            f"map_location must be a device with data, got {str(map_location)!r}: weights are copied from there into "
            f"the module. To build {model_class.__name__} without data, call it within torch.device('meta')."
        )
    model_kwargs = _without_override(model_kwargs)
    call = _under_way.get()
    if call is None or call.model_class is not model_class:
        call = _ModuleLoad(model_class, LoadOptions(), source.query, is_under_way=False)
    with bound(_under_way, None):  # a constructor may load other modules
        if call.checkpoint is not None:
            if not call.checkpoint.is_of_one_save():
                raise ReplacedMeanwhile
            model = _build(model_class, call.checkpoint, model_kwargs, replace(call.options, strict=strict))
        else:
            if call.mirrored is not None and source.path == call.mirrored[1].directory:
                chosen, local = call.mirrored
            else:
                chosen, local = _chosen(source, call), None
            with open_source(chosen, call.options, local) as checkpoint:
                if call.is_under_way and os.path.isdir(source.path):
                    is_same = _config_in(source.path) == call.config
                    if not (is_same and checkpoint.is_of_one_save()):
                        raise ReplacedMeanwhile
                model = _build(model_class, checkpoint, model_kwargs, replace(call.options, strict=strict))
    call.is_answered = True
    return model


def _chosen(source: CheckpointSource, call: _ModuleLoad) -> CheckpointSource:
    """Return the source that an override's `super()` loads: for a repo, the commit whose config was just read."""
    query = replace(source.query, variant=call.query.variant, subfolder=call.query.subfolder)
    if call.is_under_way and source.find_local() is None:
        from hfshard.hub.cache import RepoCache

        commit = RepoCache(source.path, query.cache_dir).commit_of(query.revision)
        query = replace(query, revision=commit or query.revision)
    return replace(source, query=query)


def _split(
    model_class: type, kwargs: Mapping[str, Any], own: Mapping[str, Any]
) -> tuple[LoadOptions, CheckpointQuery, dict[str, Any]]:
    """Split off hfshard's arguments from those for huggingface_hub and for the constructor, whose names come first."""
    names = frozenset(inspect.signature(model_class.__init__).parameters)  # type: ignore[misc]
    defaults = LoadOptions()
    load_options = {name: value for name, value in own.items() if name == "strict" or name not in names}
    rest = dict(kwargs)
    rest |= {name: own[name] for name in own.keys() - load_options.keys() if own[name] != getattr(defaults, name, None)}
    public_key = load_options.pop("public_key", None)
    signature = None if public_key is None else required_signature(public_key)
    process_group = load_options.pop("process_group", None)
    options = LoadOptions(**load_options, signature=signature)
    if process_group is not None:
        raise InvalidArgumentError(
            "process_group is for models that are spread over ranks, but each rank builds a plain module by itself. "
            "Leave it out. To load into a spread module, call hfshard.load_model(module, path, process_group=...)."
        )
    if options.parallelize is not None:
        raise InvalidArgumentError(
            "parallelize is for transformers models. Build the module, spread it, and load the weights into it: "
            "hfshard.load_model(parallelize(module), path)."
        )
    if options.strict is not None:
        rest["strict"] = options.strict
    chosen = {name: rest.pop(name) for name in _WHICH if name in rest and name not in names}
    hub = {name: rest[name] for name in _HUB_ARGUMENTS if name in rest}
    return options, CheckpointQuery(**chosen, **hub, needs_signature=signature is not None), rest


def _build_by_override(
    call: _ModuleLoad, start: Any, source: CheckpointSource, path: str | os.PathLike[str], kwargs: Mapping[str, Any]
) -> Any:
    """Load by the class's own `_from_pretrained`, which may call the mixin's."""
    options = call.options
    local = source.fetch(options.progress) if source.is_for_hfshard_only else None
    place, traits = path, LocalFolder.traits
    if local is not None:
        place, traits = local.path, local.traits
        if local.mirror is not None:
            place, call.mirrored = local.directory, (source, local)
    if options.signature is not None:
        raise InvalidArgumentError(
            f"{call.model_class.__name__} has its own _from_pretrained, which may read any file, so public_key "
            "cannot check what it reads. Run hfshard verify PATH --public-key KEY first, and leave out public_key."
        )

    def build() -> Any:
        call.config = _config_in(os.fspath(place))
        with bound(_under_way, call):
            return start.from_pretrained(place, **kwargs)

    built = retry_if_replaced(build, traits, source.path)
    if not call.is_answered and (options.strict is not None or options.verify != LoadOptions().verify):
        raise InvalidArgumentError(
            f"{call.model_class.__name__} has its own _from_pretrained, which loaded the weights itself, so strict "
            "and verify had no effect. Leave them out."
        )
    return built


def _config_in(directory: str) -> bytes | None:
    return read_config(directory) if os.path.isdir(directory) else None


def _without_override(model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Remove from the arguments the key that a commit in progress adds to a config."""
    kept = {name: value for name, value in model_kwargs.items() if name != WEIGHTS_OVERRIDE_KEY}
    if isinstance(kept.get("config"), dict):
        kept["config"].pop(WEIGHTS_OVERRIDE_KEY, None)  # the config that the model will keep
    return kept


def _build_unchanged(call: _ModuleLoad, start: Any, source: CheckpointSource, kwargs: Mapping[str, Any]) -> Any:
    """Build from a config and weights of the same save."""
    options = call.options
    local = source.fetch(options.progress)

    def build() -> Any:
        with (
            open_source(source, options, local, check_beside=True) as checkpoint,
            _place_of_config(local.directory) as place,
        ):
            call.checkpoint = checkpoint
            with bound(_under_way, call):
                return start.from_pretrained(place, **kwargs)

    return retry_if_replaced(build, local.traits, source.path)


@contextmanager
def _place_of_config(directory: str) -> Iterator[str]:
    """Yield the directory whose config.json huggingface_hub reads; a cleaned copy if a commit is unfinished."""
    config = read_config(directory)
    if config is None or WEIGHTS_OVERRIDE_KEY.encode() not in config:
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="hfshard-") as folder:
        saved = without_weights_override(config)
        if json.loads(saved):  # else it is a placeholder: the checkpoint has no config
            with open(os.path.join(folder, CONFIG_NAME), "wb") as file:
                file.write(saved)
        yield folder


def _build(model_class: Any, checkpoint: OpenCheckpoint, model_kwargs: Mapping[str, Any], options: LoadOptions) -> Any:
    model = model_class(**model_kwargs)
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(
            f"{model_class.__name__} is not an nn.Module. Give it its own _from_pretrained, or derive it from "
            "nn.Module."
        )
    info = load_opened(model, checkpoint, options)
    for what, names in (("lacks", info["missing_keys"]), ("has no place for", info["unexpected_keys"])):
        if names:
            who = f"'{checkpoint.directory}'" if what == "lacks" else model_class.__name__
            logger.warning("%s %s %s.", who, what, shorten_list(sorted(names), _SHOWN))
    return model.eval()
