"""What is written once in the package, and would come back as a second copy: counted by the syntax trees."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests import REPOSITORY

PACKAGE = REPOSITORY / "hfshard"

# A call -> the only modules that make it.
CALLED_IN = {
    "NewCheckpoint": {"saving/pipeline"},
    "plan_request": {"saving/pipeline", "saving/reshard_in_place", "saving/resharding"},  # two only compare with it
    "plan_commit": {"commit/commit_plan", "commit/directory_commit", "places/fetch", "saving/reshard_in_place"},
    "genops": {"pickles/pickle_opcodes"},
    "compare_file": {"checkpoint/check_files"},
}

# A class or a function -> the only module that defines one of this name.
DEFINED_IN = {
    "ByteBudget": "stores/byte_budget",
    "NewCheckpoint": "commit/transaction",
    "Retry": "stores/retry",
    "Save": "saving/pipeline",
    "GroupSession": "distributed/rendezvous",
    "Session": "_util/call_ranks",
    "Transaction": "commit/transaction",
    "check_files": "checkpoint/check_files",
    "compare_file": "checkpoint/check_files",
    "retry_if_replaced": "checkpoint/check_files",
}

# The sinks of the one save: classes with the methods of `Transaction`.
SINKS = {
    "commit/directory_commit": "DirectoryTransaction",
    "commit/store_commit": "StoreTransaction",
    "saving/hub_transaction": "HubTransaction",
    "training/run/run_directory": "RunDirectoryTransaction",
    "training/run/run_store": "RunStoreTransaction",
}

# Loops that start again when somebody has replaced what they read; each for a reason of its own.
LOOPS = {
    "checkpoint/check_files": "retry_if_replaced, which all readers of checkpoints use",
    "commit/store_commit": "plain copies of a save that another one overtakes",
    "hub/push_files": "the conflict of two pushes",
    "training/run/find_checkpoint": "the checkpoints of a run, of which rotation removes some",
}
REPLACED = ("ChangedError", "StaleParentError", "ReplacedMeanwhile")


@cache
def _trees() -> dict[str, ast.Module]:
    """Path of each module within the package, without ".py" -> its syntax tree."""
    return {
        path.relative_to(PACKAGE).with_suffix("").as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def _called(tree: ast.AST) -> frozenset[str]:
    """Last names of everything that is called."""
    functions = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return frozenset(getattr(one, "attr", "") or getattr(one, "id", "") for one in functions)


@cache
def _defined(tree: ast.AST) -> tuple[ast.ClassDef | ast.FunctionDef, ...]:
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef))


def _has_methods_of_a_sink(node: ast.AST) -> bool:
    methods = {one.name for one in ast.iter_child_nodes(node) if isinstance(one, ast.FunctionDef)}
    return isinstance(node, ast.ClassDef) and {"prepare", "write", "commit"} <= methods


def _starts_again(tree: ast.AST) -> bool:
    """Return whether a loop catches the error of something that was replaced."""
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]
    caught = [node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.ExceptHandler) and node.type]
    return any(name in ast.unparse(handler.type or handler) for handler in caught for name in REPLACED)


@pytest.mark.parametrize("name", CALLED_IN)
def test_it_is_called_in_these_modules_only(name: str) -> None:
    assert {module for module, tree in _trees().items() if name in _called(tree)} == CALLED_IN[name]


@pytest.mark.parametrize("name", DEFINED_IN)
def test_it_is_defined_in_one_module(name: str) -> None:
    homes = [module for module, tree in _trees().items() for one in _defined(tree) if one.name == name]
    assert homes == [DEFINED_IN[name]]


def test_each_kind_of_place_has_one_sink_of_the_one_save() -> None:
    found = {
        module: node.name
        for module, tree in _trees().items()
        for node in _defined(tree)
        if _has_methods_of_a_sink(node) and node.name != "Transaction"
    }
    assert found == SINKS | {"saving/pipeline": "Save"}


def test_few_loops_start_again_when_something_was_replaced() -> None:
    assert {module for module, tree in _trees().items() if _starts_again(tree)} == LOOPS.keys()


def test_a_second_copy_would_be_found() -> None:
    tree = ast.parse(
        "class Second:\n"
        "    def prepare(self): pass\n"
        "    def write(self): pass\n"
        "    def commit(self):\n"
        "        while True:\n"
        "            try:\n"
        "                return plans.plan_request(self)\n"
        "            except errors.CheckpointChangedError:\n"
        "                continue\n"
    )
    assert "plan_request" in _called(tree)
    assert [node.name for node in _defined(tree) if _has_methods_of_a_sink(node)] == ["Second"]
    assert _starts_again(tree)
    assert not _starts_again(
        ast.parse("for one in many:\n    try:\n        one()\n    except OSError:\n        pass\n")
    )


def test_every_name_stands_for_something() -> None:
    names = {*CALLED_IN, *DEFINED_IN}
    defined = {node.name for tree in _trees().values() for node in _defined(tree)} | {"genops"}
    assert names <= defined
    assert all((Path(PACKAGE) / f"{module}.py").exists() for module in LOOPS)
