"""Exact resume: a run that is killed and resumed in a new process ends as the one that was left alone, bit for bit."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hfshard.training import CheckpointManager
from tests.flows.resume_cases import CASES, REPEATED, run_plain
from tests.flows.resume_runs import STEPS, Case, Run, run_roles
from tests.flows.resume_trainings import ACCELERATE, TRAINER, run_accelerate, run_trainer
from tests.helpers import processes

BATCHES_PER_EPOCH = 5
_SHOWN = 8
_RUN: dict[str, Any] = {"Trainer": run_trainer, "Accelerate": run_accelerate}
_STEPS = {"": STEPS, "Trainer": None, "Accelerate": 21}
"""Of a whole run; None: its log is in everything that it ends with."""


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """The runs of a case: how each ended and what it reports, and the steps of a whole one."""

    steps: int | None
    ends: dict[str, processes.End]
    reports: dict[str, dict[str, Any]]
    suffixes: set[str]
    """Of the files of the killed and resumed run."""

    def differences(self, one: str, other: str) -> list[str]:
        """Every value in which two runs differ; empty if they are the same, bit for bit."""
        pairs = [("", self.reports[one]["everything"], self.reports[other]["everything"])]
        if self.steps is not None:
            first = self.reports[one]["restored"] or self.reports[other]["restored"] or 0
            done = [self.reports[role]["steps"] for role in (one, other)]
            steps = [part[len(part) - (self.steps - first) :] for part in done]  # none, where the last step was saved
            assert [len(part) for part in steps] == [self.steps - first] * 2
            pairs += [(f"step {number}: ", *pair) for number, pair in enumerate(zip(*steps), first + 1)]
        return [
            f"{at}{path}: {mine.get(path)} | {theirs.get(path)}"
            for at, mine, theirs in pairs
            for path in mine | theirs
            if mine.get(path) != theirs.get(path)
        ]


def run_case(
    name: str, root: Path, roles: tuple[tuple[str, ...], ...], store: str = "hfshard", fresh: bool = False
) -> CaseOutcome:
    """Run some of a case's roles, one after the other, until one of them does not end as it should.

    Those of each process are together, which saves forks and imports. With `fresh`, the resumed one's is an interpreter
    that starts from nothing, and none that was forked as the others.
    """
    root.mkdir(parents=True)
    program, _, case = name.rpartition(": ")
    run_role: Any = _RUN.get(program) or partial(run_plain, store=store)
    if program == "Trainer" and TRAINER[case].as_upstream:
        roles = (("straight", "upstream", "killed"), *roles[1:])
    ends: dict[str, processes.End] = {}
    reports: dict[str, dict[str, Any]] = {}
    for together in roles:
        role = together[-1]
        is_fresh, modules = fresh and role == "resumed", (getattr(run_role, "func", run_role).__module__,)
        words, order = root / f"{role}.txt", (run_role, case, together, root)
        ends[role] = processes.end_of(words, run_roles, *order, fresh=is_fresh, modules=modules)
        if ends[role].status != (-signal.SIGKILL if role.startswith("killed") else 0):
            break
        for one in together:
            if not one.startswith("killed"):
                reports[one] = json.loads((root / f"{one}.json").read_text())
    suffixes = {path.suffix for path in (root / "run").rglob("*") if path.is_file()}
    return CaseOutcome(_STEPS[program], ends, reports, suffixes)


RESUMED = (("straight", "killed"), ("resumed",))
BROKEN = {
    "optimizer-nadam-bf16": "optimizer 1/state/first.weight/'mu_product': torch.float32",
    "optimizer-asgd-bf16": "optimizer 1/state/first.weight/'eta': torch.float32",
    "optimizer-own-master-weights": "optimizer 1/state/first.weight/'master': torch.float32",
}
"""What a run with torch.save gets wrong; the rest of such a run, and other such runs, are exact."""

ROLLED_BACK = (
    "everything", "stateful-diary", "extra-state", "alternating-gradients", "scaler-skips-steps", "optimizer-lbfgs",
    "optimizer-own-master-weights", "optimizer-own-counter", "optimizer-adamw-three-groups", "optimizer-asgd-bf16",
    "scheduler-lambda-callable", "scheduler-lambda-holds-optimizer", "scheduler-cyclic-callable", "scheduler-plateau",
    "scheduler-sequential-stateful", "scheduler-chained", "scheduler-own-bound-method", "scheduler-hf-greedy",
    "scheduler-own-crowded",
)  # fmt: skip
"""What could keep something of the steps that are to be forgotten."""

Jobs = processes.Jobs[tuple[str, str], CaseOutcome]


def _job(item: pytest.Item) -> tuple[str, str] | None:
    """What a test wants to have run: a case, and how."""
    wants = getattr(item, "originalname", "")
    case = getattr(item, "callspec", None)
    return None if wants not in HOW or case is None or item.get_closest_marker("skip") else (case.params["name"], wants)


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Every case that a test of this session asks for."""
    root = tmp_path_factory.mktemp("runs")
    wanted = dict.fromkeys(job for item in request.session.items if (job := _job(item)) is not None)
    numbers = {job: number for number, job in enumerate(wanted)}
    with processes.pool() as pool:

        def begin(job: tuple[str, str]) -> Future[CaseOutcome]:
            name, how = job
            return pool.submit(run_case, name, root / f"{numbers[job]}-{name}", **HOW[how])

        yield processes.Jobs(begin, wanted)
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def outcome(name: str, jobs: Jobs, request: pytest.FixtureRequest) -> CaseOutcome:
    """The runs of a test's case."""
    return jobs[name, getattr(request.node, "originalname", "")].result()


def _names(cases: Iterable[Case]) -> list[Any]:
    marks = [[pytest.mark.compat] * case.compat + [pytest.mark.slow] * (case.name in REPEATED) for case in cases]
    return [pytest.param(case.name, marks=some, id=case.name) for case, some in zip(cases, marks, strict=True)]


_PROGRAMS = [
    *(pytest.param(f"Trainer: {name}", marks=[pytest.mark.compat] * case.oldest) for name, case in TRAINER.items()),
    *(pytest.param(f"Accelerate: {name}", marks=pytest.mark.compat) for name in ACCELERATE),
]


def _last_saves(name: str) -> set[int]:
    """The steps that may be the newest whole checkpoint of the killed run."""
    program, _, of_program = name.rpartition(": ")
    if program:
        return {*(TRAINER if program == "Trainer" else ACCELERATE)[of_program].resumed_after}
    case = CASES[name]
    every = BATCHES_PER_EPOCH if case.save_at == "epoch" else case.every
    last = case.death[0] // every * every
    if case.death[1] == "saving":
        return set(range(last - 2 * every, STEPS + 1))
    return {last} if case.blocking else {last, last - every}


def _assert_resumed_exactly(name: str, outcome: CaseOutcome) -> None:
    assert "resumed" in outcome.reports, outcome.ends
    assert outcome.reports["resumed"]["restored"] in _last_saves(name)
    differences = outcome.differences("straight", "resumed")
    assert not differences, f"{len(differences)} differ: {differences[:_SHOWN]}"


@pytest.mark.parametrize("name", [*_names(CASES.values()), *_PROGRAMS])
def test_a_killed_run_resumes_to_the_bit(name: str, outcome: CaseOutcome) -> None:
    _assert_resumed_exactly(name, outcome)
    if ": " in name:
        assert outcome.suffixes == {".safetensors", ".json"}
    if "upstream" in outcome.reports:
        assert outcome.differences("straight", "upstream") == []


@pytest.mark.parametrize("name", _names([case for case in CASES.values() if case.fresh]))
def test_a_killed_run_resumes_to_the_bit_in_a_new_interpreter(name: str, outcome: CaseOutcome) -> None:
    _assert_resumed_exactly(name, outcome)


@pytest.mark.parametrize("name", ["everything", "async-everything", "saved-at-epoch-ends", "rotated-to-one"])
def test_a_run_that_is_killed_twice_resumes_to_the_bit(name: str, outcome: CaseOutcome) -> None:
    assert "resumed" in outcome.reports, outcome.ends
    assert outcome.reports["resumed"]["restored"] > CASES[name].death[0]
    assert outcome.differences("straight", "resumed") == []


@pytest.mark.parametrize("name", ROLLED_BACK)
def test_an_older_step_is_restored_into_objects_that_went_on(name: str, outcome: CaseOutcome) -> None:
    assert "rolled back" in outcome.reports, outcome.ends
    assert outcome.reports["rolled back"]["restored"] == CASES[name].back
    assert outcome.differences("straight", "rolled back") == []


@pytest.mark.parametrize(
    "name", ["dropout-2-workers-augmented", "everything", "async-everything", "optimizer-nadam-bf16"]
)
def test_saving_at_every_step_changes_no_number(name: str, outcome: CaseOutcome) -> None:
    assert "saving" in outcome.reports, outcome.ends
    assert outcome.differences("straight", "saving") == []


@pytest.mark.parametrize("name", [*BROKEN, "optimizer-adamw", "dropout"])
def test_the_matrix_tells_an_exact_store_from_an_inexact_one(name: str, outcome: CaseOutcome) -> None:
    assert "resumed" in outcome.reports, outcome.ends
    differences = outcome.differences("straight", "resumed")
    if name in BROKEN:
        assert any(text.startswith(BROKEN[name]) for text in differences), differences
    else:
        assert differences == []


HOW: dict[str, dict[str, Any]] = {
    test_a_killed_run_resumes_to_the_bit.__name__: {"roles": RESUMED},
    test_a_killed_run_resumes_to_the_bit_in_a_new_interpreter.__name__: {"roles": RESUMED, "fresh": True},
    test_a_run_that_is_killed_twice_resumes_to_the_bit.__name__: {
        "roles": (("straight", "killed"), ("killed again",), ("resumed",))
    },
    test_an_older_step_is_restored_into_objects_that_went_on.__name__: {"roles": (("straight", "rolled back"),)},
    test_saving_at_every_step_changes_no_number.__name__: {"roles": (("straight", "saving"),)},
    test_the_matrix_tells_an_exact_store_from_an_inexact_one.__name__: {"roles": RESUMED, "store": "torch.save"},
}
"""How the cases of a test are run."""


def test_the_matrix_has_all_that_it_promises() -> None:
    """Each class of torch is in a case that runs without --slow."""
    always = {name: case for name, case in CASES.items() if name not in REPEATED}
    assert len(always) >= 90
    assert set(CASES) > REPEATED
    schedulers, optimizers = (
        {name for name, value in vars(module).items() if isinstance(value, type) and name.endswith(ends)}
        for module, ends in ((torch.optim.lr_scheduler, ("LR", "Restarts", "Plateau", "Scheduler")), (torch.optim, ""))
    )
    tried = {type(Run(case).scheduler).__name__ for case in always.values() if case.scheduler is not None}
    assert schedulers - {"LRScheduler", "_LRScheduler"} - tried == set()
    of_optimizers = [case for name, case in always.items() if name.startswith("optimizer-")]
    used = {type(one).__name__ for case in of_optimizers for one in Run(case).optimizers}
    assert optimizers - {"Optimizer"} - used == set()


def test_a_save_leaves_every_tensor_where_it_is(tmp_path: Path) -> None:
    run = Run(CASES["everything"])
    run.train(3)
    tensors = [*run.model.state_dict(keep_vars=True).values()]
    tensors += [value for state in run.optimizers[0].state.values() for value in state.values()]
    tensors += [parameter.grad for parameter in run.model.parameters() if parameter.grad is not None]
    before = [(id(tensor), tensor.data_ptr(), tensor._version, tensor.requires_grad) for tensor in tensors]
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, run.state())
    run.close()
    assert [(id(tensor), tensor.data_ptr(), tensor._version, tensor.requires_grad) for tensor in tensors] == before
