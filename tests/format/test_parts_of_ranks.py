"""What other programs save in parts is called what it is, by every verb, with the command that merges it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import hfshard
from hfshard.cli.main import main
from hfshard.errors import CheckpointNotFoundError
from hfshard.format.parts_of_ranks import describe_parts, reject_partitioned_file
from hfshard.training import CheckpointManager, TrainingState
from hfshard.viewing.inspection import inspect_checkpoint

ZERO3 = ["zero_pp_rank_0_mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"]
ZERO2 = ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
DCP = [".metadata", "__0_0.distcp"]
UNPICKLES = "(it unpickles them: run it only if you trust their origin)"
OF_DEEPSPEED = "contains a model that DeepSpeed saved in parts for each rank"
IN_DEEPSPEED = "in the program that saved it, and save the weights there."
OF_DCP = "contains tensors that torch.distributed.checkpoint (DCP) saved in parts"
NOT_YET = "but hfshard cannot read these yet."
BY_SCRIPT = "Merge them with the script that DeepSpeed saved next to them:"
SAFETENSORS = "hfshard loads OUT; for safetensors, run: hfshard convert OUT MODEL."


def below(folder: str, names: list[str]) -> list[str]:
    return [f"{folder}/{name}" for name in names]


PLACES: dict[str, tuple[list[str], str]] = {
    "ZeRO-3": (
        ["latest", "zero_to_fp32.py", *below("global_step20", ZERO3)],
        f"'run' {OF_DEEPSPEED} in 'global_step20', {NOT_YET} {BY_SCRIPT} python run/zero_to_fp32.py run OUT "
        f"{UNPICKLES}. {SAFETENSORS}",
    ),
    "ZeRO-2, the newest of two steps": (
        ["latest", "zero_to_fp32.py", *below("global_step9", ZERO2), *below("global_step10", ZERO2)],
        f"'run' {OF_DEEPSPEED} in 'global_step10', {NOT_YET} {BY_SCRIPT} python run/zero_to_fp32.py run OUT "
        f"{UNPICKLES}. {SAFETENSORS} Its file 'global_step10/mp_rank_00_model_states.pt' has all weights in the "
        "training dtype, and hfshard loads that file.",
    ),
    "Accelerate, with ZeRO": (
        ["zero_to_fp32.py", "scheduler.bin", *below("pytorch_model", ZERO3)],
        f"'run' {OF_DEEPSPEED} in 'pytorch_model', {NOT_YET} {BY_SCRIPT} python run/zero_to_fp32.py run OUT "
        f"-t pytorch_model {UNPICKLES}. {SAFETENSORS}",
    ),
    "a run of Trainer": (
        ["checkpoint-5/config.json", "checkpoint-5/latest", *below("checkpoint-5/global_step5", ZERO3)],
        f"'run' {OF_DEEPSPEED} in 'checkpoint-5/global_step5', {NOT_YET} Merge them with DeepSpeed's script: python -m "
        f"deepspeed.utils.zero_to_fp32 run/checkpoint-5 OUT {UNPICKLES}. {SAFETENSORS}",
    ),
    "DeepSpeed without ZeRO": (
        below("global_step1", ["mp_rank_00_model_states.pt"]),
        f"'run' {OF_DEEPSPEED} in 'global_step1', {NOT_YET} Its file 'global_step1/mp_rank_00_model_states.pt' has all "
        "weights in the training dtype, and hfshard loads that file.",
    ),
    "a pipeline": (
        below("global_step1", ["layer_02-model_states.pt", "mp_rank_00_model_states.pt"]),
        f"'run' {OF_DEEPSPEED} in 'global_step1', {NOT_YET} Load it with DeepSpeed {IN_DEEPSPEED}",
    ),
    "experts": (
        below(
            "global_step1", ["layer_0_expert_1_mp_rank_00_model_states.pt", "expp_rank_0_mp_rank_00_optim_states.pt"]
        ),
        f"'run' {OF_DEEPSPEED} in 'global_step1', {NOT_YET} Load it with DeepSpeed {IN_DEEPSPEED}",
    ),
    "DCP": (
        DCP,
        f"'run' {OF_DCP}, {NOT_YET} Merge them with torch: python -m torch.distributed.checkpoint.format_utils "
        f"dcp_to_torch run OUT.pt {UNPICKLES}. hfshard loads OUT.pt; for safetensors, run: hfshard convert OUT.pt "
        "MODEL.",
    ),
    "torchtitan": (
        [*below("checkpoint/step-9", DCP), *below("checkpoint/step-10", DCP)],
        f"'run' {OF_DCP} in 'checkpoint/step-10', {NOT_YET} Merge them with torch: python -m "
        f"torch.distributed.checkpoint.format_utils dcp_to_torch run/checkpoint/step-10 OUT.pt {UNPICKLES}. "
        "hfshard loads OUT.pt; for safetensors, run: hfshard convert OUT.pt MODEL.",
    ),
    "Accelerate, with FSDP": (
        ["scheduler.bin", *below("pytorch_model_fsdp_0", DCP), *below("optimizer_0", DCP)],
        f"'run' {OF_DCP} in 'pytorch_model_fsdp_0', {NOT_YET} Merge them with Accelerate: accelerate merge-weights "
        f"run/pytorch_model_fsdp_0 OUT {UNPICKLES}. hfshard loads OUT.",
    ),
    "FSDP, LOCAL_STATE_DICT": (
        ["pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_rank1.bin"],
        f"'run' contains one file per rank, each with parts of the tensors, {NOT_YET} Load them in the program that "
        "saved them, on as many ranks, and save the full model (FULL_STATE_DICT).",
    ),
    "verl": (
        below("actor", ["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"]),
        f"'run' contains one file per rank, each with parts of the tensors in 'actor', {NOT_YET} Merge them with verl: "
        f"python -m verl.model_merger merge --backend fsdp --local_dir run/actor --target_dir OUT {UNPICKLES}. hfshard "
        "loads OUT.",
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_place_is_described(name: str) -> None:
    paths, expected = PLACES[name]

    assert describe_parts(paths, "run") == expected


@pytest.mark.parametrize("name", PLACES)
def test_a_directory_is_not_said_to_hold_no_weights(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, expected = PLACES[name]
    for path in paths:
        (tmp_path / "run" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / path).touch()
    monkeypatch.chdir(tmp_path)

    with pytest.raises(CheckpointNotFoundError) as caught:
        hfshard.load_state_dict("run")

    assert str(caught.value).replace(f"{tmp_path}/", "") == expected


@pytest.mark.parametrize(
    ("paths", "place"),
    [
        (["a b/latest", *below("a b/global_step1", ZERO3)], "it's"),
        ([*below("a b", DCP)], "it's"),
    ],
)
def test_commands_are_quoted(paths: list[str], place: str) -> None:
    described = str(describe_parts(paths, place))

    assert """ 'it'"'"'s/a b' """ in described


def test_what_is_elsewhere_is_downloaded_first_and_its_script_not_run() -> None:
    zero = describe_parts(PLACES["ZeRO-3"][0], "org/model", is_directory=False)
    tag = describe_parts(ZERO3, "s3://bucket/run/global_step20", is_directory=False)

    assert zero == (
        f"'org/model' {OF_DEEPSPEED} in 'global_step20', {NOT_YET} Download it to a directory DIR. Merge them with "
        f"DeepSpeed's script: python -m deepspeed.utils.zero_to_fp32 DIR OUT {UNPICKLES}. {SAFETENSORS}"
    )
    assert tag is not None
    assert "python -m deepspeed.utils.zero_to_fp32 DIR OUT -t global_step20" in tag


@pytest.mark.parametrize(
    "paths",
    [
        ["model.safetensors", *PLACES["ZeRO-3"][0]],
        ["checkpoint-5/model-00001-of-00002.safetensors", *PLACES["a run of Trainer"][0]],
        ["pytorch_model.bin.index.json", *DCP],
        ["pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.bin"],
        [".metadata", "latest", "layer_states.pt", "a/b/c/__0_0.distcp"],
    ],
)
def test_other_places_are_none(paths: list[str]) -> None:
    assert describe_parts(paths, "run") is None


@pytest.fixture
def zero3(tmp_path: Path) -> Path:
    """A directory of ZeRO-3, whose file of the model has what DeepSpeed writes, and of which a step is asked for."""
    folder = tmp_path / "zero" / "global_step7"
    folder.mkdir(parents=True)
    shapes = [{"weight": torch.Size([2, 2]), "bias": torch.Size([2])}]
    tensors = {"weight": torch.empty(0), "bias": torch.empty(0), "mean": torch.ones(2)}
    torch.save({"module": tensors, "param_shapes": shapes}, folder / ZERO3[0])
    (folder / ZERO3[1]).touch()
    (folder.parent / "zero_to_fp32.py").touch()
    return folder


VERBS: dict[str, Callable[[Path, Path], object]] = {
    "load_state_dict": lambda place, out: hfshard.load_state_dict(place),
    "load_model": lambda place, out: hfshard.load_model(nn.Linear(2, 2), place),
    "verify": lambda place, out: hfshard.verify_checkpoint(place),
    "inspect": lambda place, out: inspect_checkpoint(place),
    "show": lambda place, out: hfshard.show_checkpoint(place, f"{out}.html"),
    "diff": lambda place, out: hfshard.diff_checkpoints(place, place),
    "reshard": lambda place, out: hfshard.reshard_checkpoint(place, out / "resharded"),
    "convert": lambda place, out: hfshard.reshard_checkpoint(place, out / "converted", use_safetensors=False),
    "push": lambda place, out: hfshard.push_checkpoint(place, out / "hub"),
    "restore": lambda place, out: CheckpointManager(out / "run").restore(TrainingState(model=nn.Linear(2, 2)), place),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("is_step", [False, True])
def test_every_verb_says_what_a_directory_is(verb: str, is_step: bool, zero3: Path, tmp_path: Path) -> None:
    place = zero3 if is_step else zero3.parent
    root = shlex.quote(str(zero3.parent))

    with pytest.raises(CheckpointNotFoundError) as caught:
        VERBS[verb](place, tmp_path / "out")

    assert OF_DEEPSPEED in str(caught.value)
    assert f"python {root}/zero_to_fp32.py {root} OUT -t global_step7" in str(caught.value)
    assert ("the rest of the run can resume them" in str(caught.value)) == (verb == "restore")
    assert not list((tmp_path / "out").rglob("*.safetensors"))


@pytest.mark.parametrize("command", ["verify", "inspect", "convert"])
def test_the_command_line_says_it_too(command: str, zero3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [command, str(zero3.parent)] + ([str(zero3.parents[1] / "out")] if command == "convert" else [])

    assert main(arguments) == 1

    assert OF_DEEPSPEED in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["load_state_dict", "load_model", "inspect", "convert", "restore"])
def test_the_empty_tensors_in_a_file_of_zero3_are_no_weights(verb: str, zero3: Path, tmp_path: Path) -> None:
    file = zero3 / ZERO3[0]

    with pytest.raises(CheckpointNotFoundError) as caught:
        VERBS[verb](file, tmp_path / "out")

    assert str(caught.value).startswith(
        f"'{file}' has an empty tensor in place of 'weight' and 1 more: DeepSpeed ZeRO-3 saved the values with the "
        "optimizer, in parts for each rank, but hfshard cannot read these yet. Merge them with the script "
    )
    assert f"zero_to_fp32.py {shlex.quote(str(zero3.parent))} OUT -t global_step7" in str(caught.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_other_dicts_with_shapes_are_none_of_zero3() -> None:
    nested = torch.nested.nested_tensor([torch.ones(1)])
    for module in ({"weight": nested}, {"weight": 1}, {}):
        reject_partitioned_file({"module": module, "param_shapes": [{"weight": torch.Size([2])}, 3]}, "x.pt")
    others: list[object] = [[], {"module": {}, "param_shapes": {}}, {"module": [], "param_shapes": []}]
    for value in others:
        reject_partitioned_file(value, "x.pt")


def test_steps_may_have_any_number_of_digits() -> None:
    described = describe_parts(["9" * 5000 + "/" + name for name in DCP], "run")

    assert described is not None


def test_a_file_of_zero3_is_not_verified(zero3: Path) -> None:
    report = hfshard.verify_checkpoint(zero3 / ZERO3[0])

    (problem,) = report.problems
    assert "has an empty tensor in place of 'weight' and 1 more" in problem.message


def test_a_whole_file_of_deepspeed_is_loaded_and_may_have_empty_tensors(tmp_path: Path) -> None:
    weights = {"weight": torch.ones(2, 2), "none": torch.empty(0)}
    shapes = [{"weight": torch.Size([2, 2]), "none": torch.Size([0])}]
    torch.save({"module": weights, "param_shapes": shapes}, tmp_path / "mp_rank_00_model_states.pt")

    loaded = hfshard.load_state_dict(tmp_path / "mp_rank_00_model_states.pt")

    assert {name: list(tensor.shape) for name, tensor in loaded.items()} == {"weight": [2, 2], "none": [0]}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_command_for_dcp_makes_what_hfshard_loads(tmp_path: Path) -> None:
    save: Any = dcp.save  # type: ignore[attr-defined]
    save({"model": {"weight": torch.arange(6.0)}}, checkpoint_id=tmp_path / "saved", no_dist=True)
    with pytest.raises(CheckpointNotFoundError) as caught:
        hfshard.load_state_dict(tmp_path / "saved")
    told = re.search(r": python (.*? OUT\.pt) \(it unpickles", str(caught.value))
    assert told is not None

    command = [str(tmp_path / word) if word == "OUT.pt" else word for word in shlex.split(told[1])]
    subprocess.run([sys.executable, "-W", "ignore", *command], check=True, capture_output=True)

    assert hfshard.load_state_dict(tmp_path / "OUT.pt")["weight"].tolist() == [0, 1, 2, 3, 4, 5]
