"""Cases of the matrix, and the one call of a session that makes those of a group of ranks."""

from __future__ import annotations

import fcntl
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from tests.distributed.gloo import check_ranks
from tests.flows.resume_trainings import as_launched

_WARM_UP = "tests.foreign.producers.deepspeed_on_cpu:warm_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A checkpoint that a framework saves."""

    name: str
    """Of its test, and of its directory."""
    framework: str
    """The module that must be installed."""
    producer: str
    """MODULE:FUNCTION within this package; called on each rank with the rank, the place and the arguments."""
    ranks: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    is_slow: bool = False
    """Runs with --slow: a sibling runs always."""

    @property
    def batch(self) -> str:
        """Name what is made by the same processes."""
        return f"{self.framework}-{self.ranks}" + "-slow" * self.is_slow


def made(case: Case, cases: Sequence[Case], root: Path) -> Path:
    """Return the place of a case; the first process of the session that asks makes all of its batch.

    Args:
        case: The wanted one.
        cases: All.
        root: A directory that the session's processes share.
    """
    batch = root / "batches" / case.batch
    batch.mkdir(parents=True, exist_ok=True)
    with open(batch / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (batch / "ended").exists():
            (batch / "ended").touch()
            siblings = [each for each in cases if each.batch == case.batch]
            modules = [_WARM_UP] if case.framework == "deepspeed" else []
            check_ranks(batch / "ranks", case.ranks, make_batch, root, siblings, modules=modules)
            (batch / "succeeded").touch()
    assert (batch / "succeeded").exists(), f"the producers of {case.batch} failed; the first test says how"
    return root / case.name


def make_batch(rank: int, root: Path, cases: Sequence[Case]) -> None:
    """Make checkpoints one after the other, on one rank."""
    for case in cases:
        place = root / case.name
        place.mkdir(parents=True, exist_ok=True)
        module, _, function = case.producer.partition(":")
        producer = getattr(importlib.import_module(f"tests.foreign.producers.{module}"), function)
        print(f"== {case.name}", flush=True)
        with as_launched(rank, case.ranks):
            producer(rank, place, **case.arguments)


def _zero_cases() -> list[Case]:
    """ZeRO: each pair of stage, precision and ranks with one of the models; the rest of the product is slow."""
    pairs = {
        ("nasty", 1, "bf16", 1), ("nasty", 1, "fp32", 2), ("nasty", 1, "fp16", 4),
        ("nasty", 2, "fp16", 1), ("nasty", 2, "bf16", 2), ("nasty", 2, "fp32", 4),
        ("nasty", 3, "fp32", 1), ("nasty", 3, "fp16", 2), ("nasty", 3, "bf16", 4),
        ("plain", 1, "bf16", 4), ("plain", 2, "bf16", 4), ("plain", 3, "bf16", 2),
    }  # fmt: skip
    return [
        _zero(model, stage, precision, ranks, is_slow=(model, stage, precision, ranks) not in pairs)
        for model, stage, precision, ranks in product(
            ("nasty", "plain"), (1, 2, 3), ("fp32", "bf16", "fp16"), (1, 2, 4)
        )
    ]


def _zero(
    model: str, stage: int, precision: str, ranks: int, *, variant: str = "", is_slow: bool = False, **arguments: Any
) -> Case:
    return Case(
        name=f"deepspeed-zero{stage}-{precision}-{ranks}-{model}" + f"-{variant}" * bool(variant),
        framework="deepspeed",
        producer="zero:save_zero",
        ranks=ranks,
        arguments={"model_name": model, "stage": stage, "precision": precision, "options": {}, **arguments},
        is_slow=is_slow,
    )


CASES = (*_zero_cases(),)
