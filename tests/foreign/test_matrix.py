"""What real frameworks save is loaded as it was in memory: each framework, stage, dtype, number of ranks, nesting."""

from __future__ import annotations

import contextlib
import io
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hfshard
from hfshard.__main__ import main
from tests.foreign.producers.cases import CASES, Case, made
from tests.foreign.producers.models import build
from tests.foreign.producers.truth import assert_same, checkpoint_of, read_truth

# The state of each case whose reader is asked for the model by name.
KEYS = {"torch-fsdp2-torchtitan-2-threads": None}


def _parameters(cases: list[Case]) -> list[object]:
    return [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.is_slow else [])
        for case in cases
    ]


def place_of(case: Case, root: Path) -> Path:
    """Return where a case is, or skip its test."""
    if find_spec(case.framework) is None:
        pytest.skip(f"{case.framework} is not installed: pip install '.[test,frameworks]'")
    return made(case, CASES, root)


@pytest.mark.parametrize("case", _parameters(list(CASES)))
def test_what_a_framework_saves_is_loaded_to_the_bit(case: Case, produced: Path) -> None:
    place = place_of(case, produced)

    loaded = hfshard.load_state_dict(checkpoint_of(place))

    assert_same(loaded, read_truth(place))
