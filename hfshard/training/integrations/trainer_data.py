"""The batches of a Trainer: seeded one by one, and compared between a checkpoint and the training that resumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from hfshard.errors import StateDictMismatchError
from hfshard.training.data.loader_state import length_of
from hfshard.training.data.plain_loader import plain_loader
from hfshard.training.integrations.rank_batches import BatchShare

_DATA: Final = {
    "seed": "seed (or data_seed)",
    "shuffled_by": "seed that torch had when the loader was made",
    "samples": "number of samples",
    "batches": "number of batches in an epoch",
    "accumulated": "gradient_accumulation_steps",
}
"""What has to be the same again for the same batches, and what a message calls it."""


def prepared_seeded_loader(accelerator: Accelerator, loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
    """Return a prepared loader with the batches of another prepared one, each loaded under seeds of its own.

    The other one gives this process its share of the batches already, so Accelerate must not share them out again.
    """
    share = BatchShare.of(accelerator)
    seeded = _seeded_loader(loader, seed, share)
    if share.count == 1:
        return accelerator.prepare_data_loader(seeded)  # type: ignore[no-any-return]
    return prepare_data_loader(  # type: ignore[no-any-return]
        seeded,
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=accelerator.device_placement,
        rng_types=list(accelerator.rng_types),
        dispatch_batches=False,
        non_blocking=accelerator.non_blocking,
    )


def _seeded_loader(loader: DataLoader[Any], seed: int, share: BatchShare) -> DataLoader[Any]:
    """Return a loader with the same batches in the same order, each loaded under seeds of its own.

    It draws from the global RNGs as before, but not with persistent workers: see `CheckpointCallback._eval_dataloader`.
    """
    plain = plain_loader(share.loader(loader, loader.batch_sampler, seed))
    if not loader.persistent_workers:
        plain.generator = loader.generator
    return plain


def data_settings(args: TrainingArguments, loader: Any) -> dict[str, int | None]:
    """Return the settings that the batches of a training and their order depend on."""
    sampler = getattr(loader.batch_sampler, "sampler", None)
    return {
        "seed": batch_seed(args),
        "shuffled_by": getattr(sampler, "initial_seed", None),  # of Accelerate's sampler
        "samples": length_of(loader.dataset),
        "batches": length_of(loader),
        "accumulated": args.gradient_accumulation_steps,
    }


def batch_seed(args: TrainingArguments) -> int:
    """Return the seed of what is drawn while data are loaded."""
    return args.seed if args.data_seed is None else args.data_seed


def check_same_data(was: dict[str, int | None], now: dict[str, int | None], checkpoint: str) -> None:
    """Refuse to skip batches that are not those of the saved training.

    Raises:
        StateDictMismatchError: A setting differs; the message says which.
    """
    for name, title in _DATA.items():
        if was.get(name) != now.get(name):
            raise StateDictMismatchError(
                f"The training of the checkpoint '{checkpoint}' had other batches than this one has: its {title} was "
                f"{was.get(name)}, and is {now.get(name)}. Set it as it was; or set ignore_data_skip=True, which "
                "begins the epoch anew.",
                path=checkpoint,
                expected=was.get(name),
                actual=now.get(name),
            )


class UnloggedLoss:
    """The sum of losses since one was last logged, which each rank has for its own batches.

    It takes the place of the loader in the training state, of which each rank saves its own.
    """

    def __init__(self, loss: float = 0.0) -> None:
        self.loss = loss

    def state_dict(self) -> dict[str, float]:
        """Return the sum."""
        return {"loss": self.loss}

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Take the sum that was saved."""
        self.loss = state_dict["loss"]
