"""Files of each rank: all ranks' or none, described and not run; the matrix has those of real shardings."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.metadata import ShardMetadata

import hfshard
from hfshard.cli.main import main
from hfshard.errors import (
    AmbiguousWeightsError,
    DamagedCheckpointError,
    HfshardError,
    IntegrityError,
    InvalidArgumentError,
    MissingShardError,
    UnsafePickleError,
)
from hfshard.foreign.find_foreign import open_foreign_run
from hfshard.foreign.rank_files import find_rank_files, read_rank_files
from tests.foreign.producers.truth import checkpoint_of, read_truth
from tests.foreign.test_matrix import BY_NAME, place_of
from tests.helpers.evil import Evil
from tests.helpers.tensor_bytes import assert_same

WEIGHTS = {"up.weight": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor(3), "none": torch.ones(0, 2)}


def file_of(rank: int, ranks: int = 2) -> str:
    return f"model_world_size_{ranks}_rank_{rank}.pt"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Two ranks with complete tensors, of which a buffer differs."""
    folder = tmp_path / "actor"
    folder.mkdir()
    for rank in range(2):
        torch.save({**WEIGHTS, "mean": torch.tensor(float(rank))}, folder / file_of(rank))
    return folder


def test_complete_tensors_are_those_of_the_first_rank(plain: Path) -> None:
    loaded = hfshard.load_state_dict(plain.parent, verify="full")

    assert_same(loaded, {**WEIGHTS, "mean": torch.tensor(0.0)})
    assert read_rank_files(str(plain)).framework == "verl (2 ranks)"
    with pytest.raises(InvalidArgumentError, match=r"was saved by verl, and has no key='x'"):
        hfshard.load_state_dict(plain, key="x")


def test_an_actor_and_a_critic_are_named(plain: Path) -> None:
    shutil.copytree(plain, plain.parent / "critic")

    assert find_rank_files(str(plain)) == file_of(0)
    with pytest.raises(AmbiguousWeightsError, match=r"has 2 models\. Pass one of them: '.*/actor', '.*/critic'"):
        find_rank_files(str(plain.parent))


def test_names_of_one_tensor_are_tied(tmp_path: Path) -> None:
    weight = torch.ones(2, 2)
    torch.save({"embed": weight, "head": weight, "copy": weight.clone()}, tmp_path / file_of(0, 1))

    assert read_rank_files(str(tmp_path)).aliases == {"head": "embed"}


def _saved(value: Any, name: str = file_of(1)) -> Callable[[Path], object]:
    return lambda folder: torch.save(value, folder / name)


def _rest(**more: Any) -> dict[str, Any]:
    return {**WEIGHTS, "mean": torch.tensor(0.0), **more}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda folder: (folder / file_of(1)).unlink(), MissingShardError, "that of rank 1 ('model_world_size_2"),
        (_saved({}, file_of(0, 4)), DamagedCheckpointError, "has files of 2, 4 ranks: some are leftovers"),
        (_saved({}, file_of(2)), DamagedCheckpointError, "are not one of each of 2 ranks"),
        (_saved({}, "model_world_size_2_rank_01.pt"), DamagedCheckpointError, "are not one of each of 2 ranks"),
        (_saved(WEIGHTS), DamagedCheckpointError, "do not both have tensor 'mean'"),
        (_saved(_rest(mean=torch.ones(2))), DamagedCheckpointError, "have different tensors 'mean'"),
        (_saved(_rest(mean=torch.tensor(1))), DamagedCheckpointError, "have different tensors 'mean'"),
        (_saved(_rest(mean=1.0)), DamagedCheckpointError, "a float in place of a tensor"),
        (_saved(_rest(mean=ShardMetadata([0], [1], "cpu"))), DamagedCheckpointError, "in place of a tensor"),
        (_saved(_rest(mean=Evil())), UnsafePickleError, "asks for 'posix.system', which is nothing a rank's file"),
        (_saved(torch.ones(2)), DamagedCheckpointError, "it is not a state dict as torch writes it"),
        (_saved(_rest(mean=torch.ones(3, 2).t())), InvalidArgumentError, "another order than row-major"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused(
    change: Callable[[Path], object], error: type[HfshardError], message: str, plain: Path
) -> None:
    change(plain)

    with pytest.raises(error) as raised:
        read_rank_files(str(plain))

    assert message in str(raised.value)


@pytest.fixture
def sharded(produced: Path, tmp_path: Path) -> Path:
    """What four ranks of FSDP2 have saved."""
    shutil.copytree(checkpoint_of(place_of(BY_NAME["verl-fsdp2-4"], produced)), tmp_path / "sharded")
    return tmp_path / "sharded"


def test_a_part_in_the_place_of_another_is_refused(sharded: Path) -> None:
    shutil.copy(sharded / file_of(0, 4), sharded / file_of(1, 4))

    with pytest.raises(DamagedCheckpointError, match="elements in a dimension"):
        hfshard.load_state_dict(sharded)


def test_files_are_joined_by_what_is_in_them_and_not_by_their_order(sharded: Path, produced: Path) -> None:
    for mine, other in ((file_of(1, 4), "other"), (file_of(3, 4), file_of(1, 4)), ("other", file_of(3, 4))):
        (sharded / mine).rename(sharded / other)

    assert_same(hfshard.load_state_dict(sharded), read_truth(place_of(BY_NAME["verl-fsdp2-4"], produced)))


def test_a_flipped_bit_is_found(sharded: Path) -> None:
    run = read_rank_files(str(sharded)).tensors["up.weight"].runs[-1]
    raw = bytearray((sharded / run.file).read_bytes())
    raw[run.offset] ^= 1
    (sharded / run.file).write_bytes(raw)

    with pytest.raises(IntegrityError, match=r"rank_\d\.pt' is damaged"):
        hfshard.load_state_dict(sharded, verify="full")


def test_config_comes_along_and_the_optimizer_does_not(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["convert", str(sharded), str(tmp_path / "out")]

    assert main(arguments) == 2
    assert "has the states of its optimizer by numbers" in capsys.readouterr().err
    assert main([*arguments, "--weights", "--dtype", "bfloat16"]) == 0

    assert {path.name for path in (tmp_path / "out").iterdir()} - {".cache"} == {"config.json", "model.safetensors"}
    assert hfshard.load_state_dict(tmp_path / "out")["up.weight"].dtype == torch.bfloat16


def test_weights_alone_are_no_run(plain: Path) -> None:
    assert open_foreign_run(str(plain)) is None
