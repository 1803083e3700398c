"""Cases of the matrix, and the one call of a session that makes those of a group of ranks."""

from __future__ import annotations

import fcntl
import importlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from tests.distributed.gloo import check_ranks
from tests.flows.resume_trainings import as_launched

_WARM_UP = "tests.foreign.producers.deepspeed_on_cpu:warm_up"
BATCH_SIZE = 5
"""Cases that are made one after the other: a machine may be so busy that each takes 20 s."""
SUB_GROUP_SIZE = 40
"""Elements: less than the largest parameter has, so that ZeRO-3 makes many."""


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
        """Name what the same processes can make."""
        return f"{self.framework}-{self.producer.partition(':')[0]}-{self.ranks}" + "-slow" * self.is_slow


def made(case: Case, cases: Sequence[Case], root: Path) -> Path:
    """Return the place of a case; the first process of the session that asks makes its siblings too.

    Args:
        case: The wanted one.
        cases: All.
        root: A directory that the session's processes share.
    """
    alike = [each for each in cases if each.batch == case.batch]
    number = alike.index(case) // BATCH_SIZE
    siblings = alike[number * BATCH_SIZE :][:BATCH_SIZE]
    batch = root / "batches" / f"{case.batch}-{number}"
    batch.mkdir(parents=True, exist_ok=True)
    with open(batch / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (batch / "ended").exists():
            (batch / "ended").touch()
            modules = [_WARM_UP] if case.framework == "deepspeed" else []
            check_ranks(batch / "ranks", case.ranks, make_batch, root, siblings, modules=modules)
            (batch / "succeeded").touch()
    assert (batch / "succeeded").exists(), f"the producers of {batch.name} failed; the first test says how"
    return root / case.name


def make_batch(rank: int, root: Path, cases: Sequence[Case]) -> None:
    """Make checkpoints one after the other, on one rank."""
    for case in cases:
        place = root / case.name
        place.mkdir(parents=True, exist_ok=True)
        module, _, function = case.producer.partition(":")
        producer = getattr(importlib.import_module(f"tests.foreign.producers.{module}"), function)
        print(f"== {case.name}, after {time.process_time():.1f} s of this process", flush=True)
        with as_launched(rank, case.ranks):
            producer(rank, place, **case.arguments)
    print(f"== {time.process_time():.1f} s", flush=True)


def _zero_cases() -> Iterator[Case]:
    """Each pair of stage, precision and ranks, with one of the models; the rest of the product is slow."""
    pairs = {
        ("nasty", 1, "bf16", 1), ("nasty", 1, "fp32", 2), ("nasty", 1, "fp16", 4),
        ("nasty", 2, "fp16", 1), ("nasty", 2, "bf16", 2), ("nasty", 2, "fp32", 4),
        ("nasty", 3, "fp32", 1), ("nasty", 3, "fp16", 2), ("nasty", 3, "bf16", 4),
        ("plain", 1, "bf16", 4), ("plain", 2, "bf16", 4), ("plain", 3, "bf16", 2),
    }  # fmt: skip
    for pair in product(("nasty", "plain"), (1, 2, 3), ("fp32", "bf16", "fp16"), (1, 2, 4)):
        yield _zero(*pair, is_slow=pair not in pairs)
    yield _zero("nasty", 3, "bf16", 2, variant="sub-groups", options={"sub_group_size": SUB_GROUP_SIZE})
    yield _zero("nasty", 2, "bf16", 4, variant="round-robin", options={"round_robin_gradients": True})
    yield _zero("nasty", 1, "bf16", 2, variant="accelerate", tag="pytorch_model")
    yield _zero("nasty", 0, "fp32", 2)
    for ranks, stage, precision in ((2, 0, "fp32"), (4, 1, "fp16"), (4, 1, "bf16"), (2, 1, "fp32")):
        yield Case(
            name=f"deepspeed-pipeline-zero{stage}-{precision}-{ranks}",
            framework="deepspeed",
            producer="pipeline:save_pipeline",
            ranks=ranks,
            arguments={"ranks": ranks, "stage": stage, "precision": precision},
        )
    for stage in (1, 2, 3):
        for injects in (False, True):
            yield Case(
                name=f"deepspeed-zero{stage}-universal" + "-injected" * injects,
                framework="deepspeed",
                producer="zero:save_universal",
                ranks=2,
                arguments={"model_name": "nasty", "stage": stage, "precision": "bf16", "injects": injects},
                is_slow=stage == 2,
            )


def _zero(
    model: str, stage: int, precision: str, ranks: int, *, variant: str = "", is_slow: bool = False, **more: Any
) -> Case:
    arguments = {"model_name": model, "stage": stage, "precision": precision, "options": {}, **more}
    name = "-".join(filter(None, ("deepspeed", f"zero{stage}", precision, str(ranks), model, variant)))
    return Case(
        name=name, framework="deepspeed", producer="zero:save_zero", ranks=ranks, arguments=arguments, is_slow=is_slow
    )


def _dcp_cases() -> Iterator[Case]:
    """Each sharding with each number of ranks, and each layout with one of them."""
    yield _dcp(1, "alone", "model")
    yield _dcp(1, "fsdp2", "top")
    yield _dcp(2, "fsdp2", "nested")
    yield _dcp(2, "fsdp2", "torchtitan", "threads", writer={"thread_count": 2})
    yield _dcp(2, "fsdp2", "top", "files", writer={"single_file_per_rank": False})
    yield _dcp(2, "fsdp2", "model", "bfloat16", dtype="bfloat16")
    yield _dcp(4, "fsdp2", "app")
    yield _dcp(2, "fsdp1", "app")
    yield _dcp(4, "fsdp1", "nested")
    yield _dcp(2, "columns", "model")
    yield _dcp(2, "columns", "torchtitan")
    yield _dcp(4, "hybrid", "top")
    yield _dcp(2, "tensor-parallel", "model", trains=False)
    yield _dcp(4, "tensor-parallel", "top", trains=False)
    yield Case(name="torch-state", framework="torch", producer="dcp:save_state", ranks=1)
    for is_consolidated in (False, True):
        yield Case(
            name="torch-safetensors" + "-consolidated" * is_consolidated,
            framework="torch",
            producer="dcp:save_safetensors",
            ranks=2,
            arguments={"ranks": 2, "is_consolidated": is_consolidated},
        )
    for sharding, ranks, is_slow in (
        ("alone", 1, False), ("fsdp2", 4, False), ("fsdp1", 2, False), ("tensor-parallel", 4, False),
        ("fsdp1", 4, True), ("hybrid", 4, True), ("columns", 2, True),
    ):  # fmt: skip
        yield Case(
            name=f"verl-{sharding}-{ranks}",
            framework="torch",
            producer="dcp:save_rank_files",
            ranks=ranks,
            arguments={"ranks": ranks, "sharding": sharding, "trains": sharding != "tensor-parallel"},
            is_slow=is_slow,
        )
    for version, ranks in ((1, 2), (2, 4)):
        yield Case(
            name=f"accelerate-fsdp{version}-{ranks}",
            framework="torch",
            producer="programs:save_accelerate",
            ranks=ranks,
            arguments={"ranks": ranks, "version": version},
        )
    yield Case(
        name="lightning-2", framework="lightning", producer="programs:save_lightning", ranks=2, arguments={"ranks": 2}
    )


def _dcp(ranks: int, sharding: str, layout: str, variant: str = "", **more: Any) -> Case:
    return Case(
        name="-".join(filter(None, ("torch", sharding, layout, str(ranks), variant))),
        framework="torch",
        producer="dcp:save_model",
        ranks=ranks,
        arguments={"ranks": ranks, "sharding": sharding, "layout": layout, **more},
    )


CASES = (*_zero_cases(), *_dcp_cases())
