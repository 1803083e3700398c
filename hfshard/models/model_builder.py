"""Build a transformers model: pass an open checkpoint's tensors to its from_pretrained, and check the result."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hfshard._util.threads import LendingLock
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.locate import check_generation_config, read_config
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.distributed.load_on_ranks import confirm_same, current_load
from hfshard.distributed.read_parts import stored_tensors
from hfshard.errors import StateDictMismatchError
from hfshard.models.load_arguments import (
    CONFIG_ATTRIBUTES,
    MODEL_ARGUMENTS,
    SOURCE_ARGUMENTS,
    commit_argument,
    device_of,
)
from hfshard.models.model_classes import class_of_alias
from hfshard.models.patching import upstream
from hfshard.models.rank_parts import ParallelizedLoad
from hfshard.places.place import ResolvedSource
from hfshard.tensors.parameter_names import (
    KeyMismatch,
    compare_keys,
    has_wrapper_prefix,
    match_prefixes,
    strip_compiled,
    strip_wrappers,
)
from hfshard.tensors.tied import Place, share_tensor
from hfshard.tensors.zero3 import reject_partitioned

building_lock: Final = LendingLock()
"""transformers builds models under process-wide settings (default dtype, no ties): two threads that load at once
would lose ties. A model may load a part of itself, also in a thread that its constructor waits for."""


@dataclass(frozen=True, slots=True)
class ModelBuilder:
    """One call of transformers' from_pretrained with an open checkpoint in place of files."""

    call: Callable[..., Any]
    """Transformers' own `from_pretrained`."""
    model_class: type[PreTrainedModel]
    name: str
    local: ResolvedSource
    checkpoint: OpenCheckpoint
    options: LoadOptions

    def build(
        self, model_args: tuple[Any, ...], config: Any, model_kwargs: dict[str, Any], kwargs: dict[str, Any]
    ) -> Any:
        """Build the model.

        Args:
            model_args, model_kwargs: For the model's constructor.
            config: The model's config.
            kwargs: All keyword arguments of `from_pretrained`.

        Returns:
            The model; or (model, info), if `output_loading_info` is set.

        Raises:
            StateDictMismatchError: No name fits, a shape differs, or strict and any name differs.
            DamagedCheckpointError: The model has a name whose entry in a pickle is not a dense tensor.
        """
        if self.model_class.can_generate() and kwargs.get("generation_config") is None:
            check_generation_config(self.local.directory, self.checkpoint.folder.pass_over)
        call = self.call
        parallel: ParallelizedLoad | None = None
        describe = partial(self._model_on_meta, config, model_args, model_kwargs)
        names = self._names(describe, kwargs)
        if self.options.parallelize is None and kwargs.get("distributed_config") is None:
            tensors = self._tensors(names, config, kwargs)
        else:
            model_class = class_of_alias(self.model_class)
            parallel = ParallelizedLoad(self.options.parallelize, model_class, self.checkpoint, self.options.read)
            tensors = self._described(names, parallel)
        arguments = {key: value for key, value in kwargs.items() if key in MODEL_ARGUMENTS | CONFIG_ATTRIBUTES}
        for key in ("config", "output_loading_info", "use_safetensors", "variant", "disable_mmap", *SOURCE_ARGUMENTS):
            arguments.pop(key, None)
        arguments |= {"config": config, "state_dict": tensors, "output_loading_info": True}
        arguments |= self._dtype_of_index(config, kwargs)
        ranks = current_load()
        if not ranks.is_alone:
            confirm_same(ranks, self.checkpoint, read_config(self.local.directory))
        try:
            with building_lock.held(), _load_report_names(self.name), _configs_named(self.local.path):
                if parallel is not None:
                    loading = parallel.load_class(self.model_class)
                    call = partial(upstream("from_pretrained", loading), loading)
                model, info = call(None, *model_args, **arguments, **model_kwargs)
        except RuntimeError as error:
            if "ignore_mismatched_sizes" in str(error):
                raise self._shapes_differ(describe, tensors) from error
            raise
        self._check(model, info, len(tensors))
        self._name(model)
        if self.options.parallelize is None:
            self._tie(model)
        self._load_generation_config(model, kwargs)
        model = model if parallel is None else parallel.parallelized
        return (model, info) if kwargs.get("output_loading_info") else model

    def _dtype_of_index(self, config: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the dtype that an index names, which for transformers comes before that of the first tensor."""
        given = kwargs.get("torch_dtype") if kwargs.get("dtype") is None else kwargs["dtype"]
        stated = self.checkpoint.index.metadata.get("dtype") if self.checkpoint.weights.is_index else None
        is_open = given in (None, "auto") and getattr(config, "dtype", None) is None
        return {} if stated is None or not is_open else {"dtype": stated}

    def _model_on_meta(self, config: Any, model_args: tuple[Any, ...], model_kwargs: dict[str, Any]) -> PreTrainedModel:
        """Build the model without data, to learn its names and shapes."""
        with torch.device("meta"):
            return self.model_class(copy.deepcopy(config), *model_args, **model_kwargs)  # some change their config

    def _shapes_differ(
        self, describe: Callable[[], PreTrainedModel], tensors: Mapping[str, torch.Tensor]
    ) -> StateDictMismatchError:
        """Build an error that lists the shapes that differ: transformers' error names neither file nor tensors."""
        model = describe()
        reject_partitioned(model, "load")  # a block of deepspeed.zero.Init partitions it on creation
        model_state = model.state_dict()
        prefix = self.model_class.base_model_prefix
        model_state |= {name.removeprefix(f"{prefix}."): tensor for name, tensor in model_state.items()}
        mismatched = compare_keys(tensors, model_state).mismatched
        shown = KeyMismatch((), (), mismatched).summary() if mismatched else "shapes differ, see the report above"
        return StateDictMismatchError(
            f"The checkpoint '{self.name}' does not fit {self.model_class.__name__}: {shown}. "
            "Load it into the class and config that it was saved with, or pass ignore_mismatched_sizes=True.",
            path=self.name,
            mismatched_keys=mismatched,
        )

    def _described(self, names: Mapping[str, str], parallel: ParallelizedLoad) -> dict[str, torch.Tensor]:
        """Build the tensors without data, by the names that transformers is given."""
        described = stored_tensors(self.checkpoint) | self.checkpoint.others
        parallel.stored_names = {short: name for name, short in names.items()}
        parallel.tie = self._tie
        return {short: described[name] for name, short in names.items()}

    def _tensors(self, names: Mapping[str, str], config: Any, kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        index = self.checkpoint.index
        with torch.inference_mode(False):  # as in transformers, a model that is loaded in that mode can be trained
            tensors = self.checkpoint.read(self._keys(), self.options.read, device_of(self.checkpoint, config, kwargs))
        # transformers ties what the config declares; passing it twice would cost a comparison of the values.
        tensors |= self.checkpoint.others
        tensors |= {name: tensors[index.tied_names[name]] for name in index.undeclared_ties}
        return {names[name]: tensor for name, tensor in tensors.items()}

    def _names(self, describe: Callable[[], PreTrainedModel], kwargs: Mapping[str, Any]) -> dict[str, str]:
        """Map each name in the file to its name for transformers: to itself where the caller renames the file's names.

        The patterns of a `key_mapping` are for the names in the file, often to strip a wrapper's prefix themselves.
        """
        stored = [*self._keys(), *self.checkpoint.others, *self.checkpoint.index.undeclared_ties]
        if kwargs.get("key_mapping") or not has_wrapper_prefix(stored):
            return dict(zip(stored, stored, strict=True))
        names = _names_for(describe(), stored)
        self._reject_merging(names)
        return names

    def _reject_merging(self, names: Mapping[str, str]) -> None:
        """Reject names that become the same without wrapper prefixes: one of the tensors would be lost."""
        first: dict[str, str] = {}
        for name, short in names.items():
            other = first.setdefault(short, name)
            if other != name:
                raise StateDictMismatchError(
                    f"'{other}' and '{name}' of the checkpoint '{self.name}' are both '{short}' without wrapper "
                    "prefixes (DataParallel, torch.compile): one of them would be lost. Save them separately, with "
                    "hfshard.load_state_dict(..., keys=...) and hfshard.save_state_dict.",
                    path=self.name,
                    fqn=name,
                )

    def _keys(self) -> list[str]:
        """List names in transformers' order: if the config has no dtype, the first tensor's becomes the model's."""
        if self.checkpoint.pickles:
            return self.checkpoint.keys
        weight_map = self.checkpoint.index.weight_map
        return sorted(self.checkpoint.keys, key=lambda name: (weight_map[name], name))

    def _check(self, model: PreTrainedModel, info: dict[str, Any], tensor_count: int) -> None:
        missing, unexpected = info["missing_keys"], info["unexpected_keys"]
        differs = bool(missing or unexpected or info["mismatched_keys"])
        if tensor_count and not differs:
            return
        model_names = model.state_dict().keys()
        difference = KeyMismatch(tuple(sorted(missing)), tuple(sorted(unexpected)), tuple(info["mismatched_keys"]))
        nothing = bool(model_names) and (len(unexpected) >= tensor_count or set(missing) >= set(model_names))
        if (self.options.strict and differs) or (nothing and not self.options.is_lenient):
            raise StateDictMismatchError(
                f"The checkpoint '{self.name}' does not fit {type(model).__name__}: {difference.summary()}. "
                f"Compare the names with: hfshard inspect --tensors {self.checkpoint.directory}",
                path=self.name,
                missing_keys=difference.missing,
                unexpected_keys=difference.unexpected,
                mismatched_keys=difference.mismatched,
            )

    def _name(self, model: PreTrainedModel) -> None:
        # transformers was given no name, and the builder used the absolute path, or a snapshot's path, instead.
        placeholders = {"None", self.local.path}
        configs: dict[int, Any] = {}  # modules share them
        for module in model.modules():
            attributes = vars(module)  # torch's `getattr` raises, slowly, for a module that has no such attribute
            if attributes.get("name_or_path") in placeholders:
                module.name_or_path = self.name  # type: ignore[assignment]
            if "config" in attributes:
                configs[id(attributes["config"])] = attributes["config"]
        for config in configs.values():
            if isinstance(config, PreTrainedConfig) and config.name_or_path in placeholders:
                config.name_or_path = self.name

    def _tie(self, model: PreTrainedModel) -> None:
        """Restore ties that the config does not declare; names may have gained or lost the base model's prefix."""
        index = self.checkpoint.index
        if not index.undeclared_ties:
            return
        modules = dict(model.named_modules(remove_duplicate=False))
        base = f"{self.model_class.base_model_prefix}."

        def place_of(name: str) -> Place | None:
            for form in (name, f"{base}{name}", name.removeprefix(base)):
                path, _, attribute = form.rpartition(".")
                if isinstance(getattr(modules.get(path), attribute, None), torch.Tensor):
                    return modules[path], attribute
            return None

        for tied_name in index.undeclared_ties:
            target, origin = place_of(tied_name), place_of(index.tied_names[tied_name])
            if target is None or origin is None:
                continue
            if getattr(*target).shape == getattr(*origin).shape:  # they differ if ignore_mismatched_sizes skipped one
                share_tensor(target, origin)

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
def _load_report_names(name: str) -> Iterator[None]:
    """Put the checkpoint's name into transformers' load report, which was given none."""
    thread = threading.get_ident()

    def give_name(record: logging.LogRecord) -> bool:
        if record.thread == thread and isinstance(record.msg, str):
            record.msg = record.msg.replace("from: None\n", f"from: {name}\n", 1)
        return True

    report_logger = logging.getLogger("transformers.modeling_utils")
    report_logger.addFilter(give_name)
    try:
        yield
    finally:
        report_logger.removeFilter(give_name)


@contextmanager
def _configs_named(name: str) -> Iterator[None]:
    """Give the config a name while the model is built: transformers, which was given none, would write "None".

    Wav2Vec2 with a `target_lang` looks up its adapter by that name. Only this thread's configs are named.
    """
    thread = threading.get_ident()
    original: Any = vars(PreTrainedConfig)["name_or_path"]

    def set_name(config: PreTrainedConfig, value: Any) -> None:
        original.fset(config, name if value is None and threading.get_ident() == thread else value)

    named: Any = PreTrainedConfig
    named.name_or_path = property(original.fget, set_name)
    try:
        yield
    finally:
        named.name_or_path = original


def _names_for(model: PreTrainedModel, names: Collection[str]) -> dict[str, str]:
    """Strip wrapper prefixes from the file's names where that yields names of this model."""
    expected = set(model.state_dict())
    prefix = model.base_model_prefix
    expected |= {f"{prefix}.{name}" for name in expected} | {name.removeprefix(f"{prefix}.") for name in expected}
    result = match_prefixes(names, expected)
    if expected.isdisjoint(result.values()):
        return {name: strip_wrappers(name) for name in names}  # all are names from before a conversion
    return {name: short if short in expected else strip_compiled(short) for name, short in result.items()}
