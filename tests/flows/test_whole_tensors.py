"""Whatever is saved and asked for: odd paths and arguments, freed memory, modes of torch, files of huggingface_hub."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file, save_model
from torch import nn

import hfshard
from hfshard.errors import AccessDeniedError, FileError, HfshardError, InvalidArgumentError, UnstorableTensorError
from hfshard.hub import DirectoryHub
from hfshard.shards.read_tensors import ReadMode
from hfshard.training import CheckpointManager, TrainingState
from tests.helpers.tiny_bert import bert

WEIGHTS = {"a": torch.ones(3), "b": torch.zeros(2)}
LONG = "x" * 300
TEXTS: tuple[Any, ...] = (5, b"x", "a\0b", "\ud800")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    hfshard.save_state_dict(WEIGHTS, tmp_path / "saved", max_shard_size=4110)
    return tmp_path / "saved"


def _state() -> TrainingState:
    return TrainingState(nn.Linear(1, 1))


def _verbs(saved: Path) -> dict[str, Callable[[Any], object]]:
    """Every public function that takes a path, as a function of it."""
    hub = saved.parent / "hub"
    new = saved.parent / "new"
    return {
        "save_state_dict": lambda path: hfshard.save_state_dict(WEIGHTS, path),
        "save_model": lambda path: hfshard.save_model(nn.Linear(1, 1), path),
        "load_state_dict": lambda path: hfshard.load_state_dict(path, local_files_only=True),
        "load_model": lambda path: hfshard.load_model(nn.Linear(1, 1), path, local_files_only=True),
        "verify_checkpoint": hfshard.verify_checkpoint,
        "reshard from": lambda path: hfshard.reshard_checkpoint(path, new, local_files_only=True),
        "reshard to": lambda path: hfshard.reshard_checkpoint(saved, path),
        "push from": lambda path: hfshard.push_checkpoint(path, hub),
        "push to": lambda path: hfshard.push_checkpoint(saved, path),
        "pull from": lambda path: hfshard.pull_checkpoint(path, new, local_files_only=True),
        "manager.save": lambda path: CheckpointManager(path).save(1, _state()),
        "manager.restore": lambda path: CheckpointManager(path).restore(_state()),
        "hub.open": DirectoryHub.open,
        "hub.create": DirectoryHub.create,
    }


def test_what_is_no_path_is_one_error_of_every_verb(saved: Path) -> None:
    hfshard.push_checkpoint(saved, saved.parent / "hub")
    (saved.parent / "file").touch()
    paths = ["", None, *TEXTS, saved.parent / "file/below", saved.parent / LONG]
    for name, verb in _verbs(saved).items():
        for path in paths:
            try:
                verb(path)
            except HfshardError:
                continue
            pytest.fail(f"{name} took {path!r:.50}")
    assert sorted(os.listdir(saved.parent)) == ["file", "hub", "saved"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may do less")
def test_missing_rights_name_the_file_and_are_a_permission_error_too() -> None:
    with tempfile.TemporaryDirectory() as open_to_all:  # pytest's own is for its user alone
        os.chmod(open_to_all, 0o755)
        closed = Path(open_to_all, "closed")
        verbs = {name: verb for name, verb in _verbs(closed).items() if name in ("save_state_dict", "load_state_dict")}
        for verb in verbs.values():  # what they import is not for everybody to read
            verb(closed)
        closed.chmod(0o000)
        os.seteuid(65534)
        try:
            for name, verb in verbs.items():
                with pytest.raises(PermissionError, match=f"'{closed}'") as caught:
                    verb(closed)
                assert isinstance(caught.value, AccessDeniedError), name
                assert (caught.value.errno, caught.value.path) == (13, str(closed))
        finally:
            os.seteuid(0)


def test_error_of_the_system_keeps_its_number(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="File name too long") as caught:
        hfshard.save_state_dict(WEIGHTS, tmp_path / LONG)

    assert caught.value.errno == 36
    assert caught.value.path == str(tmp_path / LONG)


@pytest.mark.parametrize("text", [*TEXTS, LONG], ids=["int", "bytes", "nul", "surrogate", "long"])
def test_odd_texts_are_refused_before_anything_is_written(saved: Path, text: Any) -> None:
    hub = saved.parent / "hub"
    calls: list[Callable[[], object]] = [
        lambda: hfshard.save_state_dict(WEIGHTS, saved.parent / "new", variant=text),
        lambda: hfshard.plan_shards(WEIGHTS, variant=text),
        lambda: hfshard.load_state_dict(saved, variant=text),
        lambda: hfshard.load_state_dict(saved, subfolder=text),
        lambda: hfshard.verify_checkpoint(saved, subfolder=text),
    ]
    if text != LONG:
        calls += [
            lambda: hfshard.push_checkpoint(saved, hub, revision=text),
            lambda: hfshard.push_checkpoint(saved, hub, path_in_repo=text),
            lambda: hfshard.push_checkpoint(saved, hub, commit_message=text),
            lambda: hfshard.load_state_dict(saved, revision=text),
        ]
    for call in calls:
        with pytest.raises(HfshardError):
            call()

    assert os.listdir(saved.parent) == ["saved"]


NO_DEVICES: tuple[Any, ...] = ("nonsense", -5, object(), "cuda:99", None, b"cpu", ["cpu"], 1.5)
NO_KEYS: tuple[Any, ...] = (5, [5], object(), 1.5, b"a", [None])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"device": one}, "device must be available to torch") for one in NO_DEVICES),
        *(({"keys": one}, "keys must be names, globs, or a function of the name") for one in NO_KEYS),
    ],
)
def test_what_is_no_device_and_what_are_no_keys_is_refused(saved: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        hfshard.load_state_dict(saved, **options)


def test_lazy_modules_are_refused_by_name(saved: Path) -> None:
    new = saved.parent / "new"
    lazy = nn.Sequential(nn.LazyLinear(3))
    calls: list[Callable[[], object]] = [
        lambda: hfshard.save_model(lazy, new),
        lambda: hfshard.save_state_dict(lazy.state_dict(), new),
        lambda: hfshard.plan_shards(lazy.state_dict()),
        lambda: hfshard.load_model(lazy, saved),
        lambda: CheckpointManager(new).save(1, TrainingState(lazy)),
    ]
    for call in calls:
        with pytest.raises(UnstorableTensorError, match=r"'0\.weight' has no shape yet"):
            call()

    assert not new.exists()


@pytest.mark.parametrize("state_dict", [None, [1], 5])
def test_what_is_no_state_dict_is_refused(tmp_path: Path, state_dict: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="state_dict must map names to tensors"):
        hfshard.save_state_dict(state_dict, tmp_path / "new")
    with pytest.raises(InvalidArgumentError, match="state_dict must map names to tensors"):
        hfshard.plan_shards(state_dict)
    with pytest.raises(InvalidArgumentError, match=r"must be an nn\.Module"):
        hfshard.save_model(state_dict, tmp_path / "new")


def test_what_belongs_to_another_function_is_refused_with_its_name(tmp_path: Path) -> None:
    model: Any = torch.nn.Linear(2, 2)
    state_dict: Any = {"a": torch.ones(2)}

    with pytest.raises(InvalidArgumentError, match=r"got a Linear\. To save a module, call save_model\.$"):
        hfshard.save_state_dict(model, tmp_path / "new")
    with pytest.raises(InvalidArgumentError, match=r"got a Linear\. Of a module, pass its state_dict\(\)\.$"):
        hfshard.plan_shards(model)
    with pytest.raises(InvalidArgumentError, match=r"got a dict\. To save tensors by name, call save_state_dict\.$"):
        hfshard.save_model(state_dict, tmp_path / "new")
    with pytest.raises(UnstorableTensorError, match=r"'model': it is a dict of its own, .* Save each state dict by it"):
        hfshard.save_state_dict({"model": state_dict}, tmp_path / "new")

    assert not (tmp_path / "new").exists()


def resized(tensor: torch.Tensor, nbytes: int, view: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A view of a tensor whose storage then gets another size."""
    found = view(tensor)
    tensor.untyped_storage().resize_(nbytes)
    return found


def matrix() -> torch.Tensor:
    """Of 4000 bytes."""
    return torch.arange(1000.0).reshape(10, 100)


REFUSED: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "freed": (0, lambda tensor: tensor),
    "freed parameter": (0, lambda tensor: nn.Parameter(tensor)),
    "shrunk by one byte": (3999, lambda tensor: tensor),
    "turned": (3999, lambda tensor: tensor.t()),
    "strided": (3800, lambda tensor: tensor[::3, ::9]),
    "last row": (3999, lambda tensor: tensor[9:]),
    "expanded": (3, lambda tensor: tensor[0, :1].expand(5)),
    "as bytes": (0, lambda tensor: tensor.view(torch.uint8)),
    "conjugated": (0, lambda tensor: tensor.view(torch.complex64).conj()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensor_beyond_its_storage_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    state_dict = {"whole": torch.ones(3), "head.weight": resized(matrix(), *REFUSED[name])}
    for refused in (
        lambda: hfshard.plan_shards(state_dict),
        lambda: hfshard.save_state_dict(state_dict, tmp_path / "out", max_shard_size=100),
    ):
        with pytest.raises(UnstorableTensorError, match=r"Cannot store 'head\.weight': its memory was freed") as raised:
            refused()
        assert raised.value.fqn == "head.weight"
    assert list(tmp_path.iterdir()) == []


def test_tensor_within_its_storage_is_saved(tmp_path: Path) -> None:
    state_dict = {
        "first row": resized(matrix(), 400, lambda tensor: tensor[:1]),
        "strided": resized(matrix(), 3996, lambda tensor: tensor[::9, :99]),
        "nothing": resized(matrix(), 0, lambda tensor: tensor[5:5]),
        "grown": resized(matrix(), 5000, lambda tensor: tensor),
    }

    hfshard.save_state_dict(state_dict, tmp_path)

    loaded = hfshard.load_state_dict(tmp_path)
    assert torch.equal(loaded["first row"], torch.arange(100.0).reshape(1, 100))
    assert torch.equal(loaded["strided"], matrix()[::9, :99])
    assert loaded["nothing"].shape == (0, 100)
    assert torch.equal(loaded["grown"], matrix())


@pytest.mark.compat
def test_freed_weight_of_a_transformers_model_is_refused(tmp_path: Path) -> None:
    model = bert(1.0)
    model.pooler.dense.weight.untyped_storage().resize_(0)

    with pytest.raises(UnstorableTensorError, match=r"'pooler\.dense\.weight': its memory was freed"):
        hfshard.save_model(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("blocking", [True, False])
def test_freed_memory_is_neither_copied_nor_restored_into(blocking: bool, tmp_path: Path) -> None:
    model = nn.Linear(30, 30)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(30)).sum().backward()
    optimizer.step()
    state = TrainingState(model=model, optimizer=optimizer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        hfshard.save_model(model, tmp_path / "model")

        optimizer.state[model.bias]["exp_avg"].untyped_storage().resize_(0)
        with pytest.raises(UnstorableTensorError, match="'bias/exp_avg': its memory was freed"):
            manager.save(2, state, blocking=blocking)
        bias = model.bias.detach().zero_()
        model.weight.untyped_storage().resize_(8)
        with pytest.raises(UnstorableTensorError, match="'weight': its memory was freed"):
            manager.save(2, state, blocking=blocking)
        for load in (lambda: manager.restore(state, 1), lambda: hfshard.load_model(model, tmp_path / "model")):
            with pytest.raises(
                InvalidArgumentError, match="Cannot load into 'weight' of the model: its memory was freed"
            ):
                load()

        assert manager.all_steps() == [1]
    assert torch.equal(bias, torch.zeros(30))


class DefaultDtype:
    """The default dtype, for a while."""

    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "meta": lambda: torch.device("meta"),
    "dtype": DefaultDtype,
}


def of_all_kinds() -> dict[str, torch.Tensor]:
    """Of all kinds that are written or read in a way of their own; in two files of at most 3 MB."""
    return {
        "large": torch.arange(400_000.0),
        "strided": torch.arange(600_000.0).reshape(600, 1000).t(),
        "parameter": nn.Parameter(torch.arange(5.0)),
        "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "double": torch.tensor([1 + 2j], dtype=torch.complex128),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(True),
    }


@pytest.mark.parametrize("writers", ["1", "8"])
@pytest.mark.parametrize("mode", MODES)
def test_modes_do_not_change_what_is_saved(
    mode: str, writers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HFSHARD_WRITERS", writers)
    saved = of_all_kinds()
    hfshard.save_state_dict(saved, tmp_path / "plain", max_shard_size="3MB")

    with MODES[mode]():
        hfshard.save_state_dict(saved, tmp_path / "moded", max_shard_size="3MB")
        hfshard.reshard_checkpoint(tmp_path / "plain", tmp_path / "cast", max_shard_size="1MB", dtype="float16")
        hfshard.reshard_checkpoint(tmp_path / "cast", tmp_path / "cast", max_shard_size="3MB", low_disk=True)
        assert hfshard.verify_checkpoint(tmp_path / "cast").ok

    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert sorted(path.name for path in (tmp_path / "moded").glob("model*")) == names
    for name in names:
        assert (tmp_path / "moded" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


@pytest.mark.parametrize("read", ["mmap", "pread"])
@pytest.mark.parametrize("mode", MODES)
def test_modes_do_not_change_what_is_loaded(mode: str, read: ReadMode, tmp_path: Path) -> None:
    saved = of_all_kinds()
    hfshard.save_state_dict(saved, tmp_path, max_shard_size="3MB")
    model = nn.Linear(1000, 600, bias=False)

    with MODES[mode]():
        loaded = hfshard.load_state_dict(tmp_path, read=read, verify="full")
        hfshard.save_model(model, tmp_path / "model")
        hfshard.load_model(model, tmp_path / "model", read=read)

    assert loaded.keys() == saved.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == saved[name].dtype
        assert tensor.device == torch.device("cpu")
        assert tensor.is_inference() == (mode == "inference")
        assert torch.equal(tensor, saved[name].detach())
    assert not model.weight.is_inference()
    assert model.weight.requires_grad


def test_training_checkpoint_is_saved_and_restored_in_inference_mode(tmp_path: Path) -> None:
    model = nn.Linear(300, 1000)
    with torch.inference_mode(), hfshard.CheckpointManager(tmp_path) as manager:
        state = hfshard.training.TrainingState(model=model)
        manager.save(1, state, blocking=False)
        manager.save(2, state, blocking=False)
        manager.wait_until_finished()
        before = model.weight.clone()
        model.weight.zero_()
        assert manager.restore_latest(state) == 2
        assert torch.equal(model.weight, before)


PATTERN = "model.fp16{suffix}.safetensors"
INDEX = "model.fp16.safetensors.index.json"


def state_dict(value: float = 1.0) -> dict[str, torch.Tensor]:
    """Two names for one tensor, and two more tensors; of 4000 bytes each."""
    shared = torch.full((1000,), value)
    return {"a": shared, "b": shared, "c": torch.full((1000,), value + 1), "d": torch.full((1000,), value + 2)}


def written(directory: Path, max_shard_size: int, pattern: str = PATTERN) -> Path:
    """The directory, with what huggingface_hub writes."""
    directory.mkdir()
    metadata = {"author": "me"}
    save_torch_state_dict(
        state_dict(), directory, filename_pattern=pattern, max_shard_size=max_shard_size, metadata=metadata
    )
    return directory


def check_tied(loaded: dict[str, torch.Tensor], value: float = 1.0) -> None:
    expected = state_dict(value)
    assert loaded.keys() == expected.keys()
    assert loaded["a"] is loaded["b"]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("max_shard_size", [5000, 10**6], ids=["sharded", "single"])
@pytest.mark.compat
def test_variant_and_shared_names_are_read(max_shard_size: int, tmp_path: Path) -> None:
    directory = written(tmp_path / "theirs", max_shard_size)
    assert (directory / INDEX).exists() == (max_shard_size == 5000)

    check_tied(hfshard.load_state_dict(directory, variant="fp16"))
    assert list(hfshard.load_state_dict(directory, variant="fp16", keys="b")) == ["b"]
    assert hfshard.verify_checkpoint(directory, variant="fp16").ok
    index = hfshard.reshard_checkpoint(directory, tmp_path / "ours", max_shard_size="6KB", variant="fp16")
    assert index.tied_names == {"b": "a"}
    assert index.metadata == {"author": "me"}
    check_tied(hfshard.load_state_dict(tmp_path / "ours", variant="fp16", verify="full"))


@pytest.mark.compat
def test_save_replaces_the_variant_of_huggingface_hub(tmp_path: Path) -> None:
    directory = written(tmp_path / "out", 5000)
    hfshard.save_state_dict({"other": torch.ones(2)}, directory)

    hfshard.save_state_dict(state_dict(5.0), directory, variant="fp16", max_shard_size="13KB")

    check_tied(hfshard.load_state_dict(directory, variant="fp16", verify="full"), 5.0)
    assert INDEX not in {path.name for path in directory.iterdir()}
    assert sorted(path.name for path in directory.glob("model.fp16-*")) == [
        f"model.fp16-0000{number}-of-00002.safetensors" for number in (1, 2)
    ]
    hfshard.save_state_dict(state_dict(6.0), directory, variant="fp16")
    assert sorted(path.name for path in directory.glob("model*")) == ["model.fp16.safetensors", "model.safetensors"]
    check_tied(hfshard.load_state_dict(directory, variant="fp16"), 6.0)
    assert list(hfshard.load_state_dict(directory)) == ["other"]


@pytest.mark.compat
def test_variant_of_huggingface_hub_is_pushed_and_pulled(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    hfshard.push_checkpoint(written(tmp_path / "theirs", 5000), str(hub))
    check_tied(hfshard.load_state_dict(hub, variant="fp16"))

    hfshard.pull_checkpoint(str(hub), tmp_path / "pulled", variant="fp16")
    check_tied(hfshard.load_state_dict(tmp_path / "pulled", variant="fp16"))

    hfshard.save_state_dict(state_dict(3.0), tmp_path / "new", variant="fp16")
    hfshard.push_checkpoint(tmp_path / "new", str(hub))
    check_tied(hfshard.load_state_dict(hub, variant="fp16"), 3.0)
    snapshot = hfshard.pull_checkpoint(str(hub), variant="fp16")
    assert [path.name for path in Path(snapshot).glob("model*")] == ["model.fp16.safetensors"]


@pytest.mark.compat
def test_shared_names_of_safetensors_own_save_are_read(tmp_path: Path) -> None:
    model = nn.ModuleDict({"x": nn.Linear(3, 3, bias=False), "y": nn.Linear(3, 3, bias=False)})
    model["y"].weight = model["x"].weight
    save_model(model, str(tmp_path / "model.safetensors"))

    loaded = hfshard.load_state_dict(tmp_path)

    assert loaded.keys() == {"x.weight", "y.weight"}
    assert loaded["x.weight"] is loaded["y.weight"]


@pytest.mark.compat
def test_a_size_that_is_the_name_of_a_tensor_ties_nothing(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    index = {"metadata": {"total_size": "a", "b": "a"}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    assert sorted(hfshard.load_state_dict(tmp_path)) == ["a", "b"]
