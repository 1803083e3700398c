"""Modules that a living engine of DeepSpeed ZeRO-3 has partitioned, saved and loaded by each rank for its part."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

import hfshard
from tests.distributed.gloo import check_ranks
from tests.foreign.producers.truth import read_truth, write_truth
from tests.helpers.tensor_bytes import assert_same
from tests.models import zero3_engines

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="pip install '.[test,frameworks]'")
_WARM_UP = "tests.foreign.producers.deepspeed_on_cpu:warm_up"


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_rank_saves_and_loads_its_part(ranks: int, tmp_path: Path) -> None:
    weights = zero3_engines.other_weights()
    hfshard.save_state_dict(weights, tmp_path / "other" / "saved", max_shard_size=300)
    write_truth(tmp_path / "other", weights)

    check_ranks(tmp_path / "ranks", ranks, zero3_engines.check_all, tmp_path, modules=[_WARM_UP])

    for variant in zero3_engines.variants(ranks):
        truth = read_truth(tmp_path / variant)
        for way in ("module", "engine", "state dict"):
            assert_same(hfshard.load_state_dict(tmp_path / variant / way), truth)
        files = list((tmp_path / variant / "module").glob("*.safetensors"))
        assert len(files) > 3
    if ranks == 2:
        for way in ("llama", "llama at once", "given"):
            stock = LlamaForCausalLM.from_pretrained(tmp_path / way, dtype="auto")
            assert_same(stock.state_dict(), read_truth(tmp_path / "llama"))
        saved = hfshard.load_state_dict(tmp_path / "large")
        assert len(saved) == zero3_engines.LARGE_LAYERS
