"""Models that the user spreads over ranks before they have data, and that are read by parts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel

import hfshard
from hfshard.errors import InvalidArgumentError, StateDictMismatchError
from tests.distributed.gloo import check_ranks, waiting
from tests.models.layouts import spread
from tests.models.specimens import SPECIMENS
from tests.models.test_rank_parts_stored_parts_on_ranks import convert_by_computing
from tests.zoo.mixin_classes import with_mixin


def same(found: nn.Module, expected: nn.Module) -> bool:
    """Whether parameters and all buffers are the same, bit for bit; ties, too."""
    ours = [*found.named_parameters(remove_duplicate=False), *found.named_buffers(remove_duplicate=False)]
    theirs = [*expected.named_parameters(remove_duplicate=False), *expected.named_buffers(remove_duplicate=False)]
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for (name, one), (_, other) in zip(ours, theirs, strict=True):
        first, second = (value.full_tensor() if isinstance(value, DTensor) else value for value in (one, other))
        assert first.dtype == second.dtype, name
        assert torch.equal(first, second), name
    return len(list(found.parameters())) == len(list(expected.parameters()))


def load_by_parts(rank: int, place: Path, cases: dict[str, tuple[str, ...]]) -> None:
    for name, layouts in cases.items():
        if name == "computed":
            convert_by_computing()
        specimen = SPECIMENS["llama_untied_even" if name == "computed" else name]
        model_class: Any = with_mixin(specimen.stock_class)
        if name == "computed" and rank == 0:
            with waiting(0):
                specimen.build(model_class).save_pretrained(place / name, is_main_process=True)
        torch.distributed.barrier()
        expected = model_class.from_pretrained(place / name)
        for layout in layouts:
            found = model_class.from_pretrained(place / name, parallelize=partial(spread, layout=layout))

            assert isinstance(found, model_class)
            assert not found.training
            assert same(found, expected), (name, layout)
            batch = torch.arange(8).view(2, 4)
            if layout in ("fsdp", "hsdp"):
                torch.testing.assert_close(found(batch).logits, expected(batch).logits)
    # and of the last one, as classes of transformers alone load it
    stock = hfshard.load_model(
        specimen.stock_class, place / name, dtype=torch.bfloat16, parallelize=partial(spread, layout=layouts[0])
    )
    assert same(stock, specimen.stock_class.from_pretrained(place / name, dtype=torch.bfloat16))


@pytest.mark.compat
def test_two_ranks_read_what_one_process_loads(tmp_path: Path) -> None:
    both = "fsdp", "by_turns"
    cases = {"llama_tied": ("fsdp",), "llama_mixed_dtypes": ("by_turns",), "qwen3_moe": both, "computed": both}
    for name in [*cases][:-1]:
        SPECIMENS[name].build(with_mixin(SPECIMENS[name].stock_class)).save_pretrained(tmp_path / name)
    check_ranks(tmp_path / "ranks", 2, load_by_parts, tmp_path, cases)


def test_four_ranks_read_what_one_process_loads(tmp_path: Path) -> None:
    SPECIMENS["qwen3_moe"].build(with_mixin(SPECIMENS["qwen3_moe"].stock_class)).save_pretrained(tmp_path / "qwen3_moe")
    cases = {"qwen3_moe": ("fsdp_by_turns",), "computed": ("hsdp",)}
    check_ranks(tmp_path / "ranks", 4, load_by_parts, tmp_path, cases)


def load_what_differs(rank: int, place: Path) -> None:
    shard = partial(spread, layout="fsdp")
    base = hfshard.load_model(LlamaModel, place, parallelize=shard)
    assert same(base, LlamaModel.from_pretrained(place))

    torch.manual_seed(0)
    head, info = hfshard.load_model(
        LlamaForSequenceClassification, place, parallelize=shard, output_loading_info=True, num_labels=2, pad_token_id=0
    )
    assert info["missing_keys"] == {"score.weight"}
    assert info["unexpected_keys"] == {"lm_head.weight"}
    assert same(head.model, base)
    assert 0 < head.score.weight.full_tensor().std() < 0.1
    assert head(torch.ones(1, 3, dtype=torch.int64)).logits.shape == (1, 2)

    with pytest.raises(StateDictMismatchError, match=r"score\.weight"):
        hfshard.load_model(LlamaForSequenceClassification, place, parallelize=shard, strict=True)


@pytest.mark.compat
def test_missing_names_are_initialised_and_prefixes_are_matched(tmp_path: Path) -> None:
    SPECIMENS["llama_untied"].build(with_mixin(LlamaForCausalLM)).save_pretrained(tmp_path / "whole")
    check_ranks(tmp_path / "ranks", 2, load_what_differs, tmp_path / "whole")


@pytest.mark.compat
def test_arguments_that_contradict_parallelize_are_refused(tmp_path: Path) -> None:
    mine: Any = with_mixin(LlamaForCausalLM)
    SPECIMENS["llama_untied"].build(mine).save_pretrained(tmp_path)
    for arguments in ({"device_map": "cpu"}, {"distributed_config": {"tp_size": 2}}):
        with pytest.raises(InvalidArgumentError, match=f"together with {next(iter(arguments))}"):
            mine.from_pretrained(tmp_path, parallelize=lambda model: model, **arguments)
    with pytest.raises(InvalidArgumentError, match="must return the model"):
        mine.from_pretrained(tmp_path, parallelize=lambda model: None)
    with pytest.raises(InvalidArgumentError, match="is for a model class"):
        hfshard.load_model(nn.Linear(1, 1), tmp_path, parallelize=lambda model: model)

    whole = mine.from_pretrained(tmp_path, parallelize=lambda model: model)

    assert same(whole, mine.from_pretrained(tmp_path))
    assert type(whole) is mine
