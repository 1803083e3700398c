"""A first save that ends at any request: transformers takes a class's own default config where there is none."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertModel

import hfshard
from hfshard.errors import HfshardError
from tests.servers.stores.buckets import Bucket
from tests.servers.stores.fault_proxy import FaultProxy

SIZES = {
    "vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 16,
}  # fmt: skip


class SmallConfig(BertConfig):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**SIZES, **kwargs})


class SmallBert(BertModel):
    config_class = SmallConfig


class ShardedSmallBert(hfshard.ShardedModelMixin, SmallBert):
    config_class = SmallConfig


@pytest.mark.compat
@pytest.mark.parametrize("scheme", ["s3"])
def test_weights_are_not_there_before_their_config(
    proxy: FaultProxy, bucket: Bucket, store_address: str, store_prefix: str, tmp_path: Path
) -> None:
    model = ShardedSmallBert(SmallConfig(hidden_act="relu"))
    model.save_pretrained(f"{store_address}/whole")
    found = []
    for stop in range(len(proxy.requests())):
        proxy.clear()
        proxy.fail("status", skip=stop, times=100, status=403)
        with suppress(HfshardError):
            model.save_pretrained(f"{store_address}/{stop}")
        copy = bucket.copy_to(f"{store_prefix}/{stop}", tmp_path / str(stop))
        proxy.clear()
        for load in (lambda: SmallBert.from_pretrained(copy), lambda: hfshard.load_model(SmallBert, copy)):  # noqa: B023
            with suppress(OSError, HfshardError):
                found.append((stop, load().config.hidden_act))
    assert {activation for _, activation in found} == {"relu"}, found
    assert len(found) < 2 * stop
