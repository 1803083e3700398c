"""Exact resume: a run that is killed and resumed in a new process ends as the one that was left alone, bit for bit."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hfshard.training import CheckpointManager
from tests.training import processes
from tests.training.resume.cases import CASES, REPEATED
from tests.training.resume.roles import run_roles
from tests.training.resume.runs import STEPS, Case, Run

BATCHES_PER_EPOCH = 5
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """The runs of a case, each with how it ended and what it reports."""

    ends: dict[str, processes.End]
    reports: dict[str, dict[str, Any]]

    def differences(self, one: str, other: str) -> list[str]:
        """Every value in which two runs differ; empty if they are the same, bit for bit."""
        first = self.reports[one]["restored"] or self.reports[other]["restored"] or 0
        done = [self.reports[role]["steps"] for role in (one, other)]
        steps = [part[len(part) - (STEPS - first) :] for part in done]  # none, where the last step was saved
        assert [len(part) for part in steps] == [STEPS - first] * 2
        pairs = [(f"step {number}: ", *pair) for number, pair in enumerate(zip(*steps), first + 1)]
        pairs.append(("", self.reports[one]["everything"], self.reports[other]["everything"]))
        return [
            f"{at}{path}: {mine.get(path)} | {theirs.get(path)}"
            for at, mine, theirs in pairs
            for path in mine | theirs
            if mine.get(path) != theirs.get(path)
        ]


def run_case(name: str, root: Path, roles: tuple[str, ...], store: str = "hfshard", fresh: bool = False) -> CaseOutcome:
    """Run some of a case's roles, one after the other, until one of them does not end as it should.

    Each has a process of its own, but for the first: in that process the second follows, which it saves a fork. With
    `fresh`, the resumed one's is an interpreter that starts from nothing, and none that was forked as the others.
    """
    root.mkdir(parents=True)
    ends: dict[str, processes.End] = {}
    reports: dict[str, dict[str, Any]] = {}
    for together in (roles[:2], *((role,) for role in roles[2:])):
        role = together[-1]
        is_fresh = fresh and role == "resumed"
        ends[role] = processes.run(
            root / f"{role}.txt", run_roles, name, together, root, store, fresh=is_fresh, modules=_IMPORTED
        )
        if ends[role].status != (-signal.SIGKILL if role.startswith("killed") else 0):
            break
        for one in together:
            if not one.startswith("killed"):
                reports[one] = json.loads((root / f"{one}.json").read_text())
    return CaseOutcome(ends, reports)


_IMPORTED = ("tests.training.resume.roles",)
RESUMED = ("straight", "killed", "resumed")
TWICE = ("straight", "killed", "killed again", "resumed")
SAVING = ("straight", "saving")
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


def _names(cases: list[Case]) -> list[Any]:
    marks = [[pytest.mark.compat] * case.compat + [pytest.mark.slow] * (case.name in REPEATED) for case in cases]
    return [pytest.param(case.name, marks=some, id=case.name) for case, some in zip(cases, marks, strict=True)]


def _last_saves(case: Case) -> set[int]:
    """The steps that may be the newest whole checkpoint of the killed run."""
    every = BATCHES_PER_EPOCH if case.save_at == "epoch" else case.every
    last = case.death[0] // every * every
    if case.death[1] == "saving":
        return set(range(last - 2 * every, STEPS + 1))
    return {last} if case.blocking else {last, last - every}


def _assert_resumed_exactly(case: Case, outcome: CaseOutcome) -> None:
    assert "resumed" in outcome.reports, outcome.ends
    assert outcome.reports["resumed"]["restored"] in _last_saves(case)
    differences = outcome.differences("straight", "resumed")
    assert not differences, f"killed at {case.death}: {len(differences)} differ: {differences[:_SHOWN]}"


@pytest.mark.parametrize("name", _names(list(CASES.values())))
def test_a_killed_run_resumes_to_the_bit(name: str, jobs: Jobs) -> None:
    _assert_resumed_exactly(CASES[name], jobs[name, "test_a_killed_run_resumes_to_the_bit"].result())


@pytest.mark.parametrize("name", _names([case for case in CASES.values() if case.fresh]))
def test_a_killed_run_resumes_to_the_bit_in_a_new_interpreter(name: str, jobs: Jobs) -> None:
    _assert_resumed_exactly(
        CASES[name], jobs[name, "test_a_killed_run_resumes_to_the_bit_in_a_new_interpreter"].result()
    )


@pytest.mark.parametrize("name", ["everything", "async-everything", "saved-at-epoch-ends", "rotated-to-one"])
def test_a_run_that_is_killed_twice_resumes_to_the_bit(name: str, jobs: Jobs) -> None:
    outcome = jobs[name, "test_a_run_that_is_killed_twice_resumes_to_the_bit"].result()
    assert "resumed" in outcome.reports, outcome.ends
    assert outcome.reports["resumed"]["restored"] > CASES[name].death[0]
    assert outcome.differences("straight", "resumed") == []


@pytest.mark.parametrize("name", ROLLED_BACK)
def test_an_older_step_is_restored_into_objects_that_went_on(name: str, jobs: Jobs) -> None:
    outcome = jobs[name, "test_an_older_step_is_restored_into_objects_that_went_on"].result()
    assert "rolled back" in outcome.reports, outcome.ends
    assert outcome.reports["rolled back"]["restored"] == CASES[name].back
    assert outcome.differences("straight", "rolled back") == []


@pytest.mark.parametrize(
    "name", ["dropout-2-workers-augmented", "everything", "async-everything", "optimizer-nadam-bf16"]
)
def test_saving_at_every_step_changes_no_number(name: str, jobs: Jobs) -> None:
    outcome = jobs[name, "test_saving_at_every_step_changes_no_number"].result()
    assert "saving" in outcome.reports, outcome.ends
    assert outcome.differences("straight", "saving") == []


@pytest.mark.parametrize("name", [*BROKEN, "optimizer-adamw", "dropout"])
def test_the_matrix_tells_an_exact_store_from_an_inexact_one(name: str, jobs: Jobs) -> None:
    outcome = jobs[name, "test_the_matrix_tells_an_exact_store_from_an_inexact_one"].result()
    assert "resumed" in outcome.reports, outcome.ends
    differences = outcome.differences("straight", "resumed")
    if name in BROKEN:
        assert any(text.startswith(BROKEN[name]) for text in differences), differences
    else:
        assert differences == []


HOW: dict[str, dict[str, Any]] = {
    test_a_killed_run_resumes_to_the_bit.__name__: {"roles": RESUMED},
    test_a_killed_run_resumes_to_the_bit_in_a_new_interpreter.__name__: {"roles": RESUMED, "fresh": True},
    test_a_run_that_is_killed_twice_resumes_to_the_bit.__name__: {"roles": TWICE},
    test_an_older_step_is_restored_into_objects_that_went_on.__name__: {"roles": ("straight", "rolled back")},
    test_saving_at_every_step_changes_no_number.__name__: {"roles": SAVING},
    test_the_matrix_tells_an_exact_store_from_an_inexact_one.__name__: {"roles": RESUMED, "store": "torch.save"},
}
"""How the cases of a test are outcome."""


def test_the_matrix_has_all_that_it_promises() -> None:
    """Each class of torch is in a case that runs without --slow."""
    always = {name: case for name, case in CASES.items() if name not in REPEATED}
    assert len(always) >= 90
    assert set(CASES) > REPEATED
    torch_schedulers = {
        name
        for name, value in vars(torch.optim.lr_scheduler).items()
        if isinstance(value, type)
        and name.endswith(("LR", "Restarts", "Plateau", "Scheduler"))
        and name not in ("LRScheduler", "_LRScheduler")
    }
    tried = {type(Run(case).scheduler).__name__ for case in always.values() if case.scheduler is not None}
    assert torch_schedulers - tried == set()
    torch_optimizers = {
        name for name, value in vars(torch.optim).items() if isinstance(value, type) and name != "Optimizer"
    }
    used = {
        type(one).__name__
        for name, case in always.items()
        if name.startswith("optimizer-")
        for one in Run(case).optimizers
    }
    assert torch_optimizers - used == set()


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
