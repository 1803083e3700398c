"""The floors of the house, folder by folder: who may import whom, and what `import hfshard` loads."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests import REPOSITORY

PACKAGE = REPOSITORY / "hfshard"

# Folder of the package -> its floors, from the lowest up: the files and folders in it that stand on one floor. An entry
# imports only from the floors below its own. A folder whose files do not import each other has one floor.
FLOORS: dict[str, tuple[str, ...]] = {
    "": (
        "constants errors",
        "_util",
        "storage",
        "stores",
        "hub state_dicts",
        "planning",
        "saving loading",
        "distributed signing",
        "pretrained resharding",
        "modules transfer",
        "save load reshard",
        "training",
        "removal",
        "remove verify",
        "viewing",
        "cli",
        "__main__",
    ),
    "_util": (
        "arguments file_errors garbage importing own_descriptor progress size text threads",
        "address_hints",
        "addresses",
        "paths",
    ),
    "_util.importing": ("announcement import_hook lazy",),
    "cli": (
        "output",
        "run",
        "arguments",
        "commands diff hub_commands remove_command reshard_commands show_commands sign_command",
        "training_commands",
        "main",
    ),
    "cli.arguments": ("groups shared", "checking looking moving rewriting running", "parser"),
    "cli.diff": ("as_json heat_map tables", "command"),
    "cli.run": ("startup words", "launch"),
    "cli.run.startup": ("sitecustomize",),
    "distributed": (
        "layout liveness",
        "runs sightings status",
        "participants parts spread_tensor",
        "exchange reading",
        "agreement dcp saving",
        "loading pushing",
    ),
    "distributed.dcp": ("chunks staged_save", "reader write_items", "writer"),
    "distributed.exchange": (
        "incoming listing local_bytes orders owners",
        "holders outcome",
        "schedule",
        "rounds",
        "rank_writer replica_writer",
    ),
    "distributed.parts": ("part", "by_ranges", "part_reader"),
    "distributed.pushing": ("staging_folder", "together"),
    "distributed.liveness": ("call_group messages process_record store", "heartbeat waiting", "watch"),
    "hub": (
        "hub_marker own_files refs repo_tree",
        "address export protocols",
        "directory resolve",
        "remote",
        "pull pushing",
        "push",
    ),
    "hub.directory": (
        "manifest trees",
        "checks deleted",
        "refs stage",
        "locked_hub revisions",
        "committing",
        "hub",
        "report",
    ),
    "hub.pushing": ("plan request", "compare local_files", "push_files"),
    "hub.remote": (
        "cache client uploads",
        "transport xet_uploads",
        "commit",
        "download repo",
        "commit_files ranges",
        "fetching",
    ),
    "loading": ("far options reading", "into_module source"),
    "modules": ("upstream weights", "loading saving", "pushing", "mixin"),
    "planning": ("plan",),
    "pretrained": (
        "class_alias fallback pushing",
        "ranks",
        "overrides",
        "arguments collect",
        "model_builder",
        "build request",
        "saver",
        "pusher",
        "installed mixin",
    ),
    "pretrained.installed": ("settings", "calls small_saves", "switch"),
    "pretrained.overrides": ("bottom", "override_chain"),
    "pretrained.pushing": ("model_card", "push"),
    "pretrained.ranks": ("conversion_views joint_load stages", "parallelized stored_parts"),
    "removal": ("removal_plan", "from_directory from_store", "from_run from_stored_run"),
    "resharding": ("beside checks in_place request", "reshard"),
    "saving": (
        "linking options stores",
        "store_plan writing",
        "request store_commit",
        "prepare",
        "in_memory to_store",
        "to_directory",
    ),
    "saving.stores": ("own_puts upload",),
    "signing": (
        "files signed_by upstream",
        "adapters open_weights read_files sign",
        "check",
        "stored_files",
        "required",
        "report",
    ),
    "state_dicts": ("dtensors keys offloaded wrappers", "partitioned tied", "overlap state_dict"),
    "storage": ("tensors", "format", "disk", "weights stale_signature", "checkpoint commit"),
    "storage.checkpoint": ("folder report", "checks locate", "open_files", "checkpoint", "raw_tensors verifier"),
    "storage.commit": (
        "damage interrupts steps",
        "pending_deletes rollback",
        "directory_state",
        "new_checkpoint",
        "commit commit_plan",
    ),
    "storage.disk": (
        "byte_source file_system fsops hub_place safe_open",
        "clone companions direct_io folders",
        "block_reader block_writer",
    ),
    "storage.format": ("integrity names parts_of_ranks strict_json", "header index weights_override", "stored_save"),
    "storage.tensors": ("dtypes", "tensor_layout", "tensor_bytes", "tensor_spec"),
    "storage.weights": (
        "fellow_readers hashed_output open_files populate safetensors_stream",
        "pickles safetensors_writer",
        "safetensors_shard",
        "ranged safetensors_file",
        "read_ahead",
        "tensor_reader",
    ),
    "storage.weights.ranged": ("read_ahead running_digest", "ranged_shard", "requests", "comparison", "whole_tensors"),
    "storage.weights.pickles": (
        "choosing file_in_memory name_hashes nested other_formats",
        "zip_check",
        "mapped_file opcode_scan refusals",
        "reading",
        "pickle_file",
    ),
    "stores": ("memory patience protocols", "buckets objects stored_source", "opening"),
    "stores.buckets": ("hub_calls turns", "tokens xet", "download errors upload", "calls", "bucket_store"),
    "stores.objects": (
        "failures settings variables",
        "connection part_memory retrying",
        "azure gcs s3 upload",
        "connecting",
        "cloud_store",
    ),
    "transfer": ("store_files", "copying signed_store", "pull push"),
    "training": (
        "ranks step",
        "parts",
        "data",
        "state",
        "adapter",
        "collecting",
        "spread",
        "run saving",
        "pushing",
        "restoring run_writer",
        "foreign",
        "run_reader spread_saving",
        "run_pushes",
        "manager",
        "integrations recompute",
    ),
    "training.data": (
        "loader_state seeding",
        "sampling held_generators",
        "fetching",
        "dataloader",
        "external_loader plain_loader",
    ),
    "training.foreign": (
        "checkpoint optimizers pickles torch_keys",
        "directories positions torch_file",
        "planning readers",
        "converting resuming",
    ),
    "training.foreign.directories": ("data_position files", "rng_states", "accelerate trainer", "runs"),
    "training.foreign.pickles": ("inert_pickle", "data_types described_tensors", "plain_values", "plain_files"),
    "training.integrations": (
        "rank_batches trainer_files trainer_names trainer_settings trainer_weights",
        "accelerate lightning trainer_data trainer_far trainer_places",
        "trainer_callback",
    ),
    "training.parts": (
        "nested_types same_class padded_json rng gradients",
        "nested_decoding positions",
        "nested",
        "pending_loads",
        "optimizers scheduler",
    ),
    "training.parts.optimizers": ("inner tensors", "optimizer"),
    "training.parts.positions": ("entries holders", "ordered_state reordering"),
    "training.pushing": ("contents", "hubs", "pusher"),
    "training.recompute": ("block_state", "recomputation", "gradient_checkpointing"),
    "training.restoring": (
        "applying components module_copy part_files",
        "modules reorderings",
        "part_planner",
        "restoration",
        "resume",
    ),
    "training.spread": ("layouts states uniting", "part_reading replicas stages", "merging"),
    "training.run": (
        "manifest background host_copy lock root turns",
        "run_checkpoint writing",
        "directory rotation",
        "places",
        "finding",
        "reports",
    ),
    "training.run.places": (
        "protocols",
        "directory_place run_store",
        "opening",
    ),
    "viewing.values": ("norm_scale running", "measuring"),
    "viewing.page": (
        "charts page short_names",
        "name_tree rendering writing",
        "values_data diff_page run_page step_data",
        "checkpoint_page",
    ),
    "viewing": (
        "layers opening runs stills tensor_entry",
        "folding",
        "parts_in_words",
        "adapters_in_words",
        "diff inspection",
        "values",
        "page",
        "run_view",
        "show",
    ),
    "viewing.diff": (
        "chunk_sums numbers reading report",
        "measures renames sides",
        "headline pairing",
        "comparing",
        "checkpoints",
    ),
    "viewing.runs": ("listing space",),
}

# What is not ours, beyond the standard library -> the entries of the package that import it when they run.
FOREIGN = {
    "torch": {
        "distributed",
        "load",
        "loading",
        "modules",
        "planning",
        "pretrained",
        "reshard",
        "resharding",
        "save",
        "saving",
        "state_dicts",
        "storage",
        "training",
        "viewing",
    },
    "numpy": {"distributed", "training", "viewing"},
    "xxhash": {"storage"},
    "tqdm": {"_util"},
    "transformers": {"pretrained", "training"},
    "accelerate": {"training"},
    "psutil": {"pretrained"},
    "jinja2": {"viewing"},
    "filelock": {"hub"},
    "huggingface_hub": {"hub", "modules", "pretrained", "stores"},
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


def _arrow(importer: str, imported: str) -> tuple[str, str, str] | None:
    """The folder in which two modules part, and the entries of it that they lie in; None for a folder's own file."""
    one = importer.split(".")
    other = imported.split(".")
    depth = 0
    while depth < min(len(one), len(other)) and one[depth] == other[depth]:
        depth += 1
    if depth in (len(one), len(other)):
        return None
    return ".".join(one[:depth]), one[depth], other[depth]


def _arrows(sources: dict[str, str]) -> dict[tuple[str, str, str], set[str]]:
    """(folder, importing entry, imported entry) -> the modules that import."""
    arrows: dict[tuple[str, str, str], set[str]] = {}
    for module, source in sources.items():
        for name in _ours(source):
            arrow = _arrow(module, name)
            if arrow is not None:
                arrows.setdefault(arrow, set()).add(f"{module} imports {name}")
    return arrows


def _floor(folder: str, entry: str) -> int:
    return next(number for number, floor in enumerate(FLOORS[folder]) if entry in floor.split())


def _upward(sources: dict[str, str]) -> list[str]:
    """The imports that do not go down."""
    return sorted(
        line
        for (folder, importer, imported), lines in _arrows(sources).items()
        if _floor(folder, importer) <= _floor(folder, imported)
        for line in lines
    )


def _entries(folder: Path) -> set[str]:
    """The modules and packages in a folder, by name."""
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    return files | {path.parent.name for path in folder.glob("*/__init__.py")}


def test_every_file_and_folder_has_one_floor() -> None:
    folders = {path.parent for path in PACKAGE.rglob("__init__.py")}
    found = {".".join(folder.relative_to(PACKAGE).parts): _entries(folder) for folder in folders}

    listed = {folder: [entry for floor in floors for entry in floor.split()] for folder, floors in FLOORS.items()}

    assert {folder: sorted(entries) for folder, entries in found.items()} == {
        folder: sorted(entries) for folder, entries in listed.items()
    }


def test_imports_go_down() -> None:
    assert _upward(_sources()) == []


@pytest.mark.parametrize(
    ("planted", "imported"),
    [
        ("constants", "hfshard.errors"),
        ("errors", "hfshard.save"),
        ("storage.disk.fsops", "hfshard.storage.weights.safetensors_file"),
        ("storage.format.index", "hfshard.hub.address"),
        ("saving.prepare", "hfshard.pretrained.collect"),
        ("hub.remote.client", "hfshard.hub.push"),
        ("training.parts.rng", "hfshard.training.manager"),
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
    importers = {module for module, source in _sources().items() if "modules.mixin" in _ours(source)}
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
    outside = {module for module in importers if not module.startswith(("pretrained.", "training.integrations."))}
    assert outside == set()


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
    "huggingface_hub", "huggingface_hub.utils", "numpy", "numpy.typing", "torch", "torch.autograd.graph",
    "torch.distributed", "torch.distributed.fsdp", "torch.nn", "torch.nn.modules.module", "torch.overrides",
    "transformers", "transformers.core_model_loading", "transformers.distributed",
    "transformers.distributed.configuration_utils", "transformers.dynamic_module_utils",
    "transformers.integrations.deepspeed", "transformers.models.auto.auto_factory", "transformers.utils.hub",
    "transformers.utils.import_utils", "xxhash",
}  # fmt: skip


def test_the_mixin_imports_next_to_nothing_that_transformers_does_not() -> None:
    found: set[str] = set()
    for module in ("modules.mixin", "pretrained.mixin", "pretrained.build", "pretrained.saver"):
        _imported_at_once(module, found)
    found = {name for name in found if not name.startswith("hfshard.")}
    found -= set(MODULES)
    assert {name for name in found if name.split(".")[0] not in sys.stdlib_module_names} == BY_THE_MIXIN


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
