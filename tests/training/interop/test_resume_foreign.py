"""Runs in files of torch.save: every part goes on from one; what one lacks, or has of another kind, is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Adamax, RAdam, lr_scheduler
from torch.utils.data import TensorDataset

from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError, UnsafePickleError
from hfshard.training import CheckpointManager, Gradients, ResumableDataLoader, TrainingState
from hfshard.training.interop.convert_run import convert_foreign
from hfshard.training.interop.resume_foreign import position_after
from tests.flows import resume_optimizers as optimizers
from tests.flows import resume_schedulers as schedulers
from tests.training import ingredients
from tests.training.fingerprint import flatten, of_scheduler
from tests.training.interop.programs import net, old, refused, save_of, stepped, train, two_groups

DATA: Any = torch.arange(26.0)


@pytest.mark.parametrize(
    ("epochs", "place"),
    [(0.0, (0, 0)), (2 / 7, (0, 2)), (1 + 6 / 7, (1, 6)), (1.0, (1, 0)), (1 - 1e-12, (1, 0)), (41 + 1 / 7, (41, 1))],
)
def test_epochs_are_a_place(epochs: float, place: tuple[int, int]) -> None:
    loader = ResumableDataLoader(DATA, batch_size=4)

    state, lacking = position_after(loader, epochs)

    assert state is not None and lacking == ""
    assert (state["epoch"], state["batch"]) == place
    loader.load_state_dict(state)
    assert next(iter(loader))[0] == 4 * place[1]


def test_a_batch_sampler_of_the_users_has_no_length_to_count_by() -> None:
    loader = ResumableDataLoader(DATA, batch_sampler=[[0, 1], [2]])

    assert position_after(loader, 0.5) == (
        None,
        "batches like this loader's, of which 0.5 epochs are no whole number",
    )


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("seen", [3, 7])
def test_the_state_of_a_loader_of_torchdata_is_taken_from_a_file(
    seen: int, tmp_path: Path, manager: CheckpointManager
) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    old = torchdata.StatefulDataLoader(DATA, batch_size=4)
    batches = iter(old)
    for _ in range(seen):
        next(batches)
    assert seen < 7 or next(batches, None) is None
    torch.save({"loader": old.state_dict(), "step": seen}, tmp_path / "old.pt")
    expected = [batch.tolist() for batch in (batches if seen < 7 else old)]

    loader = torchdata.StatefulDataLoader(DATA, batch_size=4)
    restored = manager.restore(TrainingState(loader=loader), tmp_path / "old.pt")

    assert restored == seen and len(restored.lacking) == 1
    assert [batch.tolist() for batch in loader] == expected


OWN_OBJECTS = {"own-bound-method", "lambda-holds-optimizer", "sequential-stateful"}
"""Schedulers whose state dict has more than data."""


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    """Steps with gradients that are made up."""
    generator = torch.Generator().manual_seed(count)
    for _ in range(count):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.rand(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step(lambda: 0.5)


ONE_OPTIMIZER = {name: case for name, case in optimizers.ALL.items() if not name.startswith(("sparse", "muon"))}
"""Those with gradients that are dense, and with nothing beside them."""


@pytest.mark.parametrize("name", ONE_OPTIMIZER)
def test_the_state_of_every_optimizer_is_restored_bit_for_bit(
    name: str, tmp_path: Path, manager: CheckpointManager
) -> None:
    case = ONE_OPTIMIZER[name]
    model, other = (case.get("model", ingredients.mlp)() for _ in range(2))
    optimizer, its_optimizer = case["optimizer"](model), case["optimizer"](other)
    trained(model, optimizer)

    restored = manager.restore(TrainingState(other, its_optimizer), old(tmp_path, model, optimizer))

    assert restored.differences == ()
    expected = dict(flatten(optimizer.state_dict(), ""))
    assert dict(flatten(its_optimizer.state_dict(), "")) == expected
    assert any("state" in key for key in expected)


@pytest.mark.parametrize("name", sorted(schedulers.ALL.keys() - {"own-crowded"}))  # torch.save refuses its lambda
def test_every_scheduler_goes_on(name: str, tmp_path: Path, manager: CheckpointManager) -> None:
    kind = schedulers.ALL[name]
    states = []
    for _ in range(2):
        model: Any = nn.ModuleDict({"first": nn.Linear(2, 3), "last": nn.Linear(3, 1)})
        optimizer: Any = optimizers.two_groups(model)
        states.append(TrainingState(model, optimizer, kind.make(optimizer)))
    before, after = states

    def steps(state: TrainingState, count: int) -> list[float]:
        rates = []
        for number in range(count):
            state.components["optimizer"].step()
            state.components["scheduler"].step(*([1 / (number + 1)] if kind.takes_loss else []))
            rates += [group["lr"] for group in state.components["optimizer"].param_groups]
        return rates

    steps(before, 4)
    torch.save({name: part.state_dict() for name, part in before.components.items()}, tmp_path / "old.pt")
    if name in OWN_OBJECTS:
        with pytest.raises(UnsafePickleError, match="without running code"):
            manager.restore(after, tmp_path / "old.pt")
    restored = manager.restore(after, tmp_path / "old.pt", strict=name not in OWN_OBJECTS)

    assert bool(restored.differences) == (name in OWN_OBJECTS)
    assert dict(of_scheduler(after.components["scheduler"])) == dict(of_scheduler(before.components["scheduler"]))
    assert steps(after, 5) == steps(before, 5)


def tutorial(tmp_path: Path, *left_out: str, **more: Any) -> str:
    """What a run with SGD and StepLR has saved after three steps."""
    torch.manual_seed(1)
    parts = stepped(net())
    train(parts, 0, 3)
    value = save_of(parts, model="model", optimizer="optimizer", scheduler="scheduler") | {"step": 3} | more
    path = tmp_path / "old.pt"
    torch.save({key: one for key, one in value.items() if key not in left_out}, path)
    return str(path)


def test_half_a_dict_is_refused_and_its_half_restored(tmp_path: Path, manager: CheckpointManager) -> None:
    path = tutorial(tmp_path, "optimizer", "scheduler")
    parts = stepped(net())
    state = TrainingState(**parts.named)

    refused(manager, state, path, r"has no 'optimizer'.*has no 'scheduler'.*Nothing was restored")
    restored = manager.restore(state, path, strict=False)

    assert ["no 'optimizer'" in one or "no 'scheduler'" in one for one in restored.differences] == [True, True]
    assert torch.equal(parts.model[0].weight, torch.load(path)["model"]["0.weight"])
    assert parts.optimizer.param_groups[0]["lr"] == 0.1


def test_parts_that_the_state_lacks_are_refused(tmp_path: Path, manager: CheckpointManager) -> None:
    path = tutorial(tmp_path, ema=net().state_dict(), teacher={"state_dict": net().state_dict()}, best=0.5)
    model = net()

    words = r"state of 'optimizer'.*'scheduler'.*'ema', which the TrainingState lacks.*'teacher'"
    refused(manager, TrainingState(model), path, words)
    restored = manager.restore(TrainingState(model), path, strict=False)

    assert len(restored.differences) == 4
    assert restored.extra == {"step": 3, "best": 0.5}


def test_weights_alone_are_a_model(tmp_path: Path, manager: CheckpointManager) -> None:
    torch.save(net().state_dict(), tmp_path / "weights.pth")
    model = net()
    restored = manager.restore(TrainingState(model), tmp_path / "weights.pth")
    assert (restored, restored.extra) == (0, {})
    assert "the number of steps (0 is taken)" in restored.lacking


def test_several_candidates_are_listed(tmp_path: Path, manager: CheckpointManager) -> None:
    path = tutorial(tmp_path, "model", net=net().state_dict(), state_dict=net().state_dict(), ema={"a": 1})
    parts = stepped(net())
    state = TrainingState(**parts.named)
    refused(manager, state, path, r"'model' could be any of several entries.*'state_dict', 'net'.*keys=\{'model'")

    refused(manager, state, path, "which the TrainingState lacks", keys={"model": "net"})
    restored = manager.restore(state, path, keys={"model": "net"}, strict=False)

    assert "'state_dict', which" in restored.differences[0]
    assert torch.equal(parts.model[0].weight, torch.load(path)["net"]["0.weight"])


def test_a_name_of_an_architecture_is_no_model(tmp_path: Path, manager: CheckpointManager) -> None:
    path = tutorial(tmp_path, model="resnet18", state_dict=net().state_dict())
    restored = manager.restore(TrainingState(**stepped(net()).named), path)
    assert restored.extra["model"] == "resnet18"


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda model: SGD(model[0].parameters(), lr=0.1, momentum=0.9), r"had \[6\] parameters.*but have \[2\]"),
        (lambda model: two_groups(model).optimizer, r"is an AdamW.*another optimizer's: it lacks 'amsgrad', 'betas'"),
        (lambda model: Adam(model.parameters()), r"is an Adam.*has 'dampening', 'momentum', 'nesterov'"),
        (
            lambda model: SGD([*model.parameters()][::-1], lr=0.1, momentum=0.9),
            r"'momentum_buffer' of '2.bias' has shape \[3, 4\].*but the parameter has \[2\]",
        ),
    ],
    ids=["fewer", "another class in other groups", "another class", "another order"],
)
def test_other_optimizers_are_refused(build: Any, match: str, tmp_path: Path, manager: CheckpointManager) -> None:
    path = tutorial(tmp_path, "scheduler")
    model = net()
    optimizer = build(model)

    refused(manager, TrainingState(model, optimizer), path, match)
    restored = manager.restore(TrainingState(model, optimizer), path, strict=False)

    assert len(restored.differences) == 1
    assert optimizer.state_dict()["state"] == {}


def test_another_scheduler_is_refused(tmp_path: Path, manager: CheckpointManager) -> None:
    path = tutorial(tmp_path)
    for make, match in (
        (lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5), "is an ExponentialLR.*it has 'step_size'"),
        (lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5), "it lacks 'T_max', 'eta_min', and it has"),
    ):
        parts = stepped(net())
        state = TrainingState(parts.model, parts.optimizer, make(parts.optimizer))
        refused(manager, state, path, match)


def test_what_a_file_never_holds_is_reported(tmp_path: Path, manager: CheckpointManager) -> None:
    path = tutorial(tmp_path)
    parts = stepped(net())
    loader: Any = ResumableDataLoader(TensorDataset(torch.arange(8)), batch_size=2, seed=1)
    position = loader.state_dict()
    torch.manual_seed(5)

    restored = manager.restore(TrainingState(**parts.named, loader=loader, held=Gradients(parts.model)), path)

    assert [one.split(" (")[0] for one in restored.lacking] == [
        "the random number generators",
        "the state of 'loader'",
        "the state of 'held'",
    ]
    assert loader.state_dict() == position
    assert torch.initial_seed() == 5


def test_gradients_that_are_left_out_stay_as_they_are(tmp_path: Path, manager: CheckpointManager) -> None:
    path = tutorial(tmp_path)
    parts = stepped(net())
    parts.model(torch.ones(2, 4)).sum().backward()
    before = [parameter.grad.clone() for parameter in parts.model.parameters() if parameter.grad is not None]

    manager.restore(TrainingState(**parts.named, held=Gradients(parts.model)), path, without=["held"])

    after = [parameter.grad for parameter in parts.model.parameters() if parameter.grad is not None]
    assert len(after) == len(before) > 0
    assert all(map(torch.equal, after, before))


@pytest.mark.parametrize("key", ["rng_state", "torch_rng_state", "cuda_rng_state_all", "random_state", "RNG", "rng"])
def test_generators_that_a_file_holds_are_reported_too(key: str, tmp_path: Path, manager: CheckpointManager) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    torch.rand(1)
    path = tutorial(tmp_path, **{key: {"torch": before}})
    torch.manual_seed(5)

    restored = manager.restore(TrainingState(**stepped(net()).named), path)

    assert restored.lacking == (
        "the random number generators (dropout and shuffling go on from those of this process; the file holds "
        f"'{key}', left in restored.extra and not set)",
    )
    assert torch.equal(restored.extra[key]["torch"], before)


def test_ours_lack_nothing_and_know_no_keys(tmp_path: Path, manager: CheckpointManager) -> None:
    state = TrainingState(net())
    manager.save(1, state)
    assert manager.restore(state, 1).lacking == ()
    with pytest.raises(InvalidArgumentError, match="keys is only for other programs' checkpoints"):
        manager.restore(state, 1, keys={"model": "ema"})
    words = r"keys names 'ema', which is not a part of the TrainingState\. Name one of: model"
    with pytest.raises(InvalidArgumentError, match=words):
        manager.restore(state, tutorial(tmp_path), keys={"ema": "ema"})
    with pytest.raises(CheckpointNotFoundError):
        manager.restore(state, tmp_path)


def test_a_restored_run_does_not_hold_the_file(tmp_path: Path, manager: CheckpointManager) -> None:
    path = tutorial(tmp_path)
    parts = stepped(net())
    manager.restore(TrainingState(**parts.named), path)
    Path(path).write_bytes(b"")  # which ends a process that has it mapped, at the next look

    train(parts, 3, 4)
    assert manager.save(4, TrainingState(**parts.named))


def test_weights_sorted_by_name_do_not_tell_the_order(tmp_path: Path) -> None:
    model = nn.LayerNorm(2)
    value = {"model": dict(sorted(model.state_dict().items())), "optimizer": Adam(model.parameters()).state_dict()}
    torch.save(value, tmp_path / "old.pt")
    with pytest.raises(InvalidArgumentError, match="its weights were sorted by name"):
        convert_foreign(str(tmp_path / "old.pt"), tmp_path / "new")


def test_names_of_a_part_of_the_model_are_found(tmp_path: Path, manager: CheckpointManager) -> None:
    parts: dict[str, Any] = {"model": net(), "other": net()}
    for name in ("model", "other"):
        parts[f"of_{name}"] = Adam(parts[name].named_parameters(), lr=0.1 if name == "model" else 0.2)
    path = tmp_path / "old.pt"
    torch.save({name: part.state_dict() for name, part in parts.items()}, path)
    before = {name: repr(part.state_dict()) for name, part in parts.items()}

    manager.restore(TrainingState(**parts), path)

    assert before == {name: repr(part.state_dict()) for name, part in parts.items()}
    with pytest.raises(InvalidArgumentError, match="there are several optimizers and models"):
        convert_foreign(str(path), tmp_path / "new")


def test_the_state_of_a_like_class_is_refused(tmp_path: Path, manager: CheckpointManager) -> None:
    model = net()
    optimizer = Adam(model.parameters())

    def sequence(optimizer: Any, then: Any) -> Any:
        return lr_scheduler.SequentialLR(optimizer, [lr_scheduler.ConstantLR(optimizer), then(optimizer)], [2])

    scheduler = sequence(optimizer, lambda one: lr_scheduler.StepLR(one, 2))
    path = old(tmp_path, model, optimizer, scheduler=scheduler.state_dict())
    for kind in (RAdam, Adamax):
        of_it = kind(model.parameters())
        of_step = sequence(of_it, lambda one: lr_scheduler.StepLR(one, 2))
        refused(manager, TrainingState(model, of_it, of_step), path, rf"{kind.__name__}, but .* it has 'amsgrad'")
    built = sequence(optimizer, lambda one: lr_scheduler.ExponentialLR(one, 0.9))
    refused(manager, TrainingState(model, optimizer, built), path, r"is an ExponentialLR, .* it has 'step_size'")
