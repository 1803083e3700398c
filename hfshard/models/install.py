"""`hfshard.install` and `hfshard.uninstall`. To call them imports neither torch nor transformers."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from hfshard._util.import_hook import announce, when_imported
from hfshard.format.digests import Checksum, Verify
from hfshard.models.install_settings import (
    Installation,
    Settings,
    add_first_installation,
    add_installation,
    current_settings,
    forget_installations,
    keeping,
)
from hfshard.models.patching import METHODS, Method, StandIn, put_in_place, stand_in_for_all
from hfshard.models.small_saves import send_small_saves

_MODELS: Final = "transformers.modeling_utils"


def install(*, verify: Verify = "structure", checksum: Checksum | None = "sha256", quiet: bool = False) -> Installation:
    """Let every transformers model of this process save, push and load by way of hfshard, from now on.

    That is every `save_pretrained`, `push_to_hub` and `from_pretrained` of a model that ends in PreTrainedModel's own
    method, whoever calls it: Trainer, a pipeline, an Auto class. Arguments, results, file names and reports stay those
    of transformers; what is saved replaces what was there as a whole, and what is loaded is checked first. What
    hfshard can't read or write itself (quantized weights, GGUF, adapters ...) transformers does as always, and so it
    does all that are not models: tokenizers, processors, configs, other libraries' models. Only where the first three
    are saved into the address of a store, hfshard sends what transformers writes; each file is put by itself.

    To call it again is to change the settings. Forked processes inherit it. transformers is not imported; where it is
    imported later, hfshard waits for it.

    Args:
        verify: What is checked before a model is built: "none"; "structure" (names, sizes, headers, fingerprints);
            "full" (every byte, against its checksum; files without one are refused).
        checksum: Of the files that are saved: "sha256", "xxh3" or None.
        quiet: Leave out the line on stderr that says that hfshard is on; without it, the first of a tree of processes
            that calls shows it.

    Returns:
        A context manager: at the end of its block, the settings from before `install` count again, or none.

    Raises:
        InvalidArgumentError: A value is not one of those that are allowed.

    Example:
        hfshard.install()
        with hfshard.install(verify="full"):
            bert = transformers.AutoModel.from_pretrained("bert")
    """
    installation = add_installation(Settings(verify=verify, checksum=checksum))
    _put_in_place()
    if not quiet:
        announce()
    return installation


def install_first(*, verify: Verify = "structure", checksum: Checksum | None = "sha256") -> None:
    """Do quietly what `install` would have done when the process began, for a program that `hfshard run` has started.

    What the program has called by now, `install` or `uninstall`, counts more.
    """
    add_first_installation(Settings(verify=verify, checksum=checksum))
    _put_in_place()


def uninstall() -> None:
    """Let transformers save, push and load its models by itself again, whatever has called `install`, and how often.

    A call that is under way, in this thread or another, ends as it began. Models with `ShardedModelMixin` and hfshard's
    own functions work as they do without `install`.

    Example:
        hfshard.uninstall()
    """
    forget_installations()


def _put_in_place() -> None:
    stand_in_for_all(_stand_in)
    when_imported(_MODELS, _wrap_models)
    send_small_saves()


def _wrap_models(module: ModuleType) -> None:
    base: Any = vars(module).get("PreTrainedModel")
    if base is not None:
        for method in METHODS:
            put_in_place(base, method)


def _stand_in() -> StandIn | None:
    settings = current_settings()
    if settings is None:
        return None

    def answer(method: Method, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        from hfshard.models.installed_methods import ANSWERS  # imports torch and transformers

        with keeping(settings):
            return ANSWERS[method](settings, target, *args, **kwargs)

    return answer
