"""A call passes through few files: what its arguments leave no room for is not asked on its way."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

import hfshard
from hfshard.training import CheckpointManager, TrainingState
from tests.helpers import processes

PACKAGE = os.path.dirname(hfshard.__file__) + os.sep

TENSORS = {"a": torch.zeros(10, 10), "b": torch.ones(5)}
LIMITS = {
    "save_state_dict": 22,
    "load_state_dict": 20,
    "from_pretrained": 30,
    "save_pretrained": 30,
    "push_to_hub": 34,
    "verify_checkpoint": 17,
    "CheckpointManager.save": 35,  # 34 where PEFT is not imported
    "CheckpointManager.restore": 40,
}


class Bert(hfshard.ShardedModelMixin, BertModel):
    """A model of transformers."""


def files_of(call: Callable[[], object]) -> list[str]:
    """The package's files whose functions a call enters, in any thread."""
    files = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            files.add(name.removeprefix(PACKAGE))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(files)


def note_ways(root: Path) -> None:
    """Make each call twice, and write down the files of the second one, which imports nothing."""
    bert = Bert(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
    hfshard.save_state_dict(TENSORS, root / "saved")
    bert.save_pretrained(root / "bert")
    net = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = TrainingState(model=net, optimizer=optimizer)
    manager = CheckpointManager(root / "run", progress=False)
    calls: dict[str, Callable[[int], object]] = {
        "save_state_dict": lambda number: hfshard.save_state_dict(TENSORS, root / str(number)),
        "load_state_dict": lambda _: hfshard.load_state_dict(root / "saved"),
        "from_pretrained": lambda _: Bert.from_pretrained(root / "bert"),
        "save_pretrained": lambda number: bert.save_pretrained(root / f"bert-{number}"),
        "push_to_hub": lambda number: bert.push_to_hub(str(root / f"hub-{number}")),
        "verify_checkpoint": lambda _: hfshard.verify_checkpoint(root / "saved"),
        "CheckpointManager.save": lambda number: manager.save(number, state),
        "CheckpointManager.restore": lambda _: manager.restore(state, 1),
    }
    ways = {}
    for name, call in calls.items():
        call(1)
        ways[name] = files_of(partial(call, 2))
    (root / "ways.json").write_text(json.dumps(ways))


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Name of a call -> the files that it enters, in a process that no other test has changed."""
    root = tmp_path_factory.mktemp("ways")
    end = processes.end_of(root / "words.txt", note_ways, root)
    assert end.status == 0, end.words
    ways: dict[str, list[str]] = json.loads((root / "ways.json").read_text())
    return ways


@pytest.mark.parametrize("name", LIMITS)
def test_a_call_passes_through_few_files(name: str, ways: dict[str, list[str]]) -> None:
    assert len(ways[name]) <= LIMITS[name], "\n".join(ways[name])


def test_a_plain_save_and_load_ask_neither_other_libraries_nor_hubs_nor_signers(ways: dict[str, list[str]]) -> None:
    files = {*ways["save_state_dict"], *ways["load_state_dict"]}

    others = ("distributed/", "foreign/", "hub/", "signing/", "stores/", "tensors/fsdp1.py", "tensors/zero3.py")
    assert sorted(file for file in files if file.startswith(others)) == []
