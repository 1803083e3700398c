"""The tables of the commit's README are what a commit does: its steps, what lies there then, and who loads what."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from huggingface_hub import load_torch_model
from safetensors.torch import load_file

import hfshard
from hfshard.commit.commit_plan import CommitStep, StagedCheckpoint, plan_commit
from hfshard.commit.directory_commit import DirectorySession
from hfshard.commit.directory_state import read_directory_state
from hfshard.format.file_names import WeightNames
from tests import REPOSITORY

README = REPOSITORY / "hfshard" / "commit" / "GUIDE.md"
NAMES = WeightNames()
OLD, NEW = 1.0, 2.0
"""The values of all tensors of the two checkpoints, which tell what was loaded."""

OLD_SHARD_BYTES = 4096 + 2 * 8
"""Room for two of the three tensors: two files."""

CASES = {
    "Shards into an empty directory": ("nothing", "shards", True),
    "Shards over shards, config unchanged": ("shards", "shards", False),
    "Shards over a single file, config unchanged": ("single", "shards", False),
    "A single file over shards, config unchanged": ("shards", "single", False),
    "Shards over shards, config changed": ("shards", "shards", True),
    "Shards over a single file, config changed": ("single", "shards", True),
    "A single file over a single file, config changed": ("single", "single", True),
}
"""Heading of a table -> what is there, what is saved, whether its config is another one."""


@dataclass(frozen=True)
class Seen:
    """A directory after a step."""

    step: CommitStep
    files: str
    transformers: str
    hub: str


def state_dict(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((2,), value) for name in "abc"}


def config(version: str) -> bytes:
    return f'{{\n  "version": "{version}"\n}}\n'.encode()


class Module(torch.nn.Module):
    """The model that huggingface_hub loads into."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abc":
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(2)))


def name_of(tensors: dict[str, torch.Tensor]) -> str:
    values = {tensor.flatten()[0].item() for tensor in tensors.values()}
    return {frozenset({OLD}): "old", frozenset({NEW}): "new"}.get(frozenset(values), "A MIXTURE")


def by_transformers(folder: Path) -> str:
    """Whose weights hfshard's reader finds, which looks where transformers does, with the config beside them."""
    try:
        weights = name_of(hfshard.load_state_dict(folder))
    except hfshard.HfshardError:
        return "error"
    version = json.loads((folder / "config.json").read_bytes())["version"]
    return weights if version in ("same", weights) else f"{weights} WEIGHTS WITH THE {version} CONFIG"


def by_hub(folder: Path) -> str:
    module = Module()
    try:
        load_torch_model(module, folder)
    except (OSError, ValueError, RuntimeError):
        return "error"
    return name_of(dict(module.state_dict()))


def whose(path: Path) -> str:
    return name_of(load_file(path))


def index_of(folder: Path, name: str) -> str:
    """Which files an index leads to: they may not be there yet."""
    files = sorted(set(json.loads((folder / name).read_bytes())["weight_map"].values()))
    if len(files) > 1:
        return f"{len(files)} shards"
    return "the single file" if files == [NAMES.single] else "the temporary file"


def described(folder: Path) -> str:
    """What lies in a directory, in words, but for a config that stays."""
    parts = []
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    if "config.json" in names:
        value = json.loads((folder / "config.json").read_bytes())
        if value["version"] != "same":
            parts.append(f"{value['version']} config" + (" (override)" if "transformers_weights" in value else ""))
    if NAMES.index in names:
        parts.append(f"index of {index_of(folder, NAMES.index)}")
    if NAMES.single in names:
        parts.append(f"{whose(folder / NAMES.single)} single file")
    for version in ("old", "new"):
        count = sum(whose(folder / name) == version for name in names if NAMES.is_shard(name))
        if count:
            parts.append(f"{count} {version} shards")
    temporary = [name for name in names if NAMES.is_commit_temporary(name)]
    parts += [f"temporary {'index' if name.endswith('.json') else 'file'}" for name in temporary]
    return ", ".join(parts)


class WatchedSession(DirectorySession):
    """A session that notes what is there after each step."""

    seen: list[Seen]

    def _execute(self, step: CommitStep) -> None:
        super()._execute(step)
        folder = Path(self.directory)
        self.seen.append(Seen(step, described(folder), by_transformers(folder), by_hub(folder)))


def commit(old: str, new: str, is_new_config: bool, folder: Path) -> list[Seen]:
    """Commit one checkpoint over another, and return what is there before and after each step."""
    directory, source = folder / "directory", folder / "source"
    directory.mkdir()
    if old != "nothing":
        limit = OLD_SHARD_BYTES if old == "shards" else 10**6
        hfshard.save_state_dict(state_dict(OLD), directory, max_shard_size=limit)
        (directory / "config.json").write_bytes(config("old" if is_new_config else "same"))
    hfshard.save_state_dict(state_dict(NEW), source, max_shard_size=1 if new == "shards" else 10**6)

    session = WatchedSession(str(directory), read_directory_state(str(directory), NAMES))
    session.seen = [Seen(CommitStep("sync"), described(directory), by_transformers(directory), by_hub(directory))]
    os.makedirs(session.staging)
    shards = {path.name: f"{path.name}.staged" for path in sorted(source.glob("*.safetensors"))}
    for name, staged in shards.items():
        shutil.copy(source / name, os.path.join(session.staging, staged))
    index = source / NAMES.index
    session.commit(
        plan_commit(
            session.state,
            StagedCheckpoint(
                shards=shards,
                keys=list("abc"),
                index=index.read_bytes() if index.exists() else None,
                config=config("new" if is_new_config else "same"),
                model_files={},
                digest="0123456789abcdef",
            ),
        )
    )
    return session.seen


def cell_of(step: CommitStep) -> str:
    if step.kind == "sync":
        return "`sync`"
    text = f"`link {step.source} {step.target}`" if step.kind == "link" else f"`{step.kind} {step.target}`"
    return f"**{text}**" if step.is_commit else text


def rows_of(seen: list[Seen]) -> list[list[str]]:
    """A row for the beginning and for each group of steps that a sync ends: all cells but the reason."""
    rows = [["", seen[0].files, seen[0].transformers, seen[0].hub]]
    cells: list[str] = []
    for one in seen[1:]:
        cells.append(cell_of(one.step))
        if one.step.kind == "sync":
            rows.append(["<br>".join(cells), one.files, one.transformers, one.hub])
            cells = []
    assert not cells
    return rows


def table_of(heading: str) -> list[list[str]]:
    """The rows of a table of the README, without the reasons."""
    section = README.read_text(encoding="utf-8").split(f"\n### {heading}\n")[1].split("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")][:-1] for line in lines[2:]]


@pytest.mark.parametrize("heading", CASES)
def test_a_table_is_what_a_commit_does(heading: str, tmp_path: Path) -> None:
    assert table_of(heading) == rows_of(commit(*CASES[heading], tmp_path))


@pytest.mark.parametrize("heading", CASES)
def test_between_two_rows_a_reader_finds_what_one_of_them_says(heading: str, tmp_path: Path) -> None:
    seen = commit(*CASES[heading], tmp_path)
    ends = [0, *(number for number, one in enumerate(seen) if number and one.step.kind == "sync")]

    for first, last in pairwise(ends):
        for one in seen[first : last + 1]:
            assert one.transformers in (seen[first].transformers, seen[last].transformers)
            assert one.hub in (seen[first].hub, seen[last].hub)


def test_every_table_has_a_test() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    headings = [line.removeprefix("### ") for line in lines if line.startswith("### ")]
    assert headings == list(CASES)
