"""Runs of transformers models, spread by transformers or by the user in every way: experts and pipelines, too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers.distributed.configuration_utils import DistributedConfig

import hfshard
from hfshard.training import CheckpointManager, TrainingState
from tests.distributed.gloo import check_ranks
from tests.models.layouts import CONFIGS, LAYOUTS, forget_meshes
from tests.models.specimens import KINDS
from tests.training.models import whole
from tests.training.test_spread_save_runs_on_ranks import assert_same, named

pytestmark = pytest.mark.compat

SAVED_AT, STEPS = 2, 3
LAYOUTS_OF = {
    2: ["fsdp", "tp", "ep", "pp", *(name for name, (world_size, _) in CONFIGS.items() if world_size == 2)],
    4: [
        *("hsdp", "fsdp_tp", "fsdp_ep", "pp_fsdp", "pp_tp"),
        *(name for name, (world_size, _) in CONFIGS.items() if world_size == 4),
    ],
}
CASES = {
    size: [(layout, kind) for layout in layouts for kind in ("tied", "moe") if kind == "moe" or "ep" not in layout]
    for size, layouts in LAYOUTS_OF.items()
}
CHOSEN = [("their_pp", "tied"), ("their_ep", "moe"), ("pp", "moe")]


class Training:
    """A model whose gradients are made of its values one by one, so that each layout has the same numbers."""

    def __init__(self, model: Any) -> None:
        self.model = model
        decayed = [one for one in model.parameters() if one.dim() > 1]
        rest = [one for one in model.parameters() if one.dim() < 2]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.1, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.5)
        self.state = TrainingState(model=model, optimizer=self.optimizer, scheduler=self.scheduler)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for parameter in self.model.parameters():
                parameter.grad = parameter.detach() * 0.5 + 0.25
            self.optimizer.step()
            self.scheduler.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of this rank's, each whole."""
        found = dict(self.model.state_dict())
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for parameter, slots in self.optimizer.state.items():
            found |= {f"{names[id(parameter)]}/{slot}": value for slot, value in slots.items()}
        return {name: whole(tensor).clone() for name, tensor in found.items()}


def expected_of(kind: str) -> list[dict[str, torch.Tensor]]:
    """What one process comes to: at the save, and at the end."""
    training = Training(KINDS[kind].build())
    training.train(SAVED_AT)
    saved = training.tensors()
    training.train(STEPS - SAVED_AT)
    return [saved, training.tensors()]


def build(layout: str, kind: str, place: Path) -> Any:
    if layout in LAYOUTS:
        return LAYOUTS[layout](KINDS[kind].build())
    config = DistributedConfig(**CONFIGS[layout][1])
    return hfshard.load_model(KINDS[kind].stock_class, place / kind, distributed_config=config)


def save_and_resume(rank: int, cases: Sequence[tuple[str, str]], place: Path) -> None:
    forget_meshes()
    expected = {kind: expected_of(kind) for kind in {kind for _, kind in cases}}
    for layout, kind in cases:
        with named(layout, kind):
            training = Training(build(layout, kind, place))
            training.train(SAVED_AT)
            with CheckpointManager(place / f"{layout}-{kind}") as manager:
                manager.save(SAVED_AT, training.state)
                again = Training(build(layout, kind, place))
                again.train(1)
                manager.restore(again.state)
            check_part(again.tensors(), expected[kind][0])
            again.train(STEPS - SAVED_AT)
            check_part(again.tensors(), expected[kind][1])


def check_part(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Of a pipeline, this rank's stage; the ranks together have everything."""
    assert_same(found, {name: expected[name] for name in found})
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, list(found))
    assert set().union(*told) == set(expected)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(CHOSEN, id="chosen"),
        *(pytest.param(cases, id=f"{size} ranks", marks=pytest.mark.slow) for size, cases in CASES.items()),
    ],
)
def test_every_layout_resumes_to_what_one_process_comes_to(tmp_path: Path, cases: list[tuple[str, str]]) -> None:
    world_size = next(size for size, known in CASES.items() if cases[0] in known)
    kinds = {kind for _, kind in cases}
    expected = {kind: expected_of(kind) for kind in kinds}
    for kind in kinds:
        hfshard.save_model(KINDS[kind].build(), tmp_path / kind)

    check_ranks(tmp_path / "ranks", world_size, save_and_resume, cases, tmp_path)

    for layout, kind in cases:
        with named(layout, kind):
            alone = Training(KINDS[kind].build())
            manager = CheckpointManager(tmp_path / f"{layout}-{kind}")
            assert manager.restore(alone.state) == SAVED_AT
            assert_same(alone.tensors(), expected[kind][0])
            alone.train(STEPS - SAVED_AT)
            assert_same(alone.tensors(), expected[kind][1])
            check_index(Path(manager.path_of(SAVED_AT)), alone.model)


def check_index(checkpoint: Path, model: Any) -> None:
    """The names of a checkpoint are those that one process saves."""
    hfshard.reshard_checkpoint(checkpoint, checkpoint.parent / "sharded", max_shard_size="10KB")
    index = json.loads((checkpoint.parent / "sharded" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == model.num_parameters()
