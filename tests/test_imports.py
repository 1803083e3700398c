"""Layers: which package may import which, and what `import hfshard` loads."""

from __future__ import annotations

import ast
import json
import sys
from functools import cache
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.helpers import processes

PACKAGE = REPOSITORY / "hfshard"

# The layers of the package, from the lowest up: a package, or a module of its own, imports only from layers below its
# own, in functions too. Inside a package there are no layers; no two files import each other in a circle.
LAYERS = (
    "constants errors",
    "_util",
    "disk tensors",
    "format stores",
    "shards",
    "pickles",
    "foreign",
    "checkpoint",
    "commit",
    "hub",
    "places",
    "signing",
    "saving",
    "distributed pull push reshard",
    "models",
    "load save",
    "training",
    "remove verify",
    "viewing",
    "cli",
    "__main__",
)

# What is not ours, beyond the standard library -> the entries of the package that import it when they run.
FOREIGN = {
    "torch": {
        "_util",
        "checkpoint",
        "commit",
        "disk",
        "foreign",
        "format",
        "models",
        "pickles",
        "places",
        "shards",
        "tensors",
        "distributed",
        "load",
        "reshard",
        "save",
        "saving",
        "training",
        "viewing",
    },
    "numpy": {"disk", "foreign", "pickles", "tensors", "distributed", "training", "viewing"},
    "xxhash": {"format", "shards"},
    "tqdm": {"_util"},
    "transformers": {"models", "training"},
    "accelerate": {"training"},
    "diffusers": {"models"},
    "psutil": {"models"},
    "jinja2": {"viewing"},
    "filelock": {"hub"},
    "huggingface_hub": {"hub", "models", "stores"},
    "obstore": {"stores"},
    "botocore": {"stores"},
    "google": {"stores"},
    "hf_xet": {"stores"},
    "model_signing": {"signing"},
}


def _modules(package: Path) -> dict[str, Path]:
    """Dotted name within the package -> file; without its own `__init__`, which re-exports from every floor."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if parts:
            modules[".".join(parts)] = path
    return modules


MODULES = _modules(PACKAGE)


@cache
def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _tree(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def _statements_of(source: str) -> tuple[tuple[ast.Import | ast.ImportFrom, bool], ...]:
    """Each import of a file's text, and whether it stands under TYPE_CHECKING."""
    found: list[tuple[ast.Import | ast.ImportFrom, bool]] = []
    left: list[tuple[ast.AST, bool]] = [(_tree(source), False)]
    while left:
        node, is_for_typing = left.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append((node, is_for_typing))
        is_switch = isinstance(node, ast.If) and _is_for_typing(node)
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):  # no expression holds an import
            inner = getattr(node, name, ())
            if isinstance(inner, list):  # a lambda's body is an expression
                left += [(one, is_for_typing or (is_switch and name == "body")) for one in inner]
    return tuple(found)


def _is_for_typing(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@cache
def _imports_of(source: str, typing_too: bool = True) -> tuple[str, ...]:
    """Every module that a file's text imports: in functions too, and under TYPE_CHECKING if asked for."""
    found: list[str] = []
    for node, is_for_typing in _statements_of(source):
        if is_for_typing and not typing_too:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        else:
            assert node.level == 0, f"imports are absolute: {source[:100]}"
            assert node.module is not None
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.append(name if name.removeprefix("hfshard.") in MODULES else node.module)
    return tuple(found)


def _ours(source: str) -> set[str]:
    return {name.removeprefix("hfshard.") for name in _imports_of(source) if name.startswith("hfshard.")}


def _sources() -> dict[str, str]:
    """Module -> its text."""
    return {module: _source(path) for module, path in MODULES.items()}


def _entry(module: str) -> str:
    """The package, or the module of its own, in which a module lies."""
    return module.split(".")[0]


def _layer(entry: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if entry in layer.split())


def _upward(sources: dict[str, str]) -> list[str]:
    """The imports between packages that do not go down."""
    return sorted(
        f"{module} imports {name}"
        for module, source in sources.items()
        for name in _ours(source)
        if _entry(module) != _entry(name)
        if _layer(_entry(module)) <= _layer(_entry(name))
    )


def test_every_package_and_module_has_one_layer() -> None:
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}

    assert sorted(files | folders) == sorted(entry for layer in LAYERS for entry in layer.split())


def test_imports_go_down() -> None:
    assert _upward(_sources()) == []


@pytest.mark.parametrize(
    ("planted", "imported"),
    [
        ("constants", "hfshard.errors"),
        ("errors", "hfshard.save"),
        ("_util.text", "hfshard.hub.repo"),
        ("saving.save_request", "hfshard.training.manager"),
        ("training.state.rng", "hfshard.viewing.show"),
    ],
)
def test_planted_upward_import_is_found(planted: str, imported: str) -> None:
    sources = _sources()
    sources[planted] += f"\n\ndef _late() -> None:\n    import {imported}\n"

    found = _upward(sources)

    assert found == [f"{planted} imports {imported.removeprefix('hfshard.')}"]


def test_no_circle() -> None:
    graph = {module: {name for name in _ours(source) if name in MODULES} for module, source in _sources().items()}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"circle: {' -> '.join([*above, module])}"
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def _names_of(node: ast.Import | ast.ImportFrom) -> list[str | None]:
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]


def test_nobody_imports_the_package_itself() -> None:
    importers = {
        module
        for module, source in _sources().items()
        for node, _ in _statements_of(source)
        if "hfshard" in _names_of(node)
    }
    assert importers == set()


def test_mixin_is_for_users_alone() -> None:
    importers = {module for module, source in _sources().items() if "models.mixin" in _ours(source)}
    assert importers == set()


def test_foreign_packages_are_imported_by_their_rooms_only() -> None:
    imports = {
        f"{module} imports {name}"
        for module, source in _sources().items()
        for name in {full.split(".")[0] for full in _imports_of(source, typing_too=False)}
        if name != "hfshard" and name not in sys.stdlib_module_names
        if module.split(".")[0] not in FOREIGN.get(name, ())
    }
    assert imports == set()


def test_transformers_is_known_in_two_rooms_only() -> None:
    importers = {
        module
        for module, source in _sources().items()
        if "transformers" in {name.split(".")[0] for name in _imports_of(source)}
    }
    outside = {module for module in importers if not module.startswith(("models.", "training.integrations."))}
    assert outside == set()


def _loaded_by(code: str, environment: dict[str, str]) -> set[str]:
    """Top-level modules, beyond the standard library, that a new process has after the code."""
    # What site's .pth files load before the first line is not the code's.
    listing = (
        f"import json, sys; before = set(sys.modules)\n{code}\nprint(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = processes.run_fresh(["-c", listing], env=environment, check=True)
    return {name.split(".")[0] for name in json.loads(done.stdout)} - sys.stdlib_module_names


def test_import_hfshard_loads_hfshard_alone(child_environment: dict[str, str]) -> None:
    assert _loaded_by("import hfshard", child_environment) == {"hfshard"}


def test_parse_size_needs_no_torch(child_environment: dict[str, str]) -> None:
    assert _loaded_by("import hfshard; hfshard.parse_size('5GB')", child_environment) == {"hfshard"}


@pytest.mark.parametrize(
    "name",
    [
        "CheckpointDiff",
        "CheckpointIndex",
        "FileDigest",
        "Problem",
        "PushResult",
        "RemovalReport",
        "TensorDiff",
        "VerifyReport",
    ],
)
def test_results_need_no_torch(name: str, child_environment: dict[str, str]) -> None:
    assert _loaded_by(f"from hfshard import {name}", child_environment) <= {"hfshard", "xxhash"}


def _imported_at_once(module: str, found: set[str]) -> set[str]:
    """Every module that the import of one of ours imports, whoever of ours it is that does."""
    found.add(module)
    left: list[ast.AST] = [_tree(_source(MODULES[module]))]
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.Lambda) or (isinstance(node, ast.If) and _is_for_typing(node)):
            continue  # runs later, or never
        left += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in _imports_of(ast.unparse(node), False):
                ours = name.removeprefix("hfshard.")
                if ours in MODULES and ours not in found:
                    _imported_at_once(ours, found)
                elif ours not in MODULES:
                    found.add(name)
    return found


# What the mixin, and a class of transformers with it, import at once. Of these, the import of PreTrainedModel lacks
# numpy.typing, auto_factory and xxhash, which are small; what else comes to the list (tqdm, peft, accelerate,
# parts of huggingface_hub) should be too.
BY_THE_MIXIN = {
    "huggingface_hub", "numpy", "numpy.typing", "torch", "torch.autograd.graph",
    "torch.distributed", "torch.distributed.fsdp", "torch.nn", "torch.nn.modules.module", "torch.overrides",
    "transformers", "transformers.core_model_loading", "transformers.distributed",
    "transformers.distributed.configuration_utils", "transformers.dynamic_module_utils",
    "transformers.integrations.accelerate", "transformers.integrations.deepspeed",
    "transformers.models.auto.auto_factory", "transformers.utils.hub", "transformers.utils.import_utils", "xxhash",
}  # fmt: skip


def test_the_mixin_imports_next_to_nothing_that_transformers_does_not() -> None:
    found: set[str] = set()
    for module in ("models.mixin", "models.transformers_methods", "models.build", "models.saver"):
        _imported_at_once(module, found)
    found = {name for name in found if not name.startswith("hfshard.")}
    found -= set(MODULES)
    assert {name for name in found if name.split(".")[0] not in sys.stdlib_module_names} == BY_THE_MIXIN


def test_what_works_without_a_hub_needs_no_huggingface_hub(child_environment: dict[str, str]) -> None:
    code = "from hfshard import CheckpointManager, sign_checkpoint; from hfshard.training import RunReader"
    assert "huggingface_hub" not in _loaded_by(code, child_environment)


def test_readers_of_other_frameworks_are_imported_when_they_are_used() -> None:
    found = {name for name in _imported_at_once("hub.push_files", set()) if name.startswith("foreign.")}

    assert found == {f"foreign.{name}" for name in ("byte_runs", "find_foreign", "foreign_shard")}


def test_every_folder_with_code_is_a_package_so_that_an_installation_has_it() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_mixin_itself_needs_no_transformers(child_environment: dict[str, str]) -> None:
    assert "transformers" not in _loaded_by("import hfshard.models.mixin", child_environment)


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
