"""The mirror image of what upstream loses (D9 to D13), and of its friction, of the list of July 2026."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import load_torch_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertModel

import hfshard
from hfshard.errors import (
    DamagedCheckpointError,
    InvalidArgumentError,
    SaveDirectoryError,
    StateDictMismatchError,
    UnknownArgumentError,
    UnsafePathError,
)
from tests.helpers.tiny_bert import SHARDED, SINGLE, Bert, bert, value_of

pytestmark = pytest.mark.compat

NEIGHBOURS = (
    "model_ema-00001-of-00002.safetensors", "model-backup-00001-of-00002.safetensors", "models-00001-of-00002.bin",
    "pytorch_model.ema.bin", "model.bak.safetensors", "README.md", "optimizer.pt", "model.safetensors.orig",
)  # fmt: skip


@pytest.mark.parametrize("limit", [SINGLE, SHARDED])
def test_d9_another_variant_and_unrelated_files_stay(limit: int, tmp_path: Path) -> None:
    bert(1).save_pretrained(tmp_path, max_shard_size=SHARDED, variant="fp16")
    for name in NEIGHBOURS:
        (tmp_path / name).write_text("somebody's")
    for generation in (2, 3):
        bert(generation).save_pretrained(tmp_path, max_shard_size=limit)
    assert value_of(BertModel.from_pretrained(tmp_path, variant="fp16")) == 1
    assert value_of(Bert.from_pretrained(tmp_path, variant="fp16")) == 1
    assert value_of(Bert.from_pretrained(tmp_path)) == 3
    assert [(tmp_path / name).read_text() for name in NEIGHBOURS] == ["somebody's"] * len(NEIGHBOURS)


@pytest.mark.parametrize("limit", [SINGLE, SHARDED])
def test_d10_a_save_does_not_change_a_live_model_that_maps_the_old_files(limit: int, tmp_path: Path) -> None:
    bert(1).save_pretrained(tmp_path, max_shard_size=limit)
    live, stock = Bert.from_pretrained(tmp_path), BertModel.from_pretrained(tmp_path)
    held = hfshard.load_state_dict(tmp_path)
    for generation in (2, 3):
        bert(generation).save_pretrained(tmp_path, max_shard_size=limit)
    assert (value_of(live), value_of(stock)) == (1, 1)
    assert {tensor.unique().item() for tensor in held.values()} == {1}


def test_d10_a_model_is_saved_over_the_files_that_it_maps_itself(tmp_path: Path) -> None:
    bert(1).save_pretrained(tmp_path, max_shard_size=SHARDED)
    live = Bert.from_pretrained(tmp_path)
    for limit in (SINGLE, SHARDED, SHARDED, SINGLE):
        live.save_pretrained(tmp_path, max_shard_size=limit)
        assert value_of(BertModel.from_pretrained(tmp_path)) == 1


def test_d10_no_file_that_exists_is_opened_for_writing(tmp_path: Path) -> None:
    bert(1).save_pretrained(tmp_path)
    with open(tmp_path / "model.safetensors", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as old:
        before = bytes(old)
        bert(2).save_pretrained(tmp_path)
        assert bytes(old) == before


def test_d11_the_old_shards_are_there_until_the_new_ones_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bert(1).save_pretrained(tmp_path, max_shard_size=SHARDED)
    old = {path.name for path in tmp_path.glob("*.safetensors")}
    real, seen = os.pwrite, []

    def watched(fd: int, block: memoryview, at: int) -> int:
        seen.append(old <= set(os.listdir(tmp_path)))
        return real(fd, block, at)

    monkeypatch.setattr(os, "pwrite", watched)
    bert(2).save_pretrained(tmp_path, max_shard_size=SHARDED)
    assert len(seen) > 5 and all(seen)


class Views(nn.Module):
    """Two parameters that are disjoint views of one storage, and one that overlaps both."""

    def __init__(self, begin: float) -> None:
        super().__init__()
        flat = torch.arange(begin, begin + 6, dtype=torch.float32)
        self.first, self.second = nn.Parameter(flat[:3]), nn.Parameter(flat[3:])
        self.across = nn.Parameter(flat[2:4])


@pytest.mark.parametrize("limit", [SINGLE, 1])
def test_d12_views_of_one_storage_are_all_stored(limit: int, tmp_path: Path) -> None:
    hfshard.save_model(Views(0), tmp_path, max_shard_size=limit)
    ours, stock = Views(7), Views(7)
    ours.across = nn.Parameter(torch.zeros(2))
    stock.across = nn.Parameter(torch.zeros(2))
    hfshard.load_model(ours, tmp_path)
    load_torch_model(stock, tmp_path)
    for model in (ours, stock):
        found = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
        assert found == {"first": [0, 1, 2], "second": [3, 4, 5], "across": [2, 3]}


def test_d12_every_shard_has_a_name_of_its_own(tmp_path: Path) -> None:
    index = hfshard.save_state_dict({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path, max_shard_size=1)
    assert index.weight_map == {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


def test_d13_strict_refuses_a_missing_and_an_unexpected_key_and_assigns_nothing(tmp_path: Path) -> None:
    hfshard.save_state_dict({"weight": torch.ones(2, 2), "extra": torch.ones(1)}, tmp_path)
    model = nn.Linear(2, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(StateDictMismatchError) as caught:
        hfshard.load_model(model, tmp_path)
    assert (caught.value.missing_keys, caught.value.unexpected_keys) == (("bias",), ("extra",))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    _, info = hfshard.load_model(model, tmp_path, strict=False, output_loading_info=True)
    assert (info["missing_keys"], info["unexpected_keys"]) == ({"bias"}, {"extra"})


BAD_SIZES = ("0GB", "-1GB", 0, -1, True, 1.5, "infGB", None, "5 gigabytes", "5GIBB")


@pytest.mark.parametrize("size", BAD_SIZES, ids=repr)
def test_friction_a_bad_size_is_refused_before_anything_is_written(size: object, tmp_path: Path) -> None:
    target = tmp_path / "new"
    saves: list[Callable[..., Any]] = [bert(1).save_pretrained, partial(hfshard.save_state_dict, {})]
    for save in saves:
        with pytest.raises((ValueError, TypeError), match="size"):
            save(target, max_shard_size=size)
    assert not target.exists()


def test_friction_gib_is_a_unit_and_a_small_b_is_a_byte() -> None:
    assert (hfshard.parse_size("5GiB"), hfshard.parse_size("200kb")) == (5_368_709_120, 200_000)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"])
def test_friction_errors_name_the_file_and_what_to_do(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpointError) as caught:
        hfshard.load_state_dict(tmp_path)
    assert str(file) in str(caught.value)
    assert ("git lfs pull" if b"lfs" in content else "Download") in str(caught.value)


def test_friction_an_index_without_metadata_loads_and_a_broken_one_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    assert hfshard.load_state_dict(tmp_path)["a"].tolist() == [1, 1]
    index.write_text('{"weight_map": {}')
    with pytest.raises(DamagedCheckpointError, match=index.name):
        hfshard.load_state_dict(tmp_path)


@pytest.mark.parametrize("escape", ["../secret.safetensors", "ABSOLUTE", "a/../../secret.safetensors"])
def test_friction_a_name_outside_the_directory_is_never_opened(escape: str, tmp_path: Path) -> None:
    folder, secret = tmp_path / "model", tmp_path / "secret.safetensors"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, secret)
    name = str(secret) if escape == "ABSOLUTE" else escape
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"a": name}}))
    with pytest.raises(UnsafePathError, match=r"model\.safetensors\.index\.json"):
        hfshard.load_state_dict(folder)


def test_friction_an_index_over_10_mib_is_read_by_its_writer() -> None:
    index = hfshard.CheckpointIndex({f"{'x' * 120}{i}": "model-00001-of-00002.safetensors" for i in range(90_000)})
    raw = index.to_json()
    assert len(raw) > 10 * 1024**2
    assert hfshard.CheckpointIndex.from_json(raw, "index").weight_map == index.weight_map


def test_friction_total_size_of_views_is_what_is_stored(tmp_path: Path) -> None:
    flat = torch.zeros(1_000_000)
    views = {f"v{i}": flat[10 * i : 10 * i + 10] for i in range(3)}
    assert hfshard.save_state_dict(views, tmp_path, max_shard_size=1).total_size == 120
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 120
    assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) == 3 * (4096 + 40)


def test_friction_the_callers_state_dict_keeps_its_keys(tmp_path: Path) -> None:
    model = bert(1)
    state_dict = dict(model.state_dict())
    before = {name: id(tensor) for name, tensor in state_dict.items()}
    model.save_pretrained(tmp_path, state_dict=state_dict, max_shard_size=SHARDED)
    assert {name: id(tensor) for name, tensor in state_dict.items()} == before


def test_friction_a_misspelt_argument_is_an_error_that_knows_better(tmp_path: Path) -> None:
    with pytest.raises(UnknownArgumentError, match="Did you mean 'max_shard_size'"):
        bert(1).save_pretrained(tmp_path / "new", max_shard_sizes="1GB")
    bert(1).save_pretrained(tmp_path)
    with pytest.raises(UnknownArgumentError, match="Did you mean 'output_loading_info'"):
        Bert.from_pretrained(tmp_path, output_loading_infos=True)
    assert not (tmp_path / "new").exists()


def test_friction_a_save_directory_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "out"
    file.write_text("mine")
    for place in (file, file / "below"):
        with pytest.raises(SaveDirectoryError, match="file"):
            bert(1).save_pretrained(place)
    assert file.read_text() == "mine"


def test_friction_no_file_is_written_for_its_owner_alone(tmp_path: Path) -> None:
    bert(1).save_pretrained(tmp_path, max_shard_size=SHARDED)
    umask = os.umask(0)
    os.umask(umask)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o666 & ~umask}


def test_friction_what_a_killed_save_left_is_swept_by_the_next(tmp_path: Path) -> None:
    bert(1).save_pretrained(tmp_path, max_shard_size=SHARDED)
    names = set(os.listdir(tmp_path))
    staging = tmp_path / ".cache" / "huggingface" / "hfshard"
    staging.mkdir(parents=True)
    (staging / "00000.weights").write_bytes(b"\0" * 4096)
    shutil.copy(next(tmp_path.glob("*.safetensors")), tmp_path / "model-00001-of-00099.safetensors")
    assert value_of(BertModel.from_pretrained(tmp_path)) == 1
    bert(1).save_pretrained(tmp_path, max_shard_size=SHARDED)
    assert set(os.listdir(tmp_path)) == names


def test_friction_pickles_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="safe_serialization"):
        bert(1).save_pretrained(tmp_path / "new", safe_serialization=False)
    assert not (tmp_path / "new").exists()


def test_friction_a_strided_save_is_the_file_of_the_contiguous_one(tmp_path: Path) -> None:
    values = torch.arange(70_000.0).reshape(700, 100)
    hfshard.save_state_dict({"w": values.t()}, tmp_path / "strided")
    hfshard.save_state_dict({"w": values.t().contiguous()}, tmp_path / "plain")
    files = [tmp_path / kind / "model.safetensors" for kind in ("strided", "plain")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert torch.equal(load_file(files[0])["w"], values.t())
