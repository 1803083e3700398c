"""Single files of DeepSpeed: what is described, and what is refused."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from hfshard.disk.safe_open import identity_of
from hfshard.errors import DamagedCheckpointError, HfshardError, UnsafePickleError
from hfshard.foreign.deepspeed_files import StateFiles
from tests.foreign.like_deepspeed import TRAINED, state_of_model, write, zero_partitions
from tests.helpers.evil import Evil

MODEL = "mp_rank_00_model_states.pt"
OPTIMIZER = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"


class ByName:
    """Object that is saved like a member of an enum in Python 3.11: by its name."""

    def __init__(self, stage: Any, name: str) -> None:
        self.stage = stage
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.stage, self.name)


class ByNumber(ByName):
    """Object that is saved like a member of an enum in other versions: by its number."""

    def __reduce__(self) -> tuple[Any, ...]:
        return self.stage, (2,)


class Own:
    """A class of the user."""


@pytest.mark.parametrize("saved", [ByName, ByNumber])
def test_stage_is_read_as_each_python_saves_it(saved: type[ByName], tmp_path: Path) -> None:
    files = zero_partitions(1, 1, TRAINED)
    state = files[OPTIMIZER]["optimizer_state_dict"]
    state["zero_stage"] = saved(type(state["zero_stage"]), "gradients")
    write(tmp_path, files)

    assert StateFiles(str(tmp_path)).read_optimizer(OPTIMIZER).stage == 2


def test_records_are_those_of_the_weights_with_the_checksums_of_the_file(tmp_path: Path) -> None:
    write(tmp_path, zero_partitions(1, 1, [{"a": torch.arange(4.0)}]))
    files = StateFiles(str(tmp_path))

    states = files.read_optimizer(OPTIMIZER)

    (record,) = files.records
    assert (record.file, record.offset, record.size) == (OPTIMIZER, states.masters[0].tensor.offset, 16)
    raw = (tmp_path / OPTIMIZER).read_bytes()[record.offset : record.offset + record.size]
    assert raw == torch.arange(4.0).numpy().tobytes()
    with zipfile.ZipFile(tmp_path / OPTIMIZER) as archive:
        assert record.crc32 in {one.CRC for one in archive.infolist()}
    assert files.identities == {OPTIMIZER: identity_of((tmp_path / OPTIMIZER).stat())}


def test_scheduler_and_plain_client_state_are_no_obstacle(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    other = {"path": tmp_path, "numbers": torch.arange(3).numpy(), "dtype": torch.bfloat16, "more": {1, 2}, 7: None}
    state = state_of_model(None, {"a": torch.ones(2)}, lr_scheduler=scheduler.state_dict(), **{"client": other})
    write(tmp_path, {MODEL: state})

    states = StateFiles(str(tmp_path)).read_model(MODEL)

    assert states.weights is not None
    assert [(name, piece.tensor.shape) for name, piece in states.weights.items()] == [("a", (2,))]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (Evil(), UnsafePickleError, r"asks for '(posix|nt)\.system', which is nothing a DeepSpeed checkpoint needs"),
        (Own(), UnsafePickleError, r"asks for '.*\.Own', .* Nothing of it was run, and nothing was loaded\. If it is"),
        (eval, UnsafePickleError, r"asks for 'builtins\.eval'"),
    ],
)
def test_other_objects_are_named_and_not_run(
    value: Any, error: type[HfshardError], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {MODEL: state_of_model(None, {}, client=value)})

    with pytest.raises(error, match=message):
        StateFiles(str(tmp_path)).read_model(MODEL)

    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "value", [None, [], {}, {"module": 3}, {"module": {1: torch.ones(1)}}, {"ds_version": 1}, torch.ones(1)]
)
def test_what_is_no_file_of_weights_is_refused(value: Any, tmp_path: Path) -> None:
    write(tmp_path, {MODEL: value})

    if value == {}:
        assert StateFiles(str(tmp_path)).read_model(MODEL).weights is None  # as a pipeline's
        return
    with pytest.raises(DamagedCheckpointError, match="cannot be read"):
        StateFiles(str(tmp_path)).read_model(MODEL)


def test_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    write(tmp_path, zero_partitions(1, 1, TRAINED))
    content = (tmp_path / OPTIMIZER).read_bytes()
    (tmp_path / OPTIMIZER).write_bytes(content[: len(content) // 2])

    with pytest.raises(DamagedCheckpointError, match="not a complete zip file"):
        StateFiles(str(tmp_path)).read_optimizer(OPTIMIZER)


def test_layers_and_universal_parameters(tmp_path: Path) -> None:
    parameter = {"param": torch.nn.Parameter(torch.ones(3, 2)), "cat_dim": 0, "vocab_tensor": True}
    write(tmp_path, {"layer.pt": {"bias": torch.arange(3)}, "zero/a/fp32.pt": parameter})
    files = StateFiles(str(tmp_path))

    piece, is_cut = files.read_universal("zero/a/fp32.pt")

    assert (piece.file, piece.tensor.shape, is_cut) == ("zero/a/fp32.pt", (3, 2), True)
    assert files.read_layer("layer.pt")["bias"].tensor.dtype == torch.int64
