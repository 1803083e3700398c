"""LoRA adapters beside their bases: pairs of factors, what merging changes, and adapters that cannot be merged so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hfshard
from hfshard.viewing.describe import headline
from hfshard.viewing.results import ValueDiff
from tests.viewing.adapters import make_adapter, make_base


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_update_of_each_weight_is_measured(tmp_path: Path, dtype: torch.dtype) -> None:
    found = hfshard.diff_checkpoints(make_base(tmp_path / "base", "", dtype), make_adapter(tmp_path / "x"), values=True)

    assert found.counts == {"only_in_a": 6, "only_in_b": 4}
    assert found.merged is not None
    assert {tensor.name: tensor.kind for tensor in found.merged.tensors if tensor.kind != "same"} == {
        "h.0.q.weight": "changed"
    }
    values = {tensor.name: tensor.values for tensor in found.merged.tensors}
    first = values["h.0.q.weight"]
    assert first is not None
    assert (first.elements, first.changed, first.max_abs, first.relative_norm) == (12, 12, 1.0, 0.5)
    assert values["h.1.q.bias"] is None
    assert found.merged.read_bytes == 2 * (12 * dtype.itemsize + 8 * 4 + 6 * 4)
    assert headline(found) == "B is an adapter (LoRA) that changes q.weight of layer 0 of 2 of A: 1 of 6 tensors."


def test_the_base_may_be_the_second_and_have_a_prefix(tmp_path: Path) -> None:
    adapter, base = make_adapter(tmp_path / "x"), make_base(tmp_path / "base", "bert.")

    found = hfshard.diff_checkpoints(adapter, base, values=True)

    assert found.merged is not None
    assert (found.merged.a, found.merged.b) == (str(base), str(adapter))
    assert [tensor.name for tensor in found.merged.differing] == ["bert.h.0.q.weight"]
    assert headline(found) == "A is an adapter (LoRA) that changes q.weight of layer 0 of 2 of B: 1 of 6 tensors."
    assert found.as_json()["merged"]["counts"]["changed"] == 1


def test_what_was_trained_as_a_whole_is_compared_or_added(tmp_path: Path) -> None:
    more = {"base_model.model.h.1.q.bias": torch.full((3,), 3.0), "base_model.model.head.weight": torch.ones(2)}
    adapter = make_adapter(tmp_path / "x", more, use_rslora=True)

    found = hfshard.diff_checkpoints(make_base(tmp_path / "base"), adapter, values=True)

    assert found.merged is not None
    norms = {tensor.name: tensor.values and tensor.values.relative_norm for tensor in found.merged.differing}
    assert norms == {
        "h.0.q.weight": pytest.approx(2**-0.5),
        "h.1.q.bias": 0.5,
        "base_model.model.head.weight": None,
    }
    assert headline(found).endswith(": 2 of 6 tensors; and adds head.weight.")


@pytest.mark.parametrize(
    ("more", "config"),
    [
        ({}, {"use_dora": True}),
        ({}, {"alpha_pattern": {"h.0": 8}}),
        ({}, {"rank_pattern": {"h.0": 8}}),
        ({}, {"fan_in_fan_out": True}),
        ({}, {"peft_type": "IA3"}),
        ({}, {"lora_alpha": "4"}),
        ({"base_model.model.h.0.v.lora_magnitude_vector": torch.ones(3)}, {}),
        ({"base_model.model.h.0.v.lora_A.weight": torch.ones(2, 4)}, {}),
        (
            {
                "base_model.model.x.lora_A.weight": torch.ones(2, 4),
                "base_model.model.x.lora_B.weight": torch.ones(3, 2),
            },
            {},
        ),
    ],
    ids=["dora", "alphas", "ranks", "transposed", "ia3", "text", "magnitude", "one factor", "another base"],
)
def test_what_is_no_plain_lora_of_this_base_is_not_merged(
    tmp_path: Path, more: dict[str, torch.Tensor], config: dict[str, Any]
) -> None:
    adapter = make_adapter(tmp_path / "x", more, **config)

    found = hfshard.diff_checkpoints(make_base(tmp_path / "base"), adapter, values=True)

    assert found.merged is None
    assert headline(found).startswith("No tensor in common; 6 tensors only in A; B is an adapter (LoRA)")


def test_without_values_nothing_is_read_and_nothing_merged(tmp_path: Path) -> None:
    found = hfshard.diff_checkpoints(make_base(tmp_path / "base"), make_adapter(tmp_path / "x"))

    assert (found.merged, found.read_bytes) == (None, 0)


def changed_by(directory: Path, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, alpha: int) -> ValueDiff:
    """Save a base of one weight and a LoRA adapter of it, and return how much the adapter changes it."""
    hfshard.save_state_dict({"q.weight": weight}, directory / "base")
    (directory / "x").mkdir()
    tensors = {"base_model.model.q.lora_A.weight": down, "base_model.model.q.lora_B.weight": up}
    save_file(tensors, directory / "x" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": len(down), "lora_alpha": alpha}
    (directory / "x" / "adapter_config.json").write_text(json.dumps(config))

    found = hfshard.diff_checkpoints(directory / "base", directory / "x", values=True)

    assert found.merged is not None
    [changed] = found.merged.differing
    assert changed.values is not None
    return changed.values


def test_a_weight_of_several_blocks_is_measured_as_one(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, down, up = (torch.randn(*shape, generator=generator) for shape in ((1500, 3001), (4, 3001), (1500, 4)))

    values = changed_by(tmp_path, weight, down, up, alpha=8)

    update = 2 * up.double() @ down.double()
    assert values.relative_norm == pytest.approx(float(update.norm() / weight.double().norm()), rel=1e-12)
    assert values.max_abs == pytest.approx(float(update.abs().max()), rel=1e-12)


def test_factors_of_several_blocks_in_float64_are_read_whole(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, down, up = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((50, 3001), (48, 3001), (50, 48))
    )

    values = changed_by(tmp_path, weight, down, up, alpha=48)

    assert values.relative_norm == pytest.approx(float((up @ down).norm() / weight.norm()), rel=1e-12)
