"""Runs in parts by name: restored and converted with what is beside them; or refused, and nothing changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfshard
from hfshard.cli.main import main
from hfshard.errors import IntegrityError, InvalidArgumentError, MissingShardError, StateDictMismatchError
from hfshard.foreign.deepspeed import read_deepspeed_run
from hfshard.training import CheckpointManager, TrainingState
from hfshard.training.interop.named_run import NamedRun
from hfshard.training.state.rng import rng_state
from tests.foreign.like_deepspeed import BUFFERS, FROZEN, TRAINED, contents, write
from tests.training.ingredients import Keeps

OPTIMIZER = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"


class Net(nn.Module):
    """The model of `like_deepspeed`, without values."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for group in TRAINED:
            for name, tensor in group.items():
                self.register_parameter(name, nn.Parameter(torch.zeros(tensor.shape, dtype=dtype)))
        for name, tensor in FROZEN.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(tensor.shape, dtype=dtype), requires_grad=False))
        for name, tensor in BUFFERS.items():
            self.register_buffer(name, torch.zeros_like(tensor))
        self.head = self.embed


def state_of(model: nn.Module, **more: Any) -> TrainingState:
    groups = [{"params": [model.get_parameter(name) for name in group]} for group in reversed(TRAINED)]
    groups[0]["params"].append(model.get_parameter("fixed"))  # DeepSpeed leaves frozen parameters out
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return TrainingState(model, optimizer, scheduler, **more)


def files_of(stage: int, ranks: int) -> dict[str, Any]:
    """A save as DeepSpeed and SGD make it."""
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)]} for _ in TRAINED], lr=0.1, momentum=0.5)
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    files = contents(stage, ranks)
    for name, content in files.items():
        if "model_states" in name:
            content |= {"global_steps": 7, "epoch": 2, "lr_scheduler": scheduler.state_dict()}
            continue
        states = content["optimizer_state_dict"]
        states["loss_scaler"] = None
        for key in ("base_optimizer_state", "optimizer_state_dict"):
            for group in states.get(key, {}).get("param_groups", ()):
                group |= options
            for slots in states.get(key, {}).get("state", {}).values():
                slots["momentum_buffer"] = slots.pop("exp_avg")
                del slots["step"]
    return files


def assert_restored(state: TrainingState) -> None:
    model, optimizer = state.components["model"], state.components["optimizer"]
    for group in TRAINED:
        for name, tensor in group.items():
            parameter = model.get_parameter(name)
            assert torch.equal(parameter, tensor)
            assert torch.equal(optimizer.state[parameter]["momentum_buffer"], -tensor)
    assert torch.equal(model.fixed, FROZEN["fixed"].to(model.fixed.dtype))
    assert all(torch.equal(model.get_buffer(name), tensor) for name, tensor in BUFFERS.items())
    assert [group["lr"] for group in optimizer.param_groups] == [0.1] * 3
    assert model.head is model.embed


@pytest.mark.parametrize(("stage", "ranks"), [(2, 2), (3, 3)])
def test_a_run_is_restored_and_converted_with_groups_in_another_order(
    stage: int, ranks: int, tmp_path: Path, manager: CheckpointManager
) -> None:
    write(tmp_path / "saved" / "global_step7", files_of(stage, ranks))
    state = state_of(Net())

    restored = manager.restore(state, tmp_path / "saved")

    assert (restored, restored.extra, restored.differences) == (7, {"epoch": 2}, ())
    assert [words.partition(" (")[0] for words in restored.lacking] == ["the random number generators"]
    assert_restored(state)
    assert main(["convert", str(tmp_path / "saved"), str(manager.root)]) == 0
    converted = state_of(Net())
    for parameter in converted.components["model"].parameters():
        parameter.data = parameter.data if parameter.requires_grad else parameter.data.bfloat16()
    restored = manager.restore(converted)
    assert (restored, restored.extra) == (7, {"epoch": 2})
    assert_restored(converted)
    weights = hfshard.load_state_dict(manager.path_of(7), verify="full")
    assert torch.equal(weights["head"], TRAINED[0]["embed"])


def test_what_trainer_saves_beside_the_parts_is_restored(tmp_path: Path, manager: CheckpointManager) -> None:
    saved = tmp_path / "checkpoint-7"
    write(saved / "global_step7", files_of(2, 2))
    hfshard.save_state_dict({"up": torch.ones(1)}, saved)  # 16 bit weights, which are not the run's
    (saved / "latest").write_text("global_step7")
    (saved / "zero_to_fp32.py").write_text("")
    (saved / "trainer_state.json").write_text(json.dumps({"global_step": 7, "epoch": 1.5}))
    torch.manual_seed(3)
    words = rng_state()["python"]["words"]
    python = (3, tuple(words.view(torch.uint32).tolist()), None)
    torch.save({"python": python, "cpu": torch.get_rng_state()}, saved / "rng_state.pth")
    expected = torch.rand(3)
    state = state_of(Net())
    torch.manual_seed(4)

    restored = manager.restore(state, saved)

    assert (restored, restored.lacking) == (7, ())
    assert restored.extra == {"global_step": 7, "epoch": 1.5} | {"epoch": 1.5}
    assert torch.equal(torch.rand(3), expected)
    assert_restored(state)


def test_what_accelerate_saves_beside_the_parts_is_restored(tmp_path: Path, manager: CheckpointManager) -> None:
    write(tmp_path / "saved" / "pytorch_model", files_of(3, 2))
    torch.save({"tensor": torch.tensor(5)}, tmp_path / "saved" / "custom_checkpoint_0.pkl")
    torch.save({"torch_manual_seed": torch.get_rng_state()}, tmp_path / "saved" / "random_states_1.pkl")
    own = Keeps(torch.tensor(0))

    restored = manager.restore(state_of(Net(), own=own), tmp_path / "saved", keys={"own": "custom_checkpoint_0"})

    assert (restored, own.tensor.item()) == (7, 5)


def test_parameters_of_a_group_count_their_own_steps(tmp_path: Path) -> None:
    """DeepSpeed has one count for all of them, which torch would increase once for each."""
    write(tmp_path, contents(2, 2))
    state = NamedRun(read_deepspeed_run(str(tmp_path), "")).parts(())["optimizer"]["state"]
    before = {number: int(slots["step"]) for number, slots in state.items()}

    state[0]["step"] += 1

    assert {number: int(slots["step"]) for number, slots in state.items()} == before | {0: before[0] + 1}


def test_the_checksums_of_a_file_without_needed_tensors_are_left_out(tmp_path: Path) -> None:
    """A model without buffers and frozen weights has everything in the files of its masters."""
    write(tmp_path, contents(2, 2))
    run = read_deepspeed_run(str(tmp_path), "")
    masters = {name: run.weights.tensors[name] for group in TRAINED for name in group}

    NamedRun(replace(run, weights=replace(run.weights, tensors=masters, aliases={}))).check_values()


def test_a_model_of_fewer_bits_than_the_masters_is_refused(tmp_path: Path, manager: CheckpointManager) -> None:
    write(tmp_path / "saved", files_of(2, 2))
    model = Net(torch.bfloat16)

    with pytest.raises(StateDictMismatchError, match=r"'embed' as torch\.float32.*Restore into model\.float\(\)"):
        manager.restore(state_of(model), tmp_path / "saved")

    assert not any(parameter.any() for parameter in model.parameters())


def test_what_cannot_be_read_changes_nothing(tmp_path: Path, manager: CheckpointManager) -> None:
    files = files_of(2, 2)
    for name, content in files.items():
        if "optim" in name:
            content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["worker_error"] = torch.ones(3)
    write(tmp_path / "other", files)
    write(tmp_path / "damaged", files_of(2, 2))
    path = tmp_path / "damaged" / OPTIMIZER
    raw = path.read_bytes()
    at = raw.index((-TRAINED[0]["embed"].flatten()[1:4]).numpy().tobytes())
    path.write_bytes(raw[:at] + bytes(4) + raw[at + 4 :])
    write(tmp_path / "missing", files_of(2, 2))
    (tmp_path / "missing" / OPTIMIZER).unlink()
    model = Net()

    for name, error in (("other", InvalidArgumentError), ("damaged", IntegrityError), ("missing", MissingShardError)):
        with pytest.raises(error):
            manager.restore(state_of(model), tmp_path / name)
        assert main(["convert", str(tmp_path / name), str(manager.root)]) != 0

    assert not any(parameter.any() for parameter in model.parameters())
    assert manager.latest_step() is None
