"""What the trace of a real save shows of its order on disk: a power cut finds no name without its bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.helpers import processes
from tests.sweeps.child import TRACED, Call, has_strace, parse_trace
from tests.sweeps.power import Effect, disorder, effects_of

SAVES = """
import os, sys
import torch, transformers, hfshard
torch.set_num_threads(1)
root = sys.argv[1]
if sys.argv[2] == "without flushes":
    os.fsync = os.fdatasync = lambda fd: None
def save(directory, size, value, act="gelu", with_model=True):
    config = transformers.BertConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=16, max_position_embeddings=16, hidden_act=act)
    model = transformers.BertModel(config)
    for parameter in model.parameters():
        parameter.data.fill_(value)
    before = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
    os.mkdir(os.path.join(root, "begin"))
    if with_model:
        hfshard.save_model(model, directory, max_shard_size=size)
    else:
        hfshard.save_state_dict(model.state_dict(), directory, max_shard_size=size)
    os.mkdir(os.path.join(root, "end"))
    os.rmdir(os.path.join(root, "begin"))
    os.rmdir(os.path.join(root, "end"))
    print("\\t".join([directory, *before]))
deep, bare, bins = (os.path.join(root, name) for name in ("new/deep", "bare", "bins"))
for number, (size, act) in enumerate([
    (6000, "gelu"), (6000, "gelu"), (6000, "relu"), ("1MB", "relu"), ("1MB", "relu"), ("1MB", "gelu"),
    (6000, "gelu"), (8000, "relu"), ("1MB", "gelu"),
]):
    save(deep, size, float(number), act)
for number, size in enumerate([6000, "1MB", "1MB", 6000, 6000]):
    save(bare, size, float(number), with_model=False)
os.mkdir(bins)
for number, size in enumerate(["1MB", 6000]):
    for name in os.listdir(bins):
        os.unlink(os.path.join(bins, name))
    torch.save({"x": torch.ones(2)}, os.path.join(bins, "pytorch_model.bin"))
    save(bins, size, float(number))
"""


def _saves(trace: str) -> list[list[Call]]:
    """The calls of each save, between its marks."""
    saves: list[list[Call]] = []
    is_inside = False
    for call in parse_trace(trace):
        if call.name.startswith("mkdir") and '/begin"' in call.text:
            saves.append([])
            is_inside = True
        elif call.name.startswith("mkdir") and '/end"' in call.text:
            is_inside = False
        elif is_inside:
            saves[-1].append(call)
    return saves


@pytest.fixture(scope="module")
def traced_saves(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, set[str], list[Effect]]]:
    """The saves of hfshard as it is."""
    return _trace(tmp_path_factory.mktemp("order").resolve(), "as it is")


def _trace(root: Path, how: str) -> list[tuple[str, set[str], list[Effect]]]:
    """(directory, paths that lay in it, effects) of each of many real saves, in one process under strace."""
    if not has_strace():
        pytest.skip("NO STRACE: THE ORDER OF FSYNC IS NOT CHECKED HERE. Install strace to check it.")
    trace = root.with_suffix(".trace")
    strace = ["-y", "-s", "32", "-o", str(trace), "-e", f"trace={TRACED}"]
    done = processes.run(["-c", SAVES, root, how], cwd=REPOSITORY, env=os.environ, strace=strace, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    saves = _saves(trace.read_text(errors="replace"))
    assert len(saves) == len(lines) == 16
    return [
        (directory, {os.path.join(directory, name) for name in before}, effects_of(calls))
        for (directory, *before), calls in zip(lines, saves, strict=True)
    ]


def test_every_save_flushes_bytes_before_names_and_names_before_removals(
    traced_saves: list[tuple[str, set[str], list[Effect]]],
) -> None:
    for number, (directory, before, effects) in enumerate(traced_saves):
        assert disorder(effects, directory, before) == [], f"save {number} into {directory}"


def test_without_its_flushes_every_save_would_be_out_of_order(tmp_path: Path) -> None:
    for directory, before, effects in _trace(tmp_path.resolve(), "without flushes"):
        assert len(disorder(effects, directory, before)) >= 2


def test_a_save_names_its_files_by_rename_only(traced_saves: list[tuple[str, set[str], list[Effect]]]) -> None:
    for directory, _, effects in traced_saves:
        made = [one for one in effects if one.kind in ("create", "open") and os.path.dirname(one.path) == directory]
        assert made == []
        assert any(one.kind == "rename" and os.path.dirname(one.target) == directory for one in effects)


def test_between_the_first_step_and_the_last_only_directories_are_flushed(
    traced_saves: list[tuple[str, set[str], list[Effect]]],
) -> None:
    for directory, _, effects in traced_saves:
        first = next(
            place
            for place, one in enumerate(effects)
            if one.kind == "rename" and os.path.dirname(one.target) == directory
        )
        assert {one.path for one in effects[first:] if one.kind == "sync"} == {directory}
        assert len([one for one in effects[:first] if one.kind == "sync" and "/hfshard/" in one.path]) >= 1


def test_a_save_that_makes_directories_flushes_those_above_them(
    traced_saves: list[tuple[str, set[str], list[Effect]]],
) -> None:
    directory, _, effects = traced_saves[0]
    above, top = os.path.dirname(directory), os.path.dirname(os.path.dirname(directory))
    steps = [(one.kind, one.path) for one in effects]
    assert steps.index(("mkdir", above)) < steps.index(("sync", top))
    assert steps.index(("mkdir", directory)) < steps.index(("sync", above))
    first = next(place for place, one in enumerate(effects) if one.kind == "rename")
    assert steps.index(("sync", above)) < first


def _effects(*lines: str) -> list[Effect]:
    return [Effect(*line.split()) for line in lines]


GOOD = (
    "create /d/.s/1",
    "write /d/.s/1",
    "sync /d/.s/1",
    "create /d/.s/2",
    "sync /d/.s/2",
    "rename /d/.s/1 /d/m-1.safetensors",
    "sync /d",
    "rename /d/.s/2 /d/index.json",
    "sync /d",
    "unlink /d/old.safetensors",
    "sync /d",
)
BEFORE = {"/d/index.json", "/d/old.safetensors"}


def test_the_rules_accept_a_save_in_order() -> None:
    assert disorder(_effects(*GOOD), "/d", BEFORE) == []


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        (2, "rename 1 -> m-1.safetensors before its bytes are on disk"),
        (4, "rename 2 -> index.json before its bytes are on disk"),
        (6, "rename 2 -> index.json before 'rename 1 -> m-1.safetensors' is on disk"),
        (8, "unlink old.safetensors before 'rename 2 -> index.json' is on disk"),
        (10, "at the end 'unlink old.safetensors' is not on disk"),
    ],
)
def test_the_rules_see_each_flush_that_is_left_out(left_out: int, words: str) -> None:
    lines = [line for place, line in enumerate(GOOD) if place != left_out]
    assert disorder(_effects(*lines), "/d", BEFORE) == [words]


def test_the_rules_see_a_file_that_is_written_in_place() -> None:
    assert "opens /d/index.json for writing" in disorder(_effects("open /d/index.json"), "/d", BEFORE)[0]


def test_the_rules_see_weights_before_their_index_and_a_directory_that_is_not_flushed() -> None:
    early = _effects("mkdir /d", "rename /d/.s/2 /d/index.json", "rename /d/.s/1 /d/m-1.safetensors", "sync /d")
    found = disorder(early, "/d", set())
    assert "rename 1 -> m-1.safetensors before 'rename 2 -> index.json' is on disk" in found
    assert "rename 2 -> index.json before the directory /d is on disk" in found
    assert "at the end 'd' is not on disk" in found
