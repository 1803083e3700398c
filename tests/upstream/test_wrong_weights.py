"""The mirror image of what upstream gets wrong silently (D1 to D8 of the list of July 2026)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertModel

import hfshard
from hfshard.errors import (
    DamagedCheckpointError,
    IntegrityError,
    NotEnoughSpaceError,
    StateDictMismatchError,
)
from tests.helpers.tiny_bert import SHARDED, SINGLE, Bert, all_see, bert, read_by_all, value_of

pytestmark = pytest.mark.compat


def test_d1_a_stale_single_file_does_not_outrank_a_new_sharded_save(tmp_path: Path) -> None:
    bert(1).save_pretrained(tmp_path, max_shard_size=SINGLE)
    bert(2).save_pretrained(tmp_path, max_shard_size=SHARDED)
    assert not (tmp_path / "model.safetensors").exists()
    assert read_by_all(tmp_path) == all_see(2)


def test_d1_a_single_file_of_stock_transformers_does_not_either(tmp_path: Path) -> None:
    bert(1, cls=BertModel).save_pretrained(tmp_path)
    bert(2).save_pretrained(tmp_path, max_shard_size=SHARDED)
    assert read_by_all(tmp_path) == all_see(2)


def test_d1_nor_do_stale_shards_outlive_a_new_single_file(tmp_path: Path) -> None:
    bert(1).save_pretrained(tmp_path, max_shard_size=SHARDED)
    bert(2).save_pretrained(tmp_path, max_shard_size=SINGLE)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    assert read_by_all(tmp_path) == all_see(2)


@pytest.mark.parametrize("limit", [SINGLE, SHARDED])
def test_d2_an_old_pickle_does_not_stay_beside_new_safetensors(limit: int, tmp_path: Path) -> None:
    old = bert(1, cls=BertModel)
    old.config.save_pretrained(tmp_path)
    torch.save(old.state_dict(), tmp_path / "pytorch_model.bin")
    bert(2).save_pretrained(tmp_path, max_shard_size=limit)
    assert not (tmp_path / "pytorch_model.bin").exists()
    assert read_by_all(tmp_path) == all_see(2)


def test_d2_safetensors_come_before_a_pickle_that_somebody_left(tmp_path: Path) -> None:
    bert(2).save_pretrained(tmp_path)
    torch.save(bert(1, cls=BertModel).state_dict(), tmp_path / "pytorch_model.bin")
    assert value_of(Bert.from_pretrained(tmp_path)) == 2
    assert hfshard.load_state_dict(tmp_path)["pooler.dense.bias"].unique().item() == 2


def test_d3_shards_of_two_saves_mixed_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    bert(1).save_pretrained(tmp_path / "a", max_shard_size=SHARDED)
    bert(2).save_pretrained(tmp_path / "b", max_shard_size=SHARDED)
    shard = sorted(path.name for path in (tmp_path / "a").glob("*.safetensors"))[1]
    shutil.copy(tmp_path / "a" / shard, tmp_path / "b" / shard)
    for load in (Bert.from_pretrained, hfshard.load_state_dict):
        with pytest.raises(IntegrityError, match=shard):
            load(tmp_path / "b")
    (problem, *_) = hfshard.verify_checkpoint(tmp_path / "b").problems
    assert problem.file == str(tmp_path / "b" / shard)


def test_d3_a_new_save_of_the_same_layout_writes_no_name_that_the_old_one_uses(tmp_path: Path) -> None:
    bert(1).save_pretrained(tmp_path, max_shard_size=SHARDED)
    before = {path.name for path in tmp_path.glob("*.safetensors")}
    bert(2).save_pretrained(tmp_path, max_shard_size=SHARDED)
    assert before.isdisjoint(path.name for path in tmp_path.glob("*.safetensors"))
    assert read_by_all(tmp_path) == all_see(2)


@pytest.mark.parametrize("limit", [SINGLE, SHARDED])
def test_d3_d4_a_save_that_fails_for_want_of_space_changes_nothing(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bert(1).save_pretrained(tmp_path, max_shard_size=limit)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    full = os.statvfs_result((4096, 4096, 1000, 1, 1, 1000, 100, 100, 0, 255))  # one free block
    monkeypatch.setattr(os, "statvfs", lambda _path: full)
    with pytest.raises(NotEnoughSpaceError, match="4,096 are free"):
        bert(2, hidden=16).save_pretrained(tmp_path, max_shard_size=limit)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_d4_a_save_that_fails_half_way_leaves_the_old_config_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bert(1).save_pretrained(tmp_path, max_shard_size=SHARDED)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    real, calls = os.pwrite, []

    def fails(fd: int, block: memoryview, at: int) -> int:
        calls.append(fd)
        if len(calls) > 5:
            raise OSError(28, "No space left on device")
        return real(fd, block, at)

    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(OSError, match="No space left"):
        bert(2, hidden=16).save_pretrained(tmp_path, max_shard_size=SHARDED)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert read_by_all(tmp_path) == all_see(1)


@pytest.mark.parametrize("limit", [SINGLE, SHARDED])
def test_d5_one_flipped_bit_is_found_and_its_tensor_named(limit: int, tmp_path: Path) -> None:
    bert(1).save_pretrained(tmp_path, max_shard_size=limit)
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(IntegrityError, match=shard.name):
        Bert.from_pretrained(tmp_path, verify="full")
    problems = hfshard.verify_checkpoint(tmp_path).problems
    assert {problem.file for problem in problems} == {str(shard)}
    assert len({problem.tensor for problem in problems} - {None}) == 1


@pytest.mark.parametrize("checksum", ["sha256", "xxh3"])
def test_d5_a_bit_flipped_far_from_the_samples_is_found_too(checksum: str, tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(5000), "b": torch.zeros(5000)}
    hfshard.save_state_dict(tensors, tmp_path, checksum=checksum)  # type: ignore[arg-type]
    file = tmp_path / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(IntegrityError, match="tensor 'b'") as caught:
        hfshard.load_state_dict(tmp_path, verify="full")
    assert (caught.value.fqn, caught.value.path) == ("b", str(file))


def test_d6_a_key_in_two_shards_is_an_error(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"a": torch.zeros(2), "c": torch.ones(2)}, tmp_path / "model-00002-of-00002.safetensors")
    files = {"a": 1, "b": 1, "c": 2}
    weight_map = {name: f"model-0000{number}-of-00002.safetensors" for name, number in files.items()}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(DamagedCheckpointError, match="'a'"):
        hfshard.load_state_dict(tmp_path)


def test_d7_a_shard_without_a_promised_key_is_an_error(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys("ab", "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(DamagedCheckpointError, match=r"'b'.*missing") as caught:
        hfshard.load_state_dict(tmp_path)
    assert caught.value.fqn == "b"


def _compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_d8_prefixes_of_wrappers_in_foreign_files_are_looked_through(prefix: str, tmp_path: Path) -> None:
    model = bert(3, cls=BertModel)
    model.config.save_pretrained(tmp_path)
    state_dict = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    save_file(state_dict, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert value_of(Bert.from_pretrained(tmp_path)) == 3
    assert value_of(hfshard.load_model(bert(0, cls=BertModel), tmp_path)) == 3


@pytest.mark.parametrize("wrap", [nn.DataParallel, _compiled], ids=["DataParallel", "compile"])
def test_d8_wrapped_models_are_saved_without_prefixes(wrap: type[nn.Module], tmp_path: Path) -> None:
    hfshard.save_model(wrap(bert(3)), tmp_path)
    assert read_by_all(tmp_path) == all_see(3)


def test_d8_a_child_honestly_called_module_keeps_its_name(tmp_path: Path) -> None:
    honest = nn.Sequential()
    honest.add_module("module", nn.Linear(2, 2))
    hfshard.save_model(honest, tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == {"module.weight", "module.bias"}
    fresh = nn.Sequential()
    fresh.add_module("module", nn.Linear(2, 2))
    hfshard.load_model(fresh, tmp_path)
    assert torch.equal(fresh.state_dict()["module.weight"], honest.state_dict()["module.weight"])


def test_d8_a_checkpoint_of_which_nothing_fits_is_never_a_random_model(tmp_path: Path) -> None:
    bert(1, cls=BertModel).config.save_pretrained(tmp_path)
    save_file({"of.another.model": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StateDictMismatchError, match="23 missing"):
        Bert.from_pretrained(tmp_path)
