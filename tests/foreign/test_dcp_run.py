"""Runs of torch.distributed.checkpoint: the optimizers of real frameworks to the bit, and values that are refused."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hfshard.errors import DamagedCheckpointError, HfshardError, InvalidArgumentError, UnsafePickleError
from hfshard.foreign.byte_runs import ForeignGroup, ForeignRun
from hfshard.foreign.dcp_run import read_dcp_run
from tests.foreign.dcp_files import halves, save_dcp, tensors_of
from tests.foreign.producers.cases import CASES, Case
from tests.foreign.producers.truth import checkpoint_of, read_truth
from tests.foreign.test_matrix import parameters, place_of
from tests.helpers.evil import Evil
from tests.helpers.tensor_bytes import assert_same

RUNS = [
    case
    for case in CASES
    if case.producer.startswith("programs:") or case.arguments.get("layout") in ("nested", "app", "torchtitan")
]
MATRICES = {"embed.weight", "up.weight", "down.weight"}


def run_in(checkpoint: Path) -> ForeignRun:
    if (checkpoint / "pytorch_model_fsdp_0").exists():
        return read_dcp_run(str(checkpoint), folder="pytorch_model_fsdp_0", optimizer_folder="optimizer_0")
    return read_dcp_run(str(checkpoint))


@pytest.mark.parametrize("case", parameters(list(RUNS)))
def test_an_optimizer_is_that_of_the_living_run(case: Case, produced: Path) -> None:
    place = place_of(case, produced)

    optimizer = run_in(checkpoint_of(place)).optimizer

    assert optimizer is not None
    found = tensors_of(optimizer.table)
    assert_same(found, {name: one.reshape(found[name].shape) for name, one in read_truth(place, "states").items()})
    assert found["up.weight/exp_avg"].shape == (7, 6)
    assert [set(one.parameters) for one in optimizer.groups if one.options["weight_decay"] == 0.1] == [MATRICES]
    assert optimizer.has_groups == (case.arguments.get("layout") != "torchtitan")
    assert len(optimizer.groups) == (3 if optimizer.has_groups else 2)
    assert {one.options["lr"] for one in optimizer.groups} == {0.03}


def test_other_values_are_plain(produced: Path) -> None:
    (case,) = [case for case in RUNS if case.name == "torch-fsdp2-torchtitan-2-threads"]

    run = run_in(checkpoint_of(place_of(case, produced)))

    assert run.extra["train_state"] == {"step": torch.tensor(2), "losses": b"seen"}
    assert run.extra["dataloader"] == {"dp_rank_0": {"position": 0}, "dp_rank_1": {"position": 1}}
    assert run.extra["lr_scheduler"]["milestones"] == {"30": 1, "60": 1}  # as torch writes a Counter's keys
    assert run.extra.keys() == {"train_state", "dataloader", "lr_scheduler"}


# Directories with one weight, "w", and an optimizer of it.

W = torch.arange(8.0).reshape(4, 2)
GROUP = {"optimizer.param_groups.0.lr": 0.5, "optimizer.param_groups.0.params": ["w"]}
NESTED = {"model.w": W, "optimizer.state.w.exp_avg": W + 1, **GROUP}
PATHS: dict[str, tuple[str | int, ...]] = {
    "optimizer.state.w.exp_avg": ("optimizer", "state", "w", "exp_avg"),
    "optimizer.param_groups.0.lr": ("optimizer", "param_groups", 0, "lr"),
    "optimizer.param_groups.0.params": ("optimizer", "param_groups", 0, "params"),
}


def saved(place: Path, state: dict[str, Any], paths: dict[str, tuple[str | int, ...]] | None = None) -> str:
    save_dcp(place, state, {"optimizer.state.w.exp_avg": halves((4, 2), 0)}, paths={**PATHS, **(paths or {})})
    return str(place)


def test_numbers_and_tensors_among_options_and_slots(tmp_path: Path) -> None:
    more = {"optimizer.state.w.momentum_buffer": None, "optimizer.param_groups.0.betas.0": torch.tensor(0.75)}
    paths: dict[str, tuple[str | int, ...]] = {
        "optimizer.state.w.momentum_buffer": ("optimizer", "state", "w", "momentum_buffer"),
        "optimizer.param_groups.0.betas.0": ("optimizer", "param_groups", 0, "betas", 0),
    }

    run = read_dcp_run(saved(tmp_path, {**NESTED, **more, "step": 7}, {**paths, "step": ("step",)}))

    assert run.optimizer is not None
    assert_same(tensors_of(run.optimizer.table), {"w/exp_avg": W + 1})
    assert run.optimizer.slots == {"w": {"momentum_buffer": None}}
    assert run.optimizer.groups == (ForeignGroup(("w",), {"lr": 0.5, "betas": [torch.tensor(0.75)]}),)
    assert run.extra == {"step": 7}
    assert {os.path.basename(path) for path in run.files} == {".metadata", "__0_0.distcp", "__1_0.distcp"}


def test_names_that_a_program_has_joined_itself(tmp_path: Path) -> None:
    state = {
        "a.w": W, "a.w.v": W, "optimizer.state.a.w.v.exp_avg": W, "optimizer.param_groups.a.w.v.lr": 0.5,
        "optimizer.param_groups.a.w.lr": 0.5, "optimizer.state.a.w.exp_avg": W,
    }  # fmt: skip
    save_dcp(tmp_path, state, paths={name: (name,) for name in state})

    optimizer = read_dcp_run(str(tmp_path)).optimizer

    assert optimizer is not None
    assert sorted(optimizer.table.tensors) == ["a.w.v/exp_avg", "a.w/exp_avg"]
    assert [(set(one.parameters), one.options) for one in optimizer.groups] == [({"a.w", "a.w.v"}, {"lr": 0.5})]
    assert not optimizer.has_groups


def test_weights_alone_have_no_optimizer(tmp_path: Path) -> None:
    run = read_dcp_run(saved(tmp_path, {"model.w": W, "model.v": W, "step": 3}, {"step": ("step",)}))

    assert run.optimizer is None
    assert sorted(run.weights.tensors) == ["v", "w"]


class Other:
    pass


REFUSED: dict[str, tuple[dict[str, Any], type[HfshardError], str]] = {
    "a call": ({"optimizer.param_groups.0.lr": Evil()}, UnsafePickleError, "asks for 'posix.system'"),
    "a call among other values": ({"step": Evil()}, UnsafePickleError, "asks for 'posix.system'"),
    "an object": (
        {"optimizer.param_groups.0.lr": Other()},
        UnsafePickleError,
        r"an object of '.*Other' as 'optimizer\.param_groups\.0\.lr', which cannot be read without running code",
    ),
    "numbers": ({"optimizer.param_groups.0.params": [0]}, InvalidArgumentError, "numbers, not names, for the param"),
    "a parameter in no group": (
        {"optimizer.param_groups.0.params": ["v"]},
        DamagedCheckpointError,
        "a state of 'w', which is in no group",
    ),
    "a parameter in two groups": (
        {"optimizer.param_groups.0.params": ["w", "w"]},
        DamagedCheckpointError,
        "'w' in two groups",
    ),
    "a nested state": (
        {"optimizer.state.w.inner.exp": W},
        InvalidArgumentError,
        "a nested state 'inner' of 'w'",
    ),
    "no list of groups": (
        {"optimizer.param_groups.1.lr": 3},
        DamagedCheckpointError,
        "group 1 of its optimizer has no list of parameters",
    ),
    "a missing group": ({"optimizer.param_groups.2.lr": 3}, DamagedCheckpointError, "do not fit together"),
    "something else": ({"optimizer.more": 3}, DamagedCheckpointError, "but has 'more'"),
    "two optimizers": (
        {"critic.param_groups.0.params": ["w"]},
        InvalidArgumentError,
        "has the optimizers 'critic', 'optimizer'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_are_refused_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, error, message = REFUSED[name]
    paths = {
        fqn: tuple(int(key) if key.isdecimal() else key for key in fqn.split(".")) for fqn in change if fqn not in PATHS
    }
    place = saved(tmp_path / "d", {**NESTED, **change}, paths)
    monkeypatch.chdir(tmp_path)

    with pytest.raises(error, match=message):
        read_dcp_run(place)

    assert not (tmp_path / "evil").exists()


def test_a_changed_byte_of_a_value_is_found(tmp_path: Path) -> None:
    place = saved(tmp_path, {**NESTED, "note": "the only text of its kind"}, {"note": ("note",)})
    file = tmp_path / "__0_0.distcp"
    raw = file.read_bytes()
    assert len(re.findall(b"only text", raw)) == 1
    file.write_bytes(raw.replace(b"only text", b"onlY text"))

    with pytest.raises(DamagedCheckpointError, match="differs from its checksum"):
        read_dcp_run(place)


def test_a_truncated_file_is_found(tmp_path: Path) -> None:
    place = saved(tmp_path, NESTED)
    file = tmp_path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-3000])

    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp' is damaged: of the tensor 'optimizer"):
        read_dcp_run(place)
