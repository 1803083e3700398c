"""The golden checkpoints load, verify, and are what hfshard still writes, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

import hfshard
from tests.golden.cases import CASES, HERE, write
from tests.helpers.tensor_bytes import assert_same


@pytest.mark.parametrize("name", CASES)
def test_a_golden_checkpoint_loads(name: str) -> None:
    make, arguments = CASES[name]
    expected = make()
    verify = "full" if arguments.get("checksum", "sha256") else "structure"
    loaded = hfshard.load_state_dict(HERE / name, variant=arguments.get("variant"), verify=verify)  # type: ignore[arg-type]
    assert_same(loaded, expected)
    if name.startswith("tied"):
        assert loaded["lm_head"] is loaded["embed"]


@pytest.mark.parametrize("name", CASES)
def test_the_same_bytes_are_written_still(name: str, tmp_path: Path) -> None:
    write(name, tmp_path)
    golden = {path.name: path.read_bytes() for path in (HERE / name).iterdir()}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == golden


def test_no_golden_checkpoint_is_without_a_case() -> None:
    folders = {path.name for path in HERE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == CASES.keys()
