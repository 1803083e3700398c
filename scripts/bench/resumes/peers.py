"""The ways to save and resume that are compared, each as its own documentation writes it, for one process each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, default_collate

from bench.resumes.task import BATCH_SIZE, DISK_BYTES, STEPS, STEPS_PER_EPOCH, Parts, Record, TrainingJob, build


def run(job: TrainingJob) -> None:
    """The body of a process: train, and write down what happened or what was raised."""
    log = os.open(job.directory / f"{job.phase}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    record = Record(job)
    warnings.simplefilter("always")
    # Workers are forked, as is usual; those of a fork server would outlive a SIGKILL.
    multiprocessing.set_start_method("fork", force=True)
    try:
        TRAININGS[job.way](job, record)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        traceback.print_exc()
        record.note(error=f"{type(error).__name__}: {error}")


def _torch_save(job: TrainingJob, record: Record) -> None:
    # pytorch.org/tutorials: "Saving and loading a general checkpoint".
    parts = build(job)
    loader = DataLoader(parts.data, batch_size=BATCH_SIZE, shuffle=job.shuffle, num_workers=job.workers)
    step = 0
    if job.resume:
        path = job.directory / "checkpoint.pt" if job.keep_one else _newest(job.directory, "*.pt")
        checkpoint = torch.load(path, weights_only=True)
        parts.model.load_state_dict(checkpoint["model_state_dict"])
        parts.optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
        parts.scheduler.load_state_dict(checkpoint["scheduler_state_dict"])
        step = checkpoint["step"]
    while step < STEPS:
        done = step % STEPS_PER_EPOCH
        for index, batch in enumerate(loader):
            if index < done or step == STEPS:
                continue
            _train(parts, batch)
            step += 1
            record.step(step, parts.model)
            if _is_due(job, step):
                with _perhaps_full(job, step, record):
                    torch.save(
                        {
                            "step": step,
                            "model_state_dict": parts.model.state_dict(),
                            "optimizer_state_dict": parts.optimizer.state_dict(),
                            "scheduler_state_dict": parts.scheduler.state_dict(),
                        },
                        job.directory / ("checkpoint.pt" if job.keep_one else f"checkpoint-{step}.pt"),
                    )
            record.end_of_step(step)
    record.finish(parts)


def _trainer(job: TrainingJob, record: Record, *, ours: bool = False) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Recorder(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            record.step(state.global_step, parts.model)
            # A real SIGKILL while the next step is under way; at the step's end, its checkpoint is still to be written.
            if job.full_from is not None and state.global_step >= job.full_from:
                _fill_disk()

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            record.end_of_step(state.global_step)

    parts = build(job)
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
    record.finish(parts)


def _accelerate(job: TrainingJob, record: Record, *, ours: bool = False) -> None:
    # huggingface.co/docs/accelerate: "Checkpointing", and complete_nlp_example.py.
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    parts = build(job)
    configuration = ProjectConfiguration(
        str(job.directory), automatic_checkpoint_naming=True, total_limit=1 if job.keep_one else None
    )
    accelerator = Accelerator(cpu=True, project_config=configuration)
    if ours:
        _accelerate_ours(job, record, parts, accelerator)
        return
    loader = DataLoader(parts.data, batch_size=BATCH_SIZE, shuffle=job.shuffle, num_workers=job.workers)
    model, optimizer, loader, scheduler = accelerator.prepare(parts.model, parts.optimizer, loader, parts.scheduler)
    step = 0
    if job.resume:
        newest = _newest(job.directory / "checkpoints", "checkpoint_*")
        accelerator.load_state(str(newest))
        saves = int(newest.name.split("_")[1]) + 1
        step = saves * (job.save_every or STEPS)
        configuration.iteration = saves
    while step < STEPS:
        active = accelerator.skip_first_batches(loader, step % STEPS_PER_EPOCH) if step % STEPS_PER_EPOCH else loader
        for batch in active:
            if step == STEPS:
                break
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            record.step(step, parts.model)
            if _is_due(job, step):
                with _perhaps_full(job, step, record):
                    accelerator.save_state()
            record.end_of_step(step)
    record.finish(parts)


def _accelerate_ours(job: TrainingJob, record: Record, parts: Parts, accelerator: Any) -> None:
    from hfshard.training import CheckpointManager, ResumableDataLoader, prepare_loader, prepared_state

    plain = ResumableDataLoader(
        parts.data, batch_size=BATCH_SIZE, shuffle=job.shuffle, num_workers=job.workers, seed=17
    )
    loader = prepare_loader(accelerator, plain)
    model, optimizer, scheduler = accelerator.prepare(parts.model, parts.optimizer, parts.scheduler)
    manager = CheckpointManager(job.directory / "run", max_to_keep=1 if job.keep_one else None)
    state = prepared_state(accelerator, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    step = int(manager.restore_latest(state) or 0)
    while step < STEPS:
        for batch in loader:
            if step == STEPS:
                break
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            record.step(step, parts.model)
            if _is_due(job, step):
                with _perhaps_full(job, step, record):
                    manager.save(step, state)
            record.end_of_step(step)
    record.finish(parts)


def _hfshard(job: TrainingJob, record: Record) -> None:
    from hfshard.training import CheckpointManager, ResumableDataLoader, TrainingState

    parts = build(job)
    loader = ResumableDataLoader(
        parts.data, batch_size=BATCH_SIZE, shuffle=job.shuffle, num_workers=job.workers, seed=17
    )
    manager = CheckpointManager(job.directory / "run", max_to_keep=1 if job.keep_one else None)
    state = TrainingState(model=parts.model, optimizer=parts.optimizer, scheduler=parts.scheduler, loader=loader)
    step = int(manager.restore_latest(state) or 0)
    while step < STEPS:
        for batch in loader:
            if step == STEPS:
                break
            _train(parts, batch)
            step += 1
            record.step(step, parts.model)
            if _is_due(job, step):
                with _perhaps_full(job, step, record):
                    manager.save(step, state)
            record.end_of_step(step)
    record.finish(parts)


def _trainer_ours(job: TrainingJob, record: Record) -> None:
    _trainer(job, record, ours=True)


def _accelerate_with_ours(job: TrainingJob, record: Record) -> None:
    _accelerate(job, record, ours=True)


TRAININGS = {
    "torch.save": _torch_save,
    "Trainer": _trainer,
    "Accelerate": _accelerate,
    "hfshard": _hfshard,
    "hfshard in Trainer": _trainer_ours,
    "hfshard in Accelerate": _accelerate_with_ours,
}


def _train(parts: Parts, batch: dict[str, torch.Tensor]) -> None:
    parts.model(**batch)["loss"].backward()
    parts.optimizer.step()
    parts.scheduler.step()
    parts.optimizer.zero_grad()


def _is_due(job: TrainingJob, step: int) -> bool:
    return job.save_every is not None and step % job.save_every == 0


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
    os._exit(1)
