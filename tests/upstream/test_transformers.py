"""The mirror image of what upstream gets wrong silently (D1 to D8), loses (D9 to D13), and its friction (July 2026)."""

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
    IntegrityError,
    NotEnoughSpaceError,
    SaveDirectoryError,
    StateDictMismatchError,
    UnsafePathError,
)
from tests.helpers.tiny_bert import SHARDED, SINGLE, Bert, all_see, bert, read_by_all, value_of
from tests.saving.helpers import flip
from tests.zoo.compare import contents

pytestmark = pytest.mark.compat


@pytest.mark.parametrize(
    ("old_class", "old", "new"),
    [(Bert, SINGLE, SHARDED), (BertModel, SINGLE, SHARDED), (Bert, SHARDED, SINGLE)],
    ids=["single file", "single file of stock transformers", "shards"],
)
def test_d1_stale_files_do_not_outrank_or_outlive_a_new_save(
    old_class: type[BertModel], old: int, new: int, tmp_path: Path
) -> None:
    bert(1, cls=old_class).save_pretrained(tmp_path, max_shard_size=old)
    bert(2).save_pretrained(tmp_path, max_shard_size=new)
    if new == SHARDED:
        assert not (tmp_path / "model.safetensors").exists()
    else:
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
    before = contents(tmp_path)
    full = os.statvfs_result((4096, 4096, 1000, 1, 1, 1000, 100, 100, 0, 255))  # one free block
    monkeypatch.setattr(os, "statvfs", lambda _path: full)
    with pytest.raises(NotEnoughSpaceError, match="4,096 are free"):
        bert(2, hidden=16).save_pretrained(tmp_path, max_shard_size=limit)
    assert contents(tmp_path) == before


def test_d4_a_save_that_fails_half_way_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bert(1).save_pretrained(tmp_path, max_shard_size=SHARDED)
    before = contents(tmp_path)
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
    assert contents(tmp_path) == before
    assert read_by_all(tmp_path) == all_see(1)


@pytest.mark.parametrize("limit", [SINGLE, SHARDED])
def test_d5_one_flipped_bit_is_found_and_its_tensor_named(limit: int, tmp_path: Path) -> None:
    bert(1).save_pretrained(tmp_path, max_shard_size=limit)
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    flip(shard, -1)
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
    flip(file, -1)
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
    honest, fresh = (nn.ModuleDict({"module": nn.Linear(2, 2)}) for _ in range(2))
    hfshard.save_model(honest, tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == {"module.weight", "module.bias"}
    hfshard.load_model(fresh, tmp_path)
    assert torch.equal(fresh.state_dict()["module.weight"], honest.state_dict()["module.weight"])


def test_d8_a_checkpoint_of_which_nothing_fits_is_never_a_random_model(tmp_path: Path) -> None:
    bert(1, cls=BertModel).config.save_pretrained(tmp_path)
    save_file({"of.another.model": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StateDictMismatchError, match="23 missing"):
        Bert.from_pretrained(tmp_path)


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
    for load in (hfshard.load_model, load_torch_model):
        model = Views(7)
        model.across = nn.Parameter(torch.zeros(2))
        load(model, tmp_path)
        found = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
        assert found == {"first": [0, 1, 2], "second": [3, 4, 5], "across": [2, 3]}


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


def test_friction_a_strided_save_is_the_file_of_the_contiguous_one(tmp_path: Path) -> None:
    values = torch.arange(70_000.0).reshape(700, 100)
    hfshard.save_state_dict({"w": values.t()}, tmp_path / "strided")
    hfshard.save_state_dict({"w": values.t().contiguous()}, tmp_path / "plain")
    files = [tmp_path / kind / "model.safetensors" for kind in ("strided", "plain")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert torch.equal(load_file(files[0])["w"], values.t())
