"""Runs of DeepSpeed ZeRO-3: saved by each rank for its part, and restored by any number of ranks, to the bit."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from hfshard.training import CheckpointManager, TrainingState
from tests.distributed.gloo import check_ranks
from tests.foreign.producers.models import build, optimizer_of
from tests.foreign.producers.truth import read_truth
from tests.training.state import zero_engines

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="pip install '.[test,frameworks]'"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
_WARM_UP = "tests.foreign.producers.deepspeed_on_cpu:warm_up"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks saved, and have restored themselves."""
    place = tmp_path_factory.mktemp("zero")
    check_ranks(place / "ranks", 2, zero_engines.save_runs, place, modules=[_WARM_UP])
    return place


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_another_number_of_ranks_goes_on(ranks: int, saved: Path, tmp_path: Path) -> None:
    check_ranks(tmp_path, ranks, zero_engines.restore_runs, saved, modules=[_WARM_UP])

    if ranks == 1:
        model = build("nasty")
        optimizer = optimizer_of(model)
        CheckpointManager(saved / "fp32" / "run").restore(TrainingState(model=model, optimizer=optimizer))
        truth = read_truth(saved / "fp32")
        for name, parameter in model.named_parameters():
            assert parameter.equal(truth[f"weight/{name}"]), name
            for slot in zero_engines.MOMENTS if parameter.requires_grad else ():
                assert optimizer.state[parameter][slot].equal(truth[f"{slot}/{name}"]), name
            assert not parameter.requires_grad or optimizer.state[parameter]["step"] == zero_engines.STEP
