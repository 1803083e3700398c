"""What else a run may have: averages of the weights, and stateful objects and a loader as users write them."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

from tests.training import ingredients


def ema(model: nn.Module) -> dict[str, Any]:
    return {"ema": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))}


def ema_with_buffers(model: nn.Module) -> dict[str, Any]:
    return {"ema": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)}


class Shadow:
    """An average of the weights that a user wrote himself: a dict of tensors, in twice the precision."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: tensor.detach().double() for name, tensor in model.named_parameters()}
        self.updates = 0

    def update(self, model: nn.Module, step: int, loss: float) -> None:
        self.updates += 1
        for name, tensor in model.named_parameters():
            self.weights[name].lerp_(tensor.detach().double(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.updates = state["weights"], state["updates"]


class Diary:
    """A user's object that keeps whatever Python has, and hands out its own containers rather than copies."""

    def __init__(self, model: nn.Module) -> None:
        self.values: dict[str, Any] = {
            "last": deque(maxlen=3), "all": deque(), "seen": Counter(), "by_step": {}, "sum": np.zeros(2),
            "best": np.inf, "worst": -np.inf, "unknown": float("nan"), "minus_zero": -0.0, "pair": (1, (2.5, None)),
            "none": None, "big": 2**70, "text": "ä\u2028\x00\n", "ordered": OrderedDict(b=1, a=2),
            "tensor": torch.zeros(3),
            "nested": [{"deep": [torch.ones(2, dtype=torch.float16), {"er": (True, False)}]}], "empty": [{}, [], ()],
            "ints": np.arange(3, dtype=np.int16), "single": np.float32(0.1), "flag": np.bool_(True),
        }  # fmt: skip

    def update(self, model: nn.Module, step: int, loss: float) -> None:
        values = self.values
        values["last"].append(loss)
        values["all"].append((step, loss))
        values["seen"][step % 3] += 1
        values["by_step"][step] = {"loss": loss, -step: [step]}
        values["sum"] += (step, loss)
        values["best"] = min(values["best"], loss)
        values["tensor"] += loss
        values["nested"][0]["deep"][0] *= 0.5
        values["ordered"].move_to_end("b" if step % 2 else "a")
        values["single"] = np.float32(values["single"] + np.float32(loss))

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


class Generators:
    """Random numbers that a user draws from generators of his own."""

    def __init__(self) -> None:
        self.ours = np.random.default_rng(5)
        self.theirs = torch.Generator().manual_seed(5)
        self.sum = 0.0

    def update(self, model: nn.Module, step: int, loss: float) -> None:
        self.sum += float(self.ours.normal()) + float(torch.randn((), generator=self.theirs))

    def state_dict(self) -> dict[str, Any]:
        return {"ours": self.ours.bit_generator.state, "theirs": self.theirs.get_state(), "sum": self.sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ours.bit_generator.state = state["ours"]
        self.theirs.set_state(state["theirs"])
        self.sum = state["sum"]


def generators(model: nn.Module) -> dict[str, Any]:
    return {"generators": Generators()}


def shadow(model: nn.Module) -> dict[str, Any]:
    return {"shadow": Shadow(model)}


def diary(model: nn.Module) -> dict[str, Any]:
    return {"diary": Diary(model)}


def everything(model: nn.Module) -> dict[str, Any]:
    return {**ema(model), **shadow(model), **diary(model)}


class Stateful:
    """A loader that is not ours: it counts its batches itself, and starts in the middle of an epoch when told to."""

    def __init__(self, data: Dataset[ingredients.Pair]) -> None:
        self.data, self.epoch, self.batch = data, 0, 0

    def __iter__(self) -> Any:
        order = torch.randperm(ingredients.SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.batch < ingredients.SAMPLES // 2:
            self.batch += 1
            pairs = [self.data[index] for index in order[2 * self.batch - 2 : 2 * self.batch]]
            yield torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
        self.epoch, self.batch = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.batch = state["epoch"], state["batch"]
