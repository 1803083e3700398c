"""Modes of torch that belong to a thread change neither what is saved nor what is loaded, nor whether it works."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import nn

import hfshard
from hfshard.shards.read_tensors import ReadMode


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


def tensors() -> dict[str, torch.Tensor]:
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
    saved = tensors()
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
    saved = tensors()
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
