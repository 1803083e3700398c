"""Every optimizer of torch, those of transformers, and some that users write: name -> the case's options."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer

from tests.training import ingredients

Make = Callable[[nn.Module], Optimizer | list[Optimizer]]


def _split(model: nn.Module, is_first: Callable[[nn.Parameter], bool]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parameters = list(model.parameters())
    return [one for one in parameters if is_first(one)], [one for one in parameters if not is_first(one)]


def over(kind: Callable[..., Optimizer], **options: Any) -> Make:
    """All of a model's parameters in one group."""
    return lambda model: kind(model.parameters(), **options)


def two_groups(model: nn.Module) -> Optimizer:
    """Momentum, and rates that differ: what a scheduler is tried on."""
    decayed, others = _split(model, lambda parameter: parameter.ndim > 1)
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "lr": 0.01, "momentum": 0.8}]
    return optim.SGD(groups, lr=0.02, momentum=0.9)


def three_groups(model: nn.Module) -> Optimizer:
    """Every option differs, one has a name of the user's, and the order is not the model's."""
    first, last = model.get_submodule("first"), model.get_submodule("last")
    groups: list[dict[str, Any]] = [
        {"params": list(last.parameters()), "lr": 0.03, "betas": (0.5, 0.9), "name": "head"},
        {"params": [first.bias], "weight_decay": 0.0, "amsgrad": True},
        {"params": [first.weight], "eps": 1e-5, "user": {"depth": (1, None), 3: [0.5, float("inf")]}},
    ]
    return optim.AdamW(groups, lr=0.01)


def added_group(model: nn.Module) -> Optimizer:
    """The second group came by add_param_group."""
    first, last = model.get_submodule("first"), model.get_submodule("last")
    optimizer = optim.Adam(last.parameters(), lr=0.01)
    optimizer.add_param_group({"params": list(first.parameters()), "lr": 0.001})
    return optimizer


def only_trainable(model: nn.Module) -> Optimizer:
    return optim.Adam(_split(model, lambda parameter: parameter.requires_grad)[0], lr=0.01)


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    """Muon takes matrices only; a second optimizer has the rest."""
    matrices, others = _split(model, lambda parameter: parameter.ndim == 2)
    return [optim.Muon(matrices, lr=0.01), optim.AdamW(others, lr=0.01)]


def hf_adafactor(**options: Any) -> Make:
    def make(model: nn.Module) -> Optimizer:
        from transformers.optimization import Adafactor

        return Adafactor(model.parameters(), **options)

    return make


class MasterWeights(Optimizer):
    """A user's: bf16 parameters whose float32 originals live in the state, beside a dict and plain numbers."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr, "bounds": (0.1, float("inf"))})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.detach().float()
                    state["history"] = {"norms": [], 0: None}
                    state["count"] = 0
                state["count"] += 1
                state["history"]["norms"] = [*state["history"]["norms"][-2:], float(parameter.grad.norm())]
                state["history"][0] = (state["count"], parameter.grad.sum().float())
                state["master"].add_(parameter.grad.float(), alpha=-group["lr"])
                parameter.data.copy_(state["master"])


class KeepsItsOwn(optim.SGD):
    """A user's: a counter beside the state, in a state dict with one key more than usual."""

    steps_done = 0

    def step(self, closure: Any = None) -> Any:
        self.steps_done += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.steps_done
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps_done": {"all": (self.steps_done, torch.tensor(self.steps_done))}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps_done = state_dict["steps_done"]["all"][0]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "steps_done"})


class Scaled(optim.SGD):
    """A user's: options that a state lacks come from an attribute, whenever a state is loaded."""

    def __init__(self, params: Iterable[torch.Tensor], scale: float) -> None:
        super().__init__(params, lr=0.05, momentum=0.9)
        self.scale = scale
        self.param_groups[0]["scale"] = scale

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            group.setdefault("scale", self.scale)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(group["scale"])
        super().step(closure)


_BF16 = {"model": ingredients.mlp_bf16}
_LAST = {"model": ingredients.ChannelsLast}
_TOKENS = {"model": ingredients.Sparse, "data": ingredients.Tokens, "loss": ingredients.sum_of_rows}

ALL: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": over(optim.SGD, lr=0.05)},
    "sgd-momentum": {"optimizer": over(optim.SGD, lr=0.05, momentum=0.9)},
    "sgd-nesterov": {"optimizer": over(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1)},
    "sgd-dampening-maximize": {
        "optimizer": over(optim.SGD, lr=0.001, momentum=0.9, dampening=0.1, maximize=True, foreach=True)
    },
    "sgd-fused": {"optimizer": over(optim.SGD, lr=0.05, momentum=0.9, fused=True)},
    "sgd-bf16": {"optimizer": over(optim.SGD, lr=0.05, momentum=0.9), **_BF16},
    "adam": {"optimizer": over(optim.Adam, lr=0.01)},
    "adam-amsgrad": {"optimizer": over(optim.Adam, lr=0.01, amsgrad=True)},
    "adam-fused-amsgrad": {"optimizer": over(optim.Adam, lr=0.01, amsgrad=True, fused=True)},
    "adam-complex": {"optimizer": over(optim.Adam, lr=0.01), "model": ingredients.Complex},
    "adamw": {"optimizer": ingredients.adamw},
    "adamw-foreach": {"optimizer": over(optim.AdamW, lr=0.01, foreach=True)},
    "adamw-fused": {"optimizer": over(optim.AdamW, lr=0.01, fused=True)},
    "adamw-amsgrad-foreach": {"optimizer": over(optim.AdamW, lr=0.01, amsgrad=True, foreach=True)},
    "adamw-tensor-lr": {
        "optimizer": lambda model: optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False)
    },
    "adamw-tensor-betas": {
        "optimizer": lambda model: optim.AdamW(
            model.parameters(), lr=torch.tensor(0.01), betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
        )
    },
    "adamw-bf16": {"optimizer": ingredients.adamw, **_BF16},
    "adamw-three-groups": {"optimizer": three_groups},
    "adam-added-group": {"optimizer": added_group},
    "adam-no-state-yet": {"optimizer": over(optim.Adam, lr=0.01), "kill": (1, "backward"), "save_every": 1},
    "nadam": {"optimizer": over(optim.NAdam, lr=0.01, momentum_decay=0.01, decoupled_weight_decay=True)},
    "nadam-bf16": {"optimizer": over(optim.NAdam, lr=0.01), **_BF16, "save_every": 1},
    "asgd": {"optimizer": over(optim.ASGD, lr=0.05, t0=2)},
    "asgd-bf16": {"optimizer": over(optim.ASGD, lr=0.05, t0=2), **_BF16},
    "adafactor": {"optimizer": over(optim.Adafactor, lr=0.05)},
    "adafactor-bf16": {"optimizer": over(optim.Adafactor, lr=0.05), **_BF16},
    "radam": {"optimizer": over(optim.RAdam, lr=0.01)},
    "radam-bf16": {"optimizer": over(optim.RAdam, lr=0.01), **_BF16},
    "rmsprop": {"optimizer": over(optim.RMSprop, lr=0.01)},
    "rmsprop-centered": {"optimizer": over(optim.RMSprop, lr=0.01, centered=True, momentum=0.9)},
    "adagrad": {"optimizer": over(optim.Adagrad, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1)},
    "adagrad-sparse": {"optimizer": over(optim.Adagrad, lr=0.05), **_TOKENS},
    "adadelta": {"optimizer": over(optim.Adadelta, lr=0.5)},
    "adamax": {"optimizer": over(optim.Adamax, lr=0.01)},
    "adamax-bf16": {"optimizer": over(optim.Adamax, lr=0.01), **_BF16},
    "rprop": {"optimizer": over(optim.Rprop, lr=0.01)},
    "sparse-adam": {"optimizer": over(optim.SparseAdam, lr=0.01), **_TOKENS},
    "lbfgs": {"optimizer": over(optim.LBFGS, lr=0.1, max_iter=3, history_size=3), "closure": True},
    "lbfgs-wolfe": {"optimizer": over(optim.LBFGS, line_search_fn="strong_wolfe", max_iter=3), "closure": True},
    "hf-adafactor": {"optimizer": hf_adafactor()},
    "hf-adafactor-bf16": {"optimizer": hf_adafactor(lr=0.01, relative_step=False, beta1=0.9), **_BF16, "compat": True},
    "adamw-channels-last": {"optimizer": ingredients.adamw, **_LAST},
    "adamw-fused-channels-last": {"optimizer": over(optim.AdamW, lr=0.01, fused=True), **_LAST},
    "sgd-fused-channels-last": {"optimizer": over(optim.SGD, lr=0.05, momentum=0.9, fused=True), **_LAST},
    "adafactor-channels-last": {"optimizer": over(optim.Adafactor, lr=0.05), **_LAST},
    "own-master-weights": {"optimizer": over(MasterWeights, lr=0.01), **_BF16},
    "own-counter": {"optimizer": over(KeepsItsOwn, lr=0.05, momentum=0.9)},
    "own-setstate": {"optimizer": over(Scaled, scale=0.5)},
}
if hasattr(optim, "Muon"):
    ALL["muon"] = {"optimizer": muon_and_adamw}
    ALL["muon-bf16"] = {"optimizer": muon_and_adamw, **_BF16}
