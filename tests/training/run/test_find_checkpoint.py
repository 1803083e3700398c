"""Damaged and hostile checkpoints: passed over by name, refused when asked for, and never restored in part."""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfshard
from hfshard.errors import DamagedCheckpointError, HfshardError
from hfshard.training import CheckpointManager, TrainingState
from tests.sweeps.run_states import Save, Tiny, expected, perform, seed_all
from tests.training.run import hostile

OLD, NEW = Save(1, 1, layout="sharded", metric=0.5), Save(2, 2, layout="sharded", metric=0.25)

FILES = (
    "checkpoint.json",
    "model-00001-of-00003.safetensors",
    "model-00003-of-00003.safetensors",
    "model.safetensors.index.json",
    "optimizer-00002-of-00003.safetensors",
    "optimizer.safetensors.index.json",
    "state.safetensors.index.json",
    "training_state.json",
)
"""Of each kind one, and one more shard."""

EACH_DAMAGE = ("checkpoint.json", "model-00001-of-00003.safetensors", "training_state.json")
"""What is damaged in each way without --slow."""
EACH_FILE = ("cut in half", "flipped in the middle", "gone")
"""What happens to each file without --slow."""

FLIPS = 40
MUTATIONS = 40


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints."""
    run = tmp_path_factory.mktemp("saved") / "run"
    perform(OLD, run)
    perform(NEW, run)
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def flip(path: Path, position: int, bit: int = 0) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1 << bit
    path.write_bytes(raw)


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.rename(path.parent.parent / "aside")
        make(path)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "short of a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "flipped at the beginning": lambda path: flip(path, 0),
    "flipped in the middle": lambda path: flip(path, path.stat().st_size // 2),
    "flipped at the end": lambda path: flip(path, path.stat().st_size - 1),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "gone": os.unlink,
    "a directory": replaced_by(lambda path: path.mkdir()),
    "a pipe": replaced_by(os.mkfifo),
    "a link to nothing": replaced_by(lambda path: path.symlink_to("nothing")),
    "a link to itself": replaced_by(lambda path: path.symlink_to(path.name)),
}


def assert_unchanged_by(fresh: Tiny, action: Callable[[], object], match: str) -> HfshardError:
    """The action raises one of our errors, with these words, and leaves the run and its random numbers alone."""
    seed_all(5)
    before = fresh.fingerprint()
    with pytest.raises(HfshardError, match=match) as caught:
        action()
    assert fresh.fingerprint() == before
    return caught.value


@pytest.mark.parametrize(
    ("damage", "file"),
    # The last byte of a manifest is the end of its line, after which nothing is missing.
    [
        pytest.param(damage, file, marks=() if damage in EACH_FILE or file in EACH_DAMAGE else pytest.mark.slow)
        for damage in DAMAGES
        for file in FILES
        if (damage, file) != ("short of a byte", "checkpoint.json")
    ],
)
def test_a_damaged_newest_checkpoint_is_passed_over_by_name(
    run: Path, damage: str, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGES[damage](run / "checkpoint-00000002" / file)
    name = re.escape(f"checkpoint-00000002/{file}")
    manager, fresh = CheckpointManager(run), Tiny(0)
    assert_unchanged_by(fresh, lambda: manager.restore(fresh.state(), 2), name)
    with caplog.at_level(logging.WARNING, "hfshard"):
        assert manager.restore_latest(fresh.state()) == 1
    assert fresh.fingerprint() == expected(1, False)
    assert any(re.search(name, record.getMessage()) for record in caplog.records)
    problems = manager.verify()
    assert problems[1] == []
    assert [re.search(name, str(problem)) is not None for problem in problems[2]] == [True]


def test_a_flipped_bit_anywhere_is_found(run: Path) -> None:
    """All but those that a single file says of its own tensors' digests, by which damage is told in detail."""
    checkpoint, draw = run / "checkpoint-00000002", random.Random(1)
    files = sorted(checkpoint.iterdir())
    manager = CheckpointManager(run)
    for _ in range(FLIPS):
        path = draw.choice(files)
        position, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
        flip(path, position, bit)
        assert manager.verify(2)[2] != [], (path.name, position, bit)
        flip(path, position, bit)
    assert manager.verify(2)[2] == []


@pytest.mark.parametrize("kind", ["fingerprint", "xxh3"])
def test_a_flipped_bit_in_what_a_single_file_says_of_itself_is_passed_over(tmp_path: Path, kind: str) -> None:
    perform(Save(1, 1), tmp_path / "run")
    perform(Save(2, 2), tmp_path / "run")
    path = tmp_path / "run/checkpoint-00000002/optimizer.safetensors"
    found = re.search(rf'{kind}\\": \\"|{kind}\\":\\"'.encode(), path.read_bytes())
    assert found is not None
    at = found.end()
    path.write_bytes(path.read_bytes()[:at] + (b"0" if path.read_bytes()[at : at + 1] != b"0" else b"1")
                     + path.read_bytes()[at + 1 :])  # fmt: skip
    fresh = Tiny(0)
    assert CheckpointManager(tmp_path / "run").restore_latest(fresh.state()) == 1
    assert fresh.fingerprint() == expected(1, False)


def test_where_all_checkpoints_are_damaged_it_is_an_error_and_not_a_fresh_start(run: Path) -> None:
    (run / "checkpoint-00000001/checkpoint.json").unlink()
    flip(run / "checkpoint-00000002/model-00001-of-00003.safetensors", 4100)
    manager, fresh = CheckpointManager(run), Tiny(0)
    error = assert_unchanged_by(fresh, lambda: manager.restore_latest(fresh.state()), "None of the 2 checkpoints")
    assert isinstance(error, DamagedCheckpointError)
    assert_unchanged_by(fresh, lambda: manager.restore(fresh.state()), "None of the 2 checkpoints")
    assert manager.latest_step() == 2
    assert_unchanged_by(fresh, lambda: manager.latest_step(verify="full"), "None of the 2 checkpoints")


def test_a_run_without_checkpoints_is_a_fresh_start(tmp_path: Path) -> None:
    fresh, manager = Tiny(0), CheckpointManager(tmp_path / "missing")
    assert manager.restore_latest(fresh.state()) is None
    assert manager.latest_step() is None
    assert manager.all_steps() == []
    assert manager.verify() == {}
    assert_unchanged_by(fresh, lambda: manager.restore(fresh.state()), "There is no checkpoint in")
    assert_unchanged_by(fresh, lambda: manager.restore(fresh.state(), 3), "no checkpoint of step 3.*It has: none")
    assert not (tmp_path / "missing").exists()
    (tmp_path / "checkpoint-00000001").write_text("a file of the user's")
    assert CheckpointManager(tmp_path).restore_latest(fresh.state()) is None


def test_a_checkpoint_under_another_steps_name_is_passed_over(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(run / "checkpoint-00000001", run / "checkpoint-00000007")
    fresh = Tiny(0)
    assert CheckpointManager(run).restore_latest(fresh.state()) == 2
    assert "checkpoint-00000007' is the checkpoint of step 1" in caplog.text
    assert CheckpointManager(run).all_steps() == [1, 2]


def test_a_damaged_checkpoint_is_named_though_its_step_is_not_the_highest(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    perform(Save(1, 3), run)  # after a restore of an earlier step, say
    (run / "checkpoint-00000001/checkpoint.json").unlink()
    fresh = Tiny(0)
    assert CheckpointManager(run).restore_latest(fresh.state()) == 2
    assert "checkpoint-00000001/checkpoint.json' is missing" in caplog.text


def attempts(change: Callable[[random.Random], str], run: Path) -> dict[str, int]:
    """Restore a checkpoint with one odd value after another: it is restored, or refused and nothing changes."""
    counts = {"restored": 0, "refused": 0}
    fresh = Tiny(0)
    for seed in range(MUTATIONS):
        words = change(random.Random(seed))
        seed_all(5)
        before = fresh.fingerprint()
        manager = CheckpointManager(run, keep_best="loss")
        try:
            manager.restore(fresh.state(), 1)
        except HfshardError:
            counts["refused"] += 1
            assert fresh.fingerprint() == before, (seed, words)
        except Exception as error:
            raise AssertionError(f"{seed}: {words}") from error
        else:
            counts["restored"] += 1
            fresh = Tiny(0)
        manager.verify()
        manager.best_step()
    return counts


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A run with one checkpoint."""
    perform(Save(1, 1, metric=0.5), tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")
def test_odd_values_in_a_training_state_are_restored_or_refused_whole(single: Path) -> None:
    checkpoint = single / "checkpoint-00000001"
    state = hostile.training_state_of(checkpoint)

    def change(draw: random.Random) -> str:
        odd, words = hostile.mutated(state, draw)
        hostile.write_training_state(checkpoint, odd)
        return words

    counts = attempts(change, single)
    assert counts["refused"] > MUTATIONS / 2


def test_odd_values_in_a_manifest_are_refused_whole(single: Path) -> None:
    checkpoint = single / "checkpoint-00000001"
    body = hostile.manifest_of(checkpoint)

    def change(draw: random.Random) -> str:
        odd, words = hostile.mutated(body, draw)
        hostile.write_manifest(checkpoint, odd)
        return words

    counts = attempts(change, single)
    assert counts["refused"] > MUTATIONS / 2


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "5", '{"format": 1}', '{"format": 1e999}', '{"format": NaN}', '{"format": 2}', "\ufeff{}",
     '{"a": 1, "a": 2}', "[" * 10**5, '{"x":' * 5000, '{"format": ' + "9" * 5000 + "}"],
)  # fmt: skip
@pytest.mark.parametrize("file", ["checkpoint.json", "training_state.json"])
def test_other_json_in_the_place_of_a_file_is_refused(single: Path, file: str, text: str) -> None:
    checkpoint = single / "checkpoint-00000001"
    if file == hostile.TRAINING_STATE:
        body = hostile.manifest_of(checkpoint)
        body["files"][file] = hostile.record_of(text.encode())
        hostile.write_manifest(checkpoint, body)
    (checkpoint / file).write_text(text)
    fresh = Tiny(0)
    assert_unchanged_by(fresh, lambda: CheckpointManager(single).restore(fresh.state(), 1), re.escape(file))


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "..", "", "a\u0000b", "C:\\x"])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(single: Path, name: str) -> None:
    checkpoint = single / "checkpoint-00000001"
    (single / "outside").write_bytes(b"outside")
    body: dict[str, Any] = hostile.manifest_of(checkpoint)
    body["files"][name] = hostile.record_of(b"outside")
    hostile.write_manifest(checkpoint, body)
    fresh = Tiny(0)
    assert_unchanged_by(fresh, lambda: CheckpointManager(single).restore(fresh.state(), 1), "checkpoint.json")


def test_a_single_file_beside_the_shards_is_not_restored_and_is_told_of(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with CheckpointManager(tmp_path / "run", max_shard_size=400) as manager:
        place = Path(manager.save(1, TrainingState(model=model)))
        assert len(list(place.glob("model-*-of-*.safetensors"))) > 1
        hfshard.save_state_dict({name: torch.zeros_like(one) for name, one in weights.items()}, tmp_path / "other")
        (tmp_path / "other" / "model.safetensors").rename(place / "model.safetensors")
        nn.init.ones_(model.get_parameter("0.weight"))
        manager.restore(TrainingState(model=model), 1)
        [problem] = manager.verify(1)[1]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    words = "model.safetensors' does not belong to the checkpoint, but other tools load it instead of the checkpoint's "
    assert str(problem).endswith(f"{words}own files. Move it elsewhere.")
