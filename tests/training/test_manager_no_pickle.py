"""No checkpoint has a pickle in it, and none is needed to read one."""

from __future__ import annotations

import json
import pickle
import pickletools
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors import safe_open

from hfshard.training import CheckpointManager
from tests.flows.resume_cases import CASES
from tests.flows.resume_runs import Run

RICHEST = (
    "everything", "stateful-diary", "optimizer-lbfgs", "optimizer-own-master-weights", "optimizer-own-counter",
    "scheduler-own-bound-method", "scheduler-lambda-holds-optimizer", "scheduler-sequential-stateful",
    "scheduler-cyclic-bound-method", "scheduler-hf-greedy",
)  # fmt: skip
"""What holds functions, callables, an optimizer, nested lists and arrays."""
STEPS = 2
BASE64_PICKLES = (b'"gAI', b'"gAM', b'"gAN', b'"gAS', b'"gAR', b'"gAV', b'"gAW')
"""How pickles of the protocols 2 to 5 begin in a text."""
ARCHIVES = (b"\x80", b"PK", b"\x1f\x8b", b"BZh", b"\xfd7zXZ")
"""How pickles, zip, gzip, bzip2 and xz begin."""


def _is_pickle(data: bytes) -> bool:
    """Whether pickle's own disassembler reads it to the end."""
    try:
        for _ in pickletools.genops(data):
            pass
    except Exception:
        return False
    return True


def _no_such_number(text: str) -> NoReturn:
    raise AssertionError(f"{text} is no JSON")


def _refused(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError("somebody unpickles")


def test_the_test_knows_a_pickle() -> None:
    assert all(_is_pickle(pickle.dumps({"a": [1.5]}, protocol)) for protocol in range(6))
    assert not _is_pickle(b'{"a": [1.5]}')


@pytest.mark.compat
@pytest.mark.parametrize("name", RICHEST)
def test_no_file_is_a_pickle_and_a_restore_needs_no_unpickler(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path) as manager, closing(Run(CASES[name])) as run:
        for step in range(1, STEPS + 1):
            run.train(step)
            manager.save(step, run.state())
        files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for path in files:
        data = path.read_bytes()
        assert not data.startswith(ARCHIVES), path
        assert not zipfile.is_zipfile(path), path
        assert not _is_pickle(data), path
        if path.suffix == ".json":
            json.loads(data, parse_constant=_no_such_number)
            assert not any(begin in data for begin in BASE64_PICKLES), path
        else:
            with safe_open(path, "pt") as file:
                assert file.keys()
    run = Run(CASES[name], seed=1)
    for attribute in ("Unpickler", "_Unpickler", "load", "loads"):
        monkeypatch.setattr(pickle, attribute, _refused)
    for module in (torch, torch.serialization):
        monkeypatch.setattr(module, "load", _refused)
    with CheckpointManager(tmp_path) as manager:
        assert run.resume(manager) == STEPS
