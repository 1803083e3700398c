"""A small run of training: how it is built, stepped, saved, killed and resumed, and what else it may have."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import threading
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

from hfshard.training import ResumableDataLoader, TrainingState
from tests.training import fingerprint, ingredients

STEPS = 12
"""2N. With 10 samples in batches of 2, two epochs end on the way."""
NEXT_LRS = 6
"""Steps of the scheduler alone, after the last."""
NEXT_BATCHES = 3
PHASES = ("batch", "backward", "optimizer", "scheduler", "saved")
"""Where in a step a run can be killed: after a batch was drawn, after the gradients are there, after the optimizer's
step, after the scheduler's and before the save, right after the save. "saving" is another: somewhere in the save."""
LONGEST_SECONDS = 0.02
"""From the beginning of a save to a kill in it: two small saves."""
LATEST_SECONDS = 60
"""Until a kill that is under way must have come: a timer's thread may have to wait for a busy machine."""
_SAFE_INTEGER = 2**31

Kill = tuple[int, str]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a run is made of, and when it is saved and killed."""

    name: str
    model: Callable[[], nn.Module] = ingredients.mlp
    optimizer: Callable[[nn.Module], Optimizer | list[Optimizer]] = ingredients.adamw
    scheduler: Callable[[Optimizer], Any] | None = None
    scheduler_takes_loss: bool = False
    scheduler_steps: str = "step"
    """Or "epoch"."""
    data: Callable[[], Any] | None = ingredients.Points
    """None: there is no loader, the batches are random numbers of the main process."""
    loader: Mapping[str, Any] = field(default_factory=dict)
    """Options of the loader."""
    own_loader: Callable[[Any], Any] | None = None
    """A loader that is not ours."""
    loss: Callable[[nn.Module, Any], torch.Tensor] = ingredients.squared_error
    accumulate: int = 1
    """Batches in a step."""
    autocast: bool = False
    scaler: bool = False
    closure: bool = False
    extras: Mapping[str, Callable[[nn.Module], Any]] = field(default_factory=dict)
    """Other stateful objects; each has `update(model, step, loss)`, or `update_parameters(model)`."""
    save_every: int | None = None
    """Steps from a save to the next. None: drawn by the case's name."""
    save_at: str = "step"
    """Or "epoch"."""
    blocking: bool = True
    manager: Mapping[str, Any] = field(default_factory=dict)
    """Options of the manager."""
    kill: Kill | None = None
    """After so many whole steps, in that phase of the next. None: drawn by the case's name."""
    compat: bool = False
    """Runs on the oldest supported versions too."""
    fresh: bool = False
    """Is resumed in an interpreter that is started from nothing, too."""

    @property
    def seed(self) -> int:
        """Its own, the same in every process."""
        return zlib.crc32(self.name.encode()) % _SAFE_INTEGER

    @property
    def death(self) -> Kill:
        """When it is killed: before step `steps + 1` is done, in the phase."""
        if self.kill is not None:
            return self.kill
        draw = random.Random(self.seed)
        return draw.randint(self.every + 1, STEPS - 2), draw.choice(PHASES[:4])

    @property
    def every(self) -> int:
        """Steps from a save to the next."""
        return self.save_every or random.Random(f"saves of {self.name}").choice((2, 3, 4))

    @property
    def back(self) -> int:
        """The older step that a run returns to: of its saves the first from step 3 on."""
        return self.every * math.ceil(3 / self.every)


class Run:
    """A model in training, with all that belongs to it."""

    manager: Any = None

    def __init__(self, case: Case, *, seed: int | None = None, as_state: Callable[..., Any] = TrainingState) -> None:
        """Build it as a user's script does: everything new, before anything is restored."""
        self.case, self.as_state = case, as_state
        for set_seed in (random.seed, np.random.seed, torch.manual_seed):
            set_seed(case.seed if seed is None else seed)
        self.model = case.model()
        made = case.optimizer(self.model)
        self.optimizers = made if isinstance(made, list) else [made]
        self.scheduler = case.scheduler(self.optimizers[0]) if case.scheduler else None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3) if case.scaler else None
        self.extras = {name: make(self.model) for name, make in case.extras.items()}
        self.loader: Any = None
        if case.data is not None and case.own_loader is not None:
            self.loader = case.own_loader(case.data())
        elif case.data is not None:
            options = {"batch_size": 2, "shuffle": True, "seed": 7, **case.loader}
            self.loader = ResumableDataLoader(case.data(), **options)
        self.steps: list[dict[str, str]] = []
        self.done = 0
        self.kill: Kill | None = None
        self.batches = self._batches()

    def state(self) -> Any:
        """What is saved and restored, as the store wants it."""
        more = {f"optimizer_{number}": one for number, one in enumerate(self.optimizers[1:], 2)}
        return self.as_state(
            model=self.model, optimizer=self.optimizers[0], scheduler=self.scheduler, loader=self.loader,
            scaler=self.scaler, **more, **self.extras,
        )  # fmt: skip

    def _batches(self) -> Generator[Any, None, None]:
        """The loop over epochs and batches, as everybody writes it."""
        while self.loader is None:
            yield torch.randn(2, 4), torch.randn(2, 1)
        for _ in range(self.loader.epoch, 10**6):
            for batch in self.loader:
                self.reach("batch")
                yield batch
            if self.scheduler is not None and self.case.scheduler_steps == "epoch":
                self._step_scheduler(self.done)
            if self.case.save_at == "epoch":
                self.save()
        raise AssertionError("that many epochs are no test")

    def close(self) -> None:
        """End the loop, and so its workers; torch waits ten seconds for those of a loop that is found as garbage."""
        self.batches.close()

    def reach(self, phase: str) -> None:
        """Be killed, if it is to be here."""
        if self.kill == (self.done, phase):
            os.kill(os.getpid(), signal.SIGKILL)

    def save(self) -> None:
        """As the case does it."""
        if self.kill == (self.done, "saving"):
            delay = random.Random(self.case.seed).uniform(0, LONGEST_SECONDS)
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if self.manager is not None:
            self.manager.save(self.done, self.state(), blocking=self.case.blocking)

    def train(self, until: int = STEPS, *, manager: Any = None, kill: Kill | None = None) -> None:
        """Train to the end of step `until`; with a manager, save as the case says."""
        self.manager, self.kill = manager, kill
        while self.done < until:
            batches = [next(self.batches) for _ in range(self.case.accumulate)]
            loss = self._step(batches)
            if self.scheduler is not None and self.case.scheduler_steps == "step":
                self._step_scheduler(loss)
            for extra in self.extras.values():
                update = getattr(extra, "update_parameters", None)
                update(self.model) if update else extra.update(self.model, self.done + 1, loss)
            self.reach("scheduler")
            self.done += 1
            rates = " ".join(str(group["lr"]) for group in self.optimizers[0].param_groups)
            self.steps.append({"loss": loss.hex(), "lr": rates, **dict(fingerprint.flatten(batches, "batch"))})
            if self.case.save_at == "step" and self.done % self.case.every == 0:
                self.save()
            self.reach("saved")

    def _step(self, batches: list[Any]) -> float:
        def backward() -> Any:
            total = torch.zeros(())
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            for batch in batches:
                with torch.autocast("cpu", torch.bfloat16, enabled=self.case.autocast):
                    loss = self.case.loss(self.model, batch) / len(batches)
                (self.scaler.scale(loss) if self.scaler else loss).backward()
                total += loss.detach()
            self.reach("backward")
            return total

        if self.case.closure:
            loss = float(self.optimizers[0].step(backward))
        else:
            loss = float(backward())
            for optimizer in self.optimizers:
                self.scaler.step(optimizer) if self.scaler else optimizer.step()
        if self.scaler:
            self.scaler.update()
        self.reach("optimizer")
        return loss

    def _step_scheduler(self, loss: float) -> None:
        assert self.scheduler is not None
        self.scheduler.step(loss) if self.case.scheduler_takes_loss else self.scheduler.step()

    def resume(self, manager: Any) -> int | None:
        """Restore the newest checkpoint: the step that the run goes on from."""
        step: int | None = manager.restore_latest(self.state())
        self.done = int(step or 0)
        return step

    def roll_back(self, manager: Any, step: int) -> int:
        """Restore an older checkpoint into the objects that went on since, and begin the loop anew."""
        self.close()
        self.done = int(manager.restore(self.state(), step))
        self.steps, self.batches = [], self._batches()
        return self.done

    def everything(self) -> dict[str, str]:
        """All that the two runs must have in common at the end; it is the last thing to ask of a run."""
        found = dict(fingerprint.of_rngs()) | dict(fingerprint.of_model(self.model))
        for number, optimizer in enumerate(self.optimizers, 1):
            found |= fingerprint.of_optimizer(optimizer, self.model, f"optimizer {number}")
        if self.scheduler is not None:
            found |= fingerprint.of_scheduler(self.scheduler)
        if self.scaler is not None:
            found |= fingerprint.flatten(self.scaler.state_dict(), "scaler")
        for name, extra in self.extras.items():
            found |= fingerprint.flatten(extra.state_dict(), name)
        for number in range(NEXT_LRS if self.scheduler is not None else 0):
            self._step_scheduler(1.0 + number % 2)
            for index, group in enumerate(self.optimizers[0].param_groups):
                found |= fingerprint.flatten(group["lr"], f"next lr {number} of group {index}")
        self.kill = self.manager = None
        for number in range(NEXT_BATCHES):
            found |= fingerprint.flatten(next(self.batches), f"next batch {number}")
        return found | {f"{path} after the batches": text for path, text in fingerprint.of_rngs()}


def ema(model: nn.Module, **options: Any) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), **options)


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

    def __init__(self, model: nn.Module) -> None:
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


class TorchSave:
    """All state dicts and the generators in one pickle, as everybody writes it: the matrix finds fault with it."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.path = root / "checkpoint.pt"
        root.mkdir(exist_ok=True)

    def save(self, step: int, state: dict[str, Any], *, blocking: bool = True) -> None:
        rngs = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        states = {name: one.state_dict() for name, one in state.items() if one is not None}
        aside = self.path.with_suffix(".tmp")
        torch.save({"step": step, "states": states, "rngs": rngs}, aside)
        os.replace(aside, self.path)

    def restore_latest(self, state: dict[str, Any]) -> Any:
        saved = torch.load(self.path, weights_only=False)
        for name, one in state.items():
            if one is not None:
                one.load_state_dict(saved["states"][name])
        random.setstate(saved["rngs"][0])
        np.random.set_state(saved["rngs"][1])
        torch.set_rng_state(saved["rngs"][2])
        return saved["step"]

    def close(self) -> None:
        """Nothing is under way."""


def everything_of(model: Any, optimizer: Any, scheduler: Any, **own: Any) -> dict[str, str]:
    """All that two trainings are compared by, bit for bit, where others than we write the loop."""
    optimizer, scheduler = getattr(optimizer, "optimizer", optimizer), getattr(scheduler, "scheduler", scheduler)
    parts = (
        fingerprint.of_model(model),
        fingerprint.of_optimizer(optimizer, model, "optimizer"),
        fingerprint.of_scheduler(scheduler),
        fingerprint.of_rngs(),
        fingerprint.flatten(own, "own"),
    )
    return {path: value for part in parts for path, value in part}


def run_roles(run_role: Callable[[str, str, Path], None], name: str, roles: tuple[str, ...], root: Path) -> None:
    """Do some of the runs of a case in this process, each of which leaves a report in `root`."""
    for role in roles:
        run_role(name, role, root)


def report(root: Path, role: str, restored: int | None, steps: list[Any], everything: dict[str, str]) -> None:
    """Leave what comes of a role: the step it went on from, what is known of each step, and what it ended with."""
    found = {"restored": restored, "steps": steps, "everything": everything}
    (root / f"{role}.json").write_text(json.dumps(found))
