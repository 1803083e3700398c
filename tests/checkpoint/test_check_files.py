"""A small file that checkpoints share is right if any of them recorded it, and wrong if none did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

import hfshard
from hfshard.errors import IntegrityError

CONFIG = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20)


class Bert(hfshard.ShardedModelMixin, BertModel):
    """The stock encoder."""


@pytest.mark.parametrize("limit", ["5GB", "10KB"], ids=["single", "sharded"])
def test_a_variant_that_rewrites_the_shared_config_leaves_the_weights_beside_it_verifiable(
    tmp_path: Path, limit: str
) -> None:
    model: Any = Bert(CONFIG)
    model.save_pretrained(tmp_path, max_shard_size=limit)
    model.to(torch.float16).save_pretrained(tmp_path, max_shard_size=limit, variant="fp16")
    assert '"float16"' in (tmp_path / "config.json").read_text()

    for variant in (None, "fp16"):
        assert hfshard.verify_checkpoint(tmp_path, variant=variant).problems == ()
        hfshard.load_state_dict(tmp_path, variant=variant, verify="full")


def test_a_config_that_no_save_wrote_is_an_error_for_each_checkpoint_beside_it(tmp_path: Path) -> None:
    model: Any = Bert(CONFIG)
    model.save_pretrained(tmp_path)
    model.to(torch.float16).save_pretrained(tmp_path, variant="fp16")
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("float16", "float64"))

    for variant in (None, "fp16"):
        with pytest.raises(IntegrityError, match=r"config\.json"):
            hfshard.load_state_dict(tmp_path, variant=variant, verify="full")
