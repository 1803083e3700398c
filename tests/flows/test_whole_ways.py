"""A call passes through few files: what its arguments leave no room for is not asked on its way."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

import hfshard
from hfshard.training import CheckpointManager, TrainingState

PACKAGE = os.path.dirname(hfshard.__file__) + os.sep

TENSORS = {"a": torch.zeros(10, 10), "b": torch.ones(5)}


class Bert(hfshard.ShardedModelMixin, BertModel):
    """A model of transformers."""


def files_of(call: Callable[[], object]) -> set[str]:
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
    return files


def calls(root: Path) -> dict[str, Callable[[str], object]]:
    bert = Bert(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
    hfshard.save_state_dict(TENSORS, root / "saved")
    bert.save_pretrained(root / "bert")
    net = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = TrainingState(model=net, optimizer=optimizer)
    manager = CheckpointManager(root / "run", progress=False)
    manager.save(7, state)
    return {
        "save_state_dict": lambda name: hfshard.save_state_dict(TENSORS, root / name),
        "load_state_dict": lambda _: hfshard.load_state_dict(root / "saved"),
        "from_pretrained": lambda _: Bert.from_pretrained(root / "bert"),
        "save_pretrained": lambda name: bert.save_pretrained(root / name),
        "push_to_hub": lambda name: bert.push_to_hub(str(root / f"hub-{name}")),
        "verify_checkpoint": lambda _: hfshard.verify_checkpoint(root / "saved"),
        "CheckpointManager.save": lambda name: manager.save(8 + ["first", "second"].index(name), state),
        "CheckpointManager.restore": lambda _: manager.restore(state, 7),
    }


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("save_state_dict", 22),
        ("load_state_dict", 20),
        ("from_pretrained", 30),
        ("save_pretrained", 30),
        ("push_to_hub", 35),
        ("verify_checkpoint", 18),
        ("CheckpointManager.save", 34),
        ("CheckpointManager.restore", 40),
    ],
)
def test_a_call_passes_through_few_files(name: str, most: int, tmp_path: Path) -> None:
    call = calls(tmp_path)[name]
    call("first")

    files = files_of(lambda: call("second"))

    assert len(files) <= most, sorted(files)


def test_a_plain_save_and_load_ask_neither_other_libraries_nor_hubs_nor_signers(tmp_path: Path) -> None:
    plain = calls(tmp_path)

    def save_and_load() -> None:
        plain["save_state_dict"]("new")
        plain["load_state_dict"]("new")

    files = files_of(save_and_load)

    others = ("distributed/", "foreign/", "hub/", "signing/", "stores/", "tensors/fsdp1.py", "tensors/zero3.py")
    assert sorted(file for file in files if file.startswith(others)) == []
