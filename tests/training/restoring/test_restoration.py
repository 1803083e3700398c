"""A checkpoint is chosen, read and compared; what differs is named with what to do, and nothing is changed by it."""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import DataLoader

import hfshard
from hfshard.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidArgumentError,
    StateDictMismatchError,
    UnstorableTensorError,
)
from hfshard.format.index import FileDigest
from hfshard.training import CheckpointManager, Gradients, ResumableDataLoader, TrainingState
from hfshard.training.restoring.restoration import read_set
from hfshard.training.run.manifest import CheckpointManifest, folder_at, read_manifest, small_record
from tests.flows.resume_runs import ema
from tests.training import fingerprint, ingredients

STEP = 2


class Run:
    """The parts of a run by name, each of which a test may build in another way."""

    def __init__(self, seed: int, **changes: Callable[..., Any]) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        make: dict[str, Any] = {"model": ingredients.mlp, "optimizer": _adamw, "scheduler": _step_lr, "loader": _loader}
        make |= changes
        self.model: nn.Module = make["model"]()
        self.optimizer: Optimizer = make["optimizer"](self.model)
        self.scheduler = make["scheduler"](self.optimizer)
        self.members: dict[str, Any] = {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler,
            "loader": make["loader"](), "ema": ema(self.model),
            "first": Counter(), "second": Counter(),
        }  # fmt: skip
        for name in changes.keys() - {"model", "optimizer", "scheduler", "loader"}:
            self.members[name] = changes[name]()
        self.members = {name: one for name, one in self.members.items() if one is not None}
        self.state = TrainingState(**self.members)

    def train(self) -> None:
        for batch, _ in zip(self.members["loader"], range(STEP)):
            self.optimizer.zero_grad()
            ingredients.squared_error(self.model, batch).backward()
            self.optimizer.step()
            self.scheduler.step()
            self.members["ema"].update_parameters(self.model)
            self.members["first"].count += 1
            self.members["second"].count += 2

    def everything(self, *without: str) -> dict[str, str]:
        """All that a restore could change."""
        found = dict(fingerprint.of_rngs()) if "rng" not in without else {}
        if "optimizer" not in without:
            found |= fingerprint.of_optimizer(self.optimizer, self.model, "optimizer")
        for name, one in self.members.items():
            if name not in ("optimizer", *without):
                found |= fingerprint.flatten(one.state_dict(), name)
        return found


class Counter:
    """A user's object."""

    def __init__(self, refuses: bool = False) -> None:
        self.count, self.refuses = 0, refuses

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses and state["count"]:
            raise RuntimeError("not with me")
        self.count = state["count"]


def _groups(*groups: str) -> Callable[[nn.Module], Optimizer]:
    """AdamW with groups of parameters; the last has another rate."""

    def make(model: nn.Module) -> Optimizer:
        named = dict(model.named_parameters())  # a shallower model has not all of them
        made: list[dict[str, Any]] = [
            {"params": [named[name] for name in one.split() if name in named]} for one in groups
        ]
        return torch.optim.AdamW([*made[:-1], {**made[-1], "lr": 0.01}])

    return make


_adamw = _groups("first.weight first.bias", "last.weight last.bias")


def _step_lr(optimizer: Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, 2)


def _loader(length: int = 10, **options: Any) -> ResumableDataLoader[ingredients.Pair]:
    return ResumableDataLoader(ingredients.Points(length), **{"batch_size": 2, "shuffle": True, "seed": 3, **options})


def _with(**modules: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A model some of whose modules are other ones, or new."""

    def make() -> nn.Module:
        model = ingredients.mlp()
        for name, module in modules.items():
            model.register_module(name, module())
        return model

    return make


_shallower = _with(last=lambda: nn.Linear(8, 1, bias=False))


@dataclass(frozen=True, slots=True)
class Other:
    """How the run that restores differs from the one that was saved."""

    changes: dict[str, Callable[..., Any]]
    words: tuple[str, ...]
    """In the message."""
    unfit: tuple[str, ...]
    """The parts that strict=False leaves as they were built."""


_MODEL = ("model", "optimizer", "ema")
_RATES = ("optimizer", "scheduler")
OTHERS = {
    "wider-model": Other(
        {"model": _with(first=lambda: nn.Linear(4, 9), last=lambda: nn.Linear(9, 1))},
        ("'model'", "first.weight", "[8, 4]", "[9, 4]"), _MODEL,
    ),
    "model-with-more": Other(
        {"model": _with(extra=lambda: nn.Linear(1, 1))}, ("'model'", "extra.weight", "extra.bias"), ("model", "ema")
    ),
    "model-with-less": Other({"model": _shallower}, ("'model'", "last.bias"), _MODEL),
    "other-dtype": Other({"model": ingredients.mlp_bf16}, ("'model'", "first.weight", "float32", "bfloat16"), _MODEL),
    "one-group": Other(
        {"optimizer": _groups("first.weight first.bias last.weight last.bias")},
        ("'optimizer'", "had 2 groups", "has 1"), _RATES,
    ),
    "three-groups": Other(
        {"optimizer": _groups("first.weight", "first.bias", "last.weight last.bias")},
        ("'optimizer'", "had 2 groups", "has 3"), _RATES,
    ),
    "missing-group": Other(
        {"optimizer": _groups("first.weight first.bias")}, ("'optimizer'", "had 2 groups", "last.weight"), _RATES
    ),
    "moved-parameter": Other(
        {"optimizer": _groups("first.weight", "first.bias last.weight last.bias")},
        ("'optimizer'", "'first.bias' was in another group"), _RATES,
    ),
    "other-optimizer": Other(
        {"optimizer": lambda model: torch.optim.SGD(_adamw(model).param_groups, lr=0.1)},
        ("'optimizer'", "SGD", "AdamW"), ("optimizer",),
    ),
    "other-scheduler": Other(
        {"scheduler": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9)},
        ("'scheduler'", "StepLR", "ExponentialLR"), ("scheduler",),
    ),
    "other-batch-size": Other(
        {"loader": lambda: _loader(batch_size=3)}, ("'loader'", "batch_size 2", "has 3"), ("loader",)
    ),
    "other-seed": Other({"loader": lambda: _loader(seed=4)}, ("'loader'", "seed 3", "has 4"), ("loader",)),
    "other-length": Other(
        {"loader": lambda: _loader(11)}, ("'loader'", "length of the dataset 10", "has 11"), ("loader",)
    ),
    "missing-in-the-checkpoint": Other({"third": Counter}, ("has no 'third'",), ("third",)),
    "missing-in-the-state": Other({"second": lambda: None}, ("'second'", "second=..."), ()),
    "another-kind": Other({"second": lambda: nn.Linear(2, 2)}, ("'second'",), ("second",)),
}  # fmt: skip
Saved = tuple[Path, dict[str, str]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A checkpoint, and the numbers that are in it."""
    root, run = tmp_path_factory.mktemp("run"), Run(1)
    run.train()
    with CheckpointManager(root) as manager:
        manager.save(STEP, run.state)
    return root, run.everything()


@pytest.mark.parametrize("strict", [True, False])
def test_a_run_that_is_the_same_is_restored(saved: Saved, strict: bool) -> None:
    run = Run(2)
    restored = CheckpointManager(saved[0]).restore(run.state, strict=strict)
    assert (restored, restored.differences) == (STEP, ())
    assert run.everything() == saved[1]


@pytest.mark.parametrize("name", OTHERS)
def test_another_run_is_refused_by_name_and_left_as_it_was(name: str, saved: Saved) -> None:
    other = OTHERS[name]
    run = Run(2, **other.changes)
    before = run.everything()
    with pytest.raises(StateDictMismatchError) as caught:
        CheckpointManager(saved[0]).restore(run.state)
    message = str(caught.value)
    assert not [word for word in (*other.words, "checkpoint-00000002") if word not in message], message
    assert "Build" in message or "Pass" in message or "pass" in message, message
    assert run.everything() == before


@pytest.mark.parametrize("name", OTHERS)
def test_not_strict_restores_what_fits_and_reports_the_rest(
    name: str, saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    other = OTHERS[name]
    run = Run(2, **other.changes)
    with caplog.at_level(logging.WARNING, "hfshard"):
        restored = CheckpointManager(saved[0]).restore(run.state, strict=False)
    assert restored == STEP
    for said in (" ".join(restored.differences), " ".join(record.getMessage() for record in caplog.records)):
        assert not [word for word in other.words if word not in said], said
    kept = run.everything(*other.unfit)
    expected = {path: text for path, text in saved[1].items() if path in kept}
    assert kept == expected and len(expected) > len(dict(fingerprint.of_rngs()))


def test_not_strict_loads_the_weights_that_fit_beside_those_that_do_not(saved: Saved) -> None:
    run, same = Run(2, model=_shallower), Run(3)
    CheckpointManager(saved[0]).restore(same.state)
    CheckpointManager(saved[0]).restore(run.state, strict=False)
    for name in ("first.weight", "first.bias", "last.weight"):
        assert torch.equal(run.model.get_parameter(name), same.model.get_parameter(name))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["first", "second", "loader"])
def test_an_object_that_refuses_its_state_leaves_all_as_it_was(name: str, strict: bool, saved: Saved) -> None:
    run = Run(2) if name == "loader" else Run(2, **{name: lambda: Counter(refuses=True)})
    if name == "loader":
        run.members["loader"].load_state_dict = Counter(refuses=True).load_state_dict
    before = run.everything()
    with pytest.raises((StateDictMismatchError, RuntimeError, KeyError), match=f"'{name}'"):
        CheckpointManager(saved[0]).restore(run.state, strict=strict)
    assert run.everything() == before


def test_gradients_of_before_are_dropped_by_a_restore(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainingState(model=model))
        (model(torch.ones(1, 2)).sum() * float("nan")).backward()
        manager.restore_latest(TrainingState(model=model))
    assert model.weight.grad is None


class Branches(nn.Module):
    """Layers of which each step trains one, so that the others have no gradient, or one of zeros."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, step: int) -> torch.Tensor:
        layer = self.layers[step % len(self.layers)]
        x = torch.tensor([step]) if isinstance(layer, nn.Embedding) else torch.full((1, 2), float(step))
        total: torch.Tensor = layer(x).sum()
        return total


def _linear_branches() -> tuple[Branches, Optimizer]:
    model = Branches(*(nn.Linear(2, 1) for _ in range(3)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _sparse_branches() -> tuple[Branches, Optimizer]:
    model = Branches(*(nn.Embedding(9, 2, sparse=True) for _ in range(3)))
    return model, torch.optim.SparseAdam([*model.parameters()], lr=0.1)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("saves_before_zero_grad", [True, False])
@pytest.mark.parametrize("build", [_linear_branches, _sparse_branches])
def test_a_parameter_without_a_gradient_in_some_steps_is_resumed_exactly(
    tmp_path: Path, build: Callable[[], tuple[Branches, Optimizer]], saves_before_zero_grad: bool, set_to_none: bool
) -> None:
    """An optimizer skips a parameter without a gradient, but one of zeros it decays, and moves by its momentum."""

    def train(first: int, model: Branches, optimizer: Optimizer, manager: CheckpointManager | None = None) -> None:
        for step in range(first, 6):
            if saves_before_zero_grad:
                optimizer.zero_grad(set_to_none=set_to_none)
            model(step).backward()
            optimizer.step()
            if not saves_before_zero_grad:
                optimizer.zero_grad(set_to_none=set_to_none)
            if manager is not None and step == 1:  # the third layer has had no gradient yet
                manager.save(step, TrainingState(model=model, optimizer=optimizer))

    torch.manual_seed(0)
    model, optimizer = build()
    manager = CheckpointManager(tmp_path)
    train(0, model, optimizer, manager)
    again, its_optimizer = build()

    manager.restore(TrainingState(model=again, optimizer=its_optimizer), 1)
    assert again.layers[2].weight.grad is None
    train(2, again, its_optimizer)

    for own, resumed in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(own, resumed)


def test_gradients_of_a_checkpoint_that_does_not_note_them_are_none(tmp_path: Path) -> None:
    """Such are those of earlier versions, and those that `hfshard convert` makes."""
    model, optimizer = _linear_branches()
    model(0).backward()
    state = TrainingState(model=model, optimizer=optimizer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        _edit_training_state(tmp_path / "checkpoint-00000001", lambda nested: nested.pop("gradients"))
        manager.restore(state, 1)
        assert [one.grad for one in model.parameters()] == [None] * 6


@pytest.mark.parametrize("gradients", [{"layers.0.weight": 3}, {"layers.0.weight": "1"}, [], 7])
def test_gradients_that_a_save_does_not_note_are_damage(tmp_path: Path, gradients: Any) -> None:
    model, optimizer = _linear_branches()
    state = TrainingState(model=model, optimizer=optimizer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        _edit_training_state(tmp_path / "checkpoint-00000001", lambda nested: nested.update(gradients=gradients))
        with pytest.raises(DamagedCheckpointError, match="the state of 'optimizer' is not what hfshard writes"):
            manager.restore(state, 1)


def _edit_training_state(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the optimizer's state in a checkpoint, whose manifest states the file as it is then."""
    path = checkpoint / "training_state.json"
    nested = json.loads(path.read_bytes())
    change(nested["components"]["optimizer"]["state"])
    path.write_text(json.dumps(nested))
    manifest = read_manifest(str(checkpoint))
    files = manifest.files | {path.name: small_record(path.read_bytes())}
    (checkpoint / "checkpoint.json").write_bytes(replace(manifest, files=files).to_json())


def test_a_restore_without_the_optimizer_creates_no_gradients(tmp_path: Path) -> None:
    model, optimizer = _linear_branches()
    model(0).backward()
    state = TrainingState(model=model, optimizer=optimizer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        manager.restore(state, 1, without=["optimizer"])
    assert model.layers[0].weight.grad is None


def test_a_scaler_forgets_what_was_unscaled_before_a_restore(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    state = TrainingState(model=model, optimizer=optimizer, scaler=scaler)

    def backward() -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.unscale_(optimizer)

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        manager.restore(state, 1)  # the scaler was not used yet
        backward()
        manager.restore(state, 1)
    backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0, 1.0]]
    assert scaler.get_scale() == 4.0


def test_a_refused_restore_leaves_a_scaler_as_it_was(tmp_path: Path) -> None:
    """Its gradients stay unscaled: were they forgotten, the step would divide them once more."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    refuses = Counter(refuses=True)
    refuses.count = 1
    state = TrainingState(model=model, optimizer=optimizer, scaler=scaler, refuses=refuses)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        nn.init.zeros_(model.weight)
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(StateDictMismatchError, match="not with me"):
            manager.restore(state, 1)
    scaler.step(optimizer)
    assert model.weight.tolist() == [[-1.0, -1.0]]


def test_a_scaler_that_was_on_is_refused_where_it_is_off(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainingState(scaler=torch.amp.GradScaler("cpu")))
        with pytest.raises(StateDictMismatchError, match="'scaler' is a GradScaler that is off"):
            manager.restore_latest(TrainingState(scaler=torch.amp.GradScaler("cpu", enabled=False)))


def model_of(value: float) -> nn.Linear:
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


@pytest.fixture
def run(tmp_path: Path) -> CheckpointManager:
    """Steps 1, 2 and 3, of which the second is the best."""
    manager = CheckpointManager(tmp_path / "run", keep_best="loss")
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        manager.save(step, TrainingState(model=model_of(step)), metric=loss)
    return manager


def test_the_best_and_the_latest_are_restored_and_found_by_these_words(run: CheckpointManager) -> None:
    model = model_of(0)
    state = TrainingState(model=model)

    assert (run.restore(state, "best"), model.weight[0, 0].item()) == (2, 2.0)
    assert (run.restore(state, "latest"), model.weight[0, 0].item()) == (3, 3.0)
    assert [Path(run.path_of(word)).name for word in ("best", "latest")] == [
        "checkpoint-00000002",
        "checkpoint-00000003",
    ]
    hfshard.load_model(model, run.path_of("best"))
    assert model.weight[0, 0].item() == 2.0


def test_words_that_name_no_checkpoint_are_refused(run: CheckpointManager, tmp_path: Path) -> None:
    state = TrainingState(model=model_of(0))
    with pytest.raises(InvalidArgumentError, match="keep_best="):
        CheckpointManager(run.root).restore(state, "best")
    with pytest.raises(CheckpointNotFoundError, match=r"There is no checkpoint with the metric 'other' in"):
        CheckpointManager(run.root, keep_best="other").restore(state, "best")
    with pytest.raises(CheckpointNotFoundError, match=r"There is no checkpoint in '.*empty'"):
        CheckpointManager(tmp_path / "empty").restore(state, "latest")
    with pytest.raises(InvalidArgumentError, match="'best' or 'latest', got 'newest'"):
        run.path_of("newest")  # type: ignore[arg-type]


def test_the_error_for_weights_of_a_run_names_its_checkpoints(run: CheckpointManager) -> None:
    names = "checkpoint-00000003, checkpoint-00000002, checkpoint-00000001"
    with pytest.raises(CheckpointNotFoundError, match=rf"have weights, {names}: pass one of them, as '.*-00000003'"):
        hfshard.load_model(model_of(0), run.root)


def test_parts_that_are_left_out_stay_as_they_were_built(tmp_path: Path) -> None:
    def loader(batch_size: int) -> Any:
        return ResumableDataLoader(list(range(8)), batch_size, shuffle=True)  # type: ignore[arg-type]

    manager, first = CheckpointManager(tmp_path), loader(2)
    next(iter(first))
    manager.save(1, TrainingState(model=model_of(1), loader=first))
    model, other = model_of(0), loader(4)
    state = TrainingState(model=model, loader=other)

    with pytest.raises(StateDictMismatchError, match=r"restore\(state, ..., without=\['loader'\]\)"):
        manager.restore(state, 1)
    manager.restore(state, 1, without=["loader"])

    assert (model.weight[0, 0].item(), other.batch) == (1.0, 0)
    nn.init.zeros_(model.weight)
    assert manager.restore_latest(state, without=["loader"]) == 1
    assert model.weight[0, 0].item() == 1.0
    with pytest.raises(InvalidArgumentError, match=r"no part 'lodaer' to leave out. It has: model, loader"):
        manager.restore(state, 1, without=["lodaer"])
    with pytest.raises(InvalidArgumentError, match=r"must be a list of names, such as \['loader'\]"):
        manager.restore(state, 1, without="loader")
    with pytest.raises(StateDictMismatchError, match="strict=False to leave it out"):
        manager.restore(TrainingState(model=model), 1)


def test_a_model_that_is_left_out_still_names_parameters(tmp_path: Path) -> None:
    def parts() -> TrainingState:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        return TrainingState(model=model, optimizer=optimizer, gradients=Gradients(model))

    manager = CheckpointManager(tmp_path / "run")
    state, fresh = parts(), parts()
    state.components["optimizer"].step()
    manager.save(1, state)
    before = fresh.components["model"].weight.detach().clone()
    assert manager.restore(fresh, 1, without=["model", "gradients"]) == 1

    model = fresh.components["model"]
    assert torch.equal(model.weight, before)
    assert model.weight.grad is not None
    assert fresh.components["optimizer"].state[model.weight]["step"] == 2


def test_a_generator_is_a_part(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    torch.rand(2, generator=generator)
    manager = CheckpointManager(tmp_path)
    manager.save(1, TrainingState(noise=generator))
    expected = torch.rand(2, generator=generator)
    fresh = torch.Generator().manual_seed(4)

    manager.restore(TrainingState(noise=fresh), 1)

    assert torch.equal(torch.rand(2, generator=fresh), expected)


def test_an_object_in_the_place_of_the_optimizer_is_restored(tmp_path: Path) -> None:
    saved: dict[str, Any] = {"optimizer": ingredients.Keeps(torch.ones(2))}
    fresh: dict[str, Any] = {"optimizer": ingredients.Keeps(torch.zeros(2))}
    manager = CheckpointManager(tmp_path)
    manager.save(1, TrainingState(**saved))

    assert manager.restore(TrainingState(**fresh), 1) == 1
    assert fresh["optimizer"].tensor.tolist() == [1.0, 1.0]


def test_what_can_not_be_saved_is_told_what_to_write_instead(tmp_path: Path) -> None:
    manager, model = CheckpointManager(tmp_path / "run"), model_of(1)
    parts: Any = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    with pytest.raises(InvalidArgumentError, match=r"Write: TrainingState\(model=..., optimizer=...\)"):
        manager.save(1, parts)
    with pytest.raises(InvalidArgumentError, match=r"got a Linear. Write: TrainingState\(model=model, optimizer=opt"):
        manager.restore(model)  # type: ignore[arg-type]
    with pytest.raises(UnstorableTensorError, match=r"'extra/args' is a argparse.Namespace.*vars\(args\)"):
        manager.save(1, TrainingState(model=model), extra={"args": argparse.Namespace(lr=1)})
    with pytest.raises(UnstorableTensorError, match=r"'extra/place'.*build the object from them after a restore"):
        manager.save(1, TrainingState(model=model), extra={"place": tmp_path})
    with pytest.raises(InvalidArgumentError, match=r"'train_loader' is a DataLoader.*ResumableDataLoader"):
        TrainingState(train_loader=DataLoader([1, 2]))  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def reader(place: Path, *names: str) -> Callable[..., dict[str, torch.Tensor]]:
    manifest = CheckpointManifest(1, 0, {}, {name: FileDigest() for name in names})
    return partial(read_set, folder_at(str(place)), manifest, 0, None)


def test_a_set_that_the_manifest_does_not_name_has_no_tensors(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2), "b": torch.zeros(1)}, tmp_path / "state.safetensors")
    read = reader(tmp_path, "state.safetensors")

    assert read("optimizer") == {}
    assert reader(tmp_path)("state") == {}
    assert {name: one.tolist() for name, one in read("state").items()} == {"b": [0.0], "w": [1.0, 1.0]}
    assert [*read("state", lambda name: name == "w")] == ["w"]


def test_what_training_goes_on_with_is_in_memory_and_what_is_copied_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_file({"w": torch.full((1024,), 3, dtype=torch.uint8)}, path)
    read = reader(tmp_path, "state.safetensors")
    kept, copied = read("state")["w"], read("state", is_copied=True)["w"]

    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, bytes([9]) * 1024, path.stat().st_size - 1024)
    os.close(fd)

    assert kept.unique().tolist() == [3]
    assert copied.unique().tolist() == [9]
