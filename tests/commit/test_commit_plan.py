"""The steps of the main commits: `+` rename, `=` link, `-` remove, `|` sync; `?` moves a reader, `!` commits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hfshard.commit.commit_plan import CommitPlan, StagedCheckpoint, plan_commit
from hfshard.commit.directory_state import read_directory_state
from hfshard.format.file_names import WeightNames
from hfshard.format.index import CheckpointIndex
from hfshard.save import save_state_dict

UNIQUE = "model-hfshard-0123456789abcdef.safetensors"
INDEX = "model.safetensors.index.json"
OLD_SHARDS = "-model-00001-of-00002.safetensors -model-00002-of-00002.safetensors"
FIRST_NEW_SHARDS = "+model-00001-of-00003.safetensors +model-00002-of-00003.safetensors"
NEW_SHARDS = f"{FIRST_NEW_SHARDS} +model-00003-of-00003.safetensors"


def written(plan: CommitPlan) -> str:
    signs = {"rename": "+", "link": "=", "remove": "-", "sync": "|"}
    return " ".join(
        ("!" if step.is_commit else "?" if step.moves else "")
        + (signs[step.kind] if step.kind != "rename" or not (step.is_commit or step.moves) else "")
        + (f"{step.source}>{step.target}" if step.kind == "link" else step.target)
        for step in plan.steps
    )


def old_checkpoint(folder: Path, kind: str, config: bytes | None = b'{"n": 1}\n') -> None:
    tensors = {"a": torch.ones(2), "b": torch.ones(2)}
    if kind in ("single", "sharded"):
        save_state_dict(tensors, folder, max_shard_size=1 if kind == "sharded" else 10**6)
    elif kind == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    if config is not None:
        (folder / "config.json").write_bytes(config)


def new_checkpoint(
    kind: str, config: bytes | None = b'{"n": 1}\n', model_files: dict[str, bytes] | None = None
) -> StagedCheckpoint:
    names = WeightNames()
    files = [names.single] if kind == "single" else names.shards(3)
    index = None if kind == "single" else CheckpointIndex({"a": files[0], "b": files[1]}).to_json()
    shards = {file: f"{number:05d}.weights" for number, file in enumerate(files)}
    return StagedCheckpoint(shards, ["a", "b"], index, config, model_files or {}, "0123456789abcdef00")


CASES = {
    # Nothing there: config and index before what they name, so that half a save is an error to every reader.
    ("none", "single", "same"): "+config.json | !model.safetensors |",
    ("none", "sharded", "same"): f"+config.json +{INDEX} | {FIRST_NEW_SHARDS} !model-00003-of-00003.safetensors |",
    # The config stays: the index, or the single file; where readers look at both, the second one commits.
    ("sharded", "sharded", "same"): f"{NEW_SHARDS} | !{INDEX} | {OLD_SHARDS} |",
    ("single", "sharded", "same"): f"+{INDEX} | {NEW_SHARDS} | ?{INDEX} | !-model.safetensors |",
    ("single", "single", "same"): "!model.safetensors |",
    ("sharded", "single", "same"): f"?model.safetensors | !{INDEX} | {OLD_SHARDS} | -{INDEX} |",
    ("bin", "single", "same"): "!model.safetensors | -pytorch_model.bin |",
    # The config changes: config.json moves transformers, and the index the rest.
    ("sharded", "sharded", "other"): (
        f"{NEW_SHARDS} +{UNIQUE}.index.json | ?config.json | !{INDEX} | +config.json | "
        f"{OLD_SHARDS} -{UNIQUE}.index.json |"
    ),
    ("single", "sharded", "other"): (
        f"+{INDEX} | {NEW_SHARDS} +{UNIQUE}.index.json | ?config.json | !{INDEX} | -model.safetensors | +config.json | "
        f"-{UNIQUE}.index.json |"
    ),
    ("single", "single", "other"): (
        f"+{INDEX} | +{UNIQUE} | ?config.json | !{INDEX} | ={UNIQUE}>model.safetensors | +config.json +{INDEX} | "
        f"-{UNIQUE} | -{INDEX} |"
    ),
    ("sharded", "single", "other"): (
        f"+{UNIQUE} | ?config.json | !{INDEX} | ={UNIQUE}>model.safetensors | +config.json +{INDEX} | "
        f"{OLD_SHARDS} -{UNIQUE} | -{INDEX} |"
    ),
}


MOVED_AT_ONCE = {
    ("none", "single", "same"),
    ("none", "sharded", "same"),
    ("sharded", "sharded", "same"),
    ("single", "single", "same"),
    ("bin", "single", "same"),
}
"""Where one step moves all readers."""


@pytest.mark.parametrize(("old", "new", "config"), CASES)
def test_the_steps_of_a_commit(old: str, new: str, config: str, tmp_path: Path) -> None:
    old_checkpoint(tmp_path, old, None if old == "none" else b'{"n": 1}\n')
    checkpoint = new_checkpoint(new, b'{"n": 1}\n' if config == "same" else b'{"n": 2}\n')
    plan = plan_commit(read_directory_state(str(tmp_path), WeightNames()), checkpoint)
    steps, expected = written(plan).split(), CASES[old, new, config].split()
    assert steps == expected


@pytest.mark.parametrize(("old", "new", "config"), CASES)
def test_one_step_commits_and_syncs_stand_on_both_sides(old: str, new: str, config: str, tmp_path: Path) -> None:
    old_checkpoint(tmp_path, old)
    checkpoint = new_checkpoint(new, b'{"n": 1}\n' if config == "same" else b'{"n": 2}\n')
    plan = plan_commit(read_directory_state(str(tmp_path), WeightNames()), checkpoint)
    (at,) = [number for number, step in enumerate(plan.steps) if step.is_commit]
    assert plan.steps[at + 1].kind == plan.steps[-1].kind == "sync"
    assert "remove" not in {step.kind for step in plan.steps[:at]}
    assert sum(bool(step.moves) for step in plan.steps[:at]) == ((old, new, config) not in MOVED_AT_ONCE)
    assert not any(step.moves for step in plan.steps[at:])


def test_a_commit_by_config_names_the_new_weights_and_then_no_longer(tmp_path: Path) -> None:
    old_checkpoint(tmp_path, "sharded")
    plan = plan_commit(read_directory_state(str(tmp_path), WeightNames()), new_checkpoint("sharded", b'{"n": 2}\n'))
    configs = [plan.small_files[step.source] for step in plan.steps if step.target == "config.json"]
    assert json.loads(configs[0]) == {"n": 2, "transformers_weights": f"{UNIQUE}.index.json"}
    assert configs[1:] == [b'{"n": 2}\n']


def test_new_model_files_come_before_the_commit_and_replaced_ones_right_after(tmp_path: Path) -> None:
    old_checkpoint(tmp_path, "sharded")
    (tmp_path / "generation_config.json").write_bytes(b"{}")
    model_files = {"generation_config.json": b'{"k": 1}', "modeling_mine.py": b"pass"}
    plan = plan_commit(
        read_directory_state(str(tmp_path), WeightNames()), new_checkpoint("sharded", model_files=model_files)
    )
    assert written(plan) == (f"+modeling_mine.py {NEW_SHARDS} | !{INDEX} | +generation_config.json | {OLD_SHARDS} |")


def test_a_file_in_a_folder_is_replaced_after_the_commit_like_any_other(tmp_path: Path) -> None:
    old_checkpoint(tmp_path, "sharded")
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "model.safetensors").write_bytes(b"old")
    model_files = {"2_Dense/model.safetensors": b"new", "3_Dense/model.safetensors": b"new"}
    plan = plan_commit(
        read_directory_state(str(tmp_path), WeightNames()), new_checkpoint("sharded", model_files=model_files)
    )
    assert written(plan) == (
        f"+3_Dense/model.safetensors {NEW_SHARDS} | !{INDEX} | +2_Dense/model.safetensors | {OLD_SHARDS} |"
    )
