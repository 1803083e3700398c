"""The weights in what programs save: found under the usual keys, and never by a guess where there are several."""

from __future__ import annotations

import io
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfshard
from hfshard.errors import (
    AmbiguousWeightsError,
    DamagedCheckpointError,
    InvalidArgumentError,
    StateDictMismatchError,
    UnsafePickleError,
)
from hfshard.viewing.inspection import inspect_checkpoint

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]


def net(seed: int = 0) -> nn.Module:
    """A small module with buffers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


MODEL = net()
STATE = MODEL.state_dict()
AVERAGE = net(1).state_dict()


def trained() -> dict[str, Any]:
    """A run's other parts."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {
        "epoch": 3,
        "best_acc1": torch.tensor(0.5),
        "optimizer_state_dict": optimizer.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng_state": {"cpu": torch.get_rng_state()},
        "metrics": {"loss": torch.tensor(1.0)},
    }


def prefixed(prefix: str) -> dict[str, torch.Tensor]:
    """The state dict of a wrapper, or of a module that has this one as a child."""
    return {f"{prefix}{name}": tensor for name, tensor in STATE.items()}


KINDS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "a state dict": (None, STATE),
    "DataParallel": (None, nn.DataParallel(MODEL).state_dict()),
    "torch.compile": (None, prefixed("_orig_mod.")),
    "both": (None, prefixed("module._orig_mod.")),
    "the tutorial": ("model_state_dict", {"model_state_dict": STATE, "loss": 0.5, **trained()}),
    "ImageNet": ("state_dict", {"arch": "resnet18", "state_dict": prefixed("module."), **trained()}),
    "torchvision": ("model", {"model": STATE, "lr_scheduler": {"last_epoch": 3}, **trained()}),
    "mmcv": ("state_dict", {"meta": {"epoch": 1, "hooks": [1]}, "state_dict": STATE, **trained()}),
    "timm": ("state_dict", {"arch": "vit", "version": 2, "state_dict": STATE, "amp_scaler": {"scale": 1.0}}),
    "fairseq": ("model", {"cfg": {"lr": [0.1]}, "model": STATE, "last_optimizer_state": {"state": {0: STATE}}}),
    "net": ("net", {"net": STATE, "acc": 0.9}),
    "network": ("network", {"network": STATE}),
    "DeepSpeed": ("module", {"module": STATE, "param_shapes": [{"0.weight": torch.Size([4, 3])}], "dp_world_size": 1}),
    "weights": ("weights", {"weights": STATE, "step": 7}),
    "Real-ESRGAN": ("params", {"params": STATE}),
    "an average alone": ("ema", {"ema": STATE}),
    "HiFi-GAN": ("generator", {"generator": STATE}),
    "nested": ("model.state_dict", {"model": {"state_dict": STATE, "name": "net"}, **trained()}),
    "Catalyst": ("model_state_dict", {"model_state_dict": STATE, "criterion_state_dict": {}, "epoch": 1}),
    "detectron2": ("model", {"model": STATE, "iteration": 9, "__author__": "x", "optimizer": trained()["optimizer"]}),
    "an unusual key": ("backbone", {"backbone": STATE, **trained()}),
    "an average that is off": ("model", {"model": STATE, "model_ema": None, "ema": {}}),
}


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_found(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    key, value = KINDS[name]
    path = tmp_path / "checkpoint.pth.tar"
    torch.save(value, path, _use_new_zipfile_serialization=len(name) % 2 == 0)

    model = net(2)
    with caplog.at_level(logging.INFO, logger="hfshard"):
        hfshard.load_model(model, path)

    assert all(torch.equal(tensor, STATE[name]) for name, tensor in model.state_dict().items())
    said = [record.getMessage() for record in caplog.records if record.name.endswith("pickle_file")]
    assert said == ([] if key is None else [f"The weights in '{path}' are under the key '{key}'."])
    if key is not None:
        assert list(hfshard.load_state_dict(path, key=key)) == list(hfshard.load_state_dict(path))


SEVERAL: dict[str, tuple[dict[str, Any], list[str]]] = {
    "torchvision": ({"model": STATE, "model_ema": AVERAGE, "epoch": 1}, ["model", "model_ema"]),
    "timm": ({"state_dict": STATE, "state_dict_ema": AVERAGE}, ["state_dict", "state_dict_ema"]),
    "DINO": ({"student": STATE, "teacher": AVERAGE, "epoch": 1}, ["student", "teacher"]),
    "GAN": ({"generator": STATE, "discriminator": AVERAGE}, ["generator", "discriminator"]),
    "Real-ESRGAN": ({"params": STATE, "params_ema": AVERAGE}, ["params", "params_ema"]),
    "nested": ({"model": STATE, "ema": {"state_dict": AVERAGE, "decay": 0.9}}, ["model", "ema.state_dict"]),
    "unusual": ({"encoder": STATE, "decoder": AVERAGE, **trained()}, ["encoder", "decoder"]),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_are_listed_and_not_guessed(tmp_path: Path, name: str) -> None:
    value, keys = SEVERAL[name]
    path = tmp_path / "checkpoint.pt"
    torch.save(value, path)
    model = net(2)
    before = model.state_dict()["0.weight"].clone()

    with pytest.raises(AmbiguousWeightsError) as caught:
        hfshard.load_model(model, path)

    assert caught.value.keys == tuple(keys)
    assert f"'{keys[0]}' (7 tensors, 136 bytes), '{keys[1]}' (7 tensors, 136 bytes)" in str(caught.value)
    assert f"load_state_dict(..., key='{keys[0]}'), or --key {keys[0]} on the command line" in str(caught.value)
    assert torch.equal(model.state_dict()["0.weight"], before)
    hfshard.load_model(model, path, key=keys[1])
    assert torch.equal(model.state_dict()["0.weight"], AVERAGE["0.weight"])
    assert list(hfshard.load_state_dict(path, key=keys[0], like={"0.bias": torch.empty(4)})) == ["0.bias"]
    assert hfshard.verify_checkpoint(path).ok


def test_one_dict_under_two_keys_is_one(tmp_path: Path) -> None:
    torch.save({"model": STATE, "state_dict": STATE}, tmp_path / "twice.pt")
    assert list(hfshard.load_state_dict(tmp_path / "twice.pt")) == NAMES


def test_a_key_may_have_dots_of_its_own(tmp_path: Path) -> None:
    torch.save({"a.b": {"c": STATE}, "a": {"b": {"c": AVERAGE}, "x": 1}}, tmp_path / "dots.pt")
    assert torch.equal(hfshard.load_state_dict(tmp_path / "dots.pt", key="a.b.c")["0.bias"], STATE["0.bias"])


@pytest.mark.parametrize(
    "value, key, problem",
    [
        ({"model": STATE}, "ema", r"has nothing under key='ema'\. Its weights: 'model' \(7 tensors, 136 bytes\)"),
        ({"model": STATE, "epoch": 3}, "epoch", "has a int under key='epoch'"),
        (STATE, "model", "has nothing under key='model'. Leave out key if all of the file is weights"),
        (STATE, "0.weight", "has a Tensor under key='0.weight'"),
    ],
)
def test_a_key_that_leads_nowhere_is_refused(tmp_path: Path, value: Any, key: str, problem: str) -> None:
    torch.save(value, tmp_path / "checkpoint.pt")
    with pytest.raises(InvalidArgumentError, match=problem):
        hfshard.load_state_dict(tmp_path / "checkpoint.pt", key=key)


def test_a_key_is_for_one_file_of_torch_save(tmp_path: Path) -> None:
    hfshard.save_state_dict(STATE, tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(InvalidArgumentError, match=r"has no key='model': only single files of torch\.save"):
            hfshard.load_state_dict(path, key="model")
    with pytest.raises(InvalidArgumentError, match="key must be text"):
        hfshard.load_state_dict(tmp_path, key=b"model")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value, problem",
    [
        (
            trained()["optimizer"],
            "contains no weights that hfshard recognizes: its entries are 'state', 'param_groups'",
        ),
        ({"model": {"a": torch.ones(2), 3: torch.ones(1)}}, "under 'model': its entry 'int' has a name of type int"),
        ({"a": torch.ones(2, device="meta")}, "its entry 'a' is a tensor without data"),
        ({"a": torch.eye(2).to_sparse()}, "its entry 'a' is a sparse or nested tensor"),
        ([torch.ones(2)], "contains a list, not a state dict"),
    ],
)
def test_what_is_no_weights_is_named(tmp_path: Path, value: Any, problem: str) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save(value, path)

    with pytest.raises(DamagedCheckpointError, match=problem):
        hfshard.load_state_dict(path)
    report = hfshard.verify_checkpoint(path)
    assert [found.file for found in report.problems] == [str(path)]


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("epoch", 3, "is a int, not a tensor"),
        ("0._extra_state", {"scale": torch.ones(3)}, "is a dict, not a tensor"),
        ("meta", torch.ones(2, device="meta"), "is a tensor without data"),
        ("sparse", torch.eye(2).to_sparse(), "is a sparse or nested tensor"),
    ],
)
@pytest.mark.parametrize("key", [None, "model"])
def test_an_entry_that_is_no_tensor_is_a_name_and_is_never_lost(
    name: str, value: Any, problem: str, key: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.pt"
    entries = {**STATE, name: value}
    torch.save(entries if key is None else {key: entries}, path)

    assert list(hfshard.load_state_dict(path, keys=NAMES)) == NAMES
    _, info = hfshard.load_model(net(2), path, strict=False, output_loading_info=True)
    assert info["unexpected_keys"] == {name}
    with pytest.raises(StateDictMismatchError, match=f"1 unexpected: {name}"):
        hfshard.load_model(net(2), path)
    for use in (
        hfshard.load_state_dict,
        inspect_checkpoint,
        partial(hfshard.reshard_checkpoint, dst=tmp_path / "out"),
        partial(hfshard.load_state_dict, keys=[name]),
    ):
        with pytest.raises(DamagedCheckpointError, match=f"its entry '{name}' {problem}"):
            use(path)
    assert not (tmp_path / "out").exists()
    problems = hfshard.verify_checkpoint(path).problems
    assert [(found.file, found.tensor) for found in problems] == [(str(path), name)]


def test_an_entry_that_is_no_tensor_but_that_the_module_has_is_refused(tmp_path: Path) -> None:
    torch.save({**STATE, "0.bias": 3}, tmp_path / "checkpoint.pt")

    with pytest.raises(DamagedCheckpointError, match=r"its entry '0\.bias' is a int"):
        hfshard.load_model(net(2), tmp_path / "checkpoint.pt", strict=False)


class Whole(nn.Module):
    """A module that is saved with its class."""


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "older"])
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_an_object_saved_whole_is_named(tmp_path: Path, is_zip: bool) -> None:
    torch.save(Whole(), tmp_path / "model.pt", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(UnsafePickleError) as caught:
        hfshard.load_state_dict(tmp_path / "model.pt")

    assert caught.value.actual == f"{__name__}.Whole"
    assert f"it is a complete '{__name__}.Whole' object" in str(caught.value)
    assert "weights_only=False).state_dict()" in str(caught.value)


def test_what_is_beside_the_weights_and_refused_is_named(tmp_path: Path) -> None:
    path = tmp_path / "args.pt"
    torch.save({"model": STATE, "args": io.StringIO}, path)
    with pytest.raises(UnsafePickleError, match=r"its pickle asks for '_?io\.StringIO'.*python -c 'import torch; "):
        hfshard.load_state_dict(path)


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_quantized_tensors_are_loaded_and_not_converted(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8)
    torch.save({"a": quantized}, tmp_path / "quantized.pt")

    assert torch.equal(hfshard.load_state_dict(tmp_path / "quantized.pt")["a"].dequantize(), quantized.dequantize())
    with pytest.raises(hfshard.errors.UnstorableTensorError):
        hfshard.reshard_checkpoint(tmp_path / "quantized.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
