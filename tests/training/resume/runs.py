"""A small run of training: how it is built, stepped, saved, killed and resumed; each in a process of its own."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import zlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

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

Batch = Any
Kill = tuple[int, str]


class Manager(Protocol):
    """What a run asks of a store of checkpoints."""

    def save(self, step: int, state: Any, *, blocking: bool = True) -> Any:
        """Save it."""

    def restore_latest(self, state: Any) -> int | None:
        """Restore the newest, if there is one."""

    def restore(self, state: Any, step: int) -> int:
        """Restore that one."""

    def close(self) -> None:
        """Finish what is under way."""


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
    loss: Callable[[nn.Module, Batch], torch.Tensor] = ingredients.squared_error
    accumulate: int = 1
    """Batches in a step."""
    autocast: bool = False
    scaler: bool = False
    closure: bool = False
    extras: Callable[[nn.Module], dict[str, Any]] | None = None
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

    def __init__(self, case: Case, *, seed: int | None = None, as_state: Callable[..., Any] = TrainingState) -> None:
        """Build it as a user's script does: everything new, before anything is restored."""
        self.case, self.as_state = case, as_state
        seed = case.seed if seed is None else seed
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = case.model()
        made = case.optimizer(self.model)
        self.optimizers = made if isinstance(made, list) else [made]
        self.scheduler = case.scheduler(self.optimizers[0]) if case.scheduler else None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3) if case.scaler else None
        self.extras = case.extras(self.model) if case.extras else {}
        self.loader = self._loader()
        self.steps: list[dict[str, str]] = []
        self.done = 0
        self.kill: Kill | None = None
        self.batches = self._batches()

    def _loader(self) -> Any:
        if self.case.data is None:
            return None
        if self.case.own_loader is not None:
            return self.case.own_loader(self.case.data())
        return ResumableDataLoader(
            self.case.data(), **{"batch_size": 2, "shuffle": True, "seed": 7, **self.case.loader}
        )

    def state(self) -> Any:
        """What is saved and restored, as the store wants it."""
        more = {f"optimizer_{number}": one for number, one in enumerate(self.optimizers[1:], 2)}
        return self.as_state(
            model=self.model, optimizer=self.optimizers[0], scheduler=self.scheduler, loader=self.loader,
            scaler=self.scaler, **more, **self.extras,
        )  # fmt: skip

    def _batches(self) -> Generator[Batch, None, None]:
        """The loop over epochs and batches, as everybody writes it."""
        if self.loader is None:
            while True:
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

    manager: Manager | None = None

    def train(self, until: int = STEPS, *, manager: Manager | None = None, kill: Kill | None = None) -> None:
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
            self.steps.append(self._record(batches, loss))
            if self.case.save_at == "step" and self.done % self.case.every == 0:
                self.save()
            self.reach("saved")

    def _step(self, batches: list[Batch]) -> float:
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

    def _record(self, batches: list[Batch], loss: float) -> dict[str, str]:
        return {
            "loss": loss.hex(),
            "lr": " ".join(str(group["lr"]) for group in self.optimizers[0].param_groups),
            **dict(fingerprint.flatten(batches, "batch")),
        }

    def resume(self, manager: Manager) -> int | None:
        """Restore the newest checkpoint: the step that the run goes on from."""
        step = manager.restore_latest(self.state())
        self.done = 0 if step is None else int(step)
        return step

    def roll_back(self, manager: Manager, step: int) -> int:
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
