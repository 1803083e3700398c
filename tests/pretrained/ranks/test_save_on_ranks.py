"""Transformers models of which each rank has a part, saved."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import hfshard
from hfshard.errors import InvalidArgumentError
from hfshard.pretrained.class_alias import architecture_of, view_as_alias
from tests.distributed.gloo import check_ranks

pytestmark = pytest.mark.compat


class Mine(hfshard.ShardedModelMixin, LlamaForCausalLM):
    pass


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip


def save_stages(rank: int, whole: Path, place: Path) -> None:
    from transformers.distributed.configuration_utils import DistributedConfig

    model = Mine.from_pretrained(whole, distributed_config=DistributedConfig(pp_size=2))
    assert "model.layers.0.mlp.up_proj.weight" in model.state_dict() or rank == 1
    assert "lm_head.weight" not in model.state_dict() or rank == 1
    for save in (
        lambda: model.save_pretrained(place / "out"),
        lambda: hfshard.save_model(model, place / "out"),
        lambda: model.push_to_hub(f"file://{place}/hub"),
        lambda: hfshard.training.CheckpointManager(place / "run").save(1, hfshard.training.TrainingState(model=model)),
    ):
        with pytest.raises(hfshard.HfshardError, match="is one of 2 pipeline stages") as caught:
            save()
        assert isinstance(caught.value, InvalidArgumentError) or rank == 1


def look_at_sharded_classes(rank: int) -> None:
    mine = Mine(config())
    stock = LlamaForCausalLM(config())
    for model in (mine, stock):
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        assert type(model).__name__.startswith("FSDP")
        view = view_as_alias(model)

        assert architecture_of(type(model)) is LlamaForCausalLM
        assert (type(view).__name__, type(view).__module__) == ("LlamaForCausalLM", LlamaForCausalLM.__module__)
        assert vars(view) is vars(model)
    assert repr(mine).startswith("LlamaForCausalLM(")
    assert not mine.is_custom_code()


def test_a_model_under_fully_shard_is_known_by_the_class_it_had_before(tmp_path: Path) -> None:
    check_ranks(tmp_path, 1, look_at_sharded_classes)


def test_a_pipeline_stage_is_not_saved_as_the_whole_model(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    Mine(config()).save_pretrained(tmp_path / "whole")
    check_ranks(tmp_path / "ranks", 2, save_stages, tmp_path / "whole", place)
    assert not [path for path in place.rglob("*") if path.is_file()]
