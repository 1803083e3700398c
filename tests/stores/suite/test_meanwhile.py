"""A copy while somebody saves over its source, or the store refuses, at each request: one save or the other."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from hfshard.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    CommitUnfinishedError,
    HubNotFoundError,
    RemoteChangedError,
    StoreError,
)
from tests.servers.stores.fault_proxy import FaultProxy
from tests.stores.suite.conftest import Place

pytestmark = pytest.mark.parametrize("scheme", ["s3"])

MOST_REQUESTS = 60

ACTS: dict[str, Callable[[str, str, str], Any]] = {
    "pull": lambda source, _, folder: hfshard.pull_checkpoint(source, f"{folder}/new", progress=False),
    "push": lambda source, _, folder: hfshard.push_checkpoint(source, f"{folder}/hub", progress=False),
    "copy": lambda source, other, _: hfshard.push_checkpoint(source, other, progress=False),
    "in_place": lambda source, _, __: hfshard.reshard_checkpoint(source, source, "1MB", progress=False),
}

QUICK = (("push", "race"), ("in_place", "race"), ("pull", "status"))
"""What is tried without --slow, at each second request."""


def _save(place: str, value: float) -> None:
    state = {f"t{number}": torch.full((3000,), value) for number in range(2)}
    hfshard.save_state_dict(state, place, max_shard_size="16KB", progress=False)


def _value_at(place: str) -> float | None:
    """The number that all tensors there are filled with; None where there is no checkpoint."""
    try:
        loaded = hfshard.load_state_dict(place, verify="full")
    except (CheckpointNotFoundError, HubNotFoundError):
        return None
    (value,) = {float(number) for tensor in loaded.values() for number in tensor.unique()}
    assert len(loaded) == 2
    return value


@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("act", "what"),
    [
        pytest.param(act, what, marks=[] if (act, what) in QUICK else pytest.mark.slow)
        for act in ACTS
        for what in ("race", "status")
    ],
)
def test_at_each_request(
    store: Place, proxy: FaultProxy, tmp_path: Path, act: str, what: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HFSHARD_STORE_RETRY_SECONDS", "0")
    outcomes = set()
    for number in range(0, MOST_REQUESTS, step):
        source, other, folder = f"{store.path}/{number}", f"{store.path}/{number}-new", str(tmp_path / str(number))
        os.mkdir(folder)
        _save(source, 1)
        fault = proxy.fail(what, skip=number, status=403, action=lambda place=source: _save(place, 2))
        try:
            ACTS[act](source, other, folder)
            outcomes.add("done")
        except (CheckpointChangedError, RemoteChangedError, StoreError, CommitUnfinishedError) as error:
            outcomes.add(type(error).__name__)
        was_hit = fault.times == 0
        proxy.clear()

        written = {"pull": f"{folder}/new", "push": f"{folder}/hub", "copy": other, "in_place": source}[act]
        at_source = _value_at(source)
        assert at_source == (2 if was_hit and what == "race" else 1) or (act, what) == ("in_place", "race")
        assert at_source in (1, 2)
        if os.path.isabs(written) and not os.path.isdir(written):
            continue
        assert _value_at(written) in ((1, 2, None) if what == "race" else (1, None)), number
        if not was_hit:
            break
    assert not was_hit
    assert "done" in outcomes
    assert len(outcomes) > 1
