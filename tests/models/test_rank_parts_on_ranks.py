"""Parts of tensors that ranks have of what is stored: which they are, saved together, and read before there is data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Interleave,
    PermuteForRope,
    Transpose,
    WeightConverter,
    revert_weight_conversion,
)

import hfshard
from hfshard.distributed.spread_tensor import SpreadTensor, with_spread_tensors
from hfshard.errors import InvalidArgumentError, StateDictMismatchError, UnstorableTensorError
from hfshard.models import rank_parts
from hfshard.models.rank_parts import ConvertedTensor, stored_parts, trace_reverted
from hfshard.tensors.state_dict import collect_state_dict
from tests.distributed.gloo import check_ranks, waiting
from tests.helpers.memory import file_mapped_at
from tests.models.layouts import spread
from tests.models.specimens import SPECIMENS
from tests.zoo.mixin_classes import with_mixin
from tests.zoo.models import ZOO


@pytest.mark.compat
def test_each_expert_is_a_rectangle_of_the_fused_ones() -> None:
    model = ZOO["qwen3_moe"].build()

    traced = trace_reverted(model, model.state_dict())

    experts = "model.layers.1.mlp.experts"
    fused = f"{experts}.gate_up_proj"  # [4 experts, 2 x 16 features, 32]
    assert traced[f"{experts}.2.gate_proj.weight"] == ConvertedTensor(
        (16, 32), torch.float32, (fused,), ((2, 3), (0, 16), (0, 32))
    )
    assert traced[f"{experts}.3.up_proj.weight"].window == ((3, 4), (16, 32), (0, 32))
    assert traced["model.norm.weight"] == ConvertedTensor((32,), torch.float32, ("model.norm.weight",), ((0, 32),))
    assert list(traced)[:2] == ["lm_head.weight", "model.embed_tokens.weight"]


def written(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    copy[0] = 0
    return copy


Reversion = Callable[[dict[str, torch.Tensor]], torch.Tensor]
VIEWS: dict[str, tuple[Reversion, tuple[tuple[int, int], ...]]] = {
    "itself": (lambda it: it["a"].contiguous().detach(), ((0, 6), (0, 4))),
    "in another shape": (lambda it: it["a"].reshape(2, 3, 4), ((0, 6), (0, 4))),
    "a column": (lambda it: it["a"][:, 1:2], ((0, 6), (1, 2))),
    "a chunk of rows": (lambda it: torch.chunk(it["a"], 3)[1].contiguous(), ((2, 4), (0, 4))),
    "half a row": (lambda it: it["a"].view(-1)[4:6].unsqueeze(0), ((1, 2), (0, 2))),
    "one element": (lambda it: it["a"][5, 3], ((5, 6), (3, 4))),
    "nothing": (lambda it: it["empty"].t().t(), ((0, 0), (0, 3))),
}
COMPUTED: dict[str, tuple[Reversion, tuple[str, ...]]] = {
    "transposed": (lambda it: it["a"].t().contiguous(), ("a",)),
    "two rows and a half": (lambda it: it["a"].view(-1)[:10], ("a",)),
    "every other row": (lambda it: it["a"][::2], ("a",)),
    "expanded": (lambda it: it["a"][:1].expand(6, 4), ("a",)),
    "concatenated": (lambda it: torch.cat([it["b"], it["a"]])[6:], ("a", "b")),
    "cast": (lambda it: it["a"].half(), ("a",)),
    "as other bits": (lambda it: it["a"].view(torch.int32), ("a",)),
    "written into a copy": (lambda it: written(it["a"]), ("a",)),
    "put into a new tensor": (lambda it: torch.empty_like(it["b"]).copy_(it["a"]), ("a", "b")),
    "given by nobody": (lambda it: torch.zeros(3, device="meta"), ()),
}


def traced_as(reversion: Reversion, monkeypatch: pytest.MonkeyPatch) -> ConvertedTensor:
    def revert(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"stored": reversion(tensors)}

    monkeypatch.setattr(rank_parts, "revert_weight_conversion", revert)
    tensors = {"a": torch.zeros(6, 4), "b": torch.zeros(6, 4), "empty": torch.zeros(0, 3)}
    return trace_reverted(torch.nn.Linear(1, 1), tensors)["stored"]  # type: ignore[arg-type]


@pytest.mark.compat
@pytest.mark.parametrize("case", VIEWS)
def test_a_view_is_a_rectangle_of_its_source(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reversion, window = VIEWS[case]
    assert traced_as(reversion, monkeypatch).window == window


@pytest.mark.compat
@pytest.mark.parametrize("case", COMPUTED)
def test_what_shows_another_order_is_computed_from_its_sources(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reversion, sources = COMPUTED[case]
    traced = traced_as(reversion, monkeypatch)
    assert (traced.window, traced.sources) == (None, sources)


@pytest.mark.compat
def test_what_nobody_gave_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    traced_as(COMPUTED["given by nobody"][0], monkeypatch)
    model: Any = nn.Linear(1, 1)
    with pytest.raises(UnstorableTensorError, match=r"Cannot store 'stored': .* unknown from which ones"):
        stored_parts(model, {"a": torch.zeros(6, 4)})


def convert_by_computing() -> None:
    """Let transformers permute, transpose and interleave weights of Llama, for this process."""
    register_checkpoint_conversion_mapping(
        "llama",
        [
            WeightConverter(
                "self_attn.qkv.weight",
                ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
                operations=[Chunk(dim=0), PermuteForRope(permute_layer_names=["q_proj", "k_proj"])],
            ),
            WeightConverter(r"\.wo\.", r".o_proj.", operations=[Transpose(0, 1)]),
            WeightConverter(r"\.w3\.", r".up_proj.", operations=[Interleave(dim=0)]),
        ],
        overwrite=True,
    )


Stored = dict[str, tuple[tuple[int, ...], torch.dtype, bytes]]


def stored_bytes(tensors: dict[str, Any]) -> Stored:
    return {
        name: (tuple(tensor.shape), tensor.dtype, tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }


def united(stored: dict[str, Any]) -> Stored:
    """Put the parts of all ranks together."""
    mine = [
        (runs.offsets, runs.lengths, part.part().flatten().view(torch.uint8).numpy())
        for part in stored.values()
        if isinstance(part, SpreadTensor) and (runs := part.runs())
    ]
    theirs: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(theirs, mine)
    whole: dict[str, Any] = {}
    number = 0
    for name, part in stored.items():
        if not isinstance(part, SpreadTensor):
            whole |= stored_bytes({name: part})
            continue
        raw = np.full(int(np.prod(part.shape)) * part.dtype.itemsize, 255, np.uint8)
        for offsets, lengths, data in (parts[number] for parts in theirs):
            at = 0
            for offset, length in zip(offsets, lengths, strict=True):
                raw[offset : offset + length] = data[at : at + length]
                at += length
            assert at == len(data)
        whole[name] = (part.shape, part.dtype, raw.tobytes())
        number += 1
    return whole


def compare_with_one_process(rank: int, layouts: tuple[str, ...]) -> None:
    for name in ("llama_bf16", "qwen3_moe", "computed"):
        if name == "computed":
            convert_by_computing()
        specimen = ZOO["llama_untied" if name == "computed" else name]
        model = specimen.build()
        expected = stored_bytes(revert_weight_conversion(model, model.state_dict()))
        assert name != "computed" or "model.layers.0.self_attn.qkv.weight" in expected

        for layout in layouts:
            spread_model = spread(specimen.build(), layout)
            stored = with_spread_tensors(stored_parts(spread_model, collect_state_dict(spread_model)))

            assert list(stored) == list(expected), (name, layout)
            assert united(stored) == expected, (name, layout)
            addresses = {parameter.to_local().data_ptr() for parameter in spread_model.parameters()}
            assert name == "computed" or all(
                part.local.data_ptr() in addresses for part in stored.values() if part.local.numel()
            )


TWO_OR_FOUR = [pytest.param(2, marks=pytest.mark.compat), 4]


@pytest.mark.parametrize("ranks", TWO_OR_FOUR)
def test_the_parts_of_ranks_are_what_one_process_stores(ranks: int, tmp_path: Path) -> None:
    layouts = {2: ("fsdp", "by_turns"), 4: ("fsdp_by_turns", "hsdp")}
    check_ranks(tmp_path, ranks, compare_with_one_process, layouts[ranks])


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


BOTH = ("fsdp", "by_turns")
READ: dict[int, dict[str, tuple[str, ...]]] = {
    2: {"llama_tied": ("fsdp",), "llama_mixed_dtypes": ("by_turns",), "qwen3_moe": BOTH, "computed": BOTH},
    4: {"qwen3_moe": ("fsdp_by_turns",), "computed": ("hsdp",)},
}


@pytest.mark.parametrize("ranks", TWO_OR_FOUR)
def test_ranks_read_what_one_process_loads(ranks: int, tmp_path: Path) -> None:
    for name in [*READ[ranks]][:-1]:
        SPECIMENS[name].build(with_mixin(SPECIMENS[name].stock_class)).save_pretrained(tmp_path / name)
    check_ranks(tmp_path / "ranks", ranks, load_by_parts, tmp_path, READ[ranks])


def train_what_is_mapped(rank: int, place: Path) -> None:
    shard = partial(spread, layout="fsdp")
    mapped, copied = (
        hfshard.load_model(LlamaForCausalLM, place, parallelize=shard, read=read) for read in ("auto", "pread")
    )
    for model in (mapped, copied):
        parts = [parameter.to_local() for parameter in model.parameters()]
        paths = {file_mapped_at(part.data_ptr()) for part in parts if part.numel()}
        assert paths == ({str(place / "model.safetensors")} if model is mapped else {""})
    for _ in range(2):
        for model in (mapped, copied):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            model(torch.arange(8).view(2, 4), labels=torch.arange(8).view(2, 4)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert same(mapped, copied)


@pytest.mark.compat
def test_a_model_that_is_mapped_trains_as_one_that_is_copied(tmp_path: Path) -> None:
    SPECIMENS["llama_tied"].build(with_mixin(LlamaForCausalLM)).save_pretrained(tmp_path / "whole")
    before = (tmp_path / "whole" / "model.safetensors").read_bytes()

    check_ranks(tmp_path / "ranks", 2, train_what_is_mapped, tmp_path / "whole")

    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == before


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
        with pytest.raises(InvalidArgumentError, match=f"Cannot combine parallelize with {next(iter(arguments))}"):
            mine.from_pretrained(tmp_path, parallelize=lambda model: model, **arguments)
    with pytest.raises(InvalidArgumentError, match="must return the model"):
        mine.from_pretrained(tmp_path, parallelize=lambda model: None)
    with pytest.raises(InvalidArgumentError, match="is for a model class"):
        hfshard.load_model(nn.Linear(1, 1), tmp_path, parallelize=lambda model: model)

    whole = mine.from_pretrained(tmp_path, parallelize=lambda model: model)

    assert same(whole, mine.from_pretrained(tmp_path))
    assert type(whole) is mine
