"""Living modules under FSDP1, saved and loaded: each rank its part, and no rank the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaForCausalLM

import hfshard
from tests.distributed.gloo import check_ranks
from tests.foreign.producers.models import build
from tests.helpers.memory import MIB, peak_during
from tests.helpers.tensor_bytes import assert_same
from tests.models.specimens import SPECIMENS
from tests.tensors.fsdp1_models import counted_gathers, gathered, train, trained_by, wrapped


def save_and_load(rank: int, place: Path, ways: list[str]) -> None:
    for way in ways:
        model = wrapped(way)
        train(model, trained_by(model, way))
        with torch.no_grad():
            model(torch.zeros(2, dtype=torch.long))  # complete parameters stay behind, which a load must not leave
        with counted_gathers() as calls:
            index = hfshard.save_model(model, place / way, rank == 0, max_shard_size=700)
        assert not calls, way
        assert index is not None
        assert index.tied_names == {"head.weight": "embed.weight"}
        with counted_gathers() as calls:
            whole = gathered(model)
        assert calls or way != "parts" or dist.get_world_size() == 1  # others have what the pass has gathered
        assert_same(hfshard.load_state_dict(place / way), whole)

        other = wrapped(way)
        with torch.no_grad():
            other(torch.zeros(2, dtype=torch.long))
        with counted_gathers() as calls:
            hfshard.load_model(other, place / way)
        assert not calls, way
        assert train(other, trained_by(other, way)) == train(model, trained_by(model, way))
        assert_same(gathered(other), gathered(model))


def save_transformers(rank: int, place: Path) -> None:
    torch.manual_seed(2)
    kind: Any = LlamaForCausalLM
    inner = kind(SPECIMENS["llama_untied_even"].make_config())
    before = {name: tensor.clone() for name, tensor in inner.state_dict().items()}
    model: Any = wrapped("parts", inner)
    hfshard.save_model(model, place / "verb", rank == 0)
    hfshard.save_model(model.module, place / "inner", rank == 0)
    hfshard.install()
    model.save_pretrained(place / "installed", is_main_process=rank == 0)
    hfshard.uninstall()
    if rank == 0:
        for way in ("verb", "inner", "installed"):
            stock, info = kind.from_pretrained(place / way, output_loading_info=True)
            assert not info["missing_keys"]
            assert not info["unexpected_keys"]
            assert_same(dict(stock.state_dict()), before)
    dist.barrier()


def save_large(rank: int, place: Path) -> None:
    model = wrapped("parts", nn.Sequential(*(nn.Linear(1024, 2048, bias=False) for _ in range(12))))
    hfshard.save_model(model, place / "warm", max_shard_size="9MiB")
    peak = peak_during(lambda: hfshard.save_model(model, place / "large", max_shard_size="9MiB"))
    assert peak < 0.4 * 96 * MIB  # windows and one file's blocks, whatever the model's size


def work_of_two(rank: int, place: Path) -> None:
    save_and_load(rank, place, ["parts", "flat"])
    save_transformers(rank, place)
    save_large(rank, place)


def test_two_ranks_save_and_load_their_parts(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, work_of_two, tmp_path)

    model = build("nasty")
    hfshard.load_model(model, tmp_path / "parts")
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "ways"),
    [(1, ["parts", "flat"]), (2, ["whole", "bits", "flat and full"]), (4, ["parts", "flat", "hybrid"])],
)
def test_every_way_on_every_number_of_ranks(tmp_path: Path, ranks: int, ways: list[str]) -> None:
    check_ranks(tmp_path / "ranks", ranks, save_and_load, tmp_path, ways)
