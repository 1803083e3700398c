"""Weights that another framework saved in parts, pushed and converted into a store."""

from __future__ import annotations

from pathlib import Path

import torch

import hfshard
from hfshard.cli.main import main
from tests.foreign.dcp_files import halves, save_dcp


def test_parts_are_pushed_and_converted_to_a_store(tmp_path: Path, store_address: str) -> None:
    weights = {"w": torch.arange(24.0).reshape(6, 4), "b": torch.ones(3)}
    state = {f"model.{name}": tensor for name, tensor in weights.items()}
    save_dcp(tmp_path / "parts", state, {"model.w": halves((6, 4), 1)})
    (tmp_path / "parts" / "tokenizer.json").write_text("{}")

    pushed = hfshard.push_checkpoint(tmp_path / "parts", f"{store_address}/pushed")
    status = main(["convert", str(tmp_path / "parts"), f"{store_address}/converted"])

    assert pushed.is_new
    assert status == 0
    for folder in ("pushed", "converted"):
        loaded = hfshard.load_state_dict(f"{store_address}/{folder}", verify="full")
        assert {name: one.tolist() for name, one in loaded.items()} == {n: one.tolist() for n, one in weights.items()}
