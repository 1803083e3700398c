"""Files of torch.save that ask for code, or for more than they hold: refused or left out, and nothing is run."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hfshard.errors import DamagedCheckpointError, HfshardError, StateDictMismatchError, UnsafePickleError
from hfshard.pickles.plain_values import read_plain_file
from hfshard.training import CheckpointManager, TrainingState
from tests.attacks.files.torchfile import DOUBLED, call, colliding, complex_of_one_hash, numbers_of_one_hash, zipped

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


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    """Of a run that has no checkpoint yet."""
    return CheckpointManager(tmp_path / "run")


@pytest.fixture(autouse=True)
def nothing_ran() -> Any:
    RAN.clear()
    yield
    assert RAN == []


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


def refused(
    manager: CheckpointManager, path: str, why: str, error: type[HfshardError] = DamagedCheckpointError, **options: Any
) -> HfshardError:
    """Restore a file into a model, which stays as it is."""
    model = linear()
    with pytest.raises(error, match=why) as caught:
        manager.restore(TrainingState(model, **options.pop("parts", {})), path, **options)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), linear().parameters()))
    return caught.value


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("function", [eval, exec, __import__, open, pickle.loads, os.system])
def test_a_file_that_asks_for_code_is_refused(
    function: Callable[..., Any], strict: bool, tmp_path: Path, manager: CheckpointManager
) -> None:
    path = saved(tmp_path, args=Reduced(function, "raise SystemExit"))
    refused(manager, path, "made to run code", UnsafePickleError, strict=strict)


@pytest.mark.parametrize(
    "value",
    [Reduced(run, 1), Stateful(), Indexed(a=1), [Reduced(Reduced, run)], Reduced(torch.load, "x")],
    ids=["reduced", "stateful", "indexed", "nested", "loading"],
)
def test_objects_are_named_and_left_out(value: Any, tmp_path: Path, manager: CheckpointManager) -> None:
    model = linear()
    path = saved(tmp_path, args=value)
    RAN.clear()  # making them may have run something

    error: Any = refused(manager, path, r"Pass strict=False to leave them out", UnsafePickleError)
    restored = manager.restore(TrainingState(model), path, strict=False)

    assert error.actual in restored.differences[0]
    assert (restored, model.weight.tolist()) == (3, [[1.0, 1.0], [1.0, 1.0]])


def test_an_object_among_plain_values_is_named_and_not_they(tmp_path: Path, manager: CheckpointManager) -> None:
    path = saved(tmp_path, args=Stateful(), kinds=[int, str, range(3), slice(2)])

    error = refused(manager, path, r"Pass strict=False to leave them out", UnsafePickleError)

    assert "Stateful" in str(error)
    assert manager.restore(TrainingState(linear()), path, strict=False) == 3


def test_an_object_in_place_of_weights_or_of_a_part_is_no_part(tmp_path: Path, manager: CheckpointManager) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    path = saved(tmp_path, optimizer=Stateful())

    restored = manager.restore(TrainingState(model, optimizer), path, strict=False)

    assert [words in one for one, words in zip(restored.differences, ["Stateful", "no 'optimizer'"], strict=True)]
    assert optimizer.param_groups[0]["lr"] == 0.5
    torch.save(model, path)
    refused(manager, path, r"torch\.nn\.modules\.linear\.Linear", HfshardError)
    refused(manager, path, "not a dict of states", strict=False)


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
    path = saved(tmp_path, more=value, **({} if strict else {"object": Reduced(run)}))
    if why:
        refused(manager, path, why, strict=strict)
    else:
        assert manager.restore(TrainingState(linear()), path, strict=strict).extra["more"] == value


def test_tensors_larger_than_their_bytes_are_refused(tmp_path: Path, manager: CheckpointManager) -> None:
    optimizer = torch.optim.SGD(linear().parameters(), lr=0.5, momentum=0.9)
    state = {**optimizer.state_dict(), "state": {0: {"momentum_buffer": torch.ones(1).expand(1 << 40)}}}
    for more in ({}, {"object": Reduced(run)}):
        path = saved(tmp_path, optimizer=state, **more)
        parts = {"optimizer": optimizer}
        refused(manager, path, "more elements than the file has bytes for", parts=parts, strict=not more)


def test_a_described_tensor_must_have_its_bytes(tmp_path: Path, manager: CheckpointManager) -> None:
    path = saved(tmp_path, object=Reduced(run))
    with zipfile.ZipFile(path) as archive:
        data = archive.read("checkpoint/data.pkl")
    longer = data.replace(b"K\x04t", b"K\x08t", 1).replace(b"K\x04tq", b"K\x08tq", 1)
    assert longer != data
    refused(manager, with_pickle(path, longer), "16 bytes for 8 elements", strict=False)


NESTED_PARAMETERS = b"ctorch._utils\n_rebuild_parameter\n" * 5000 + b"K\x01" + b"\x85R" * 5000 + b"."


@pytest.mark.parametrize(
    ("opcodes", "why"),
    [
        (b"}ccollections\nOrderedDict\n)RK\x01s.", "contents that such a value cannot have .*unhashable"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x02K\x03K\x04tR.", "a tensor that it does not contain"),
        (b"ctorch._utils\n_rebuild_parameter\n)R.", "a tensor that it does not contain"),
        (b"cnumpy\ndtype\n)R.", "is not a valid numpy.dtype"),
        (b"ctorch\ndevice\n(X\x03\x00\x00\x00abctR.", "is not a valid torch.device"),
        (NESTED_PARAMETERS, "RecursionError"),
        (b"cnumpy\nnothing\n.", "not a dict of states"),
    ],
)
def test_what_is_described_and_can_not_be_is_damaged(
    opcodes: bytes, why: str, tmp_path: Path, manager: CheckpointManager
) -> None:
    path = with_pickle(saved(tmp_path), b"\x80\x02cnumpy\nother\n0" + opcodes)
    refused(manager, path, why, strict=False)


def test_numpy_values_are_numbers_and_nothing_else(tmp_path: Path, manager: CheckpointManager) -> None:
    values = {"a": np.float32(1.5), "b": np.arange(6, dtype=">i2").reshape(2, 3), "c": np.bool_(True)}
    restored = manager.restore(TrainingState(linear()), saved(tmp_path, values=values))
    assert restored.extra["values"]["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (restored.extra["values"]["a"], restored.extra["values"]["c"]) == (1.5, True)
    for hostile in (np.array([Reduced(run)], dtype=object), np.zeros(2, dtype=[("a", "i4"), ("b", "f8")])):
        refused(manager, saved(tmp_path, values=hostile), "values", HfshardError)


def test_a_damaged_file_is_refused(tmp_path: Path, manager: CheckpointManager) -> None:
    for more in ({}, {"object": Reduced(run)}):
        path = saved(tmp_path, **more)
        data = bytearray(Path(path).read_bytes())
        data[data.index(struct.pack("<f", 1.0) * 4)] ^= 1
        for content, why in ((data, "checksum"), (data[:-100], ".")):
            Path(path).write_bytes(content)
            refused(manager, path, why, strict=not more)


def test_an_entry_that_is_named_and_not_there_is_an_error(tmp_path: Path, manager: CheckpointManager) -> None:
    with pytest.raises(StateDictMismatchError, match=r"no entry 'ema\.model'.*It has: model, step"):
        manager.restore(TrainingState(linear()), saved(tmp_path), keys={"model": "ema.model"})


UNKNOWN = b"cnot\nknown\n0}"
"""torch refuses what follows, which then is described; an empty dict is on the stack."""
LAUGHING_LIST = b"K\x01" + b"".join(b"q%c0](h%ch%ce" % ((number,) * 3) for number in range(60))
"""A list of two lists, which are one, of two lists, 60 deep."""
NUMPY = b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R(K\x01"
DTYPE = b"cnumpy\ndtype\n\x8c\x02u1\x89\x88\x87R(K\x03\x8c\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
BIG = struct.pack("<i", 1 << 20)

BOMBS = {
    "deep tuples as a name": (b")" + b"\x85" * 200_000 + b"Ns", "does what no training state"),
    "a laugh as a name": (DOUBLED + b"Ns", "does what no training state"),
    "a laugh as text": (
        b"Nc_codecs\nencode\n" + LAUGHING_LIST + b"\x8c\x06latin1\x86Rs",
        "is not a valid _codecs.encode",
    ),
    "a laugh as bytes": (
        b"Nc_codecs\nencode\nK\x01\x85R"
        + b"".join(b"q%c0c_codecs\nencode\nh%ch%c\x86R" % ((number,) * 3) for number in range(60))
        + b"s",
        "is not a valid _codecs.encode",
    ),
    "a laugh as a dtype": (b"Ncnumpy\ndtype\n" + LAUGHING_LIST + b"\x85Rs", "a dtype that is not numeric"),
    "a laugh as a shape": (
        b"N" + NUMPY + b"J\x00\x00\x00\x7f](K\x01e\x86" + DTYPE + b"\x89C\x01atbs",
        "a shape that is not only ints",
    ),
    "one array, many times": (
        b"N](B" + BIG + b"z" * (1 << 20) + b"q\x00" + DTYPE + b"q\x010"
        + (NUMPY + b"J" + BIG + b"\x85h\x01\x89h\x00tb") * 3000
        + b"es",
        "objects that together are larger than the file",
    ),
    "one list, many times": (
        b"N]((" + b"K\x01" * (1 << 16) + b"lq\x000" + b"cbuiltins\nlist\nh\x00\x85R" * 3000 + b"es",
        "objects that together are larger than the file",
    ),
    "tuples of one hash": (
        b"N}(" + b"".join(pair + b"N" for pair in colliding(300)) + b"us", "names that all have the same hash"
    ),
    "a set of tuples of one hash": (
        b"N" + call("builtins", "set", b"](" + b"".join(colliding(300)) + b"e") + b"s", "is not a valid builtins.set"
    ),
    "complex numbers of one hash": (
        b"N}(" + complex_of_one_hash(300) + b"us", "names that take too long to hash"
    ),
    "names of one hash": (b"N}(" + numbers_of_one_hash() + b"us", "too large a number as a name"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(name: str, tmp_path: Path) -> None:
    body, match = BOMBS[name]
    path = tmp_path / "old.pt"
    path.write_bytes(zipped(UNKNOWN + body, {}))
    with pytest.raises(HfshardError, match=match):
        read_plain_file(str(path), str(tmp_path), strict=False, verify="full")


def test_views_of_one_memory_are_not_copied_one_by_one(tmp_path: Path) -> None:
    whole = torch.arange(1 << 18)
    path = tmp_path / "old.pt"
    torch.save({"views": [whole[number:] for number in range(50)], "turned": whole.reshape(2, -1).T}, path)
    file = read_plain_file(str(path), str(tmp_path), strict=True, verify="full")
    copied = file.copied(file.value, "")
    assert len({one.untyped_storage().data_ptr() for one in [*copied["views"], copied["turned"]]}) == 1
    assert copied["views"][49][0] == 49
    assert copied["turned"].tolist()[1] == [1, (1 << 17) + 1]
