"""Checkpoints of real frameworks, loaded to the bit: each framework, stage, dtype, number of ranks, and nesting."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hfshard
from hfshard.cli.main import main
from hfshard.training import CheckpointManager, TrainingState
from tests.distributed.gloo import check_ranks
from tests.foreign.producers.cases import CASES, Case, made
from tests.foreign.producers.dcp import SHARDINGS
from tests.foreign.producers.models import LEARNING_RATE, build, optimizer_of, train
from tests.foreign.producers.truth import checkpoint_of, gathered, read_truth
from tests.foreign.producers.zero import RESUMED
from tests.helpers.tensor_bytes import assert_same

BY_NAME = {case.name: case for case in CASES}
ZERO = [case for case in CASES if case.producer == "zero:save_zero" and case.arguments["stage"] > 0]


def place_of(case: Case, root: Path) -> Path:
    """Return where a case's checkpoint and truth are."""
    if find_spec(case.framework) is None:
        pytest.skip(f"{case.framework} is not installed: pip install '.[test,frameworks]'")
    return made(case, CASES, root)


def parameters(cases: list[Case]) -> list[object]:
    return [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * case.is_slow) for case in cases]


@pytest.mark.parametrize("case", parameters(list(CASES)))
def test_state_dict_is_that_of_the_living_model(case: Case, produced: Path) -> None:
    place = place_of(case, produced)

    loaded = hfshard.load_state_dict(checkpoint_of(place))

    assert_same(loaded, read_truth(place))


@pytest.mark.parametrize("case", parameters(ZERO))
def test_weights_are_those_of_deepspeeds_own_script(case: Case, produced: Path) -> None:
    """Except for the script's mistakes: it loses all frozen weights of stage 1, and makes every buffer float32."""
    place = place_of(case, produced)
    script = importlib.import_module("deepspeed.utils.zero_to_fp32")
    tag = case.arguments.get("tag")
    expected = script.get_fp32_state_dict_from_zero_checkpoint(str(checkpoint_of(place)), tag)

    loaded = hfshard.load_state_dict(checkpoint_of(place))

    of_stage_1 = case.arguments["stage"] == 1
    assert loaded.keys() - expected.keys() == {name for name in loaded if of_stage_1 and name.startswith("frozen.")}
    assert expected.keys() <= loaded.keys()
    for name, tensor in expected.items():
        assert loaded[name].to(tensor.dtype).equal(tensor), name


@pytest.mark.parametrize("case", parameters([case for case in CASES if case.producer == "dcp:save_model"]))
def test_weights_are_those_of_torchs_own_conversion(case: Case, produced: Path, tmp_path: Path) -> None:
    place = place_of(case, produced)
    dcp_to_torch_save(checkpoint_of(place), tmp_path / "all.pt")
    expected = torch.load(tmp_path / "all.pt", weights_only=False)
    for key in {"model": ["model"], "nested": ["model"], "app": ["app", "model"]}.get(case.arguments["layout"], []):
        expected = expected[key]

    loaded = hfshard.load_state_dict(checkpoint_of(place))

    assert_same(loaded, {name: expected[name] for name in loaded})


@pytest.mark.parametrize(
    "name",
    [
        "deepspeed-zero1-fp16-4-nasty",
        "deepspeed-zero2-bf16-2-nasty",
        "deepspeed-zero3-bf16-4-nasty",
        "torch-fsdp2-app-4",
        "torch-fsdp1-nested-4",
        "accelerate-fsdp1-2",
        "verl-fsdp2-4",
    ],
)
def test_a_model_is_filled_and_converted(name: str, produced: Path, tmp_path: Path) -> None:
    place = place_of(BY_NAME[name], produced)
    truth = read_truth(place)

    model = hfshard.load_model(build("nasty"), checkpoint_of(place))
    out = ["--max-shard-size", "400", "--weights"]
    status = main(["convert", str(checkpoint_of(place)), str(tmp_path / "out"), *out])

    assert status == 0
    assert_same(hfshard.load_state_dict(tmp_path / "out", verify="full"), truth)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    for fqn, tensor in model.state_dict().items():
        assert tensor.equal(truth[fqn].to(tensor.dtype)), fqn


RUNS = [case for case in CASES if case.producer == "zero:save_universal" or case in ZERO]


@pytest.mark.parametrize("case", parameters(RUNS))
def test_states_of_the_optimizer_are_those_of_the_living_one(case: Case, produced: Path, tmp_path: Path) -> None:
    place = place_of(case, produced)
    model = build(case.arguments["model_name"])
    optimizer = optimizer_of(model)
    scaler = torch.amp.GradScaler("cpu")
    state = TrainingState(model, optimizer, scaler=scaler if case.arguments["precision"] == "fp16" else None)

    restored = CheckpointManager(tmp_path / "run").restore(state, checkpoint_of(place))

    assert (restored, restored.differences, len(restored.lacking)) == (2, (), 1)
    assert restored.extra == ({"seen": ["a", 3]} if case in ZERO else None)
    assert_same(_states_of(model, optimizer), read_truth(place, "states"))
    truth = read_truth(place)
    assert_same(model.state_dict(), {name: one.float() if "frozen" in name else one for name, one in truth.items()})


def _states_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the tensors of an optimizer's state, named like those in the truth."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}/{slot}": one for parameter, slots in optimizer.state.items() for slot, one in slots.items()
    }


ALONE = [case for case in ZERO if case.ranks == 1 and case.arguments["precision"] == "fp32"]


@pytest.mark.parametrize("case", parameters(ALONE))
def test_a_run_goes_on_as_under_deepspeed(case: Case, produced: Path, tmp_path: Path) -> None:
    """Restored from DeepSpeed's files, and from a run converted from them: to the bit what DeepSpeed resumes."""
    place = place_of(case, produced)
    assert main(["convert", str(checkpoint_of(place)), str(tmp_path / "run")]) == 0

    for source in (checkpoint_of(place), None):
        model = build(case.arguments["model_name"])
        optimizer = optimizer_of(model)
        CheckpointManager(tmp_path / "run").restore(TrainingState(model, optimizer), source)
        train(model, optimizer)
        assert_same(model.state_dict(), read_truth(place, "resumed"))


ON_TWO = [
    case for case in ZERO if (case.arguments["precision"], case.ranks) in RESUMED - {("fp32", 1)}
    if not case.arguments["options"] and "tag" not in case.arguments
]  # fmt: skip


@pytest.mark.parametrize("case", parameters(ON_TWO))
def test_a_run_of_two_ranks_goes_on_as_under_deepspeed(case: Case, produced: Path, tmp_path: Path) -> None:
    """On two ranks of FSDP2, to the bit; in one process on both ranks' batches, to the bit in float32.

    After bf16, one process computes gradients in float32: two steps later it is apart by at most what one step moves.
    """
    place = place_of(case, produced)
    expected = _without_statistics(read_truth(place, "resumed"))

    check_ranks(tmp_path / "ranks", 2, _resume_sharded, place, case.arguments, tmp_path / "run")

    model = build(case.arguments["model_name"])
    optimizer = optimizer_of(model)
    CheckpointManager(tmp_path / "run").restore(TrainingState(model, optimizer), checkpoint_of(place))
    train(model, optimizer, seeds=(0, 1))
    found = _without_statistics(model.state_dict())
    if case.arguments["precision"] == "fp32":
        assert_same(found, expected)
    else:
        apart = max((found[name] - tensor).abs().max().item() for name, tensor in expected.items())
        assert 0 < apart <= LEARNING_RATE


def _resume_sharded(rank: int, place: Path, arguments: dict[str, Any], run: Path) -> None:
    """Restore this rank's parts, go on as the ranks of DeepSpeed did, and compare."""
    model = build(arguments["model_name"])
    dtype = torch.bfloat16 if arguments["precision"] == "bf16" else None
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    optimizer = optimizer_of(model)
    CheckpointManager(run).restore(TrainingState(model, optimizer), checkpoint_of(place))
    train(model, optimizer, seeds=(rank,))
    assert_same(_without_statistics(gathered(model.state_dict())), _without_statistics(read_truth(place, "resumed")))


def _without_statistics(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out what each rank counts of its own batches, and what is not trained."""
    own = ("running_mean", "running_var", "num_batches_tracked", "calls", "scale", "mask")
    return {
        name: one for name, one in tensors.items() if name.split(".")[-1] not in own and not name.startswith("frozen.")
    }


def test_ranks_of_fsdp2_restore_their_parts_of_a_run(produced: Path, tmp_path: Path) -> None:
    place = place_of(BY_NAME["deepspeed-zero1-fp32-2-nasty"], produced)

    check_ranks(tmp_path / "ranks", 2, _restore_sharded, place, tmp_path / "run")


def _restore_sharded(rank: int, place: Path, run: Path) -> None:
    """Restore this rank's parts, and compare all of them."""
    model = SHARDINGS["fsdp2"](build("nasty"), 2)
    optimizer = optimizer_of(model)
    CheckpointManager(run).restore(TrainingState(model, optimizer), checkpoint_of(place))
    assert_same(gathered(_states_of(model, optimizer)), read_truth(place, "states"))


def test_several_tags_are_named_unless_one_is_the_latest(produced: Path, tmp_path: Path) -> None:
    place = place_of(BY_NAME["deepspeed-zero2-bf16-2-nasty"], produced)
    checkpoint = checkpoint_of(place)
    for tag in ("global_step2", "global_step4"):
        shutil.copytree(checkpoint / "global_step2", tmp_path / tag)

    with pytest.raises(hfshard.errors.AmbiguousWeightsError, match=r"'.*/global_step2', '.*/global_step4'"):
        hfshard.load_state_dict(tmp_path)
    assert_same(hfshard.load_state_dict(tmp_path / "global_step2"), read_truth(place))
    (tmp_path / "latest").write_text("global_step4")
    assert_same(hfshard.load_state_dict(tmp_path), read_truth(place))


@pytest.mark.parametrize("name", ["deepspeed-zero1-fp16-4-nasty", "deepspeed-zero3-bf16-4-nasty"])
def test_the_file_of_a_rank_that_is_missing_is_named(name: str, produced: Path, tmp_path: Path) -> None:
    folder = checkpoint_of(place_of(BY_NAME[name], produced)) / "global_step2"
    for path in folder.iterdir():
        if "zero_pp_rank_2" not in path.name or "optim" not in path.name:
            (tmp_path / path.name).hardlink_to(path)

    with pytest.raises(hfshard.errors.MissingShardError, match="zero_pp_rank_2_mp_rank_00_optim_states"):
        hfshard.load_state_dict(tmp_path)


DEEPSPEED = [case for case in CASES if case.framework == "deepspeed"]


@pytest.mark.parametrize("case", parameters(DEEPSPEED))
def test_each_save_of_deepspeed_is_verified(case: Case, produced: Path) -> None:
    report = hfshard.verify_checkpoint(checkpoint_of(place_of(case, produced)))

    assert report.problems == ()


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("deepspeed-zero1-bf16-1-nasty", "deepspeed-zero2-bf16-2-nasty"),
        ("deepspeed-zero2-fp16-1-nasty", "deepspeed-zero1-fp16-4-nasty"),
        ("deepspeed-zero2-fp32-4-nasty", "deepspeed-zero1-fp32-2-nasty"),
    ],
)
def test_weights_of_another_save_than_the_optimizers_are_found(
    name: str, other: str, produced: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint_of(place_of(BY_NAME[name], produced)), tmp_path / "mixed")
    model = "global_step2/mp_rank_00_model_states.pt"
    shutil.copy(checkpoint_of(place_of(BY_NAME[other], produced)) / model, tmp_path / "mixed" / model)

    report = hfshard.verify_checkpoint(tmp_path / "mixed")
    with pytest.raises(hfshard.errors.IntegrityError, match="has files of different saves") as raised:
        hfshard.load_state_dict(tmp_path / "mixed", verify="full")

    (problem,) = report.problems
    assert "parameter 'embed.weight' in the model's file is not its float32 master" in str(problem)
    assert raised.value.fqn == "embed.weight"


def test_tied_weights_are_one_tensor(produced: Path) -> None:
    loaded = hfshard.load_state_dict(checkpoint_of(place_of(BY_NAME["deepspeed-zero3-bf16-4-nasty"], produced)))

    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    assert isinstance(loaded["head.weight"], torch.Tensor)
