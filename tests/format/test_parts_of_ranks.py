"""Parts of ranks that no reader has found are called what they are, by every verb, with what to do."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
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


def below(folder: str, names: list[str]) -> list[str]:
    return [f"{folder}/{name}" for name in names]


def found(what: str, where: str, path: str) -> str:
    return (
        f"'run' {what}{where}. To load the weights, pass '{path}'; to write them as safetensors, run: hfshard convert "
        f"--weights {path} OUT."
    )


PLACES: dict[str, tuple[list[str], str]] = {
    "ZeRO-3": (
        ["latest", "zero_to_fp32.py", *below("global_step20", ZERO3)],
        found(OF_DEEPSPEED, " in 'global_step20'", "run/global_step20"),
    ),
    "ZeRO-2, the newest of two steps": (
        ["latest", "zero_to_fp32.py", *below("global_step9", ZERO2), *below("global_step10", ZERO2)],
        found(OF_DEEPSPEED, " in 'global_step10'", "run/global_step10"),
    ),
    "a pipeline": (
        below("global_step1", ["layer_02-model_states.pt", "mp_rank_00_model_states.pt"]),
        found(OF_DEEPSPEED, " in 'global_step1'", "run/global_step1"),
    ),
    "DCP": (DCP, found(OF_DCP, "", "run")),
    "Accelerate, with FSDP": (
        ["scheduler.bin", *below("pytorch_model_fsdp_0", DCP), *below("optimizer_0", DCP)],
        found(OF_DCP, " in 'pytorch_model_fsdp_0'", "run/pytorch_model_fsdp_0"),
    ),
}
DEEPER: dict[str, tuple[list[str], str]] = {
    "a run of Trainer": (
        ["checkpoint-5/config.json", "checkpoint-5/latest", *below("checkpoint-5/global_step5", ZERO3)],
        found(OF_DEEPSPEED, " in 'checkpoint-5/global_step5'", "run/checkpoint-5/global_step5"),
    ),
    "torchtitan": (
        [*below("checkpoint/step-9", DCP), *below("checkpoint/step-10", DCP)],
        found(OF_DCP, " in 'checkpoint/step-10'", "run/checkpoint/step-10"),
    ),
    "DCP, without its metadata": (
        DCP[1:],
        f"'run' {OF_DCP}, but not '.metadata', which says where each of them is. Copy it there: its name begins with "
        "a dot, which '*' does not match.",
    ),
    "DCP's Hugging Face writer": (
        [
            "sharded/shard-00001-model-00001-of-00001.safetensors",
            "sharded/shard-00002-model-00001-of-00001.safetensors",
        ],
        "'run' contains safetensors that torch.distributed.checkpoint (DCP) saved in parts for each rank in 'sharded', "
        f"{NOT_YET} Load them there with dcp.load and HuggingFaceStorageReader, on any number of ranks, and save the "
        "model with hfshard.save_model.",
    ),
    "FSDP, LOCAL_STATE_DICT": (
        ["pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_rank1.bin"],
        f"'run' contains one file per rank, each with parts of the tensors, {NOT_YET} Load them in the program that "
        "saved them, on as many ranks, and save the full model (FULL_STATE_DICT).",
    ),
    "verl": (
        below("global_step_5/actor", ["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"]),
        found(
            "contains one file per rank, each with parts of the tensors",
            " in 'global_step_5/actor'",
            "run/global_step_5/actor",
        ),
    ),
}


@pytest.mark.parametrize("name", PLACES | DEEPER)
def test_a_place_is_described(name: str) -> None:
    paths, expected = (PLACES | DEEPER)[name]

    assert describe_parts(paths, "run") == expected


@pytest.mark.parametrize("name", DEEPER)
def test_a_directory_is_not_said_to_hold_no_weights(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, expected = DEEPER[name]
    for path in paths:
        (tmp_path / "run" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / path).touch()
    monkeypatch.chdir(tmp_path)

    with pytest.raises(CheckpointNotFoundError) as caught:
        hfshard.load_state_dict("run")

    assert str(caught.value).replace(f"{tmp_path}/", "") == expected


def test_commands_are_quoted() -> None:
    described = str(describe_parts([*below("a b", DCP)], "it's"))

    assert """ 'it'"'"'s/a b' """ in described


def test_what_is_elsewhere_is_downloaded_first() -> None:
    zero = describe_parts(PLACES["ZeRO-3"][0], "org/model", is_directory=False)

    assert zero == (
        f"'org/model' {OF_DEEPSPEED} in 'global_step20'. Download it to a directory DIR. To load the weights, pass "
        "'DIR/global_step20'; to write them as safetensors, run: hfshard convert --weights DIR/global_step20 OUT."
    )


@pytest.mark.parametrize(
    "paths",
    [
        ["model.safetensors", *PLACES["ZeRO-3"][0]],
        ["checkpoint-5/model-00001-of-00002.safetensors", *DEEPER["a run of Trainer"][0]],
        ["pytorch_model.bin.index.json", *DCP],
        ["pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.bin"],
        [".metadata", "latest", "layer_states.pt", "a/b/c/__0_0.distcp"],
    ],
)
def test_other_places_are_none(paths: list[str]) -> None:
    assert describe_parts(paths, "run") is None


@pytest.fixture
def zero3(tmp_path: Path) -> Path:
    """The folder of a step in Trainer's run, whose file of the model has what DeepSpeed writes for ZeRO-3."""
    folder = tmp_path / "run of Trainer" / "checkpoint-7" / "global_step7"
    folder.mkdir(parents=True)
    shapes = [{"weight": torch.Size([2, 2]), "bias": torch.Size([2])}]
    tensors = {"weight": torch.empty(0), "bias": torch.empty(0), "mean": torch.ones(2)}
    torch.save({"module": tensors, "param_shapes": shapes}, folder / ZERO3[0])
    (folder / ZERO3[1]).touch()
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
def test_every_verb_says_what_a_directory_is(verb: str, zero3: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError) as caught:
        VERBS[verb](zero3.parents[1], tmp_path / "out")

    assert OF_DEEPSPEED in str(caught.value)
    assert f"hfshard convert --weights {shlex.quote(str(zero3))} OUT" in str(caught.value)
    assert ("the rest of the run can resume them" in str(caught.value)) == (verb == "restore")
    assert not list((tmp_path / "out").rglob("*.safetensors"))


@pytest.mark.parametrize("command", ["verify", "inspect", "convert"])
def test_the_command_line_says_it_too(command: str, zero3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = zero3.parents[1]
    arguments = [command, str(run)] + ([str(run.parent / "out")] if command == "convert" else [])

    assert main(arguments) == 1

    assert OF_DEEPSPEED in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["load_state_dict", "load_model", "inspect", "convert", "restore"])
def test_the_empty_tensors_in_a_file_of_zero3_are_no_weights(verb: str, zero3: Path, tmp_path: Path) -> None:
    file = zero3 / ZERO3[0]

    with pytest.raises(CheckpointNotFoundError) as caught:
        VERBS[verb](file, tmp_path / "out")

    assert str(caught.value) == (
        f"'{file}' has an empty tensor in place of 'weight' and 1 more: DeepSpeed ZeRO-3 saved the values with the "
        f"optimizer, in parts for each rank. Pass the directory with all of them: '{zero3}'."
    )


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
