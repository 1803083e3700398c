"""Work that waits for the import of a module."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hfshard._util.lazy_imports import on_import

NAME = "hooked_package.late"


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose module `late` sleeps while it is imported."""
    folder = tmp_path / "hooked_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "late.py").write_text("import time\ntime.sleep(0.05)\nvalue = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    others = [one for one in sys.meta_path if type(one).__name__ != "_ImportHookFinder"]
    monkeypatch.setattr(sys, "meta_path", others)
    yield folder
    for name in [name for name in sys.modules if name.startswith("hooked_package")]:
        del sys.modules[name]


def test_the_work_is_done_when_the_module_is_imported_and_again_when_it_is_reloaded() -> None:
    seen: list[int] = []

    def work(module: ModuleType) -> None:
        seen.append(module.value)

    on_import(NAME, work)
    on_import(NAME, work)
    assert "hooked_package" not in sys.modules and seen == []

    module = importlib.import_module(NAME)
    assert seen == [1]
    assert module.__spec__ is not None and type(module.__spec__.loader).__name__ == "SourceFileLoader"
    importlib.reload(module)
    assert seen == [1, 1]


def test_a_module_that_is_there_is_worked_on_at_once() -> None:
    module = importlib.import_module(NAME)
    seen: list[ModuleType] = []

    on_import(NAME, seen.append)

    assert seen == [module]


def test_a_module_that_another_thread_imports_is_whole_when_the_work_is_done() -> None:
    seen: list[int] = []
    thread = threading.Thread(target=importlib.import_module, args=(NAME,))
    importlib.import_module("hooked_package")
    thread.start()
    while NAME not in sys.modules:
        pass

    on_import(NAME, lambda module: seen.append(module.value))
    thread.join()

    assert seen == [1]


def test_a_thread_that_has_asked_the_other_finders_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, may_go_on = threading.Event(), threading.Event()

    class Slow:
        @staticmethod
        def find_spec(fullname: str, *args: object) -> None:
            if fullname == NAME and not asked.is_set():
                asked.set()
                assert may_go_on.wait(60)

    importlib.import_module("hooked_package")
    monkeypatch.setattr(sys, "meta_path", [Slow, *sys.meta_path])
    thread = threading.Thread(target=importlib.import_module, args=(NAME,))
    thread.start()
    assert asked.wait(60)
    seen: list[ModuleType] = []
    threading.Timer(0.05, may_go_on.set).start()

    on_import(NAME, seen.append)
    thread.join()

    assert seen == [sys.modules[NAME]]


def test_many_threads_that_import_do_the_work_once() -> None:
    seen: list[ModuleType] = []
    on_import(NAME, seen.append)
    threads = [threading.Thread(target=importlib.import_module, args=(NAME,)) for _ in range(4)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(seen) == 1


def test_an_error_of_the_module_or_of_the_work_is_the_imports_and_other_modules_are_left_alone(package: Path) -> None:
    def fail(module: ModuleType) -> None:
        raise RuntimeError("no")

    on_import("hooked_package.broken", fail)
    (package / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("hooked_package.broken")

    (package / "broken.py").write_text("import hooked_package.late\n")
    importlib.invalidate_caches()
    with pytest.raises(RuntimeError, match="no"):
        importlib.import_module("hooked_package.broken")
    assert "hooked_package.broken" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hooked_package.nowhere")
