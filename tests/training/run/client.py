"""The process that trains, pushes and resumes: it imports everything once, and forks a child for each task."""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from transformers import BertModel

import hfshard.hub.hub_repo  # before the forks: what each would read and compile again
from hfshard.errors import HfshardError
from hfshard.pull import pull_checkpoint
from hfshard.training import CheckpointManager, TrainingState
from tests.hub.client_process import do_task, note_waits, prepare
from tests.hub.models import digest_of, make_model

STEPS = 4
SAVED = (1, 2, 3)
LIMITS = {1: "6KB", 2: "10MB", 3: "40KB"}
"""Step -> max_shard_size: a model of 11 shards, of one file, of 2 shards; an optimizer of 19, 1 and 3; a state of 3, 1
and 1."""
LOSSES = {1: 0.5, 2: 0.25, 3: 0.75}


class Run:
    """A model in training: dropout and data draw from all generators."""

    def __init__(self, seed: int) -> None:
        self.model = make_model(seed, stock=True).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state = TrainingState(model=self.model, optimizer=self.optimizer)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)

    def step(self) -> None:
        """One step."""
        words = torch.randint(0, 64, (2, 8)) + random.randrange(2) * np.random.randint(2)
        self.optimizer.zero_grad()
        self.model(words % 64).last_hidden_state.square().mean().backward()
        self.optimizer.step()

    def digest(self) -> str:
        """Of every bit that the next steps depend on."""
        hasher = hashlib.sha256(digest_of(self.model.state_dict()).encode())
        for slots in self.optimizer.state.values():
            hasher.update(digest_of(slots).encode())
        hasher.update(repr((random.getstate(), np.random.get_state())).encode())
        hasher.update(torch.get_rng_state().numpy().tobytes())
        return hasher.hexdigest()


def train(root: str, first: int = 1, last: int = STEPS, **options: Any) -> dict[str, Any]:
    """Train and save; gives the digest after each step, that of the model at each, and what waiting raised."""
    run, digests, models = Run(0), {}, {}
    manager = CheckpointManager(root, keep_best="loss", **options)
    for step in range(1, last + 1):
        run.step()
        digests[step], models[step] = run.digest(), digest_of(run.model.state_dict())
        if step in SAVED and step >= first:
            manager.save(step, run.state, metric=LOSSES[step], max_shard_size=LIMITS[step])
    error = ""
    try:
        manager.wait_until_finished()
    except HfshardError as raised:
        error = type(raised).__name__
    return {"digests": digests, "models": models, "error": error}


def push(root: str, repo_id: str, step: Any = None, **options: Any) -> Any:
    """`manager.push`."""
    with CheckpointManager(root, keep_best="loss") as manager:
        done = manager.push(repo_id, step, **options)
        return [asdict(one) for one in done] if isinstance(done, list) else asdict(done)


def restore(root: str, place: str, **options: Any) -> dict[str, Any]:
    """Restore into a run of other weights and random numbers, go on to the end; gives digests."""
    run = Run(7)
    before = run.digest()
    try:
        step = CheckpointManager(root).restore(run.state, place, **options)
    except HfshardError:
        assert run.digest() == before, "a restore that fails changes nothing"
        raise
    restored = run.digest()
    for _ in range(step, STEPS):
        run.step()
    return {"step": int(step), "restored": restored, "end": run.digest(), "path": step.path, "metrics": step.metrics}


def pull(repo_id: str, directory: str | None = None, **options: Any) -> bool:
    """`pull_checkpoint`; whether what came is whole."""
    return hfshard.verify_checkpoint(pull_checkpoint(repo_id, directory, **options)).ok


def load_stock(repo_id: str, **options: Any) -> str:
    """The digest of what stock transformers loads."""
    done: Any = BertModel.from_pretrained(repo_id, output_loading_info=True, **options)
    loaded, info = done
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return digest_of(loaded.state_dict())


TASKS: dict[str, Callable[..., Any]] = {task.__name__: task for task in (train, push, restore, pull, load_stock)}


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Do one task; gives what came of it."""
    kept = prepare(order, ("hfshard",))
    waits = note_waits()
    if not order["task"].startswith("load_stock"):
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Use 'content=", DeprecationWarning)  # huggingface_hub's own, of httpx
    return do_task(order, TASKS) | {"log": kept.lines, "waits": waits}
