"""A save whose files hold what those of another checkpoint do, whatever their sizes are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.places.place import place_to_save
from hfshard.saving.pipeline import save_request
from hfshard.saving.save_request import SaveOptions, request_from_state_dict


@pytest.mark.parametrize(
    ("kept", "files"),
    [
        ((("c",), ("a", "b")), {"model-00001-of-00002.safetensors": ["c"], "model-00002-of-00002.safetensors": ["a", "b"]}),  # noqa: E501
        ((("c", "a", "b"),), {"model.safetensors": ["a", "b", "c"]}),
    ],
)  # fmt: skip
def test_files_hold_what_they_are_to_keep(
    tmp_path: Path, kept: tuple[tuple[str, ...], ...], files: dict[str, list[str]]
) -> None:
    state_dict = {name: torch.full((100,), float(number)) for number, name in enumerate("abc")}
    options = SaveOptions(max_shard_size="5GB" if len(kept) > 1 else 100)

    index = save_request(
        replace(request_from_state_dict(state_dict, options), kept_files=kept), place_to_save(tmp_path)
    )

    found: dict[str, list[str]] = {}
    for name, file in sorted(index.weight_map.items()):
        found.setdefault(file, []).append(name)
    assert found == files
    if len(kept) > 1:
        raw = (tmp_path / "model.safetensors.index.json").read_bytes()
        assert json.loads(raw)["weight_map"] == index.weight_map
    assert torch.equal(hfshard.load_state_dict(tmp_path, verify="full")["b"], state_dict["b"])
