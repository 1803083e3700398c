"""What is in a checkpoint, by its headers alone: totals, the checkpoint of a run, and keys of pickles."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import hfshard
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.errors import AmbiguousWeightsError, CheckpointNotFoundError, InvalidArgumentError
from hfshard.training import CheckpointManager, TrainingState
from hfshard.viewing.inspection import OpenRequest, inspect_checkpoint, open_with_one_key
from hfshard.viewing.results import DtypeEntry, TensorEntry


def plainly_saved(path: Path, count: int) -> Path:
    """Save one tensor of `count` elements as another library does."""
    path.parent.mkdir(parents=True)
    save_file({"a": torch.ones(count)}, path)
    return path.parent


def request_for(path: Path, key: str | None) -> OpenRequest:
    return OpenRequest(path, CheckpointQuery(), LoadOptions(key=key))


def test_totals_and_order_are_those_of_the_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"x": torch.ones(5).bfloat16(), "y": torch.ones(2, 3), "z": torch.tensor(1), "w": torch.zeros(0)}
    hfshard.save_state_dict({**tensors, "y_tied": tensors["y"]}, tmp_path / "out", metadata={"note": "hello"})
    (tmp_path / "out" / "model.sig").write_text("no signature at all")
    monkeypatch.chdir(tmp_path)

    found = inspect_checkpoint("out")

    assert (found.place, found.directory, found.entry) == (str(tmp_path / "out"), "out", "model.safetensors")
    assert (found.nbytes, found.parameters) == (10 + 24 + 8 + 0, 5 + 6 + 1 + 0)
    assert found.dtypes == (
        DtypeEntry("F32", 2, 6, 24),
        DtypeEntry("BF16", 1, 5, 10),
        DtypeEntry("I64", 1, 1, 8),
    )
    assert found.largest(2) == [
        TensorEntry("y", "F32", (2, 3), 24, "model.safetensors"),
        TensorEntry("x", "BF16", (5,), 10, "model.safetensors"),
    ]
    assert (found.tied_names, found.metadata, found.signature) == (
        {"y_tied": "y"},
        {"format": "pt", "note": "hello"},
        "model.sig",
    )
    assert found.is_verifiable
    assert found.as_json()["tensors"][-1]["shape"] == list(found.tensors[-1].shape)


def test_damaged_tensors_do_not_matter_and_a_damaged_header_does(tmp_path: Path) -> None:
    hfshard.save_state_dict({"a": torch.ones(3)}, tmp_path)
    path = tmp_path / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + b"\xff")

    assert [file.tensors for file in inspect_checkpoint(tmp_path).files] == [1]
    path.write_bytes(raw[:8] + b"!" + raw[9:])
    with pytest.raises(hfshard.HfshardError, match=r"model\.safetensors"):
        inspect_checkpoint(tmp_path)


def test_a_run_is_its_latest_checkpoint_and_a_step_may_lack_zeros(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (3, 12):
            manager.save(step, TrainingState(model=nn.Linear(2, 2)))

    assert inspect_checkpoint(tmp_path).place == f"{tmp_path}/checkpoint-00000012"
    assert inspect_checkpoint(tmp_path / "checkpoint-3").place == f"{tmp_path}/checkpoint-00000003"
    with pytest.raises(CheckpointNotFoundError):
        inspect_checkpoint(tmp_path / "checkpoint-4")


def test_the_latest_of_a_trainer_is_by_number_and_complete(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        plainly_saved(tmp_path / f"checkpoint-{step}" / "model.safetensors", step)
        if step < 11:  # which was killed before its state was written
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")

    found = inspect_checkpoint(tmp_path)

    assert (found.place, found.parameters) == (f"{tmp_path}/checkpoint-10", 10)
    assert not found.is_verifiable and found.signature is None


def test_a_key_is_for_the_pickles_among_the_checkpoints(tmp_path: Path) -> None:
    plain = plainly_saved(tmp_path / "plain" / "model.safetensors", 2)
    pickled = tmp_path / "x.pt"
    torch.save({"ema": {"a": torch.ones(3)}, "model": {"a": torch.ones(4)}}, pickled)

    assert inspect_checkpoint(pickled, key="ema").key == "ema"
    assert inspect_checkpoint(pickled, key="model").parameters == 4
    with ExitStack() as stack:
        found = open_with_one_key(stack, [request_for(plain, "ema"), request_for(pickled, "ema")])
        assert [list(one.checkpoint.index.weight_map.values()) for one in found] == [["model.safetensors"], ["x.pt"]]
        with pytest.raises(InvalidArgumentError):
            open_with_one_key(stack, [request_for(plain, "ema"), request_for(plain, "ema")])
        with pytest.raises(InvalidArgumentError, match="'none'"):
            open_with_one_key(stack, [request_for(plain, "none"), request_for(pickled, "none")])
        with pytest.raises(AmbiguousWeightsError):
            open_with_one_key(stack, [request_for(pickled, None)])
