"""The ways to save and resume that are compared, each as its own documentation writes it, for one process each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, default_collate

from bench.resumes.task import BATCH_SIZE, DISK_BYTES, STEPS, STEPS_PER_EPOCH, Parts, Record, TrainingJob, build

Batch = dict[str, torch.Tensor]


def run(job: TrainingJob) -> None:
    """Train, as the body of a process, and write down what happened or what was raised."""
    log = os.open(job.directory / f"{job.phase}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    record = Record(job)
    warnings.simplefilter("always")
    # Workers are forked, as is usual; those of a fork server would outlive a SIGKILL.
    multiprocessing.set_start_method("fork", force=True)
    try:
        parts = build(job)
        TRAININGS[job.way](job, record, parts)
        record.finish(parts)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        traceback.print_exc()
        record.note(error=f"{type(error).__name__}: {error}")


def _torch_save(job: TrainingJob, record: Record, parts: Parts) -> None:
    # pytorch.org/tutorials: "Saving and loading a general checkpoint".
    loader = DataLoader(parts.data, batch_size=BATCH_SIZE, shuffle=job.shuffle, num_workers=job.workers)
    step = 0
    if job.resume:
        path = job.directory / "checkpoint.pt" if job.keep_one else _newest(job.directory, "*.pt")
        checkpoint = torch.load(path, weights_only=True)
        parts.model.load_state_dict(checkpoint["model_state_dict"])
        parts.optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
        parts.scheduler.load_state_dict(checkpoint["scheduler_state_dict"])
        step = checkpoint["step"]

    def save(step: int) -> None:
        torch.save(
            {
                "step": step,
                "model_state_dict": parts.model.state_dict(),
                "optimizer_state_dict": parts.optimizer.state_dict(),
                "scheduler_state_dict": parts.scheduler.state_dict(),
            },
            job.directory / ("checkpoint.pt" if job.keep_one else f"checkpoint-{step}.pt"),
        )

    _loop(job, record, parts, step, lambda done: islice(loader, done, None), partial(_train, parts), save)


def _trainer(job: TrainingJob, record: Record, parts: Parts, *, ours: bool = False) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Recorder(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            record.step(state.global_step, parts.model)
            # A real SIGKILL while the next step is under way; at the step's end, its checkpoint is still to be written.
            if job.full_from is not None and state.global_step >= job.full_from:
                _fill_disk()

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            record.end_of_step(state.global_step)

    trainer = Trainer(
        model=parts.model,
        args=TrainingArguments(
            output_dir=str(job.directory / "run"),
            per_device_train_batch_size=BATCH_SIZE,
            max_steps=STEPS,
            save_strategy="no" if job.save_every is None else "steps",
            save_steps=job.save_every or STEPS,
            save_total_limit=1 if job.keep_one else None,
            dataloader_num_workers=job.workers,
            train_sampling_strategy="random" if job.shuffle else "sequential",
            seed=17,
            use_cpu=True,
            report_to=[],
            logging_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        data_collator=default_collate,
        train_dataset=parts.data,
        optimizers=(parts.optimizer, cast(Any, parts.scheduler)),
        callbacks=[Recorder()],
    )
    resume: str | bool = job.resume
    if ours:
        from hfshard.training import CheckpointCallback

        checkpoints = CheckpointCallback().attach(trainer)
        resume = checkpoints.latest() or False
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Exception as error:  # noqa: BLE001 - each library has its own for a full disk
        _note_full(job, record, error)


def _accelerate(job: TrainingJob, record: Record, parts: Parts, *, ours: bool = False) -> None:
    # huggingface.co/docs/accelerate: "Checkpointing", and complete_nlp_example.py.
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    configuration = ProjectConfiguration(
        str(job.directory), automatic_checkpoint_naming=True, total_limit=1 if job.keep_one else None
    )
    accelerator = Accelerator(cpu=True, project_config=configuration)
    if ours:
        from hfshard.training import prepare_loader, prepared_state

        loader = prepare_loader(accelerator, _our_loader(job, parts))
        model, optimizer, scheduler = accelerator.prepare(parts.model, parts.optimizer, parts.scheduler)
    else:
        plain = DataLoader(parts.data, batch_size=BATCH_SIZE, shuffle=job.shuffle, num_workers=job.workers)
        model, optimizer, loader, scheduler = accelerator.prepare(parts.model, parts.optimizer, plain, parts.scheduler)

    def train(batch: Batch) -> None:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    if ours:
        state = prepared_state(accelerator, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        _managed(job, record, parts, loader, train, state)
        return
    step = 0
    if job.resume:
        newest = _newest(job.directory / "checkpoints", "checkpoint_*")
        accelerator.load_state(str(newest))
        saves = int(newest.name.split("_")[1]) + 1
        step = saves * (job.save_every or STEPS)
        configuration.iteration = saves
    _loop(
        job,
        record,
        parts,
        step,
        lambda done: accelerator.skip_first_batches(loader, done) if done else loader,
        train,
        lambda step: accelerator.save_state(),
    )


def _hfshard(job: TrainingJob, record: Record, parts: Parts) -> None:
    from hfshard.training import TrainingState

    loader = _our_loader(job, parts)
    state = TrainingState(model=parts.model, optimizer=parts.optimizer, scheduler=parts.scheduler, loader=loader)
    _managed(job, record, parts, loader, partial(_train, parts), state)


TRAININGS: dict[str, Callable[[TrainingJob, Record, Parts], None]] = {
    "torch.save": _torch_save,
    "Trainer": _trainer,
    "Accelerate": _accelerate,
    "hfshard": _hfshard,
    "hfshard in Trainer": partial(_trainer, ours=True),
    "hfshard in Accelerate": partial(_accelerate, ours=True),
}


def _our_loader(job: TrainingJob, parts: Parts) -> Any:
    from hfshard.training import ResumableDataLoader

    return ResumableDataLoader(parts.data, batch_size=BATCH_SIZE, shuffle=job.shuffle, num_workers=job.workers, seed=17)


def _managed(
    job: TrainingJob, record: Record, parts: Parts, loader: Any, train: Callable[[Batch], None], state: Any
) -> None:
    """Train with hfshard's manager, whose loader goes on where it was."""
    from hfshard.training import CheckpointManager

    manager = CheckpointManager(job.directory / "run", max_to_keep=1 if job.keep_one else None)
    step = int(manager.restore_latest(state) or 0)
    _loop(job, record, parts, step, lambda done: loader, train, lambda step: manager.save(step, state))


def _loop(
    job: TrainingJob,
    record: Record,
    parts: Parts,
    step: int,
    batches: Callable[[int], Iterable[Batch]],
    train: Callable[[Batch], None],
    save: Callable[[int], object],
) -> None:
    """Train from a step to the last one; `batches` gives those of an epoch of which some are done."""
    while step < STEPS:
        for batch in batches(step % STEPS_PER_EPOCH):
            if step == STEPS:
                break
            train(batch)
            step += 1
            record.step(step, parts.model)
            if job.save_every is not None and step % job.save_every == 0:
                with _perhaps_full(job, step, record):
                    save(step)
            record.end_of_step(step)


def _train(parts: Parts, batch: Batch) -> None:
    parts.model(**batch)["loss"].backward()
    parts.optimizer.step()
    parts.scheduler.step()
    parts.optimizer.zero_grad()


def _newest(directory: Path, pattern: str) -> Path:
    found = sorted(directory.glob(pattern), key=lambda path: int("".join(filter(str.isdigit, path.name))))
    if not found:
        raise FileNotFoundError(f"no checkpoint in {directory}")
    return found[-1]


@contextlib.contextmanager
def _perhaps_full(job: TrainingJob, step: int, record: Record) -> Iterator[None]:
    if job.full_from is None or step < job.full_from:
        yield
        return
    _fill_disk()
    try:
        yield
    except Exception as error:  # noqa: BLE001 - each library has its own for a full disk
        _note_full(job, record, error)
    record.note(full="a save on the full disk raised nothing")
    os._exit(1)


def _fill_disk() -> None:
    """From here on, a file of this process grows to DISK_BYTES, then writing fails (EFBIG), as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES, DISK_BYTES))


def _note_full(job: TrainingJob, record: Record, error: Exception) -> None:
    if job.full_from is None:
        raise error
    record.note(full=f"{type(error).__name__}: {error}")
