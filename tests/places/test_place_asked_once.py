"""Hardly a file asks what kind of place it is in: the table of `places/place.py` tells, and the rest call the place."""

from __future__ import annotations

import ast

import pytest

from tests import REPOSITORY

PACKAGE = REPOSITORY / "hfshard"

# Functions that tell from a text, or from what is on disk, which kind of place it is.
QUESTIONS = frozenset({"is_store_address", "is_meant_as_address", "is_store_url", "hub_directory", "has_hub_marker"})

# Kinds of places, and of what is in them: code that tells one by its class asks, too.
KINDS = frozenset(
    {
        *("DirectoryPlace", "StorePlace", "HubPlace", "DirectoryHubPlace"),
        *("LocalFolder", "StockFolder", "RangedFolder", "StoreFolder"),
        *("DirectoryHub", "HubRepo", "ObjectStore", "BucketStore"),
    }
)

# Files that ask -> why.
ASK = {
    "_util/arguments.py": "defines the form of an address, which needs no working directory",
    "commit/directory_state.py": "defines what a hub is, where nothing is saved",
    "hub/directory/directory_hub.py": "opens, checks, or creates, the hub that a repo_id names, and defines its form",
    "places/place.py": "has the table",
    "cli/main.py": "checks that the directory of a command exists",
    "models/small_saves.py": "stands in for transformers' functions, whose other arguments are none of its business",
    "models/diffusers_models.py": "diffusers would take an address for a directory or a repo",
    "models/build.py": "leaves what is no address to transformers, whatever is wrong with it",
}


def _asks(source: str) -> bool:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name | ast.Attribute) and _name(node) in QUESTIONS:
            return True
        if isinstance(node, ast.FunctionDef) and node.name in QUESTIONS:
            return True
        if isinstance(node, ast.Call) and _name(node.func) in ("isinstance", "issubclass") and _is_kind(node.args[1]):
            return True
        if isinstance(node, ast.Compare) and _is_of_folder(node):
            return True
    return False


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_kind(classes: ast.expr) -> bool:
    return any(_name(node) in KINDS for node in ast.walk(classes) if isinstance(node, ast.expr))


def _is_of_folder(node: ast.Compare) -> bool:
    """Whether it compares the folder of something with None, as when only one kind of place had one."""
    is_none = any(isinstance(one, ast.Constant) and one.value is None for one in node.comparators)
    return is_none and isinstance(node.left, ast.Attribute) and node.left.attr == "folder"


def test_no_other_file_asks_what_kind_of_place_it_is_in() -> None:
    asking = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if _asks(path.read_text(encoding="utf-8"))
    }

    assert asking == ASK.keys()


@pytest.mark.parametrize(
    ("planted", "is_question"),
    [
        ("if is_store_address(path): pass", True),
        ("found = addresses.is_store_url(path)", True),
        ("list(filter(has_hub_marker, paths))", True),
        ("root = hub_directory(repo_id) or repo_id", True),
        ("if isinstance(place, StorePlace): pass", True),
        ("if isinstance(target, str | places.HubPlace): pass", True),
        ("if local.folder is not None: pass", True),
        ("if place.is_read_from_disk: pass", False),
        ("if folder is None: pass", False),
        ("place = place_to_save(path)", False),
        ("isinstance(group_store, dist.HashStore)", False),
    ],
)
def test_a_planted_question_is_found(planted: str, is_question: bool) -> None:
    assert _asks(planted) is is_question
