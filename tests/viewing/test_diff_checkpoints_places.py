"""Checkpoints are compared wherever they are, and what both have digests of is not read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import hfshard
from hfshard.errors import CheckpointNotFoundError, IntegrityError
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.training import CheckpointManager
from tests.hub.pull.pull_hub import PullHub
from tests.hub.server_fixture import new_repo_id
from tests.stores.reading.conftest import put_directory
from tests.stores.runs.bucket_run import save_steps

SHAPES = {"embed.weight": (1000, 100), "head.weight": (100, 100), "head.bias": (100,)}
"""400,000, 40,000 and 400 bytes."""

HEAD = 32 * 1024
"""Bytes of a file that are asked for to read its header."""


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def with_another_bias(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return state_dict | {"head.bias": state_dict["head.bias"].add(1)}


def changed_in(report: hfshard.CheckpointDiff) -> list[str]:
    return [tensor.name for tensor in report.tensors if tensor.kind == "changed"]


@pytest.mark.compat
def test_of_two_revisions_on_the_hub_only_headers_come(hub: PullHub, tmp_path: Path) -> None:
    repo = new_repo_id()
    hfshard.save_state_dict(weights(1), tmp_path / "a")
    hfshard.save_state_dict(with_another_bias(weights(1)), tmp_path / "b")
    first = hub.publish(repo, tmp_path / "a")
    hub.publish(repo, tmp_path / "b")

    found = hub.call("diff", f"{repo}@{first}", repo)

    assert found["places"] == [f"{repo}@{first}", repo]
    assert (found["changed"], found["counts"], found["read"]) == (["head.bias"], {"same": 2, "changed": 1}, 0)
    assert hub.weights_down(repo) == 2 * HEAD
    with_values = hub.call("diff", f"{repo}@{first}", repo, values=True)
    assert with_values["read"] == 800
    assert hub.weights_down(repo) < 2 * (HEAD + 1000)
    with_local = hub.call("diff", repo, str(tmp_path / "b"))
    assert with_local["counts"] == {"same": 3}
    assert hub.weights_down(repo) == HEAD


@pytest.mark.compat
def test_files_of_one_sha256_are_not_read_whoever_wrote_them(hub: PullHub, tmp_path: Path) -> None:
    repo = new_repo_id()
    (tmp_path / "stock").mkdir()
    save_file(weights(1), tmp_path / "stock" / "model.safetensors")
    first = hub.publish(repo, tmp_path / "stock")
    (tmp_path / "stock" / "README.md").write_text("New.")
    hub.publish(repo, tmp_path / "stock")

    assert hub.call("diff", f"{repo}@{first}", repo)["read"] == 0
    assert hub.weights_down(repo) == 2 * HEAD
    # Its other side has no digest: that one is read.
    hfshard.save_state_dict(weights(1), tmp_path / "saved")
    found = hub.call("diff", str(tmp_path / "saved"), repo)
    assert (found["counts"], found["read"]) == ({"same": 3}, 440_400)


def test_steps_of_a_run_and_its_latest(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    state = hfshard.training.TrainingState(model=model)
    with hfshard.CheckpointManager(tmp_path / "run") as manager:
        manager.save(10, state)
        with torch.no_grad():
            model.bias.add_(1.0)
        manager.save(20, state)

    report = hfshard.diff_checkpoints(tmp_path / "run" / "checkpoint-10", tmp_path / "run", values=True)

    assert report.a == str(tmp_path / "run" / "checkpoint-00000010")
    assert report.b == str(tmp_path / "run" / "checkpoint-00000020")
    assert changed_in(report) == ["bias"]
    assert [tensor.values.max_abs for tensor in report.tensors if tensor.values] == [pytest.approx(1.0, rel=1e-6)]
    with pytest.raises(CheckpointNotFoundError, match="checkpoint-30"):
        hfshard.diff_checkpoints(tmp_path / "run" / "checkpoint-30", tmp_path / "run")


def test_runs_of_transformers_trainer_and_adapters(tmp_path: Path) -> None:
    run, adapters = tmp_path / "run", tmp_path / "adapters"
    for step in (500, 1000, 1500):
        for root, name in ((run, "model"), (adapters, "adapter_model")):
            place = root / f"checkpoint-{step}"
            place.mkdir(parents=True)
            save_file({"w.lora_A.weight": torch.full((2,), float(step))}, place / f"{name}.safetensors")
            if step < 1500:  # that save was cut off
                (place / "trainer_state.json").write_text("{}")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    torch.save({"w.lora_A.weight": torch.full((2,), 500.0)}, pickled / "adapter_model.bin")

    for root in (run, adapters):
        report = hfshard.diff_checkpoints(root / "checkpoint-500", root, values=True)
        assert report.b.startswith(str(root / "checkpoint-1000"))
        assert [one.values.max_abs for one in report.tensors if one.values] == [500.0]
    assert hfshard.diff_checkpoints(pickled, adapters / "checkpoint-500").is_same
    assert hfshard.diff_checkpoints(tmp_path, tmp_path, subfolder=("pickled", "adapters/checkpoint-500")).is_same
    with pytest.raises(CheckpointNotFoundError):
        hfshard.diff_checkpoints(pickled, pickled, variant="fp16")


def adapter(directory: Path, value: float) -> Path:
    """An adapter as PEFT saves it, of two tensors of 32 bytes, of which the first one has this value."""
    directory.mkdir(parents=True)
    tensors = {
        "model.q_proj.lora_A.weight": torch.full((2, 4), float(value)),
        "model.q_proj.lora_B.weight": torch.ones(4, 2),
    }
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    return directory


@pytest.mark.parametrize("scheme", ["s3"])
def test_adapters_and_runs_of_trainer_in_a_store(store_address: str, tmp_path: Path) -> None:
    for step in (500, 1000, 1500):
        checkpoint = adapter(tmp_path / "run" / f"checkpoint-{step}", step)
        if step < 1500:  # that save was cut off
            (checkpoint / "trainer_state.json").write_text("{}")
    put_directory(tmp_path, store_address)

    report = hfshard.diff_checkpoints(tmp_path / "run" / "checkpoint-500", f"{store_address}/run", values=True)

    assert report.b == f"{store_address}/run/checkpoint-1000"
    assert changed_in(report) == ["model.q_proj.lora_A.weight"]
    assert [one.values.max_abs for one in report.tensors if one.values] == [500.0]
    at_500 = f"{store_address}/run/checkpoint-500"
    assert hfshard.diff_checkpoints(store_address, at_500, subfolder=("run/checkpoint-500", "")).is_same
    page = hfshard.show_checkpoint(at_500, tmp_path / "adapter.html")
    assert "<title>run/checkpoint-500</title>" in Path(page).read_text()
    below = "run/checkpoint-1000, run/checkpoint-1500, run/checkpoint-500"
    with pytest.raises(CheckpointNotFoundError, match=f"its folders {below}: pass one of them as subfolder"):
        hfshard.diff_checkpoints(store_address, at_500)


@pytest.mark.parametrize("scheme", ["s3"])
def test_runs_in_a_store(store_address: str, tmp_path: Path) -> None:
    with CheckpointManager(store_address) as manager:
        save_steps(manager, 1, 2)

    report = hfshard.diff_checkpoints(f"{store_address}/checkpoint-1", store_address)

    assert [report.a, report.b] == [f"{store_address}/checkpoint-0000000{step}" for step in (1, 2)]
    assert (report.counts, report.read_bytes) == ({"changed": 4}, 0)
    assert "training run" in Path(hfshard.show_checkpoint(store_address, tmp_path / "run.html")).read_text()


@pytest.mark.compat
def test_adapters_on_the_hub(hub: PullHub, tmp_path: Path) -> None:
    repo, pickled, below = new_repo_id(), new_repo_id(), new_repo_id()
    first = hub.publish(repo, adapter(tmp_path / "a", 1))
    hub.publish(repo, adapter(tmp_path / "b", 2))
    (tmp_path / "pickled").mkdir()
    torch.save(load_file(tmp_path / "a" / "adapter_model.safetensors"), tmp_path / "pickled" / "adapter_model.bin")
    hub.publish(pickled, tmp_path / "pickled")
    adapter(tmp_path / "run" / "checkpoint-5", 2)
    hub.publish(below, tmp_path / "run")

    found = hub.call("diff", f"{repo}@{first}", repo)

    assert (found["changed"], found["read"]) == (["model.q_proj.lora_A.weight"], 128)
    assert hub.call("diff", f"{repo}@{first}", pickled)["counts"] == {"same": 2}
    in_folder = hub.call("diff", repo, below, subfolder=("", "checkpoint-5"))
    assert in_folder["counts"] == {"same": 2}
    assert in_folder["places"] == [repo, f"{below}/checkpoint-5"]
    refusal = f"There is no checkpoint in '{below}': none of model.safetensors, .*its folder checkpoint-5: pass it as"
    assert re.match(refusal, hub.refused("diff", repo, below).message)


def test_revisions_of_a_directory_hub(tmp_path: Path) -> None:
    hub = DirectoryHub.create(tmp_path / "hub")
    hfshard.save_state_dict(weights(1), tmp_path / "saved")
    first = hfshard.push_checkpoint(tmp_path / "saved", str(hub.root)).commit
    hfshard.save_state_dict(with_another_bias(weights(1)), tmp_path / "saved")
    hfshard.push_checkpoint(tmp_path / "saved", str(hub.root))

    report = hfshard.diff_checkpoints(f"{hub.root}@{first}", str(hub.root))

    assert changed_in(report) == ["head.bias"]
    assert report.read_bytes == 0


@pytest.mark.parametrize("scheme", ["s3"])
def test_in_a_store_what_lacks_digests_is_read(store_address: str, tmp_path: Path) -> None:
    save_file(weights(1), tmp_path / "model.safetensors")
    put_directory(tmp_path, store_address)
    hfshard.save_state_dict(with_another_bias(weights(1)), f"{store_address}/saved", max_shard_size="100KB")

    report = hfshard.diff_checkpoints(store_address, f"{store_address}/saved")

    assert changed_in(report) == ["head.bias"]
    assert report.read_bytes == 440_400
    assert hfshard.diff_checkpoints(f"{store_address}/saved", f"{store_address}/saved").read_bytes == 0


def test_one_file_of_a_directory(tmp_path: Path) -> None:
    torch.save({"state_dict": weights(1)}, tmp_path / "old.pt")
    save_file(weights(1), tmp_path / "one.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in weights(1).items()}, tmp_path / "half.safetensors")

    assert hfshard.diff_checkpoints(tmp_path / "old.pt", tmp_path / "one.safetensors").counts == {"same": 3}
    report = hfshard.diff_checkpoints(tmp_path / "one.safetensors", tmp_path / "half.safetensors", values=True)
    assert report.counts == {"cast": 3}
    assert all(tensor.values and 0 < tensor.values.relative_norm < 0.01 for tensor in report.tensors)


def test_digests_that_lie_are_found_by_full(tmp_path: Path) -> None:
    hfshard.save_state_dict(weights(1), tmp_path / "a")
    hfshard.save_state_dict(weights(1), tmp_path / "b")
    path = tmp_path / "b" / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[200_000] ^= 1  # in the middle of a tensor, which no fingerprint covers
    path.write_bytes(raw)

    assert hfshard.diff_checkpoints(tmp_path / "a", tmp_path / "b").is_same
    with pytest.raises(IntegrityError, match=r"Tensor 'embed\.weight' of shard '.*' is damaged"):
        hfshard.diff_checkpoints(tmp_path / "a", tmp_path / "b", verify="full")
