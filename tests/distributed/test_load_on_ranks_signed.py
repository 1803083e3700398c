"""Ranks that load a signed checkpoint from a store, a file of which is replaced after their last meeting."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import hfshard
from hfshard.errors import CheckpointChangedError, RankFailedError
from hfshard.places import store_mirror
from tests.distributed.gloo import check_ranks
from tests.stores.saving.memory_store import MemoryStore
from tests.zoo.mixin_classes import with_mixin

ADDRESS = "s3://models/llama"
NOTICED_SECONDS = 60.0
"""Longer than a load takes on a busy machine, and much shorter than ranks wait for each other."""
MODEL: Any = with_mixin(LlamaForCausalLM)


def spread(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def load(key: Path) -> Any:
    return MODEL.from_pretrained(ADDRESS, parallelize=spread, public_key=key)


def load_what_changes(rank: int, saved: Path, key: Path) -> None:
    store = MemoryStore({path.name: path.read_bytes() for path in saved.iterdir()})
    vars(store_mirror)["open_store"] = lambda address: store
    asked: Counter[str] = Counter()
    store.before = lambda kind, name: asked.update([kind])
    load(key)
    last = asked["list"]  # whether the weights are still those that were opened, before the model is built

    def replace(kind: str, name: str) -> None:
        asked.update([kind])
        if rank == 1 and asked["list"] == 2 * last:
            store.objects["generation_config.json"] = b"{}"

    store.before = replace
    start = time.monotonic()
    error, words = (CheckpointChangedError, "The") if rank == 1 else (RankFailedError, "Rank 1 failed.* the")
    with pytest.raises(error, match=rf"(?i)^{words} .*checkpoint in '{ADDRESS}' was replaced while it was loaded"):
        load(key)
    assert time.monotonic() - start < NOTICED_SECONDS
    assert asked["list"] == 2 * last  # no rank starts again


def test_a_rank_that_notices_a_change_after_the_last_meeting_fails_on_all_at_once(tmp_path: Path) -> None:
    from tests.signing.conftest import write_pair

    private, public = write_pair(tmp_path, "key")
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
    MODEL(LlamaConfig(**sizes, intermediate_size=32, num_hidden_layers=1)).save_pretrained(tmp_path / "saved")
    hfshard.sign_checkpoint(tmp_path / "saved", private_key=private)

    check_ranks(tmp_path / "ranks", 2, load_what_changes, tmp_path / "saved", public)
