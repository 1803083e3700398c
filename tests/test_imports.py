"""The floors of the house: who may import whom, what `import hfshard` loads."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import REPOSITORY

PACKAGE = REPOSITORY / "hfshard"

# Room -> floor. A room imports only from floors below.
FLOORS = {
    "constants": 1,
    "errors": 1,
    "progress": 1,
    "arguments": 2,
    "size": 2,
    "storage": 2,
    "tied": 2,
    "hub": 3,
    "plan": 3,
    "state_dict": 3,
    "load": 4,
    "save": 4,
    "verify": 4,
    "mixin": 5,
    "reshard": 5,
    "training": 6,
    "cli": 7,
    "__main__": 8,
}

# A room is a folder, or a file and those that were taken out of it: they may import each other, without a circle.
ROOMS = {
    "handover": "load",
    "load_pretrained": "load",
    "pretrained_arguments": "load",
    "source": "load",
    "model_card": "mixin",
    "pretrained": "state_dict",
    "publishing": "mixin",
    "regroup": "reshard",
    "stored_request": "reshard",
    "streaming": "save",
    "staging": "save",
    "upstream_class": "state_dict",
}

# Which files and folders import what is not ours, beyond the standard library, when they run.
FOREIGN = {
    "torch": {
        "load",
        "load_pretrained",
        "mixin",
        "plan",
        "pretrained",
        "pretrained_arguments",
        "reshard",
        "save",
        "state_dict",
        "storage",
        "stored_request",
        "tied",
        "training",
        "upstream_class",
    },
    "numpy": {"training"},
    "xxhash": {"storage"},
    "tqdm": {"progress"},
    "transformers": {
        "handover",
        "load_pretrained",
        "mixin",
        "pretrained",
        "pretrained_arguments",
        "training",
        "upstream_class",
    },
    "accelerate": {"training"},
    "filelock": {"hub"},
    "huggingface_hub": {"hub", "load_pretrained", "model_card", "publishing"},
}


def _modules() -> dict[str, Path]:
    """Dotted name within hfshard -> file; without the package's own `__init__`, which re-exports from every floor."""
    names = {path: path.relative_to(PACKAGE).with_suffix("").parts for path in sorted(PACKAGE.rglob("*.py"))}
    return {
        ".".join(parts[:-1] if parts[-1] == "__init__" else parts): path
        for path, parts in names.items()
        if parts != ("__init__",)
    }


MODULES = _modules()


def _imports(path: Path, *, typing_too: bool = True) -> Iterator[str]:
    """Every module that a file imports, anywhere in it: in functions too, and under TYPE_CHECKING if asked for."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    unwanted: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not typing_too:
            unwanted |= {inner for statement in node.body for inner in ast.walk(statement)}
        if node in unwanted:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name.removeprefix("hfshard.") in MODULES else node.module


def _ours(path: Path) -> set[str]:
    return {name.removeprefix("hfshard.") for name in _imports(path) if name.startswith("hfshard.")}


def _room(module: str) -> str:
    top = module.split(".")[0]
    return ROOMS.get(top, top)


def test_every_room_has_a_floor() -> None:
    assert {_room(module) for module in MODULES} == set(FLOORS)


@pytest.mark.parametrize("module", MODULES)
def test_room_imports_only_from_floors_below(module: str) -> None:
    room = _room(module)
    wrong = {name for name in _ours(MODULES[module]) if _room(name) != room and FLOORS[_room(name)] >= FLOORS[room]}
    assert not wrong, f"{module} (floor {FLOORS[room]}) imports {sorted(wrong)}, which is not below it"


@pytest.mark.parametrize("module", MODULES)
def test_nobody_imports_the_package_itself_but_who_asks_for_its_version(module: str) -> None:
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert all(alias.name != "hfshard" for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module == "hfshard":
            assert [alias.name for alias in node.names] == ["__version__"]


def test_mixin_and_cli_are_for_users_alone() -> None:
    importers = {module for module, path in MODULES.items() if {"mixin", "cli"} & {_room(name) for name in _ours(path)}}
    assert {module for module in importers if _room(module) not in ("cli", "mixin")} == {"__main__"}


def test_no_circle() -> None:
    graph = {module: {name for name in _ours(path) if name in MODULES} for module, path in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"circle: {' -> '.join([*above, module])}"
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("module", MODULES)
def test_foreign_packages_are_imported_by_their_rooms_only(module: str) -> None:
    for name in {name.split(".")[0] for name in _imports(MODULES[module], typing_too=False)}:
        if name != "hfshard" and name not in sys.stdlib_module_names:
            assert module.split(".")[0] in FOREIGN.get(name, ()), f"{module} imports {name}"


def _loaded_by(code: str, environment: dict[str, str]) -> set[str]:
    """Top-level modules, beyond the standard library, that a new process has after the code."""
    # What site's .pth files load before the first line is not the code's.
    listing = (
        f"import json, sys; before = set(sys.modules)\n{code}\nprint(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", listing], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return {name.split(".")[0] for name in json.loads(done.stdout)} - sys.stdlib_module_names


def test_import_hfshard_loads_hfshard_alone(child_environment: dict[str, str]) -> None:
    assert _loaded_by("import hfshard", child_environment) == {"hfshard"}


def test_parse_size_needs_no_torch(child_environment: dict[str, str]) -> None:
    assert _loaded_by("import hfshard; hfshard.parse_size('5GB')", child_environment) == {"hfshard"}


def test_functions_need_no_transformers(child_environment: dict[str, str], tmp_path: Path) -> None:
    code = f"""
import torch
import hfshard
hfshard.save_state_dict({{"w": torch.ones(8)}}, {str(tmp_path / "out")!r})
hfshard.load_state_dict({str(tmp_path / "out")!r})
assert hfshard.verify_checkpoint({str(tmp_path / "out")!r}).ok
"""
    loaded = _loaded_by(code, child_environment)  # tqdm is there too: torch.hub imports it
    assert {"torch", "xxhash", "hfshard"} <= loaded
    assert not loaded & {"transformers", "tokenizers", "huggingface_hub", "safetensors", "accelerate", "httpx"}
