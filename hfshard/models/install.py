"""`hfshard.install` and `hfshard.uninstall`. Calling them imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeAlias

from hfshard._util.lazy_imports import announce_once, on_import
from hfshard.format.index import Checksum, Verify
from hfshard.models.install_settings import (
    Installation,
    Settings,
    add_default_installation,
    add_installation,
    current_settings,
    forget_installations,
    use_settings,
)
from hfshard.models.patching import METHODS, HandlerLookup, Method, patch_method, set_global_handler
from hfshard.models.small_saves import send_small_saves

Handlers: TypeAlias = Mapping[Method, Callable[..., Any]]
"""Method -> what is called in its place."""


def _of_transformers() -> Handlers:
    from hfshard.models.installed_methods import HANDLERS

    return HANDLERS


def _of_diffusers() -> Handlers:
    from hfshard.models.diffusers_models import DIFFUSERS_HANDLERS

    return DIFFUSERS_HANDLERS


def _of_trainer() -> Handlers:
    from hfshard.models.trainer_saves import save_trained

    return {"save_model": save_trained}


def _of_accelerate() -> Handlers:
    from hfshard.models.trainer_saves import save_prepared

    return {"save_model": save_prepared}


class _Patched(NamedTuple):
    """A class whose methods are patched."""

    name: str
    methods: tuple[Method, ...]
    handlers: Callable[[], Handlers]
    """Imports torch, and for models of transformers that, too."""


_PATCHED: Final = {
    "transformers.modeling_utils": _Patched("PreTrainedModel", METHODS, _of_transformers),
    "diffusers.models.modeling_utils": _Patched("ModelMixin", METHODS, _of_diffusers),
    "transformers.trainer": _Patched("Trainer", ("save_model",), _of_trainer),
    "accelerate.accelerator": _Patched("Accelerator", ("save_model",), _of_accelerate),
}
"""Module -> the class in it."""
_OF_BASES: Final[dict[type, _Patched]] = {}
"""What was found in the modules: a library may have replaced a class by one of another name."""


def install(*, verify: Verify = "structure", checksum: Checksum | None = "sha256", quiet: bool = False) -> Installation:
    """Make every model of transformers and diffusers in this process save, push and load with hfshard from now on.

    This covers every `save_pretrained`, `push_to_hub` and `from_pretrained` call on a model that reaches
    PreTrainedModel's own method, whether made by Trainer, a pipeline or an Auto class. Arguments, results, file names
    and reports stay those of transformers. A save replaces the previous checkpoint as a whole, and a load is checked
    first. transformers still handles what hfshard cannot read or write itself (quantized weights, GGUF, adapters ...)
    and everything that is not a transformers model: tokenizers, processors, configs, other libraries' models. The one
    exception: when a tokenizer, processor or config is saved to a store address, hfshard uploads the files that
    transformers writes, each on its own. Models of diffusers, also as components of a pipeline, are saved by hfshard
    under diffusers' file names, and loaded by diffusers from files that hfshard has checked. What DeepSpeed ZeRO-3 has
    partitioned is saved by Trainer's and Accelerate's `save_model` from each rank's part, not gathered on the first
    rank (also with `stage3_gather_16bit_weights_on_model_save` off, where Trainer would write DeepSpeed's checkpoint
    in place of weights); unless it has an adapter, or Trainer's own `_save` is overridden.

    Calling it again changes the settings. Forked processes inherit it. It does not import transformers or
    diffusers; if one is imported later, hfshard takes effect then.

    Args:
        verify: What to check before a model is built: "none"; "structure" (names, sizes, headers, fingerprints);
            "full" (every byte, against its checksum; files without one are rejected).
        checksum: For saved files: "sha256", "xxh3" or None.
        quiet: Omit the line on stderr that says that hfshard is on; otherwise the first process of a process tree
            to call this prints it.

    Returns:
        A context manager: at the end of its block, the settings from before `install` apply again, or none.

    Raises:
        InvalidArgumentError: A value is not allowed.

    Example:
        hfshard.install()
        with hfshard.install(verify="full"):
            bert = transformers.AutoModel.from_pretrained("bert")
    """
    installation = add_installation(Settings(verify=verify, checksum=checksum))
    _put_in_place()
    if not quiet:
        announce_once()
    return installation


def install_first(*, verify: Verify = "structure", checksum: Checksum | None = "sha256") -> None:
    """Install hfshard quietly, as if when the process began, in a program that `hfshard run` has started.

    Calls of `install` or `uninstall` that the program has already made take precedence.
    """
    add_default_installation(Settings(verify=verify, checksum=checksum))
    _put_in_place()


def uninstall() -> None:
    """Make transformers and diffusers save, push and load models by themselves again, after any number of `install`s.

    A call in progress, in this thread or another, ends as it began. Models with `ShardedModelMixin` and hfshard's own
    functions work as they do without `install`.

    Example:
        hfshard.uninstall()
    """
    forget_installations()


def _put_in_place() -> None:
    set_global_handler(_stand_in)
    for module in _PATCHED:
        on_import(module, _wrap_methods)
    send_small_saves()


def _wrap_methods(module: ModuleType) -> None:
    patched = _PATCHED[module.__name__]
    base: Any = vars(module).get(patched.name)
    if base is None:
        return
    _OF_BASES[base] = patched
    for method in patched.methods:
        if method in vars(base):
            patch_method(base, method)


def _stand_in() -> HandlerLookup | None:
    settings = current_settings()
    if settings is None:
        return None

    def answer(base: type, method: Method, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        patched = _OF_BASES.get(base, _PATCHED["transformers.modeling_utils"])
        with use_settings(settings):
            return patched.handlers()[method](settings, target, *args, **kwargs)

    return answer
