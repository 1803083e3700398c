"""Imports that come later: of a package's names on first use (PEP 562), of what is above; and work after imports."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from hfshard.constants import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    Work = Callable[[ModuleType], object]

ANNOUNCED: Final = "HFSHARD_ANNOUNCED"
"""The environment variable by which child processes know that the line that hfshard is on has been shown."""
_RANKS: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""Variables in which torchrun, Slurm and MPI pass a process its rank; the first one that is set counts."""


def lazy_exports(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Create the `__getattr__` and the `__dir__` of a package whose names are imported when they are first used.

    Args:
        package: Its `__name__`.
        homes: Public name -> the module that defines it, below the package; a module's name -> itself.
    """

    def get_attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        module = import_module(f"{package}.{homes[name]}")
        value = module if homes[name] == name else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get_attribute, list_names


_from_above: dict[str, Callable[[], Any]] = {}
"""Name -> the function that imports it."""


def hand_down(name: str, import_it: Callable[[], Any]) -> None:
    """Hand a function to packages below the one that defines it, which must not import it themselves.

    Args:
        name: The name by which they ask for it.
        import_it: Imports it, when it is first used.
    """
    _from_above[name] = import_it


def from_above(name: str) -> Any:
    """Import what was handed down by this name."""
    return _from_above[name]()


def on_import(name: str, work: Work) -> None:
    """Call a function with a module each time it is imported or reloaded, and now if it is already imported.

    Args:
        name: The module's full name.
        work: Called in the importing thread before that continues. Registering the same function twice has no effect.
            Its errors are raised by the import. If threads import and wait at the same time, it may be called twice.
    """
    finder = next((one for one in sys.meta_path if isinstance(one, _ImportHookFinder)), None)
    if finder is None:
        finder = _ImportHookFinder()
        sys.meta_path.insert(0, finder)
    works = finder.works.setdefault(name, [])
    if work not in works:
        works.append(work)
    if "." in name and name.rpartition(".")[0] in sys.modules:
        _wait_for_import(name)
    if name in sys.modules:
        work(import_module(name))


def _wait_for_import(name: str) -> None:
    """Wait for another thread that is importing a module, and may have asked the finders before hfshard's was added.

    Python has no public way to wait for a module without importing it.
    """
    from importlib import _bootstrap

    lock = getattr(_bootstrap, "_ModuleLockManager", None)
    if lock is not None:
        with suppress(RuntimeError), lock(name):  # raised if that thread waits for this one
            pass


class _ImportHookFinder:
    """A finder that finds the awaited modules through the other finders, and adds the work to their loaders."""

    def __init__(self) -> None:
        self.works: dict[str, list[Work]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find an awaited module for Python's import; return None for all others, so that other finders are asked."""
        if fullname not in self.works:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                self._add_work(spec)
                return spec
        return None

    def _add_work(self, spec: ModuleSpec) -> None:
        """Have a module's loader, which exists for this module alone, call the functions after it has run it."""
        loader = spec.loader
        run_module = getattr(loader, "exec_module", None)
        if run_module is None:
            return

        def run_and_call(module: ModuleType) -> None:
            run_module(module)
            for work in tuple(self.works[spec.name]):
                work(module)

        vars(loader)["exec_module"] = run_and_call


def announce_once(where: str = "") -> None:
    """Report that hfshard is on: once, in the first process; of ranks that a launcher started, on the first one.

    Args:
        where: The program, if it is not just this process: " in train.py".
    """
    ranks = [os.environ[name] for name in _RANKS if name in os.environ]
    if os.environ.get(ANNOUNCED) or ranks[:1] not in ([], ["0"]) or sys.stderr is None:
        return
    os.environ[ANNOUNCED] = "1"
    with suppress(OSError, ValueError):  # a stream that is closed
        sys.stderr.write(
            f"hfshard {VERSION} is on{where}: save_pretrained, push_to_hub and from_pretrained of transformers "
            "models are crash-safe and checked (hfshard.uninstall() turns it off)\n"
        )
        sys.stderr.flush()
