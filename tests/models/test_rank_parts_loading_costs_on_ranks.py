"""What it costs each of four ranks to load a transformers model by parts: bytes read, and memory."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import hfshard
from tests.distributed.gloo import check_ranks
from tests.distributed.test_save_on_ranks_costs import number_in
from tests.models.layouts import CONFIGS, forget_meshes, spread
from tests.zoo.mixin_classes import with_mixin

MIB = 1 << 20
SIDE = 256


CLASSES: dict[str, Any] = {"llama": with_mixin(LlamaForCausalLM), "moe": with_mixin(Qwen3MoeForCausalLM)}


def build(kind: str, mebibytes: int) -> Any:
    """A model of so many MiB, nearly all of it in matrices that layouts split."""
    sizes: dict[str, Any] = {"hidden_size": SIDE, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64}
    features = mebibytes * MIB // (4 * 4 * 3 * SIDE) // 64 * 64  # of four layers, in three matrices of float32
    if kind == "llama":
        return CLASSES[kind](LlamaConfig(**sizes, num_hidden_layers=4, intermediate_size=features))
    experts: dict[str, Any] = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": features // 8,
        "head_dim": 64,
    }
    config = Qwen3MoeConfig(**sizes, num_hidden_layers=4, intermediate_size=SIDE, **experts)
    return CLASSES[kind](config)


def by_config(saved: Path, kind: str, layout: str) -> Any:
    sizes = {"tp_size": 4} if layout == "their_tp" else CONFIGS[layout][1]
    return CLASSES[kind].from_pretrained(saved, distributed_config=DistributedConfig(**sizes))


def by_function(saved: Path, kind: str, layout: str) -> Any:
    return CLASSES[kind].from_pretrained(saved, parallelize=partial(spread, layout=layout))


def on_meta(saved: Path, kind: str, layout: str) -> Any:
    with torch.device("meta"):
        model = CLASSES[kind](CLASSES[kind].config_class.from_pretrained(saved))
    return spread(model, layout)


def into_module(saved: Path, kind: str, layout: str) -> Any:
    model = on_meta(saved, kind, layout)
    hfshard.load_model(model, saved, strict=not layout.startswith("pp"))
    return model


def into_like(saved: Path, kind: str, layout: str) -> Any:
    return hfshard.load_state_dict(saved, like=on_meta(saved, kind, layout).state_dict())


WAYS: dict[str, Callable[[Path, str, str], Any]] = {
    "config": by_config, "function": by_function, "module": into_module, "like": into_like
}  # fmt: skip
LOADS = [
    ("llama", "fsdp", "function"),
    ("llama", "tp", "function"),
    ("llama", "tp", "module"),
    ("llama", "by_turns", "like"),
    ("llama", "hsdp", "function"),
    ("llama", "hsdp", "like"),
    ("llama", "fsdp_tp", "module"),
    ("llama", "pp_fsdp", "function"),
    ("llama", "pp_tp", "like"),
    ("llama", "their_tp", "config"),
    ("llama", "their_hsdp", "config"),
    ("llama", "their_fsdp_tp", "config"),
    ("moe", "ep", "function"),
    ("moe", "ep", "like"),
    ("moe", "fsdp_ep", "function"),
    ("moe", "fsdp_ep", "module"),
    ("moe", "their_fsdp_4", "config"),
    ("moe", "their_fsdp_ep", "config"),
]
"""Rows and columns of tensor parallel layers, replicas, stages, experts."""


def bytes_of_part(loaded: Any) -> int:
    """The bytes of what a rank has."""
    tensors = loaded.values() if isinstance(loaded, dict) else loaded.state_dict(keep_vars=True).values()
    parts = [one.to_local() if isinstance(one, DTensor) else one for one in {id(one): one for one in tensors}.values()]
    return sum(part.nbytes for part in parts)


def load_and_count(rank: int, place: Path, loads: list[tuple[str, str, str]], mebibytes: int) -> None:
    forget_meshes()
    for kind, layout, way in loads:
        name = name_of(kind, way)
        WAYS[way](place / "small" / name, kind, layout)  # what is imported and made once

        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        resident = number_in("/proc/self/status", "VmRSS")
        read = number_in("/proc/self/io", "rchar")
        loaded = WAYS[way](place / "large" / name, kind, layout)
        read = number_in("/proc/self/io", "rchar") - read
        peak = (number_in("/proc/self/status", "VmHWM") - resident) * 1024

        part = bytes_of_part(loaded)
        words = f"{kind} {layout} {way}: of {part} bytes, {read / part:.3f} read, {peak / part:.3f} in memory"
        assert part < 0.6 * mebibytes * MIB, words
        assert 0.99 * part < read < 1.1 * part, words
        assert 0.9 * part < peak < 1.15 * part + 0.06 * mebibytes * MIB, words
        del loaded


def name_of(kind: str, way: str) -> str:
    """A module's own names are others than those that transformers stores, where there are experts."""
    return f"{kind}-own" if kind == "moe" and way in ("module", "like") else kind


def check_costs(place: Path, loads: list[tuple[str, str, str]], mebibytes: int) -> None:
    """Save what is needed, in one process, and load it."""
    for name in sorted({name_of(kind, way) for kind, _, way in loads}):
        for size, number in (("small", 1), ("large", mebibytes)):
            kind, _, own = name.partition("-")
            with torch.device("meta"):
                model = build(kind, number)
            model.to_empty(device="cpu").save_pretrained(
                place / size / name, max_shard_size="20MB", checksum="xxh3", save_original_format=not own
            )
    check_ranks(place / "ranks", 4, load_and_count, place, loads, mebibytes)


def test_a_rank_reads_its_rows_columns_and_experts(tmp_path: Path) -> None:
    loads = [("llama", "tp", "function"), ("llama", "hsdp", "like"), ("moe", "ep", "function")]
    check_costs(tmp_path, loads, 64)


@pytest.mark.compat
@pytest.mark.slow
def test_a_rank_reads_its_part_in_every_layout(tmp_path: Path) -> None:
    known = [load for load in LOADS if not load[1].startswith("their") or load[1] in {*CONFIGS, "their_tp"}]
    check_costs(tmp_path, known, 256)
