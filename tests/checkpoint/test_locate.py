"""By which file a checkpoint is entered: the order in which transformers looks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfshard.checkpoint.locate import WeightsEntry, candidate_weights, locate_checkpoint
from hfshard.errors import CheckpointNotFoundError
from hfshard.format.file_names import WeightNames

SAFETENSORS = ["model.safetensors", "model.safetensors.index.json"]
PICKLES = ["pytorch_model.bin", "pytorch_model.bin.index.json"]


@pytest.mark.parametrize(
    ("use_safetensors", "expected"),
    [(None, SAFETENSORS + PICKLES), (True, SAFETENSORS), (False, PICKLES)],
)
def test_safetensors_come_before_pickles_and_single_files_before_indexes(
    use_safetensors: bool | None, expected: list[str]
) -> None:
    assert [candidate.name for candidate in candidate_weights(WeightNames(), use_safetensors)] == expected


@pytest.mark.parametrize(
    ("override", "kind"),
    [("model-hfshard-0.safetensors", "single"), ("model-hfshard-0.safetensors.index.json", "index")],
)
def test_what_the_config_names_is_the_only_candidate(override: str, kind: str) -> None:
    (candidate,) = candidate_weights(WeightNames(), None, override)

    assert (candidate.kind, candidate.name) == (kind, override)


@pytest.mark.parametrize("last", range(4))
def test_the_first_candidate_that_exists_is_entered(last: int, tmp_path: Path) -> None:
    names = SAFETENSORS + PICKLES
    for name in names[last:]:
        (tmp_path / name).touch()

    assert locate_checkpoint(str(tmp_path), WeightNames()).name == names[last]


def test_an_entry_says_whether_it_is_an_index() -> None:
    kinds = [
        WeightsEntry("single", ""),
        WeightsEntry("index", ""),
        WeightsEntry("bin", ""),
        WeightsEntry("bin_index", ""),
    ]

    assert [entry.is_index for entry in kinds] == [False, True, False, True]


def test_a_directory_without_weights_is_an_error_that_says_what_it_holds(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"other{number}.safetensors").touch()

    with pytest.raises(CheckpointNotFoundError, match=r"It contains other0.*other4\.safetensors and 2 more\."):
        locate_checkpoint(str(tmp_path), WeightNames())


def test_a_missing_directory_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"There is no directory '.*nowhere'"):
        locate_checkpoint(str(tmp_path / "nowhere"), WeightNames())
