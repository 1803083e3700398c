"""The parts that ranks have of what is stored: put together they are what one process would store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Interleave,
    PermuteForRope,
    Transpose,
    WeightConverter,
    revert_weight_conversion,
)

from hfshard.distributed.spread_tensor import SpreadTensor, with_spread_tensors
from hfshard.models.rank_parts import stored_parts
from hfshard.tensors.state_dict import collect_state_dict
from tests.distributed.gloo import check_ranks
from tests.models.layouts import spread
from tests.zoo.models import ZOO


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


def stored_bytes(tensors: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype, bytes]]:
    return {
        name: (tuple(tensor.shape), tensor.dtype, tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }


def united(stored: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype, bytes]]:
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
            assert name == "computed" or all(
                part.local.data_ptr() in addresses(spread_model) for part in stored.values() if part.local.numel()
            )


def addresses(model: torch.nn.Module) -> set[int]:
    return {parameter.to_local().data_ptr() for parameter in model.parameters()}  # type: ignore[attr-defined]


@pytest.mark.compat
def test_the_parts_of_two_ranks_are_what_one_process_stores(tmp_path: Path) -> None:
    check_ranks(tmp_path, 2, compare_with_one_process, ("fsdp", "by_turns"))


def test_the_parts_of_four_ranks_are_what_one_process_stores(tmp_path: Path) -> None:
    check_ranks(tmp_path, 4, compare_with_one_process, ("fsdp_by_turns", "hsdp"))
