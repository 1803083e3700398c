"""Builds a transformers model from a checkpoint: hfshard checks and opens the bytes, upstream does all the rest."""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hfshard.constants import (
    CHANGED_RETRIES,
)
from hfshard.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    StateDictMismatchError,
)
from hfshard.loading.options import LoadOptions
from hfshard.loading.source import CheckpointSource, LocalCheckpoint, open_source
from hfshard.pretrained.arguments import (
    CONFIG_ATTRIBUTES,
    MODEL_ARGUMENTS,
    SOURCE_ARGUMENTS,
    class_of_auto,
    commit_argument,
    config_of,
    device_of,
    pinned,
    source_of,
)
from hfshard.pretrained.fallback import is_adapter, needs_transformers_loader
from hfshard.state_dicts.keys import KeyMismatch, compare
from hfshard.state_dicts.wrappers import has_wrapper_prefix, match_prefixes, strip_compiled, strip_wrappers
from hfshard.storage.checkpoint.checkpoint import OpenCheckpoint
from hfshard.storage.checkpoint.locate import check_generation_config

logger = logging.getLogger(__name__)

_building = threading.RLock()
"""Upstream builds models under settings of the whole process (default dtype and device, no initialisation): two
threads that load at once would lose ties. Re-entrant, for models that load a part of themselves."""


def _forget_building() -> None:
    """In a forked child nobody builds, whatever the threads of its parent did."""
    global _building
    _building = threading.RLock()


os.register_at_fork(after_in_child=_forget_building)


def load_class(
    model_class: Any, path: Any, model_args: tuple[Any, ...], kwargs: dict[str, Any], options: LoadOptions
) -> Any:
    """Build a model of a transformers class, concrete or Auto.

    Args:
        model_class: The class.
        path: A directory or a repo.
        model_args: Positional arguments of its `from_pretrained`.
        kwargs: Keyword arguments of its `from_pretrained`.
        options: hfshard's own.

    Raises:
        InvalidArgumentError: It is not a transformers class.
        Everything that `load_pretrained` raises.
    """
    if not (isinstance(model_class, type) and hasattr(model_class, "from_pretrained")):
        raise InvalidArgumentError(
            f"load_model takes a module or a transformers class, and {model_class!r} is neither."
        )
    if issubclass(model_class, PreTrainedModel):
        return load_pretrained(model_class.from_pretrained, model_class, path, model_args, kwargs, options)
    name = os.fspath(path)
    local = source_of(name, kwargs).fetch(options.progress)
    if is_adapter(local.directory):  # its base may be another repo, of which our commit is none
        return cast(Any, model_class).from_pretrained(local.path, *model_args, **kwargs)
    concrete, kwargs = class_of_auto(model_class, local, pinned(kwargs, local))
    return load_pretrained(concrete.from_pretrained, concrete, name, model_args, kwargs, options, local)


def load_pretrained(
    build: Callable[..., Any],
    model_class: type[PreTrainedModel],
    path: str | os.PathLike[str] | None,
    model_args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: LoadOptions,
    local: LocalCheckpoint | None = None,
) -> Any:
    """Build a model as upstream's `from_pretrained` does, from bytes that hfshard has located, checked and opened.

    Args:
        build: Upstream's `from_pretrained` of the class.
        model_class: The class to build.
        path: A directory or a repo; None: all is handed to upstream.
        model_args: Positional arguments for the model.
        kwargs: Keyword arguments of `from_pretrained`.
        options: hfshard's own.
        local: Where the checkpoint lies, if that is known.

    Returns:
        What `build` returns.

    Raises:
        StateDictMismatchError: No tensor of the checkpoint fits, or strict and any name differs.
        Everything that `open_checkpoint` raises, and upstream.
    """
    kwargs = dict(kwargs)
    if path is None or kwargs.get("state_dict") is not None or kwargs.get("gguf_file") is not None:
        return build(path, *model_args, **kwargs)
    name = os.fspath(path)
    source = source_of(name, kwargs)
    local = local or source.fetch(options.progress)
    if is_adapter(local.directory):  # its base may be another repo, of which our commit is none
        return _checked_then_handed_over(build, local, model_args, kwargs, source, options)
    kwargs = pinned(kwargs, local)
    if needs_transformers_loader(local.directory, model_class, kwargs):
        return _checked_then_handed_over(build, local, model_args, kwargs, source, options)
    for _ in range(CHANGED_RETRIES):
        with open_source(source, options, local) as checkpoint:
            _refuse_full_pickle(checkpoint, kwargs)
            config, model_kwargs = config_of(model_class, local, kwargs)
            if not checkpoint.is_unchanged():
                continue  # a save came between the config and the weights
            return _ModelBuilder(build, model_class, name, local, checkpoint, options).build(
                model_args, config, model_kwargs, kwargs
            )
    raise CheckpointChangedError(f"The checkpoint in '{name}' kept changing. Load it when the save is done.", path=name)


class _ModelBuilder:
    """One call of upstream's from_pretrained, with an open checkpoint in place of its files."""

    def __init__(
        self,
        build: Callable[..., Any],
        model_class: type[PreTrainedModel],
        name: str,
        local: LocalCheckpoint,
        checkpoint: OpenCheckpoint,
        options: LoadOptions,
    ) -> None:
        self.call = build
        self.model_class = model_class
        self.name = name
        self.local = local
        self.checkpoint = checkpoint
        self.options = options

    def build(
        self, model_args: tuple[Any, ...], config: Any, model_kwargs: dict[str, Any], kwargs: dict[str, Any]
    ) -> Any:
        if self.model_class.can_generate() and kwargs.get("generation_config") is None:
            check_generation_config(self.checkpoint.directory)
        tensors = self._tensors(config, kwargs)
        upstream = {key: value for key, value in kwargs.items() if key in MODEL_ARGUMENTS | CONFIG_ATTRIBUTES}
        for key in ("config", "output_loading_info", "use_safetensors", "variant", "disable_mmap", *SOURCE_ARGUMENTS):
            upstream.pop(key, None)
        upstream |= {"config": config, "state_dict": tensors, "output_loading_info": True}
        try:
            with _building, _reports_naming(self.name):
                model, info = self.call(None, *model_args, **upstream, **model_kwargs)
        except RuntimeError as error:
            if "ignore_mismatched_sizes" in str(error):
                raise self._shapes_differ(config, tensors) from error
            raise
        self._check(model, info, len(tensors))
        self._name(model)
        self._tie(model)
        self._load_generation_config(model, kwargs)
        return (model, info) if kwargs.get("output_loading_info") else model

    def _shapes_differ(self, config: Any, tensors: Mapping[str, torch.Tensor]) -> StateDictMismatchError:
        """Upstream's error names neither the file nor the tensors."""
        with torch.device("meta"):
            own = self.model_class(copy.deepcopy(config)).state_dict()
        prefix = self.model_class.base_model_prefix
        own |= {name.removeprefix(f"{prefix}."): tensor for name, tensor in own.items()}
        mismatched = compare(tensors, own).mismatched
        shown = KeyMismatch((), (), mismatched).summary() if mismatched else "shapes differ, see the report above"
        return StateDictMismatchError(
            f"The checkpoint '{self.name}' does not fit {self.model_class.__name__}: {shown}. "
            "Load it into the class and config that it was saved with, or pass ignore_mismatched_sizes=True.",
            path=self.name,
            mismatched_keys=mismatched,
        )

    def _tensors(self, config: Any, kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        index = self.checkpoint.index
        tensors = self.checkpoint.read(self._keys(), self.options.read, device_of(self.checkpoint, config, kwargs))
        # What the config ties, upstream ties by itself; handing it twice would cost a comparison of the values.
        tensors |= {alias: tensors[index.tied_names[alias]] for alias in index.undeclared_ties}
        if has_wrapper_prefix(tensors):
            names = _names_for(self.model_class, config, tensors)
            tensors = {names[name]: tensor for name, tensor in tensors.items()}
        return tensors

    def _keys(self) -> list[str]:
        """The names in upstream's order: where the config has no dtype, the first tensor's is the model's."""
        if self.checkpoint.pickles:
            return self.checkpoint.keys
        weight_map = self.checkpoint.index.weight_map
        return sorted(self.checkpoint.keys, key=lambda name: (weight_map[name], name))

    def _check(self, model: PreTrainedModel, info: dict[str, Any], given: int) -> None:
        missing, unexpected = info["missing_keys"], info["unexpected_keys"]
        own = model.state_dict().keys()
        difference = KeyMismatch(tuple(sorted(missing)), tuple(sorted(unexpected)), tuple(info["mismatched_keys"]))
        nothing = bool(own) and (len(unexpected) >= given or set(missing) >= set(own))
        if nothing or (self.options.strict and (missing or unexpected or info["mismatched_keys"])):
            raise StateDictMismatchError(
                f"The checkpoint '{self.name}' does not fit {type(model).__name__}: {difference.summary()}. "
                f"Compare the names with: hfshard inspect --tensors {self.local.directory}",
                path=self.name,
                missing_keys=difference.missing,
                unexpected_keys=difference.unexpected,
                mismatched_keys=difference.mismatched,
            )

    def _name(self, model: PreTrainedModel) -> None:
        # Upstream was given no name, and wrote "None" where it goes.
        for module in model.modules():
            if getattr(module, "name_or_path", None) == "None":
                module.name_or_path = self.name  # type: ignore[assignment]
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig) and config.name_or_path == "None":
                config.name_or_path = self.name

    def _tie(self, model: PreTrainedModel) -> None:
        index = self.checkpoint.index
        modules = dict(model.named_modules(remove_duplicate=False))
        for alias in index.undeclared_ties:
            (alias_path, _, alias_name), (path, _, name) = (
                alias.rpartition("."),
                index.tied_names[alias].rpartition("."),
            )
            target, origin = modules.get(alias_path), modules.get(path)
            if target is not None and origin is not None and hasattr(target, alias_name) and hasattr(origin, name):
                setattr(target, alias_name, getattr(origin, name))

    def _load_generation_config(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
        if not (model.can_generate() and hasattr(model, "adjust_generation_fn")):
            return
        where = {key: kwargs.get(key) for key in SOURCE_ARGUMENTS}
        rest = {key: value for key, value in kwargs.items() if key not in MODEL_ARGUMENTS | CONFIG_ATTRIBUTES}
        where["force_download"] = bool(where["force_download"])
        where["local_files_only"] = bool(where["local_files_only"])
        where["revision"] = where["revision"] or "main"
        where["subfolder"] = where["subfolder"] or ""
        cast(Any, model).adjust_generation_fn(
            kwargs.get("generation_config"),
            kwargs.get("_from_auto", False),
            kwargs.get("_from_pipeline"),
            self.local.path,
            **where,
            trust_remote_code=kwargs.get("trust_remote_code"),
            **commit_argument(self.local),
            **rest,
        )


@contextmanager
def _reports_naming(name: str) -> Iterator[None]:
    """Let upstream's load report, which was given no name, say what was loaded."""
    thread = threading.get_ident()

    def give_name(record: logging.LogRecord) -> bool:
        if record.thread == thread and isinstance(record.msg, str):
            record.msg = record.msg.replace("from: None\n", f"from: {name}\n", 1)
        return True

    upstreams = logging.getLogger("transformers.modeling_utils")
    upstreams.addFilter(give_name)
    try:
        yield
    finally:
        upstreams.removeFilter(give_name)


def _checked_then_handed_over(
    build: Callable[..., Any],
    local: LocalCheckpoint,
    model_args: tuple[Any, ...],
    kwargs: dict[str, Any],
    source: CheckpointSource,
    options: LoadOptions,
) -> Any:
    try:
        with open_source(source, options, local):
            pass
    except CheckpointNotFoundError:
        logger.debug("'%s' holds no weights that hfshard knows; upstream looks for others.", local.directory)
    return build(local.path, *model_args, **kwargs)


def _refuse_full_pickle(checkpoint: OpenCheckpoint, kwargs: Mapping[str, Any]) -> None:
    if checkpoint.pickles and kwargs.get("weights_only") is False:
        raise InvalidArgumentError(
            f"'{checkpoint.directory}' holds pickled weights, and hfshard reads them only with weights_only=True: "
            "anything else may run code on your machine. Leave the argument out."
        )


def _names_for(model_class: type[PreTrainedModel], config: Any, names: Mapping[str, Any]) -> dict[str, str]:
    """Foreign names without wrappers' prefixes, where that makes them this model's."""
    with torch.device("meta"):
        expected = set(model_class(copy.deepcopy(config)).state_dict())  # some constructors change their config
    prefix = model_class.base_model_prefix
    expected |= {f"{prefix}.{name}" for name in expected} | {name.removeprefix(f"{prefix}.") for name in expected}
    result = match_prefixes(names, expected)
    if expected.isdisjoint(result.values()):
        return {name: strip_wrappers(name) for name in names}  # all are names of before a conversion
    return {name: short if short in expected else strip_compiled(short) for name, short in result.items()}
