"""Functions to call when a module is imported, and the one line on stderr that reports that hfshard is on."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from hfshard.constants import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    Work = Callable[[ModuleType], object]


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
        from importlib import import_module

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


ANNOUNCED: Final = "HFSHARD_ANNOUNCED"
"""The environment variable by which child processes know that the line has been shown."""
_RANKS: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""Variables in which torchrun, Slurm and MPI pass a process its rank; the first one that is set counts."""


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
