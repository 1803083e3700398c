"""Names of a package that are imported at their first use, and not before."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

NAME = "hfshard_lazy_sample"
INIT = """
from hfshard._util.lazy_imports import lazy_exports

own = 0
__getattr__, __dir__ = lazy_exports(__name__, {"answer": "numbers.small", "tools": "tools", "gone": "tools"})
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package with two lazy names that exist, and one that its module lacks."""
    folder = tmp_path / NAME
    (folder / "numbers").mkdir(parents=True)
    (folder / "__init__.py").write_text(INIT)
    (folder / "tools.py").write_text("hammer = 1")
    (folder / "numbers" / "__init__.py").touch()
    (folder / "numbers" / "small.py").write_text("answer = [42]")
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module(NAME)
    for name in loaded():
        del sys.modules[name]


def loaded() -> list[str]:
    """The package and its modules that were imported, sorted."""
    return sorted(name for name in sys.modules if name.partition(".")[0] == NAME)


def test_a_name_is_imported_at_its_first_use_and_only_its_module(package: ModuleType) -> None:
    assert loaded() == [NAME]

    assert package.answer == [42]

    assert loaded() == [NAME, f"{NAME}.numbers", f"{NAME}.numbers.small"]


def test_a_name_that_was_used_stays_in_the_package(package: ModuleType) -> None:
    answer = package.answer
    vars(sys.modules[f"{NAME}.numbers.small"])["answer"] = [43]

    assert vars(package)["answer"] is answer
    assert package.answer is answer


def test_a_module_can_be_a_name_itself(package: ModuleType) -> None:
    assert package.tools is sys.modules[f"{NAME}.tools"]
    assert package.tools.hammer == 1


def test_an_unknown_name_is_an_attribute_error_and_imports_nothing(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=rf"^module '{NAME}' has no attribute 'hammer'$"):
        _ = package.hammer

    assert not hasattr(package, "numbers")
    assert loaded() == [NAME]


def test_a_name_that_its_module_lacks_is_the_error_of_that_module(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=rf"^module '{NAME}\.tools' has no attribute 'gone'$"):
        _ = package.gone

    assert "gone" not in vars(package)


def test_a_module_that_failed_is_imported_again_at_the_next_use(package: ModuleType, tmp_path: Path) -> None:
    broken = tmp_path / NAME / "tools.py"
    broken.write_text("raise ImportError('no hammer here')")
    with pytest.raises(ImportError, match="no hammer here"):
        _ = package.tools

    broken.write_text("hammer = 'mended'")

    assert package.tools.hammer == "mended"


def test_all_names_are_listed_in_order_before_any_is_imported(package: ModuleType) -> None:
    listed = [name for name in dir(package) if not name.startswith("__")]

    assert listed == ["answer", "gone", "lazy_exports", "own", "tools"]
    assert loaded() == [NAME]
