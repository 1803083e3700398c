"""Another program's directory is read file by file, and each file that was read is known again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hfshard.disk.safe_open import identity_of
from hfshard.errors import CheckpointChangedError, InvalidArgumentError, StateDictMismatchError
from hfshard.training.interop.foreign_checkpoint import (
    ForeignCheckpoint,
    ForeignDirectory,
    ForeignRequest,
    list_foreign_directory,
)
from tests.foreign.dcp_files import save_dcp


def read_from(place: Path, *names: str, **more: Any) -> ForeignCheckpoint:
    """A checkpoint that consists of some files."""
    files = {str(place / name): identity_of((place / name).stat()) for name in names}
    return ForeignCheckpoint(path=str(place), files=files, step=None, components={}, **more)


def test_a_file_that_changed_or_went_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"old")
    (tmp_path / "rng.pth").touch()
    of_rank = read_from(tmp_path, "rng.pth").files
    foreign = read_from(tmp_path, "a.bin", files_of_rank=of_rank)

    foreign.confirm()
    (tmp_path / "a.bin").write_bytes(b"newer")
    with pytest.raises(CheckpointChangedError) as changed:
        foreign.confirm()
    (tmp_path / "rng.pth").unlink()
    with pytest.raises(CheckpointChangedError) as gone:
        read_from(tmp_path, files_of_rank=of_rank).confirm()

    says = "was replaced while it was being read. Nothing was restored. Retry."
    assert str(changed.value) == f"'{tmp_path}/a.bin' {says}"
    assert (changed.value.path, gone.value.path) == (f"{tmp_path}/a.bin", f"{tmp_path}/rng.pth")


def test_a_fingerprint_is_of_names_sizes_and_the_last_64_kib(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_bytes(b"{}")
    (tmp_path / "a.bin").write_bytes(b"abc")
    large = tmp_path / "large.bin"
    large.write_bytes(b"ab" + bytes(65_535))

    # printf 'a.bin 3 abcb.json 2 {}' | sha256sum
    small = "a7657178f6044400fbedd94f91cb64e850a9f38ae579a627711b41673342d323"
    assert read_from(tmp_path, "b.json", "a.bin").fingerprint() == small
    assert read_from(tmp_path, "b.json", "a.bin", files_of_rank={str(large): (0, 0, 0, 0)}).fingerprint() == small
    found = read_from(tmp_path, "large.bin").fingerprint()
    large.write_bytes(b"xb" + bytes(65_535))
    assert read_from(tmp_path, "large.bin").fingerprint() == found
    large.write_bytes(b"xy" + bytes(65_535))
    assert read_from(tmp_path, "large.bin").fingerprint() != found


def test_names_are_those_of_another_programs_directory_only(tmp_path: Path) -> None:
    (tmp_path / "optimizer.pt").touch()

    assert list_foreign_directory(str(tmp_path)) == {"optimizer.pt"}
    assert list_foreign_directory(str(tmp_path / "optimizer.pt")) == list_foreign_directory({"model": 1}) == frozenset()
    (tmp_path / "checkpoint.json").touch()
    assert list_foreign_directory(str(tmp_path)) == frozenset()


@pytest.mark.parametrize("name", ["zero_to_fp32.py", "mp_rank_00", "optimizer_0", "rank1-of-4-optimizer.pt"])
def test_parts_of_many_ranks_are_refused_and_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "optimizer.pt").touch()
    (tmp_path / "pytorch_model.bin").touch()
    assert ForeignDirectory(str(tmp_path), ForeignRequest()).names == {"optimizer.pt", "pytorch_model.bin"}

    (tmp_path / name).touch()
    with pytest.raises(StateDictMismatchError, match=f"^'{tmp_path}' has '{name}', which contains parts of tensors"):
        ForeignDirectory(str(tmp_path), ForeignRequest())


def test_only_one_pickle_has_its_tensors_in_the_models_order(tmp_path: Path) -> None:
    weights = {"second": torch.ones(2), "first": torch.zeros(1)}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    save_file(weights, tmp_path / "ema.safetensors")
    torch.save({"seed": 5}, tmp_path / "rng_state_0.pth")
    directory = ForeignDirectory(str(tmp_path), ForeignRequest())

    assert directory.weights("model_1") is None
    assert [*(directory.weights() or {})] == ["second", "first"]
    orders = [directory.has_order]
    assert sorted(directory.weights("ema") or {}) == ["first", "second"]
    assert [*orders, directory.has_order] == [True, False]
    assert directory.pickle("rng_state_0.pth", is_of_rank=True) == {"seed": 5}
    assert [Path(one).name for one in directory.files] == ["pytorch_model.bin", "ema.safetensors"]
    assert [Path(one).name for one in directory.files_of_rank] == ["rng_state_0.pth"]


def test_companions_are_read_for_a_conversion_and_never_through_a_link_to_outside(tmp_path: Path) -> None:
    (saved := tmp_path / "saved").mkdir()
    for name in ("config.json", "trainer_state.json", "model.safetensors"):
        (saved / name).write_bytes(b"{}")
    restoring = ForeignRequest(kinds={"model": "module"})

    assert ForeignDirectory(str(saved), ForeignRequest()).companions({"trainer_state.json"}) == {"config.json": b"{}"}
    (tmp_path / "secret").write_bytes(b"key")
    (saved / "notes.txt").symlink_to(tmp_path / "secret")
    assert ForeignDirectory(str(saved), restoring).companions(()) == {}
    with pytest.raises(
        InvalidArgumentError, match=r"notes\.txt' is a link to '.*secret', outside the directory to convert"
    ):
        ForeignDirectory(str(saved), ForeignRequest()).companions(())


def test_parts_have_the_requests_names_and_a_missing_one_is_told(tmp_path: Path) -> None:
    directory = ForeignDirectory(str(tmp_path), ForeignRequest(keys={"ema": "model_1"}))

    assert directory.components({"model": 1, "model_1": 2, "scaler": None}) == {"model": 1, "ema": 2}
    with pytest.raises(StateDictMismatchError) as caught:
        directory.components({"model": 1, "optimizer": 3})

    says = "has no 'model_1', which keys names for 'ema'. It has: model, optimizer. Nothing was restored."
    assert str(caught.value) == f"'{tmp_path}' {says}"


def test_weights_in_parts_are_not_the_model_of_a_run(tmp_path: Path) -> None:
    save_dcp(tmp_path, {"weight": torch.ones(2)})

    with pytest.raises(StateDictMismatchError, match=r"has '\.metadata', which contains parts of tensors"):
        ForeignDirectory(str(tmp_path), ForeignRequest()).weights()
