"""Transformers models of which each rank has a part, saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import hfshard
from hfshard.errors import InvalidArgumentError
from hfshard.pretrained.class_alias import architecture_of, view_as_alias
from tests.distributed.gloo import check_ranks
from tests.pretrained.ranks.layouts import SIX_EXPERTS, SPECIMENS, spread
from tests.zoo.mixin_classes import with_mixin

pytestmark = pytest.mark.compat


class Mine(hfshard.ShardedModelMixin, LlamaForCausalLM):
    pass


SHARD_BYTES = 12_000
HAS_EXPERT_PARALLEL = "ep_size" in DistributedConfig.__dataclass_fields__
HAS_REPLICAS = "dp_replicate_size" in DistributedConfig.__dataclass_fields__


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip


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


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def save_by_one_process(name: str, directory: Path) -> None:
    model = SPECIMENS[name].build(with_mixin(SPECIMENS[name].stock_class))
    model.save_pretrained(directory, max_shard_size=SHARD_BYTES)


def load_and_save_by_one_process(name: str, place: Path) -> None:
    save_by_one_process(name, place / name)
    model: Any = with_mixin(SPECIMENS[name].stock_class)
    model.from_pretrained(place / name).save_pretrained(place / f"{name}-again", max_shard_size=SHARD_BYTES)


def compare(directory: Path, expected: Path, case: object) -> None:
    torch.distributed.barrier()
    found = files_of(directory)
    assert "model.safetensors.index.json" in found
    assert found == files_of(expected), case
    torch.distributed.barrier()


def save_what_users_spread(rank: int, place: Path, names: tuple[str, ...], layouts: tuple[str, ...]) -> None:
    for name in names:
        for layout in layouts:
            out = place / f"{name}-{layout}"
            mine = spread(SPECIMENS[name].build(with_mixin(SPECIMENS[name].stock_class)), layout)
            mine.save_pretrained(out, is_main_process=rank == 0, max_shard_size=SHARD_BYTES)
            compare(out, place / name, (name, layout))

            stock = spread(SPECIMENS[name].build(), layout)
            index = hfshard.save_model(stock, out, is_main_process=rank == 0, max_shard_size=SHARD_BYTES)
            compare(out, place / name, (name, layout))
            assert index is not None
            assert json.loads((place / name / "model.safetensors.index.json").read_bytes()) == json.loads(
                index.to_json()
            )


def test_two_ranks_write_the_files_of_one_process(tmp_path: Path) -> None:
    names = ("llama_untied", "llama_tied", "llama_mixed_dtypes", "qwen3_moe")
    for name in names:
        save_by_one_process(name, tmp_path / name)
    check_ranks(tmp_path / "ranks", 2, save_what_users_spread, tmp_path, names, ("fsdp", "tp"))


def test_four_ranks_write_the_files_of_one_process(tmp_path: Path) -> None:
    names = ("llama_tied", "qwen3_moe")
    for name in names:
        save_by_one_process(name, tmp_path / name)
    check_ranks(tmp_path / "ranks", 4, save_what_users_spread, tmp_path, names, ("fsdp_tp", "hsdp"))


def save_what_transformers_spread(rank: int, place: Path, names: tuple[str, ...], sizes: tuple[Any, ...]) -> None:
    for name in names:
        for size in sizes:
            distributed_config = DistributedConfig(**size)
            model: Any = with_mixin(SPECIMENS[name].stock_class)
            model = model.from_pretrained(place / name, distributed_config=distributed_config)
            out = place / f"{name}-{'-'.join(size)}"
            model.save_pretrained(out, is_main_process=rank == 0, max_shard_size=SHARD_BYTES)
            compare(out, place / f"{name}-again", (name, size))


@pytest.mark.parametrize("name", ["llama_untied_even", "llama_tied_even", "qwen3_moe_even"])
def test_what_transformers_spreads_over_two_ranks_is_written_as_by_one_process(name: str, tmp_path: Path) -> None:
    load_and_save_by_one_process(name, tmp_path)
    sizes = [{"tp_size": 2}, {"fsdp_size": 2}, {"pp_size": 2}]
    if name == "qwen3_moe_even":
        sizes.append(
            {"tp_size": 2, "ep_size": 2} if HAS_EXPERT_PARALLEL else {"tp_size": 2, "enable_expert_parallel": True}
        )
    check_ranks(tmp_path / "ranks", 2, save_what_transformers_spread, tmp_path, (name,), tuple(sizes))


def test_what_transformers_spreads_over_four_ranks_is_written_as_by_one_process(tmp_path: Path) -> None:
    load_and_save_by_one_process("qwen3_moe_even", tmp_path)
    sizes: list[Any] = [{"fsdp_size": 4}]
    if HAS_REPLICAS:
        sizes = [{"tp_size": 2, "fsdp_size": 2}, {"fsdp_size": 2, "dp_replicate_size": 2}]
    sizes += [{"fsdp_size": 4, "ep_size": 2}] if HAS_EXPERT_PARALLEL else []
    check_ranks(tmp_path / "ranks", 4, save_what_transformers_spread, tmp_path, ("qwen3_moe_even",), tuple(sizes))


def test_a_rank_may_have_no_expert(tmp_path: Path) -> None:
    load_and_save_by_one_process(SIX_EXPERTS, tmp_path)
    check_ranks(tmp_path / "ranks", 4, save_what_transformers_spread, tmp_path, (SIX_EXPERTS,), ({"fsdp_size": 4},))


def save_what_needs_the_whole(rank: int, place: Path) -> None:
    stage = Mine.from_pretrained(place / "whole", distributed_config=DistributedConfig(pp_size=2))
    sharded = spread(Mine(config()), "fsdp")
    for model, words in ((stage, "is one of several pipeline stages"), (sharded, "is spread over several ranks")):
        with pytest.raises(InvalidArgumentError, match=f"{words}.*can't push it"):
            model.push_to_hub(f"file://{place}/hub")
    with pytest.raises(hfshard.HfshardError, match="checkpoints of stages are not supported"):
        hfshard.training.CheckpointManager(place / "run").save(1, hfshard.training.TrainingState(model=stage))
    with pytest.raises(InvalidArgumentError, match="would save this stage as the whole"):
        stage.save_pretrained(place / "out", distributed_checkpoint=True)


def test_what_can_not_be_done_with_a_part_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "place"
    Mine(config()).save_pretrained(place / "whole")
    check_ranks(tmp_path / "ranks", 2, save_what_needs_the_whole, place)
    assert not [path for path in place.rglob("*") if path.is_file() and path.parent.name != "whole"]
