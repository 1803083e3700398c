"""Trainer and Accelerate on two ranks: resumed they end as if they had run straight; what can't is refused."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from huggingface_hub import HfApi
from packaging.version import Version
from torch import nn
from torch.utils.data import Dataset, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer
from transformers.distributed.configuration_utils import DistributedConfig

import hfshard
from hfshard.errors import HubNotFoundError, InvalidArgumentError, RankFailedError, StateDictMismatchError
from hfshard.training import (
    CheckpointCallback,
    CheckpointManager,
    Gradients,
    ResumableDataLoader,
    prepare_loader,
    prepared_state,
)
from tests.distributed.gloo import check_ranks, run_ranks
from tests.flows.resume_runs import everything_of
from tests.flows.resume_trainings import (
    Ending,
    Points,
    arguments_for,
    as_launched,
    count_as_gpus,
    everything,
    refuse_whole_state,
    train_epoch,
)
from tests.hub.on_ranks import talking_to
from tests.servers.hub.hub_server import HubServer
from tests.training.models import whole

pytestmark = pytest.mark.compat

STEPS, SAVED_AT, WORDS = 4, 2, 20
"""Of Trainer."""
TRAINS_WHAT_IT_SPREADS = Version(transformers.__version__) >= Version("5.23")
"""Before, Trainer puts a model that `from_pretrained` has spread by FSDP2 into DistributedDataParallel, which fails."""
ASKED_FOR = {"save_only_model": True} if TRAINS_WHAT_IT_SPREADS else {}
"""What Trainer demands of those that from_pretrained has spread: it would save no optimizer."""


@dataclass(frozen=True, slots=True)
class Case:
    """How a training by Trainer is spread."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Of TrainingArguments."""
    distributed_config: dict[str, Any] = field(default_factory=dict)
    callback: dict[str, Any] = field(default_factory=dict)
    needs_gpus: bool = False
    """Whether Accelerate does it on what it takes for GPUs only."""


BEST = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss", "load_best_model_at_end": True}
FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
CHECKPOINTED = {**FSDP, "fsdp_config": {**FSDP["fsdp_config"], "activation_checkpointing": True}}  # type: ignore[dict-item]
CASES = {
    "ddp": Case({"gradient_accumulation_steps": 2, **BEST}),
    "accelerate's fsdp2": Case({**FSDP, **BEST, "learning_rate": 0.5}, needs_gpus=True),
    "accelerate's fsdp2, recomputed": Case(CHECKPOINTED, callback={"blocking": False}, needs_gpus=True),
    "transformers' tp": Case(ASKED_FOR, {"tp_size": 2}, needs_gpus=True),
}
if TRAINS_WHAT_IT_SPREADS:
    CASES["transformers' fsdp2"] = Case({**ASKED_FOR, **BEST}, {"fsdp_size": 2})


class Sentences(Dataset[dict[str, Any]]):
    """Words that Python's, numpy's and torch's RNG change."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = [random.randrange(WORDS), int(np.random.randint(WORDS)), int(torch.randint(WORDS, ()))]
        words = [index, *drawn, (5 * index) % WORDS]
        return {"input_ids": words, "labels": words}


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, attention_dropout=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def trainer(case: Case, place: Path, run: Path, **arguments: Any) -> Trainer:
    """As a script builds it."""
    known = {"per_device_train_batch_size": 2, "max_steps": STEPS, "save_steps": 2, "logging_steps": 3}
    args = arguments_for(run, **{**known, **case.arguments, **arguments})
    if case.needs_gpus and args.world_size > 1:
        count_as_gpus()
    torch.manual_seed(5)
    spread = DistributedConfig(**case.distributed_config) if case.distributed_config else None
    start: Any = LlamaForCausalLM.from_pretrained(place / "start", distributed_config=spread) if spread else llama()
    return Trainer(model=start, args=args, train_dataset=Sentences(), eval_dataset=Sentences())


def attached(case: Case, place: Path, run: Path, **callback: Any) -> tuple[Trainer, CheckpointCallback]:
    trained = trainer(case, place, run)
    return trained, CheckpointCallback(**callback).attach(trained)


def train(case: Case, place: Path, run: Path, resumed_from: str | None = None) -> Trainer:
    trained, checkpoints = attached(case, place, run, **case.callback)
    trained.accelerator.get_state_dict = refuse_whole_state
    newest = checkpoints.latest()
    assert newest == (None if resumed_from is None else str(run / f"checkpoint-{STEPS:08d}"))
    trained.train(resume_from_checkpoint=resumed_from)
    if trained.args.load_best_model_at_end:
        net: Any = trained.model
        best = hfshard.load_state_dict(run / f"checkpoint-{trained.state.best_global_step:08d}")
        assert all(torch.equal(whole(tensor), best[name]) for name, tensor in net.state_dict().items())
    return trained


def assert_same(one: dict[str, str], other: dict[str, str], name: str) -> None:
    assert one.keys() == other.keys(), name
    assert {path: (value, other[path]) for path, value in one.items() if value != other[path]} == {}, name


def run_straight_and_resumed(rank: int, place: Path) -> None:
    for name, case in CASES.items():
        run = place / name
        with as_launched(rank, 2):
            straight = everything(train(case, place, run))
            random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)  # as in no checkpoint
            resumed = everything(train(case, place, run, str(run / f"checkpoint-{SAVED_AT:08d}")))
        assert_same(straight, resumed, name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of all cases, each of which was resumed from its middle."""
    place = tmp_path_factory.mktemp("runs")
    llama().save_pretrained(place / "start")
    check_ranks(place / "ranks", 2, run_straight_and_resumed, place)
    return place


def test_a_training_by_trainer_on_two_ranks_is_resumed_exactly(runs: Path) -> None:
    for name in CASES:
        files = sorted(path.name for path in (runs / name / f"checkpoint-{SAVED_AT:08d}").iterdir())
        assert files == [
            "checkpoint.json", "config.json", "generation_config.json", "model.safetensors", "optimizer.safetensors",
            "state.safetensors", "trainer_state.json", "training_state.json",
        ], name  # fmt: skip


def test_a_spread_training_saves_what_stock_transformers_loads_and_one_process_resumes(runs: Path) -> None:
    run = runs / "accelerate's fsdp2, recomputed"
    checkpoint = run / f"checkpoint-{STEPS:08d}"
    saved = hfshard.load_state_dict(checkpoint)
    stock = LlamaForCausalLM.from_pretrained(checkpoint)
    assert stock.config.architectures == ["LlamaForCausalLM"]
    assert all(torch.equal(tensor, saved[name]) for name, tensor in stock.state_dict().items())

    alone = trainer(Case(), runs, run, max_steps=STEPS + 1, save_strategy="no")
    CheckpointCallback().attach(alone)
    with pytest.raises(StateDictMismatchError, match="number of batches in an epoch was 3, and is 5"):
        alone.train(resume_from_checkpoint=str(checkpoint))
    alone.args.ignore_data_skip = True
    alone.train(resume_from_checkpoint=str(checkpoint))
    assert alone.state.global_step == STEPS + 1


def resume_from_the_hub(rank: int, place: Path, endpoint: str) -> None:
    case = Case({"save_steps": SAVED_AT}, callback={"push_to_hub": "org/run"})
    with talking_to(endpoint, place / f"home-{rank}", "hf_write" if rank == 0 else "hf_read"), as_launched(rank, 2):
        straight = everything(train(case, place, place / "run"))
        commits = {one.title: one.commit_id for one in HfApi(endpoint=endpoint).list_repo_commits("org/run")}
        trained, _ = attached(case, place, place / "elsewhere")
        with pytest.raises(HubNotFoundError if rank == 0 else RankFailedError, match="'nothing'"):
            trained.train(resume_from_checkpoint="org/run@nothing")
        trained.train(resume_from_checkpoint=f"org/run@{commits[f'Checkpoint at step {SAVED_AT}']}")
        assert everything(trained) == straight


def test_one_rank_downloads_what_all_resume(hub_server: HubServer, tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, resume_from_the_hub, tmp_path, hub_server.endpoint)

    downloads = [request.path for request in hub_server.log if request.kind == "storage_get"]
    assert len(downloads) == len(set(downloads)) == 3  # of the model, the optimizer, the rest
    assert {path.name for path in (tmp_path / "elsewhere").iterdir()} == {f"checkpoint-{STEPS:08d}"}


def load_all_batches_on_one_rank(rank: int, place: Path) -> None:
    with as_launched(rank, 2):
        trained = trainer(Case({"accelerator_config": {"dispatch_batches": True}}), place, place / "run")
        with pytest.raises(InvalidArgumentError, match="the first process loads all batches"):
            CheckpointCallback().attach(trained)


def test_batches_that_one_rank_loads_for_all_are_refused(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, load_all_batches_on_one_rank, tmp_path)


def train_and_die(rank: int, place: Path, name: str) -> None:
    with as_launched(rank, 2):
        trained, _ = attached(CASES[name], place, place / "run")
        trained.add_callback(Ending(SAVED_AT + 1))
        trained.train()


def resume_and_compare(rank: int, place: Path, name: str) -> None:
    with as_launched(rank, 2):
        trained, checkpoints = attached(CASES[name], place, place / "run")
        newest = checkpoints.latest()
        assert newest == str(place / "run" / f"checkpoint-{SAVED_AT:08d}")
        trained.train(resume_from_checkpoint=newest)
        resumed = everything(trained)
        assert resumed == everything(train(CASES[name], place, place / "straight"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accelerate's fsdp2", "transformers' tp"])
def test_a_training_whose_ranks_were_killed_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "start")
    ends = run_ranks(tmp_path / "killed", 2, train_and_die, tmp_path, name)
    assert [end.status for end in ends] == [-signal.SIGKILL] * 2, [end.words for end in ends]
    check_ranks(tmp_path / "resumed", 2, resume_and_compare, tmp_path, name)


PREPARED_STEPS, PREPARED_SAVED_AT = 9, 5
"""Of 4 batches in an epoch: 26 samples make 7 batches of 4, and the two ranks get 4 each, the last one filled up."""


@dataclass(frozen=True, slots=True)
class PreparedCase:
    """How a training with Accelerate is spread."""

    fsdp: dict[str, Any] = field(default_factory=dict)
    """Of the plugin for FSDP2; none: DistributedDataParallel."""
    accelerator: dict[str, Any] = field(default_factory=dict)
    blocking: bool = True
    gradients: bool = False
    """Save in the middle of a gradient accumulation."""


BLOCKS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
PREPARED = {
    "ddp": PreparedCase(),
    "fsdp2": PreparedCase(BLOCKS),
    "fsdp2, recomputed, accumulating": PreparedCase(
        {**BLOCKS, "activation_checkpointing": True},
        {"gradient_accumulation_plugin": {"num_steps": 2, "sync_each_batch": True}},
        blocking=False,
        gradients=True,
    ),
    "fsdp2 in bfloat16": PreparedCase({"reshard_after_forward": False}, {"mixed_precision": "bf16"}),
}


class Block(nn.Module):
    """A layer of uneven size, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(4, 7), nn.Dropout(0.3), nn.Linear(7, 4)

    def forward(self, x_BD: torch.Tensor) -> Any:
        return x_BD + self.down(self.dropout(torch.relu(self.up(x_BD))))


class Prepared:
    """A training as a script builds it with Accelerate."""

    def __init__(self, case: PreparedCase, *, seed: int) -> None:
        self.case = case
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **case.fsdp) if case.fsdp else None
        arguments = dict(case.accelerator)
        if accumulation := arguments.pop("gradient_accumulation_plugin", None):
            arguments["gradient_accumulation_plugin"] = GradientAccumulationPlugin(**accumulation)
        if case.fsdp:
            count_as_gpus()
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, **arguments)
        torch.manual_seed(seed)
        model = nn.Sequential(Block(), Block(), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        parts: Any = self.accelerator.prepare(model, optimizer, scheduler)
        self.model, self.optimizer, self.scheduler = parts
        self.accelerator.get_state_dict = refuse_whole_state
        data = ResumableDataLoader(Points(), batch_size=4, shuffle=True, seed=1)
        self.loader = prepare_loader(self.accelerator, data)
        more: dict[str, Any] = {"gradients": Gradients(self.model)} if case.gradients else {}
        self.state = prepared_state(self.accelerator, self.model, self.optimizer, self.scheduler, self.loader, **more)
        for one in (random.seed, np.random.seed, torch.manual_seed):
            one(100 * seed + self.accelerator.process_index)

    def train(self, done: int, manager: CheckpointManager) -> list[float]:
        losses: list[float] = []
        while True:
            for loss in train_epoch(self.accelerator, self.model, self.optimizer, self.scheduler, self.loader):
                losses.append(loss)
                done += 1
                if done == PREPARED_SAVED_AT:
                    manager.save(done, self.state, blocking=self.case.blocking)
                if done == PREPARED_STEPS:
                    return losses

    def everything(self) -> dict[str, str]:
        own = {"step": self.accelerator.step, "batch": self.loader.batch}
        return everything_of(self.model, self.optimizer, self.scheduler, **own)

    def accumulate(self) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(torch.ones(2, 4)).sum())


def run_prepared_straight_and_resumed(rank: int, place: Path) -> None:
    for name, case in PREPARED.items():
        with CheckpointManager(place / name) as manager:
            with as_launched(rank, 2):
                straight = Prepared(case, seed=0)
                losses = straight.train(0, manager)
            with as_launched(rank, 2):
                resumed = Prepared(case, seed=3)
                assert manager.restore_latest(resumed.state) == PREPARED_SAVED_AT
                assert resumed.train(PREPARED_SAVED_AT, manager) == losses[PREPARED_SAVED_AT:], name
        assert_same(straight.everything(), resumed.everything(), name)


def test_a_training_with_accelerate_on_two_ranks_is_resumed_exactly(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, run_prepared_straight_and_resumed, tmp_path)

    run = tmp_path / "fsdp2, recomputed, accumulating"
    alone = Prepared(PreparedCase(accelerator={"gradient_accumulation_steps": 2}, gradients=True), seed=4)
    manager = CheckpointManager(run)
    with pytest.raises(StateDictMismatchError, match=r"shared out to 2 processes when .* but are shared out to 1 now"):
        manager.restore_latest(alone.state)
    manager.restore_latest(alone.state, strict=False)
    saved = hfshard.load_state_dict(run / f"checkpoint-{PREPARED_SAVED_AT:08d}")
    assert list(saved)[:2] == ["0.up.weight", "0.up.bias"]
    assert all(torch.equal(tensor, saved[name]) for name, tensor in alone.model.state_dict().items())


def save_amid_an_accumulation(rank: int, place: Path) -> None:
    with as_launched(rank, 2), CheckpointManager(place) as manager:
        one = Prepared(PreparedCase(BLOCKS, {"gradient_accumulation_steps": 2}, gradients=True), seed=0)
        one.accumulate()
        assert all(parameter.grad is None for parameter in one.model.parameters())
        with pytest.raises(InvalidArgumentError, match="not reduced before the last batch"):
            manager.save(1, one.state)
        one.accumulate()
        manager.save(2, one.state)
        assert manager.all_steps() == [2]


def test_gradients_that_no_checkpoint_can_have_are_refused(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, save_amid_an_accumulation, tmp_path / "run")


class Noise(Dataset[list[float]]):
    """An index, and a number that is drawn."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> list[float]:
        return [index, torch.rand(()).item()]


def share_out(rank: int) -> None:
    split: Any = DataLoaderConfiguration(split_batches=True)
    shares = {
        "each": (None, 3, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]),
        "split": (split, 1, [[[0], [2], [4], [6]], [[1], [3], [5], [0]]]),
    }
    for name, (configuration, remainder, expected) in shares.items():
        with as_launched(rank, 2):
            accelerator = Accelerator(cpu=True, dataloader_config=configuration)
            loader = prepare_loader(accelerator, ResumableDataLoader(Noise(), batch_size=2, collate_fn=torch.tensor))
            batches, ends, remainders = [], [], []
            for batch in loader:
                batches.append(batch)
                ends.append(loader.end_of_dataloader)
                remainders.append(accelerator.gradient_state.remainder)
            assert [batch[:, 0].int().tolist() for batch in batches] == expected[rank], name
            assert ends == [False] * (len(batches) - 1) + [True] and remainders[-1] == remainder
            drawn: list[Any] = [None, None]
            torch.distributed.all_gather_object(drawn, [number for batch in batches for number in batch[:, 1].tolist()])
            assert not set(drawn[0]) & set(drawn[1]), name
            sampled = ResumableDataLoader(Noise(), sampler=DistributedSampler(Noise()))
            with pytest.raises(InvalidArgumentError, match="no DistributedSampler"):
                prepare_loader(accelerator, sampled)


def test_each_rank_loads_its_share_and_draws_numbers_of_its_own(tmp_path: Path) -> None:
    check_ranks(tmp_path, 2, share_out)
