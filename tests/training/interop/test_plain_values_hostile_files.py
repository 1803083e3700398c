"""Files of torch.save that ask for code: refused or left out, and nothing of them is run."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hfshard.errors import DamagedCheckpointError, HfshardError, StateDictMismatchError, UnsafePickleError
from hfshard.pickles.pickle_opcodes import DescribedObject, GlobalReference, describe_pickle
from hfshard.training import CheckpointManager, TrainingState

RAN: list[str] = []


def run(*_: Any) -> str:
    RAN.append("run")
    return "ran"


class Reduced:
    """Is pickled as a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Stateful:
    """Runs something when it gets its state."""

    def __init__(self) -> None:
        self.value = 1

    def __setstate__(self, state: Any) -> None:
        run()


class Indexed(dict[str, int]):
    """Runs something when an item is set."""

    def __setitem__(self, key: str, value: int) -> None:
        run()


@pytest.fixture(autouse=True)
def nothing_ran() -> Any:
    RAN.clear()
    yield
    assert RAN == []


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    return CheckpointManager(tmp_path / "run")


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 2)


def saved(tmp_path: Path, **more: Any) -> str:
    """A file with weights of ones, and more."""
    path = tmp_path / "checkpoint.pt"
    weights = {name: torch.ones_like(value) for name, value in linear().state_dict().items()}
    torch.save({"model": weights, "step": 3, **more}, path)
    return str(path)


def with_pickle(path: str, data: bytes) -> str:
    """Put another pickle into a zip of torch.save."""
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, data if name.endswith("/data.pkl") else content)
    return path


def is_untouched(model: nn.Module) -> bool:
    return all(torch.equal(one, other) for one, other in zip(model.parameters(), linear().parameters()))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("function", [eval, exec, __import__, open, pickle.loads, __import__("os").system])
def test_a_file_that_asks_for_code_is_refused(
    function: Callable[..., Any], strict: bool, tmp_path: Path, manager: CheckpointManager
) -> None:
    model = linear()
    path = saved(tmp_path, args=Reduced(function, "raise SystemExit"))

    with pytest.raises(UnsafePickleError, match="made to run code"):
        manager.restore(TrainingState(model), path, strict=strict)
    assert is_untouched(model)


@pytest.mark.parametrize(
    "value",
    [Reduced(run, 1), Stateful(), Indexed(a=1), [Reduced(Reduced, run)], Reduced(torch.load, "x")],
    ids=["reduced", "stateful", "indexed", "nested", "loading"],
)
def test_objects_are_named_and_left_out(value: Any, tmp_path: Path, manager: CheckpointManager) -> None:
    model = linear()
    path = saved(tmp_path, args=value)
    RAN.clear()  # making them may have run something

    with pytest.raises(UnsafePickleError, match=r"With strict=False they are left out") as caught:
        manager.restore(TrainingState(model), path)
    assert is_untouched(model)
    restored = manager.restore(TrainingState(model), path, strict=False)

    assert caught.value.actual in restored.differences[0]
    assert (restored, model.weight.tolist()) == (3, [[1.0, 1.0], [1.0, 1.0]])


def test_an_object_in_place_of_weights_or_of_a_part_is_no_part(tmp_path: Path, manager: CheckpointManager) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    path = saved(tmp_path, optimizer=Stateful())

    restored = manager.restore(TrainingState(model, optimizer), path, strict=False)

    assert [words in one for one, words in zip(restored.differences, ["Stateful", "no 'optimizer'"], strict=True)]
    assert optimizer.param_groups[0]["lr"] == 0.5
    torch.save(model, path)
    with pytest.raises(HfshardError, match=r"torch\.nn\.modules\.linear\.Linear"):
        manager.restore(TrainingState(model), path)
    with pytest.raises(DamagedCheckpointError, match="not a dict of states"):
        manager.restore(TrainingState(model), path, strict=False)


@pytest.mark.parametrize(
    ("opcodes", "why"),
    [
        (b"cbuiltins\ngetattr\n}\x85b.", "state"),
        (b"]Kab.", "state"),
        (b"X\x01\x00\x00\x00a)R.", "no name"),
        (b"K\x01K\x02\x86)\x81.", "no name"),
        (b"\x82\x01.", "EXT1"),
        (b"h\x07.", "KeyError"),
        (b"0.", "IndexError"),
        (b"]", "ValueError"),
        (b"r\xff\xff\xff\xff.", "IndexError"),
        (b"X\xff\xff\xff\xffa.", "ValueError"),
    ],
)
def test_pickles_that_no_torch_save_writes_are_refused(opcodes: bytes, why: str) -> None:
    with pytest.raises(UnsafePickleError, match=why):
        describe_pickle(io.BytesIO(b"\x80\x02" + opcodes), "a.pt")


def test_a_call_is_only_described() -> None:
    described = describe_pickle(io.BytesIO(pickle.dumps([Reduced(run, 1), run], 2)), "a.pt")

    call, name = described.value
    assert isinstance(call, DescribedObject) and (call.name, call.arguments) == (f"{__name__}.run", (1,))
    assert name == GlobalReference(f"{__name__}.run")
    assert described.names == {f"{__name__}.run"}


def lists_of_lists(depth: int) -> Any:
    value: Any = [0] * 10
    for _ in range(depth):
        value = [value] * 10
    return value


def holding_itself() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("value", "why"),
    [(lists_of_lists(12), "more entries"), (holding_itself(), "contains itself"), (lists_of_lists(0), "")],
    ids=["entries", "circle", "plain"],
)
def test_bombs_are_refused(value: Any, why: str, strict: bool, tmp_path: Path, manager: CheckpointManager) -> None:
    model = linear()
    path = saved(tmp_path, more=value, **({} if strict else {"object": Reduced(run)}))
    if not why:
        assert manager.restore(TrainingState(model), path, strict=strict).extra["more"] == value
        return
    with pytest.raises(DamagedCheckpointError, match=why):
        manager.restore(TrainingState(model), path, strict=strict)
    assert is_untouched(model)


def test_tensors_larger_than_their_bytes_are_refused(tmp_path: Path, manager: CheckpointManager) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    state = optimizer.state_dict()
    state["state"] = {0: {"momentum_buffer": torch.ones(1).expand(1 << 40)}}
    for more in ({}, {"object": Reduced(run)}):
        path = saved(tmp_path, optimizer=state, **more)
        with pytest.raises(DamagedCheckpointError, match="more elements than the file has bytes for"):
            manager.restore(TrainingState(model, optimizer), path, strict=not more)
    assert is_untouched(model)


def test_a_described_tensor_must_have_its_bytes(tmp_path: Path, manager: CheckpointManager) -> None:
    model = linear()
    path = saved(tmp_path, object=Reduced(run))
    with zipfile.ZipFile(path) as archive:
        data = archive.read("checkpoint/data.pkl")
    longer = data.replace(b"K\x04t", b"K\x08t", 1).replace(b"K\x04tq", b"K\x08tq", 1)
    assert longer != data
    with pytest.raises(DamagedCheckpointError, match="16 bytes for 8 elements"):
        manager.restore(TrainingState(model), with_pickle(path, longer), strict=False)
    assert is_untouched(model)


NESTED_PARAMETERS = b"ctorch._utils\n_rebuild_parameter\n" * 5000 + b"K\x01" + b"\x85R" * 5000 + b"."


@pytest.mark.parametrize(
    ("opcodes", "why"),
    [
        (b"}ccollections\nOrderedDict\n)RK\x01s.", "what such a value can't have .*unhashable"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x02K\x03K\x04tR.", "a tensor that it does not have"),
        (b"ctorch._utils\n_rebuild_parameter\n)R.", "what such a value can't have"),
        (b"cnumpy\ndtype\n)R.", "is not what numpy.dtype is saved as"),
        (b"ctorch\ndevice\n(X\x03\x00\x00\x00abctR.", "is not what torch.device is saved as"),
        (NESTED_PARAMETERS, "RecursionError"),
        (b"cnumpy\nnothing\n.", "not a dict of states"),
    ],
)
def test_what_is_described_and_can_not_be_is_damaged(
    opcodes: bytes, why: str, tmp_path: Path, manager: CheckpointManager
) -> None:
    path = with_pickle(saved(tmp_path), b"\x80\x02cnumpy\nother\n0" + opcodes)
    with pytest.raises(DamagedCheckpointError, match=why):
        manager.restore(TrainingState(linear()), path, strict=False)


def test_numpy_values_are_numbers_and_nothing_else(tmp_path: Path, manager: CheckpointManager) -> None:
    import numpy as np

    model = linear()
    values = {"a": np.float32(1.5), "b": np.arange(6, dtype=">i2").reshape(2, 3), "c": np.bool_(True)}
    restored = manager.restore(TrainingState(model), saved(tmp_path, values=values))
    assert restored.extra["values"]["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (restored.extra["values"]["a"], restored.extra["values"]["c"]) == (1.5, True)
    for hostile in (np.array([Reduced(run)], dtype=object), np.zeros(2, dtype=[("a", "i4"), ("b", "f8")])):
        with pytest.raises(HfshardError, match="values"):
            manager.restore(TrainingState(model), saved(tmp_path, values=hostile))


def test_a_damaged_file_is_refused(tmp_path: Path, manager: CheckpointManager) -> None:
    model = linear()
    for more in ({}, {"object": Reduced(run)}):
        path = Path(saved(tmp_path, **more))
        data = bytearray(path.read_bytes())
        at = data.index(struct.pack("<f", 1.0) * 4)
        data[at] ^= 1
        path.write_bytes(data)
        with pytest.raises(DamagedCheckpointError, match="checksum"):
            manager.restore(TrainingState(model), path, strict=not more)
        path.write_bytes(data[:-100])
        with pytest.raises(DamagedCheckpointError):
            manager.restore(TrainingState(model), path, strict=not more)
    assert is_untouched(model)


def test_an_entry_that_is_named_and_not_there_is_an_error(tmp_path: Path, manager: CheckpointManager) -> None:
    with pytest.raises(StateDictMismatchError, match=r"no entry 'ema\.model'.*There is: model, step"):
        manager.restore(TrainingState(linear()), saved(tmp_path), keys={"model": "ema.model"})
