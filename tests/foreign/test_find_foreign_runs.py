"""Runs by name: states of an optimizer are joined like the masters; what is not element by element is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hfshard.errors import DamagedCheckpointError, HfshardError, InvalidArgumentError, MissingShardError
from hfshard.foreign.byte_runs import ForeignRun
from hfshard.foreign.find_foreign import open_foreign_run
from tests.foreign.like_deepspeed import TRAINED, contents, state_of_model, universal, values, write
from tests.helpers.tensor_bytes import assert_same

RANK_1 = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
EVERYTHING = {name: tensor for group in TRAINED for name, tensor in group.items()}


def run_of(place: Path) -> ForeignRun:
    run = open_foreign_run(str(place))
    assert run is not None
    return run


@pytest.mark.parametrize(
    ("stage", "ranks", "options"),
    [
        (1, 1, {}),
        (1, 4, {"gap": 3}),
        (2, 3, {"keeps_padding": True}),
        (2, 9, {"alignment": 1}),
        (3, 1, {}),
        (3, 4, {}),
        (3, 2, {"sub_group": 4}),
    ],
)
def test_states_are_joined_by_the_names_of_parameters(
    stage: int, ranks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    files = contents(stage, ranks, **options)
    for name, content in files.items():
        if "model_states" in name:
            content |= {"global_steps": 7, "mine": {"loss": 0.5}, "lr_scheduler": {"last_epoch": 2}}
    write(tmp_path / "global_step7", files)

    run = run_of(tmp_path)

    assert run.optimizer is not None
    assert_same(values(run.optimizer.table), {f"{name}/exp_avg": -one for name, one in EVERYTHING.items()})
    assert [group.parameters for group in run.optimizer.groups] == [tuple(group) for group in TRAINED]
    assert [group.options["momentum"] for group in run.optimizer.groups] == [0.5, 1.5, 2.5]
    if "sub_group" not in options:  # there, all sub-groups are the first group's
        assert run.optimizer.slots == {name: {"step": torch.tensor(2.0)} for name in EVERYTHING}
    assert (run.step, run.extra) == (7, {"mine": {"loss": 0.5}})
    scaler = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 0}
    assert run.parts == {"scheduler": {"last_epoch": 2}, "scaler": scaler}
    assert len(run.files) == len(files)


def test_universal_checkpoint_has_a_file_for_each_slot(tmp_path: Path) -> None:
    trained = {"up": torch.arange(6.0).view(2, 3) + 0.1}
    write(tmp_path, universal({"up": trained["up"].bfloat16()}, trained))

    run = run_of(tmp_path)

    assert run.optimizer is not None
    assert_same(values(run.optimizer.table), {"up/exp_avg": -trained["up"]})
    assert run.optimizer.slots == {"up": {"step": torch.tensor(2.0)}}
    assert run.optimizer.groups[0].options == {"lr": 0.1, "momentum": 0.5}
    assert "scaler" in run.parts


def test_counts_of_a_group_are_those_of_its_parameters(tmp_path: Path) -> None:
    """As DeepSpeed's FusedAdam has them."""
    files = contents(2, 2)
    for _, state in states_of(files):
        for group in state["param_groups"]:
            group |= {"step": 5, "bias_correction": True}
        for slots in state["state"].values():
            del slots["step"]
    write(tmp_path, files)

    optimizer = run_of(tmp_path).optimizer

    assert optimizer is not None
    assert optimizer.groups[0].options == {"lr": 0.1, "momentum": 0.5, "amsgrad": False}
    assert optimizer.slots["gain"] == {"step": 5}


def states_of(files: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Pairs of a file and the optimizer's state in it."""
    found = []
    for name, content in files.items():
        state = content.get("optimizer_state_dict", {})
        found += [(name, state[key]) for key in ("base_optimizer_state", "optimizer_state_dict") if key in state]
    return found


def change(slot: str, value: Any, ranks: tuple[str, ...] = ("rank_0", "rank_1")) -> Callable[[dict[str, Any]], None]:
    def changed(files: dict[str, Any]) -> None:
        for name, state in states_of(files):
            if any(rank in name for rank in ranks):
                state["state"][0][slot] = value

    return changed


def without_a_group(files: dict[str, Any]) -> None:
    for _, state in states_of(files):
        state["param_groups"].pop()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("spoil", "error", "match"),
    [
        (change("worker_error", torch.ones(3)), InvalidArgumentError, r"'worker_error' of shape \[3\].*--weights"),
        (change("exp_avg", torch.ones(2, 3)), InvalidArgumentError, r"'exp_avg' of shape \[2, 3\]"),
        (change("RMS", 0.5), InvalidArgumentError, "has 'RMS' in the optimizer's state, a float"),
        (change("eta", torch.tensor(0.5), ("rank_1",)), DamagedCheckpointError, "different counts"),
        (change("step", torch.tensor(9.0), ("rank_1",)), DamagedCheckpointError, "of different optimizer steps"),
        (lambda files: files.pop(RANK_1), MissingShardError, "rank_1_mp_rank_00_optim_states"),
        (without_a_group, DamagedCheckpointError, "other groups"),
    ],
)
def test_a_state_that_cannot_be_joined_is_refused_by_name(
    stage: int, spoil: Callable[[dict[str, Any]], None], error: type[HfshardError], match: str, tmp_path: Path
) -> None:
    files = contents(stage, 2)
    spoil(files)
    write(tmp_path, files)

    with pytest.raises(error, match=match):
        open_foreign_run(str(tmp_path))


def test_states_of_parameters_with_no_order_are_refused(tmp_path: Path) -> None:
    files = contents(2, 1)
    for content in files.values():
        if "optimizer_state_dict" in content:
            content["optimizer_state_dict"]["base_optimizer_state"] = [{"exp_avg": torch.ones(2)}]
    write(tmp_path / "elastic", files)
    weights = {"up": torch.ones(2)}
    state = state_of_model(None, weights, optimizer={"state": {}, "param_groups": []}, shared_params={})
    write(tmp_path / "plain", {"mp_rank_00_model_states.pt": state})

    with pytest.raises(InvalidArgumentError, match="was saved with elastic_checkpoint"):
        open_foreign_run(str(tmp_path / "elastic"))
    with pytest.raises(InvalidArgumentError, match=r"without ZeRO, which has no names.*mp_rank_00_model_states\.pt'"):
        open_foreign_run(str(tmp_path / "plain"))


def test_weights_alone_are_no_run(tmp_path: Path) -> None:
    write(tmp_path, {"mp_rank_00_model_states.pt": state_of_model(None, {"up": torch.ones(2)}, shared_params={})})

    assert open_foreign_run(str(tmp_path)) is None
