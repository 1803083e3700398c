"""Weights are put into the order of the model that config.json names, and a Trainer's optimizer gets its names."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from hfshard.errors import DamagedCheckpointError
from hfshard.training.integrations.trainer_names import _is_too_large, reorder_by_model
from hfshard.training.interop.foreign_checkpoint import ForeignCheckpoint

LAYER = "model.layers.0"
DECAYED = [
    "model.embed_tokens.weight",
    *(f"{LAYER}.self_attn.{one}_proj.weight" for one in "qkvo"),
    *(f"{LAYER}.mlp.{one}_proj.weight" for one in ("gate", "up", "down")),
    "lm_head.weight",
]
NORMS = [f"{LAYER}.input_layernorm.weight", f"{LAYER}.post_attention_layernorm.weight", "model.norm.weight"]
IN_ORDER = [*DECAYED[:-1], *NORMS, "lm_head.weight"]


def saved(place: Path, slots: dict[int, Any] | None = None, sizes: tuple[int, int] = (9, 3)) -> ForeignCheckpoint:
    """A checkpoint of a tiny Llama, sorted by name as safetensors has it, and an optimizer with two groups."""
    size: dict[str, Any] = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1}
    config = LlamaConfig(**size, num_attention_heads=2, architectures=["LlamaForCausalLM"])
    config.save_pretrained(place)
    weights = dict(sorted(LlamaForCausalLM(config).state_dict().items()))
    first, second = sizes
    groups = [{"lr": 0.5, "params": [*range(first)]}, {"lr": 0.25, "params": [*range(first, first + second)]}]
    components = {"model": weights, "optimizer": {"state": slots or {}, "param_groups": groups}}
    return ForeignCheckpoint(path=str(place), files={}, step=3, components=components, has_order=False)


def test_weights_are_ordered_and_both_groups_are_named(tmp_path: Path) -> None:
    foreign = saved(tmp_path, {8: {"exp_avg": torch.zeros(8, 4), "step": torch.tensor(3.0)}})

    found = reorder_by_model(foreign)

    assert [*found.components["model"]] == IN_ORDER
    groups = found.components["optimizer"]["param_groups"]
    assert [group["param_names"] for group in groups] == [DECAYED, NORMS]
    assert [group["lr"] for group in groups] == [0.5, 0.25]
    assert found.has_order
    assert [*foreign.components["model"]] == sorted(IN_ORDER)
    assert "param_names" not in foreign.components["optimizer"]["param_groups"][0]


@pytest.mark.parametrize(
    ("slots", "sizes"),
    [
        pytest.param({}, (3, 9), id="the groups of another program"),
        pytest.param({8: {"exp_avg": torch.zeros(4, 8)}}, (9, 3), id="a state of another shape"),
    ],
)
def test_another_optimizer_gets_no_names(tmp_path: Path, slots: dict[int, Any], sizes: tuple[int, int]) -> None:
    foreign = saved(tmp_path, slots, sizes)

    found = reorder_by_model(foreign)

    assert [*found.components["model"]] == IN_ORDER
    assert found.components["optimizer"] == foreign.components["optimizer"]
    assert found.has_order


def test_positions_that_are_no_optimizers_are_damage(tmp_path: Path) -> None:
    foreign = saved(tmp_path)
    foreign.components["optimizer"]["param_groups"][1]["params"] = [9, 10, 0]

    with pytest.raises(DamagedCheckpointError, match=r"groups do not have a number for each parameter") as caught:
        reorder_by_model(foreign)

    assert caught.value.path == str(tmp_path)


def test_weights_of_another_model_stay_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    foreign = saved(tmp_path)
    weights = foreign.components["model"]
    broken = json.loads((tmp_path / "config.json").read_text()) | {"hidden_size": "many"}

    others: list[dict[str, Any]] = [{}, {"model": None}, {"model": {**weights, "extra.weight": torch.zeros(1)}}]
    checkpoints = [replace(foreign, components=components) for components in others]
    assert [reorder_by_model(one) is one for one in checkpoints] == [True] * 3
    assert not caplog.records
    (tmp_path / "config.json").write_text(json.dumps(broken))
    with caplog.at_level(logging.WARNING):
        assert reorder_by_model(foreign) is foreign

    assert f"Cannot build the model of '{tmp_path}', so its parameters have no names: " in caplog.text


@pytest.mark.parametrize(
    ("sizes", "is_too_large"),
    [
        ({"num_hidden_layers": 4, "n_layers": 4, "encoder_layers": 4, "layer": 4}, False),
        ({"num_hidden_layers": 5}, True),
        ({"n_layer": 5}, True),
        ({"text_config": {"inner": {"num_decoder_layers": 5}}}, True),
        ({"layers_per_block": 5, "hidden_size": 5, "use_layers": True}, False),
        ({"num_local_experts": 65_536}, False),
        ({"num_local_experts": 65_537}, True),
    ],
    ids=str,
)
def test_a_config_of_more_layers_than_tensors_is_too_large(sizes: dict[str, Any], is_too_large: bool) -> None:
    assert _is_too_large(PreTrainedConfig(**sizes), 4) is is_too_large
