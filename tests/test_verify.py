"""Several files are checked at once: the report is in their order, whole, and damage in one hides none in another."""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError
from hfshard.training import CheckpointManager, TrainingState
from tests.saving.helpers import flip


def saved(directory: Path, checksum: str = "sha256") -> list[Path]:
    """Twelve files; the later ones are larger, and so are checked first."""
    tensors = {f"t{i:02d}": torch.full((1000 * (i + 1),), float(i)) for i in range(12)}
    hfshard.save_state_dict(tensors, directory, max_shard_size=1, checksum=checksum)  # type: ignore[arg-type]
    return sorted(directory.glob("*.safetensors"))


def test_the_root_of_the_file_system_is_a_directory_like_any_other() -> None:
    # A machine may have parts of other programs' checkpoints near its root, in /tmp for one.
    with pytest.raises(CheckpointNotFoundError, match=r"^(There is no checkpoint in '/'|'/' contains )"):
        hfshard.verify_checkpoint("/")


@pytest.mark.parametrize("checksum", ["sha256", "xxh3"])
def test_damage_in_several_files_is_reported_in_their_order(checksum: str, tmp_path: Path) -> None:
    shards = saved(tmp_path, checksum)
    for number in (1, 4, 11):
        flip(shards[number], -1)
    shards[7].unlink()
    report = hfshard.verify_checkpoint(tmp_path)
    assert [(problem.file, problem.tensor) for problem in report.problems] == [
        (str(shards[1]), "t01"),
        (str(shards[4]), "t04"),
        (str(shards[7]), None),
        (str(shards[11]), "t11"),
    ]
    assert report.files == ("model.safetensors.index.json", *(path.name for path in shards))
    whole = sum(path.stat().st_size for number, path in enumerate(shards) if number not in (1, 4, 7, 11))
    assert report.checked_bytes == whole


def test_every_byte_of_a_whole_checkpoint_is_checked_and_no_thread_is_left(tmp_path: Path) -> None:
    shards = saved(tmp_path)
    before = threading.enumerate()
    report = hfshard.verify_checkpoint(tmp_path)
    assert report.ok and report.checked_bytes == sum(path.stat().st_size for path in shards)
    for thread in [one for one in threading.enumerate() if one not in before]:
        thread.join(60)  # it has done its work, and may not have ended yet
        assert not thread.is_alive()


def test_a_load_in_full_names_a_damaged_file_of_many(tmp_path: Path) -> None:
    shards = saved(tmp_path)
    flip(shards[5], -1)
    with pytest.raises(hfshard.HfshardError, match=rf"{shards[5].name}.*tensor 't05'"):
        hfshard.load_state_dict(tmp_path, verify="full")


def read_by_this_process() -> int:
    """Bytes that it has read from files, cached or not."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def bytes_read_to_verify(directory: Path) -> int:
    before = read_by_this_process()
    hfshard.verify_checkpoint(directory)
    return read_by_this_process() - before


def test_bytes_are_read_once_and_those_of_a_damaged_file_once_more(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.full((2**20,), float(number)) for number in range(4)}
    hfshard.save_state_dict(tensors, tmp_path, max_shard_size=1)  # four files of 4 MiB
    assert 4 * 2**22 < bytes_read_to_verify(tmp_path) < 4 * 2**22 + 2**18
    flip(tmp_path / "model-00002-of-00004.safetensors", -1)
    assert 5 * 2**22 < bytes_read_to_verify(tmp_path) < 5 * 2**22 + 2**18


def test_a_file_without_tensors_is_checked_too(tmp_path: Path) -> None:
    for value in (1.0, 2.0):  # the second save needs names that the first has not, and no file of it can be split
        hfshard.save_state_dict({"a": torch.full((9,), value), "b": torch.ones(9)}, tmp_path, max_shard_size=1)
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    report = hfshard.verify_checkpoint(tmp_path)
    assert report.files == ("model.safetensors.index.json", *names)
    assert (report.checked_bytes, report.ok) == (3 * 4096 + 2 * 36, True)
    (tmp_path / names[2]).unlink()
    assert [problem.file for problem in hfshard.verify_checkpoint(tmp_path).problems] == [str(tmp_path / names[2])]


def test_a_total_that_the_files_do_not_add_up_to_is_a_problem_of_the_index(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(path.read_text().replace('"total_size": 312000', '"total_size": 312004'))
    [problem] = hfshard.verify_checkpoint(tmp_path).problems
    assert (problem.file, problem.tensor) == (str(path), None)
    assert "its total_size is 312004, but the shards contain 312000 bytes" in problem.message


def test_ctrl_c_ends_all_files_at_their_next_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huge, files = 2**37, ("a.safetensors", "b.safetensors")  # 128 GiB of hole each: a minute of hashing, no disk
    for name in files:
        header = json.dumps({name: {"dtype": "U8", "shape": [huge], "data_offsets": [0, huge]}}).encode()
        with open(tmp_path / name, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + huge)
    records = {name: {"sha256": "0" * 64} for name in files}
    index = {
        "metadata": {"hfshard": {"format": 1, "files": records}, "total_size": 2 * huge},
        "weight_map": {name: name for name in files},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    is_hashing, main = threading.Event(), threading.get_ident()

    class Terminal(io.StringIO):
        """Where the bar is drawn, anew when bytes were hashed."""

        def write(self, text: str) -> int:
            if self.getvalue().count("%"):
                is_hashing.set()
            return super().write(text)

    def press() -> None:
        if is_hashing.wait(60):
            signal.pthread_kill(main, signal.SIGINT)

    monkeypatch.setattr(sys, "stderr", Terminal())
    before, presser = read_by_this_process(), threading.Thread(target=press)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            hfshard.verify_checkpoint(tmp_path, progress=True)
        presser.join()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert is_hashing.is_set()
    assert read_by_this_process() - before < huge


def make_run(root: Path) -> Path:
    """A run of two checkpoints, and a model next to them."""
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    with CheckpointManager(root) as manager:
        for step in (10, 20):
            manager.save(step, TrainingState(model=model, optimizer=optimizer))
    hfshard.save_state_dict({"w": torch.ones(3)}, root)
    return root


def test_a_run_is_checked_with_every_file_of_each_checkpoint(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    names = ["checkpoint-00000010", "checkpoint-00000020"]
    files = ["model.safetensors", "optimizer.safetensors", "state.safetensors", "training_state.json"]

    report = hfshard.verify_checkpoint(root)

    assert report.ok
    assert report.directory == str(root)
    assert report.files == (
        *(f"{name}/{file}" for name in names for file in (*files, "checkpoint.json")),
        "model.safetensors",
    )
    assert [one.directory for one in report.checkpoints] == [*(f"{root}/{name}" for name in names), str(root)]
    assert report.checked_bytes == sum(one.checked_bytes for one in report.checkpoints) > 3000
    assert hfshard.verify_checkpoint(tmp_path, subfolder="run").files == report.files
    assert hfshard.verify_checkpoint(tmp_path / "elsewhere", subfolder=str(root)).files == report.files
    assert hfshard.verify_checkpoint(tmp_path, subfolder=str(root / names[0])).ok
    assert hfshard.verify_checkpoint(root, level="structure").checked_bytes == 0


def test_damage_in_a_run_is_in_the_report_of_the_run_and_of_its_checkpoint(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    damaged = root / "checkpoint-00000020" / "optimizer.safetensors"
    flip(damaged, -1)
    (root / "checkpoint-00000010" / "checkpoint.json").unlink()

    report = hfshard.verify_checkpoint(root)
    alone = hfshard.verify_checkpoint(root / "checkpoint-00000020")

    expected = [str(damaged), f"{root}/checkpoint-00000010/checkpoint.json"]
    assert sorted(problem.file for problem in report.problems) == sorted(expected)
    assert [one.ok for one in report.checkpoints] == [False, False, True]
    assert [problem.file for problem in alone.problems] == [str(damaged)]
    assert alone.checkpoints == ()
    with pytest.raises(InvalidArgumentError, match="level must be 'structure' or 'full', got 'deep'"):
        hfshard.verify_checkpoint(root, level="deep")  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint of variant 'fp16'"):
        hfshard.verify_checkpoint(root, variant="fp16")
