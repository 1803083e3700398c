"""Directories of other frameworks are recognized, and every verb takes them like any checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfshard
from hfshard.checkpoint.open_checkpoint import open_checkpoint
from hfshard.cli.main import main
from hfshard.errors import (
    AmbiguousWeightsError,
    CheckpointChangedError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    HfshardError,
    IntegrityError,
    InvalidArgumentError,
    StateDictMismatchError,
)
from hfshard.foreign.find_foreign import find_foreign, folder_of_model, is_of_run, open_foreign
from hfshard.saving.resharding import SourceUnchangedCheck
from tests.foreign import like_deepspeed
from tests.foreign.dcp_files import halves, save_dcp
from tests.helpers.tensor_bytes import assert_same

WEIGHTS = {
    "up.weight": torch.arange(24.0).reshape(6, 4),
    "up.bias": torch.arange(6.0),
    "scale": torch.tensor(0.5),
    "steps": torch.tensor(7),
}
MOMENT = {"optimizer.state.up.weight.exp_avg": torch.ones(6, 4), "optimizer.param_groups.0.lr": 0.1}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.register_buffer("scale", torch.zeros(()))
        self.register_buffer("steps", torch.tensor(0))


def save_parts(directory: Path) -> Path:
    """Save the model in two parts, along with an optimizer."""
    model = {f"model.{name}": tensor for name, tensor in WEIGHTS.items()}
    chunks = {"model.up.weight": halves((6, 4), 1), "model.up.bias": halves((6,), 0)}
    save_dcp(directory, {**model, **MOMENT}, chunks)
    return directory


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    return save_parts(tmp_path / "parts")


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A checkpoint of Trainer with FSDP: the parts in a folder, the files of the model beside it."""
    folder = tmp_path / "run" / "checkpoint-3"
    save_parts(folder / "pytorch_model_fsdp_0")
    save_dcp(folder / "optimizer_0", MOMENT)
    (folder / "config.json").write_text('{"model_type": "x", "dtype": "float32"}')
    (folder / "tokenizer.json").write_text("{}")
    for name in ("trainer_state.json", "rng_state_0.pth", "random_states_0.pkl", "latest", "scheduler.pt"):
        (folder / name).write_text("{}")
    return folder


def test_the_entry_is_found(parts: Path, trained: Path, tmp_path: Path) -> None:
    like_deepspeed.write(tmp_path / "zero" / "global_step3", like_deepspeed.contents(2, 2))

    assert find_foreign(str(parts)) == ".metadata"
    assert find_foreign(str(trained)) == "pytorch_model_fsdp_0/.metadata"
    assert find_foreign(str(tmp_path / "zero")) == "global_step3"
    assert find_foreign(str(tmp_path / "zero" / "global_step3")) == "."
    (tmp_path / "verl" / "actor" / "huggingface").mkdir(parents=True)
    (tmp_path / "verl" / "actor" / "model_world_size_2_rank_1.pt").touch()
    assert find_foreign(str(tmp_path / "verl")) == "actor/model_world_size_2_rank_1.pt"
    assert find_foreign(str(tmp_path / "verl" / "actor")) == "model_world_size_2_rank_1.pt"
    assert find_foreign(str(tmp_path / "none")) is None
    assert find_foreign(str(tmp_path)) is None
    with pytest.raises(CheckpointNotFoundError, match="no weights of another framework"):
        open_foreign(str(tmp_path), None)


def test_several_models_of_accelerate_are_named(trained: Path) -> None:
    save_parts(trained / "pytorch_model_fsdp_1")

    with pytest.raises(AmbiguousWeightsError, match=r"has 2 models\. Pass one of them: '.*_fsdp_0', '.*_fsdp_1'"):
        hfshard.load_state_dict(trained)
    assert_same(hfshard.load_state_dict(trained / "pytorch_model_fsdp_1"), WEIGHTS)


def test_the_files_of_the_model_may_be_above(trained: Path, parts: Path) -> None:
    inner = trained / "pytorch_model_fsdp_0"

    assert folder_of_model(str(trained), "pytorch_model_fsdp_0/.metadata") == str(trained)
    assert folder_of_model(str(inner), ".metadata") == str(trained)
    assert folder_of_model(str(parts), ".metadata") == str(parts)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("latest", True),
        ("zero_to_fp32.py", True),
        ("rng_state_0.pth", True),
        ("config.json", False),
        ("tokenizer.json", False),
        ("latest.json", False),
    ],
)
def test_files_of_the_run_are_told_apart(name: str, expected: bool) -> None:
    assert is_of_run(name) == expected


# Loading.


def test_all_ways_to_load(parts: Path) -> None:
    assert_same(hfshard.load_state_dict(parts), WEIGHTS)
    assert_same(hfshard.load_state_dict(parts, verify="full"), WEIGHTS)
    assert_same(hfshard.load_state_dict(parts, key="model"), WEIGHTS)
    assert_same(hfshard.load_state_dict(parts, read="mmap"), WEIGHTS)
    some = hfshard.load_state_dict(parts, keys="*.bias")
    assert list(some) == ["up.bias"]
    like = {"up.weight": torch.empty(6, 4, dtype=torch.float16)}
    assert torch.equal(hfshard.load_state_dict(parts, like=like)["up.weight"], WEIGHTS["up.weight"].half())


def test_a_module_is_filled_all_or_nothing(parts: Path) -> None:
    model = hfshard.load_model(Model(), parts)
    assert_same(model.state_dict(), WEIGHTS)

    other = nn.Linear(4, 6)
    before = other.weight.clone()
    with pytest.raises(StateDictMismatchError, match="does not fit the model"):
        hfshard.load_model(other, parts)
    assert torch.equal(other.weight, before)


def test_masters_of_deepspeed_are_loaded_and_ties_are_one_tensor(tmp_path: Path) -> None:
    like_deepspeed.write(tmp_path / "global_step3", like_deepspeed.contents(3, 2))

    found = hfshard.load_state_dict(tmp_path, verify="full")

    assert_same(found, like_deepspeed.expected())
    assert found["head"].data_ptr() == found["embed"].data_ptr()
    with pytest.raises(InvalidArgumentError, match="was saved by DeepSpeed, and has no key='model'"):
        hfshard.load_state_dict(tmp_path, key="model")


def test_weights_of_deepspeed_as_trained_have_a_key(tmp_path: Path) -> None:
    like_deepspeed.write(tmp_path / "global_step3", like_deepspeed.contents(2, 2))

    found = hfshard.load_state_dict(tmp_path, key="module")

    assert_same(found, like_deepspeed.expected(masters=False))


def test_weights_that_any_reader_finds_come_first(trained: Path) -> None:
    hfshard.save_state_dict({"w": torch.ones(1)}, trained)

    assert list(hfshard.load_state_dict(trained)) == ["w"]
    assert_same(hfshard.load_state_dict(trained / "pytorch_model_fsdp_0"), WEIGHTS)


@pytest.mark.parametrize(
    ("beside", "told"),
    [
        (("adapter_config.json", "adapter_model.safetensors"), "contains a PEFT adapter: load it with"),
        (("model.fp16.safetensors",), r"It contains model\.fp16\.safetensors"),
    ],
)
def test_nothing_is_read_beside_other_weights(beside: tuple[str, ...], told: str, trained: Path) -> None:
    for name in beside:
        (trained / name).write_text("{}")

    with pytest.raises(CheckpointNotFoundError, match=told):
        hfshard.load_state_dict(trained)
    with pytest.raises(HfshardError):
        hfshard.push_checkpoint(trained, trained.parent / "hub", progress=False)
    assert_same(hfshard.load_state_dict(trained / "pytorch_model_fsdp_0"), WEIGHTS)


@pytest.mark.parametrize(
    ("options", "told"),
    [({"use_safetensors": True}, "."), ({"variant": "fp16"}, "saved in parts have no variants: leave it out")],
)
def test_who_asks_for_safetensors_or_a_variant_gets_no_parts(options: dict[str, Any], told: str, parts: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=told):
        hfshard.load_state_dict(parts, **options)


# Looking and checking.


def test_inspect_names_the_framework_and_the_files(parts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(parts), "--format", "json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["framework"] == "torch DCP (2 files)"
    assert [file["name"] for file in found["files"]] == ["__0_0.distcp", "__1_0.distcp"]
    assert {tensor["name"] for tensor in found["tensors"]} == WEIGHTS.keys()
    assert main(["inspect", str(parts)]) == 0
    assert "saved by    torch DCP (2 files)" in capsys.readouterr().out


def test_verify_compares_what_has_a_checksum(parts: Path) -> None:
    report = hfshard.verify_checkpoint(parts)
    assert report.ok
    assert report.files == ("__0_0.distcp", "__1_0.distcp")
    assert report.checked_bytes == sum(one.nbytes for one in WEIGHTS.values())
    assert "not verified" in hfshard.verify_checkpoint(parts, level="structure").warnings[0]

    raw = bytearray((parts / "__1_0.distcp").read_bytes())
    raw[raw.index(torch.tensor([10.0, 11.0]).numpy().tobytes())] ^= 1
    (parts / "__1_0.distcp").write_bytes(raw)

    (problem,) = hfshard.verify_checkpoint(parts).problems
    assert "is damaged" in problem.message
    with pytest.raises(IntegrityError, match="have the CRC-32"):
        hfshard.load_state_dict(parts, verify="full")


def test_verify_checks_all_sets_of_weights(tmp_path: Path) -> None:
    save_dcp(tmp_path, {"model.w": torch.ones(2), "ema.w": torch.ones(3)})
    assert hfshard.verify_checkpoint(tmp_path).ok

    (tmp_path / "__0_0.distcp").write_bytes(b"x")

    assert not hfshard.verify_checkpoint(tmp_path).ok


# Writing.


def test_convert_writes_the_files_of_a_save(trained: Path, tmp_path: Path) -> None:
    arguments = ["--weights", "--max-shard-size", "9KB", "--format", "json"]
    hfshard.save_state_dict(WEIGHTS, tmp_path / "want", max_shard_size="9KB")

    for number, source in enumerate((trained, trained / "pytorch_model_fsdp_0")):
        out = tmp_path / f"out{number}"
        assert main(["convert", str(source), str(out), *arguments]) == 0

        assert sorted(os.listdir(out)) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert_same(hfshard.load_state_dict(out, verify="full"), WEIGHTS)
        assert hfshard.verify_checkpoint(out).ok


def test_convert_casts_and_takes_the_config_from_elsewhere(parts: Path, trained: Path, tmp_path: Path) -> None:
    options = ["--weights", "--dtype", "bfloat16", "--config", str(trained)]

    assert main(["convert", str(parts), str(tmp_path / "out"), *options]) == 0

    found = hfshard.load_state_dict(tmp_path / "out")
    assert {name: one.dtype for name, one in found.items()} == {
        name: torch.int64 if name == "steps" else torch.bfloat16 for name in WEIGHTS
    }
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert main(["convert", str(parts), str(tmp_path / "other"), "--weights", "--config", str(tmp_path)]) == 2
    assert not (tmp_path / "other").exists()


def test_a_reshard_is_the_same_and_not_in_place(parts: Path, tmp_path: Path) -> None:
    before = sorted(os.listdir(parts))
    hfshard.reshard_checkpoint(parts, tmp_path / "out")
    assert_same(hfshard.load_state_dict(tmp_path / "out"), WEIGHTS)

    with pytest.raises(InvalidArgumentError, match="which are not replaced in place"):
        hfshard.reshard_checkpoint(parts, parts)
    assert sorted(os.listdir(parts)) == before


def test_ties_are_kept(tmp_path: Path) -> None:
    like_deepspeed.write(tmp_path / "zero" / "global_step3", like_deepspeed.contents(2, 2))

    index = hfshard.reshard_checkpoint(tmp_path / "zero", tmp_path / "out")

    assert index.tied_names == {"head": "embed"}
    assert_same(hfshard.load_state_dict(tmp_path / "out"), like_deepspeed.expected())


def test_push_sends_safetensors_and_the_files_of_the_model(trained: Path, tmp_path: Path) -> None:
    result = hfshard.push_checkpoint(trained, tmp_path / "hub", ignore_patterns="token*")
    again = hfshard.push_checkpoint(trained, tmp_path / "hub", ignore_patterns="token*")

    assert result.is_new
    assert not again.is_new
    files = sorted(os.listdir(Path(hfshard.pull_checkpoint(str(tmp_path / "hub"), tmp_path / "pulled"))))
    assert [name for name in files if not name.startswith(".")] == ["config.json", "model.safetensors"]
    assert_same(hfshard.load_state_dict(tmp_path / "pulled", verify="full"), WEIGHTS)


# What fails, fails before anything is written.


def damage_item(parts: Path) -> None:
    raw = (parts / "__1_0.distcp").read_bytes()
    (parts / "__1_0.distcp").write_bytes(raw[:-100])


def remove_file(parts: Path) -> None:
    (parts / "__0_0.distcp").unlink()


@pytest.mark.parametrize("harm", [damage_item, remove_file])
@pytest.mark.parametrize("verb", ["convert", "push", "load_model"])
def test_nothing_is_written_or_assigned_of_a_damaged_directory(
    harm: Callable[[Path], None], verb: str, parts: Path, tmp_path: Path
) -> None:
    harm(parts)
    model = Model()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    verbs: dict[str, Callable[[], object]] = {
        "convert": lambda: hfshard.reshard_checkpoint(parts, tmp_path / "out"),
        "push": lambda: hfshard.push_checkpoint(parts, tmp_path / "out"),
        "load_model": lambda: hfshard.load_model(model, parts),
    }

    with pytest.raises((DamagedCheckpointError, CheckpointNotFoundError)) as caught:
        verbs[verb]()

    assert isinstance(caught.value, HfshardError)
    assert not list(tmp_path.glob("out/**/*.safetensors"))
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_a_source_that_changes_is_noticed_before_the_commit(parts: Path) -> None:
    with open_checkpoint(str(parts)) as checkpoint:
        check = SourceUnchangedCheck(checkpoint)
        check()
        shutil.copy(parts / "__1_0.distcp", parts / "new")
        os.replace(parts / "new", parts / "__1_0.distcp")

        with pytest.raises(CheckpointChangedError):
            check()


def test_a_run_with_an_optimizer_takes_no_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    arguments = ["convert", str(tmp_path / "run.pt"), str(tmp_path / "out"), "--dtype", "bfloat16"]

    assert main(arguments) == 2
    assert "Pass --weights to write the weights alone" in capsys.readouterr().err
    assert main([*arguments, "--weights"]) == 0
    assert hfshard.load_state_dict(tmp_path / "out")["weight"].dtype == torch.bfloat16


def test_convert_takes_the_parts_beside_safetensors(trained: Path, tmp_path: Path) -> None:
    """As beside the 16-bit weights that Trainer gathers, next to float32 masters."""
    hfshard.save_state_dict({"w": torch.ones(1)}, trained)

    assert main(["convert", str(trained), str(tmp_path / "out"), "--weights"]) == 0

    assert_same(hfshard.load_state_dict(tmp_path / "out"), WEIGHTS)
