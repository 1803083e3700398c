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

    with pytest.raises(CheckpointNotFoundError, match=r"It contains other0.*other4\.safetensors and 2 more: pass"):
        locate_checkpoint(str(tmp_path), WeightNames())


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a.safetensors", "b.bin"], "It contains a.safetensors, b.bin: pass one of them, as 'DIR/a.safetensors'."),
        (["last.ckpt"], "It contains last.ckpt: pass it, as 'DIR/last.ckpt'."),
        (["model-00001-of-00002.safetensors"], "It contains model-00001-of-00002.safetensors."),
        (
            ["rust_model.ot", "tf_model.h5"],
            "It contains rust_model.ot, tf_model.h5, which hfshard does not read: load the weights with a library that "
            "does, and save them as safetensors.",
        ),
        (["notes.txt"], "It contains no weights."),
    ],
)
def test_the_error_says_what_to_do_with_other_weights(names: list[str], said: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()

    with pytest.raises(CheckpointNotFoundError) as raised:
        locate_checkpoint(str(tmp_path), WeightNames())

    assert f". {said} To see what is there, run: ls -l DIR" in str(raised.value).replace(str(tmp_path), "DIR")


def test_a_missing_directory_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"There is no directory '.*nowhere'"):
        locate_checkpoint(str(tmp_path / "nowhere"), WeightNames())
