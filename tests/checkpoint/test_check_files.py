"""Files of one checkpoint name each tensor once, and a small file that several share is right if any recorded it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

import hfshard
from hfshard.checkpoint.check_files import check_keys, check_total
from hfshard.errors import DamagedCheckpointError, IntegrityError
from hfshard.format.index import CheckpointIndex, FileDigest

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


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ({"1": ["b"], "2": ["a"]}, "'b' of shard 'out/1' should be in '2' according to the index 'out/index'"),
        ({"1": ["a", "b"], "2": ["b"]}, "'b' of shard 'out/1' should be in '2'"),
        ({"1": ["a", "a"], "2": ["b"]}, "'a' of shard 'out/1' is also in '1'"),
        ({"1": ["a", "c"], "2": ["b"]}, "'c' of shard 'out/1' is not in the index 'out/index'"),
        ({"1": ["a"], "2": []}, "'b' of shard 'out/2' is missing, but the index 'out/index' lists it there"),
    ],
    ids=["swapped", "in two", "twice", "of no index", "missing"],
)
def test_shards_of_different_saves_are_refused_by_the_tensor_that_shows_it(
    contents: dict[str, list[str]], words: str
) -> None:
    with pytest.raises(DamagedCheckpointError, match=f"^Tensor {words}"):
        check_keys("out/index", {"a": "1", "b": "2"}, contents)


def test_shards_with_more_or_fewer_bytes_than_the_index_says_are_refused() -> None:
    index = CheckpointIndex({"a": "1"}, total_size=8, files={"1": FileDigest()})

    check_total("out/index", index, 8)
    for actual in (7, 9):
        with pytest.raises(DamagedCheckpointError, match=f"total_size is 8, but the shards contain {actual} bytes"):
            check_total("out/index", index, actual)
