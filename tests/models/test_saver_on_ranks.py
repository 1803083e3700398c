"""Transformers models of which each rank has a part, saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import hfshard
from hfshard.errors import HfshardError, InvalidArgumentError
from hfshard.models.model_classes import architecture_of, view_as_alias
from hfshard.training import TrainingState
from tests.distributed.gloo import check_ranks
from tests.helpers.peft_versions import peft_of_transformers
from tests.models.layouts import take_stage
from tests.models.specimens import SPECIMENS
from tests.zoo.mixin_classes import with_mixin

pytestmark = pytest.mark.compat


Mine: Any = with_mixin(LlamaForCausalLM)
config = SPECIMENS["llama_untied_even"].make_config


class Demanding(LlamaForCausalLM):
    """Can't be built from its config alone."""

    def __init__(self, config: LlamaConfig, extra: int) -> None:
        super().__init__(config)
        self.extra = extra


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


def save_what_needs_the_whole(rank: int, place: Path) -> None:
    stage = Mine.from_pretrained(place / "whole", distributed_config=DistributedConfig(pp_size=2))
    with pytest.raises(InvalidArgumentError, match="would save this stage as the full model"):
        stage.save_pretrained(place / "out", distributed_checkpoint=True)


def save_an_adapter(rank: int, place: Path) -> None:
    adapted: Any = Mine(config())
    adapted.add_adapter(peft_of_transformers().LoraConfig(target_modules=["q_proj"]))
    fully_shard(adapted)
    for save in (adapted.save_pretrained, adapted.push_to_hub):
        with pytest.raises(InvalidArgumentError, match="gathers only what it has spread itself"):
            save(place / "adapted")
    assert not (place / "adapted").exists()


def save_stages_of_an_unknown_whole(rank: int, place: Path) -> None:
    whole = Demanding(config(), 1)
    names = [name for name, _ in whole.named_parameters()]
    parameters = whole.num_parameters()
    stage = take_stage(whole, rank, 2)
    torch.distributed.barrier()
    index = hfshard.save_model(stage, place / "demanding")
    assert index is not None
    assert list(index.weight_map) == names
    assert index.total_parameters == parameters


def refuse_what_a_device_map_has_offloaded(rank: int, place: Path) -> None:
    places, folder = {"model": "cpu", "lm_head": "disk"}, str(place.parent / f"disk{rank}")
    model = Mine.from_pretrained(place / "whole", device_map=places, offload_folder=folder)
    words = r"on several ranks: a device_map .* Call hfshard\.save_model\(model"
    with pytest.raises(InvalidArgumentError, match=words):
        model.save_pretrained(place / "offloaded")
    assert not (place / "offloaded").exists()
    for arguments in ({"parallelize": fully_shard}, {"distributed_config": DistributedConfig(tp_size=2)}):
        with pytest.raises(ValueError, match="device_map"):
            Mine.from_pretrained(place / "whole", device_map={"": "cpu"}, **arguments)
    with hfshard.CheckpointManager(place.parent / "run") as manager:
        manager.save(1, TrainingState(model=model))
        for load in (
            lambda: hfshard.load_model(model, place / "whole"),
            lambda: manager.restore_latest(TrainingState(model=model)),
        ):
            with pytest.raises(HfshardError, match="accelerate has offloaded it"):
                load()
    torch.distributed.barrier()
    hfshard.save_model(model, place / "offloaded")
    torch.testing.assert_close(
        hfshard.load_state_dict(place / "offloaded"), hfshard.load_state_dict(place / "whole"), rtol=0, atol=0
    )


def save_and_refuse(rank: int, place: Path) -> None:
    refuse_what_a_device_map_has_offloaded(rank, place)
    save_stages_of_an_unknown_whole(rank, place)
    save_what_needs_the_whole(rank, place)


def test_what_can_not_be_done_with_a_part_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "place"
    Mine(config()).save_pretrained(place / "whole")
    check_ranks(tmp_path / "ranks", 2, save_and_refuse, place)
    folders = {path.parent.name for path in place.rglob("*") if path.is_file()}
    assert folders <= {"whole", "demanding", "offloaded"}


def test_an_adapter_of_which_each_rank_has_a_part_is_refused(tmp_path: Path) -> None:
    peft_of_transformers()
    check_ranks(tmp_path / "ranks", 2, save_an_adapter, tmp_path)
