"""What a check finds besides damaged bytes: names in wrong files, lost digests, edited configs, strays."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import hfshard
from hfshard.checkpoint.folder import LocalFolder, as_folder
from hfshard.checkpoint.reports import Problem, VerifyReport
from hfshard.checkpoint.verifier import Verifier, verify_directory
from hfshard.errors import DamagedCheckpointError, InvalidArgumentError, StoreConnectionError
from hfshard.format.file_names import WeightNames
from hfshard.models.module_weights import save_module
from hfshard.places.place import place_to_save
from hfshard.saving.save_request import SaveOptions
from hfshard.shards.shard import SafetensorsShard

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def verify(directory: Path, level: str = "full", weights_name: str | None = None) -> VerifyReport:
    return verify_directory(str(directory), WeightNames(), level, False, weights_name)


def test_a_level_that_does_not_exist_is_refused_before_anything_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^level must be 'structure' or 'full', got 'deep'\.$"):
        verify(tmp_path / "nowhere", "deep")


def test_tensors_that_the_index_swaps_are_a_problem_where_they_are_and_where_they_are_not(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / FIRST)
    save_file({"b": torch.ones(2)}, tmp_path / SECOND)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": SECOND, "b": FIRST}}))
    first, second = str(tmp_path / FIRST), str(tmp_path / SECOND)

    report = verify(tmp_path, "structure")

    again = "Download or save it again."
    assert report.problems == (
        Problem(first, "a", f"Tensor 'a' is in '{first}', but the index says that it is in {SECOND}. {again}"),
        Problem(first, "b", f"Tensor 'b' is not in '{first}', where the index says that it is. {again}"),
        Problem(second, "b", f"Tensor 'b' is in '{second}', but the index says that it is in {FIRST}. {again}"),
        Problem(second, "a", f"Tensor 'a' is not in '{second}', where the index says that it is. {again}"),
    )
    assert not report.ok


def test_a_file_of_another_library_is_whole_with_a_warning_that_no_byte_was_compared(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")

    report = verify(tmp_path)

    assert report.ok and report.checked_bytes == 0
    assert report.warnings == (
        "'model.safetensors' has no checksum (hfshard writes them): only its structure was checked.",
    )


def test_a_checksum_that_the_index_has_lost_is_a_problem(tmp_path: Path) -> None:
    hfshard.save_state_dict({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path, max_shard_size=1)
    index = json.loads((tmp_path / INDEX).read_text())
    del index["metadata"]["hfshard"]["files"][SECOND]["sha256"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    lost = str(tmp_path / SECOND)

    (problem,) = verify(tmp_path).problems

    assert (problem.file, problem.tensor) == (lost, None)
    assert problem.message.startswith(f"'{lost}' was saved with a checksum, but the index has none. ")


def test_an_edited_config_is_a_warning_until_every_byte_counts(tmp_path: Path) -> None:
    save_module(nn.Linear(2, 2), place_to_save(tmp_path), None, SaveOptions(), files={"config": b'{"a": 1}'})
    (tmp_path / "config.json").write_text('{"a": 2}')

    structure, full = verify(tmp_path, "structure"), verify(tmp_path)

    assert structure.ok and ["config.json" in text for text in structure.warnings] == [True]
    assert [problem.file for problem in full.problems] == [str(tmp_path / "config.json")]
    assert full.warnings == ()


def test_strays_are_named_unless_one_file_alone_is_to_be_checked(tmp_path: Path) -> None:
    hfshard.save_state_dict({"a": torch.ones(2)}, tmp_path)
    for name in (FIRST, "model-hfshard-placeholder.safetensors", "adapter.safetensors"):
        (tmp_path / name).touch()

    assert verify(tmp_path).warnings == (
        f"'{FIRST}' is not part of a checkpoint here; the next save by hfshard keeps or deletes it.",
        "'model-hfshard-placeholder.safetensors' is not part of a checkpoint here; the next save by hfshard keeps or "
        "deletes it.",
    )
    assert verify(tmp_path, weights_name="model.safetensors").warnings == ()


def test_the_shards_of_an_index_that_cannot_be_read_are_no_strays(tmp_path: Path) -> None:
    hfshard.save_state_dict({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path, max_shard_size=1)
    (tmp_path / INDEX).write_text("{")

    report = verify(tmp_path)

    assert [problem.file for problem in report.problems] == [str(tmp_path / INDEX)]
    assert report.warnings == ()


def test_an_error_becomes_a_problem_without_the_advice_to_verify_and_once(tmp_path: Path) -> None:
    directory = str(tmp_path)
    verifier = Verifier(as_folder(directory), WeightNames(), "full")
    error = DamagedCheckpointError(f"It is damaged. Save it again, or run 'hfshard verify {directory}'.")

    verifier.findings.add_error(error)
    verifier.findings.add_error(error)

    assert verifier.report().problems == (Problem(directory, None, "It is damaged. Save it again."),)


def test_a_store_that_cannot_be_asked_says_nothing_about_the_checkpoint(tmp_path: Path) -> None:
    verifier = Verifier(as_folder(str(tmp_path)), WeightNames(), "full")

    with pytest.raises(StoreConnectionError, match="no answer"):
        verifier.findings.add_error(StoreConnectionError("no answer"))

    assert verifier.report().ok


class ReplacedFolder(LocalFolder):
    """A directory into which another save goes at the first look at one of its files."""

    def __init__(self, path: Path, seen: str, limit: int | str) -> None:
        super().__init__(str(path))
        self.seen = seen
        self.limit = limit
        self.looks = 0

    def _look(self, name: str) -> None:
        self.looks += name == self.seen
        if name == self.seen and self.looks == 1:
            hfshard.save_state_dict({"a": torch.zeros(2), "b": torch.zeros(2)}, self.path, max_shard_size=self.limit)

    def has(self, name: str) -> bool:
        found = super().has(name)
        self._look(name)
        return found

    def open_shards(self, names: Collection[str]) -> dict[str, SafetensorsShard]:
        for name in names:
            self._look(name)
        return super().open_shards(names)


@pytest.mark.parametrize(("seen", "limit"), [(FIRST, 1), (FIRST, "1GB"), ("model.safetensors", "1GB")])
def test_a_checkpoint_that_a_save_replaces_meanwhile_is_whole(seen: str, limit: int | str, tmp_path: Path) -> None:
    hfshard.save_state_dict({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path, max_shard_size=1)
    folder = ReplacedFolder(tmp_path, seen, limit)

    report = verify_directory(folder, WeightNames(), "full", False)

    assert report.ok and folder.looks > 0
    assert not torch.any(hfshard.load_state_dict(tmp_path)["a"])


def test_a_damaged_checkpoint_is_read_once(tmp_path: Path) -> None:
    hfshard.save_state_dict({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path, max_shard_size=1)
    (tmp_path / FIRST).unlink()
    folder = ReplacedFolder(tmp_path, FIRST, 1)
    folder.looks = 1  # so that no save follows

    report = verify_directory(folder, WeightNames(), "full", False)

    assert (len(report.problems), folder.looks) == (1, 2)
