"""The public face: what users import, and where it lives."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hfshard
import hfshard.distributed
import hfshard.errors
import hfshard.hub
import hfshard.signing
import hfshard.training
from tests import REPOSITORY

PACKAGES = (hfshard, hfshard.distributed, hfshard.hub, hfshard.signing, hfshard.training)


def homes_of(package: ModuleType) -> dict[str, str]:
    """The table of exports of a package."""
    homes: dict[str, str] = vars(package)["_HOMES"]
    return homes


def imports_for_type_checkers(package: ModuleType) -> dict[str, str]:
    """Public name -> module, as the block of TYPE_CHECKING imports them."""
    assert package.__file__ is not None
    found = {}
    for node in ast.parse(Path(package.__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for statement in node.body:
                assert isinstance(statement, ast.ImportFrom)
                for alias in statement.names:
                    assert alias.asname == alias.name, "a type checker takes it for public only as `name as name`"
                    found[alias.name] = statement.module or ""
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_type_checkers_see_the_exports_of_the_table(package: ModuleType) -> None:
    name = package.__name__
    expected = {export: name if home == export else f"{name}.{home}" for export, home in homes_of(package).items()}
    assert imports_for_type_checkers(package) == expected


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_public_names_are_sorted_and_there(package: ModuleType) -> None:
    assert package.__all__ == sorted(package.__all__)
    assert set(package.__all__) - {"__version__"} == set(homes_of(package))
    assert set(package.__all__) <= set(dir(package))


@pytest.mark.parametrize(
    ("package", "name"),
    [(package, name) for package in PACKAGES for name in package.__all__ if name != "__version__"],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_public_name_is_defined_where_the_table_says_and_has_a_docstring(package: ModuleType, name: str) -> None:
    member: Any = getattr(package, name)
    defined_in = member.__name__ if inspect.ismodule(member) else member.__module__
    assert defined_in == f"{package.__name__}.{homes_of(package)[name]}"
    assert member.__doc__


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_unknown_name_is_an_attribute_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'load_modle'"):
        package.load_modle  # noqa: B018


def test_public_names_are_those_of_the_design() -> None:
    assert hfshard.__all__ == [
        "CheckpointDiff",
        "CheckpointIndex",
        "CheckpointManager",
        "FileDigest",
        "HfshardError",
        "PlannedShard",
        "Problem",
        "PushResult",
        "RemovalReport",
        "ShardPlan",
        "ShardedModelMixin",
        "TensorDiff",
        "TensorSpec",
        "VerifyReport",
        "__version__",
        "diff_checkpoints",
        "distributed",
        "errors",
        "hub",
        "install",
        "load_model",
        "load_state_dict",
        "parse_size",
        "plan_shards",
        "pull_checkpoint",
        "push_checkpoint",
        "remove_checkpoint",
        "reshard_checkpoint",
        "save_model",
        "save_state_dict",
        "show_checkpoint",
        "sign_checkpoint",
        "signing",
        "training",
        "uninstall",
        "verify_checkpoint",
    ]


def test_every_error_of_the_package_is_in_its_errors() -> None:
    """So `hfshard.errors` is all that an `except` needs."""
    for path in sorted((REPOSITORY / "hfshard").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if not re.search(r"class \w+\([^)]*Error", source):
            continue  # nothing to be found in it, and most are so
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Error") for base in node.bases):
                is_ours = any(hasattr(hfshard.errors, ast.unparse(base)) for base in node.bases)
                assert path.name == "errors.py" or not is_ours, f"{path}: {node.name}"


def test_every_error_has_the_one_base() -> None:
    classes = [member for member in vars(hfshard.errors).values() if inspect.isclass(member)]
    errors = [cls for cls in classes if issubclass(cls, Exception)]
    assert len(errors) > 20
    assert all(issubclass(cls, hfshard.HfshardError) for cls in errors)


@pytest.mark.parametrize("name", ["save_model", "save_state_dict", "reshard_checkpoint"])
def test_shards_have_the_size_that_the_hub_recommends(name: str) -> None:
    default = inspect.signature(getattr(hfshard, name)).parameters["max_shard_size"].default
    assert default == "5GB"
