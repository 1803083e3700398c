"""The producers make what they promise: trained models, files of each rank, and a truth that torch reads too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.foreign.producers.cases import CASES, Case
from tests.foreign.producers.models import MODELS, build
from tests.foreign.producers.truth import checkpoint_of, read_truth
from tests.foreign.test_matrix import BY_NAME, place_of

NO_MODEL = ("dcp:save_state", "dcp:save_safetensors", "pipeline:save_pipeline")
"""Producers whose truth has other names than a model of `models`."""
ALWAYS = [case for case in CASES if not case.is_slow]


def test_names_are_unique_and_the_slow_ones_have_siblings() -> None:
    assert len(BY_NAME) == len(CASES)
    assert {case.producer for case in ALWAYS} == {case.producer for case in CASES}


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in ALWAYS if case.producer not in NO_MODEL])
def test_truth_is_a_whole_model_that_was_trained(case: Case, produced: Path) -> None:
    truth = read_truth(place_of(case, produced))
    before = build(case.arguments.get("model_name", "nasty")).state_dict()

    assert truth.keys() == before.keys()
    assert {name: tensor.shape for name, tensor in truth.items()} == {name: one.shape for name, one in before.items()}
    if case.arguments.get("trains", True):
        changed = {name for name in truth if not truth[name].float().equal(before[name].float())}
        assert {"embed.weight", "head.weight"} <= changed
        if "norm.weight" in truth:
            assert {"calls", "norm.running_mean", "gain", "up.bias"} <= changed
            assert truth["head.weight"].equal(truth["embed.weight"])


@pytest.mark.parametrize(
    ("name", "whole", "parts"),
    [
        (
            "deepspeed-zero1-fp16-4-nasty",
            ["mp_rank_00_model_states.pt"],
            ["zero_pp_rank_{}_mp_rank_00_optim_states.pt"],
        ),
        (
            "deepspeed-zero3-bf16-4-nasty",
            [],
            ["zero_pp_rank_{}_mp_rank_00_model_states.pt", "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"],
        ),
        ("torch-fsdp2-app-4", [".metadata"], ["__{}_0.distcp"]),
    ],
)
def test_files_are_those_of_all_ranks(name: str, whole: list[str], parts: list[str], produced: Path) -> None:
    checkpoint = checkpoint_of(place_of(BY_NAME[name], produced))
    folder = checkpoint / "global_step2" if name.startswith("deepspeed") else checkpoint

    assert {path.name for path in folder.iterdir()} == {
        *whole,
        *(one.format(rank) for one in parts for rank in range(4)),
    }


def test_masters_have_bits_that_the_trained_weights_lack(produced: Path) -> None:
    place = place_of(BY_NAME["deepspeed-zero2-bf16-2-nasty"], produced)
    file = checkpoint_of(place) / "global_step2" / "mp_rank_00_model_states.pt"

    trained: dict[str, torch.Tensor] = torch.load(file, weights_only=True)["module"]

    truth = read_truth(place)
    assert truth.keys() == trained.keys()
    assert not truth["up.weight"].equal(trained["up.weight"].float())
    for name, tensor in trained.items():
        assert tensor.equal(truth[name].to(tensor.dtype)), name


def test_every_model_has_odd_sizes() -> None:
    odd: dict[str, Any] = {name: [one.numel() % 2 for one in build(name).parameters()] for name in MODELS}

    assert all(any(sizes) for sizes in odd.values())
