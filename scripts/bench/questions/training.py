"""What a training checkpoint costs: the wait of the loop, memory and bytes, against torch.save of the same state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.harness.figures import GIGABYTE, MIB, Data, at_most, peak_at_most, ratio, runs_of, skipped, table
from bench.harness.inputs import make_specs, written
from bench.harness.models import make_model
from bench.harness.question import Context, Job, Peer, Question, Target
from bench.markdown import paragraphs

SAVE, LOAD = "torch.save", "torch.load"
BLOCKING, ASYNC, FIRST = "hfshard blocking", "hfshard async", "hfshard async first"
CALL_RATIO = 0.25
PEAK_RATIO, PEAK_MIB = 1.1, 64
STATES = 3
"""Tensors as large as the model: itself, and two of Adam's."""


def peers(context: Context) -> list[Peer]:
    """The lines of the table."""

    def line(key: str, title: str, prepare: Callable[[Context], Job], base: str = SAVE, limit: str = "") -> Peer:
        return Peer(key, title, prepare, base=base, limit=limit)

    return [
        line(SAVE, "`torch.save` of all state dicts, one file (not flushed, not hashed)", with_torch_save),
        line(BLOCKING, "hfshard: save, xxh3, flushed", with_blocking),
        line(ASYNC, "hfshard: save(blocking=False), from the second one on", with_async, limit=BLOCKING),
        line(FIRST, "hfshard: the first save(blocking=False), which makes the buffers", with_first_async),
        line(LOAD, "`torch.load(weights_only=True)` and `load_state_dict` of each", with_torch_load, LOAD),
        line("hfshard restore", "hfshard: restore_latest, every byte checked", with_restore, LOAD),
    ]


def _run(context: Context) -> dict[str, Any]:
    """A model with all of Adam's state, as after some steps."""
    import torch

    model = make_model(context.size, context.specs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def _step(run: dict[str, Any]) -> None:
    """Change a little of every tensor, as a step does: what did not change would be linked, not written."""
    import torch

    with torch.no_grad():
        for parameter, state in run["optimizer"].state.items():
            for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"]):
                tensor.view(-1)[0] += 1


def _manager(context: Context, run: dict[str, Any]) -> tuple[Any, Any]:
    from hfshard.training import CheckpointManager, TrainingState

    size = context.size.shard_size
    return CheckpointManager(context.target, max_to_keep=1, max_shard_size=size), TrainingState(**run)


def with_torch_save(context: Context) -> Job:
    """Save as the tutorials do."""
    import torch

    run, path = _run(context), context.target / "checkpoint.pt"
    return Job(
        [("done", lambda: torch.save({name: part.state_dict() for name, part in run.items()}, path))],
        lambda: _written(context),
    )


def with_blocking(context: Context) -> Job:
    """A save that returns when all of it is on the disk."""
    run = _run(context)
    manager, state = _manager(context, run)
    manager.save(1, state)
    _step(run)
    return Job([("done", lambda: manager.save(2, state))], lambda: _written(context))


def with_async(context: Context) -> Job:
    """A save that returns when the state is copied, into buffers that are there."""
    run = _run(context)
    manager, state = _manager(context, run)
    manager.save(1, state, blocking=False)
    manager.wait_until_finished()
    _step(run)
    return Job(
        [("call", lambda: manager.save(2, state, blocking=False)), ("done", manager.wait_until_finished)],
        lambda: _written(context),
    )


def with_first_async(context: Context) -> Job:
    """The same, but the buffers have to be made."""
    manager, state = _manager(context, _run(context))
    return Job(
        [("call", lambda: manager.save(1, state, blocking=False)), ("done", manager.wait_until_finished)],
        lambda: _written(context),
    )


def with_torch_load(context: Context) -> Job:
    """Load as the tutorials do; the file is in the page cache."""
    import torch

    run, path = _run(context), context.target / "checkpoint.pt"
    torch.save({name: part.state_dict() for name, part in run.items()}, path)

    def restore() -> None:
        saved = torch.load(path, weights_only=True)
        for name, part in run.items():
            part.load_state_dict(saved[name])

    return Job([("done", restore)])


def with_restore(context: Context) -> Job:
    """Restore from files that the save left on the disk, not in the page cache."""
    manager, state = _manager(context, _run(context))
    manager.save(1, state)
    return Job([("done", lambda: manager.restore_latest(state))])


def _written(context: Context) -> dict[str, Any]:
    return written(context, copies=STATES)


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    total = STATES * data["bytes"]
    sizes = [
        f"{peer['title']}: {runs[0]['result']['bytes'] / total:.5f}"
        for name, peer in data["peers"].items()
        if name in (SAVE, BLOCKING) and (runs := peer["runs"])
    ]
    return paragraphs(
        f"A Llama and its AdamW, {total / GIGABYTE:.2f} GB of state. *call*: until the training loop goes on; *done*:"
        " until the checkpoint is whole. A save of hfshard replaces one that stood there.",
        table(data, list(data["peers"]), [("call", "call: "), ("done", "done: ")], "torch"),
        f"Bytes on the disk for each byte of state: {'; '.join(sizes)}.",
        skipped(data),
    )


def targets(data: Data) -> list[Target]:
    """What is aimed at, and what was measured of it."""
    calls = {run["round"]: run["seconds"]["call"] for run in runs_of(data, ASYNC)}
    total = STATES * data["bytes"]
    limit = (PEAK_RATIO * total + PEAK_MIB * MIB) / MIB
    found = ratio(data, ASYNC, BLOCKING, "call") if calls else None
    return [
        Target(f"save(blocking=False): the loop waits < {CALL_RATIO} × the blocking save", *at_most(CALL_RATIO, found)),
        Target(
            f"save(blocking=False): peak memory ≤ {PEAK_RATIO} × state + {PEAK_MIB} MiB ({limit:.0f} MiB)",
            *peak_at_most(limit, data, [FIRST, ASYNC], digits=0),
        ),
    ]


QUESTION = Question(
    "training",
    "Training checkpoints",
    peers,
    make_specs,
    lambda context, peer: [],
    render,
    targets,
    held=2.0 * STATES,  # the state, and the pages of the file
)
