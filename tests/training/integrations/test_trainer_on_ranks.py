"""transformers' Trainer on two ranks, through `CheckpointCallback`: resumed it ends as if it had run straight."""

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
from huggingface_hub import HfApi
from packaging.version import Version
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed.configuration_utils import DistributedConfig

import hfshard
from hfshard.errors import HubNotFoundError, InvalidArgumentError, RankFailedError, StateDictMismatchError
from hfshard.training import CheckpointCallback
from tests.distributed.gloo import check_ranks, run_ranks
from tests.hub.on_ranks import talking_to
from tests.hubserver.hub_server import HubServer
from tests.training.fingerprint import flatten, of_model, of_optimizer, of_rngs, of_scheduler
from tests.training.integrations.accelerate_ranks import as_launched, count_as_gpus, refuse_whole_state
from tests.training.integrations.trainer_child import Ending, timeless_log
from tests.training.models import whole

pytestmark = pytest.mark.compat

STEPS, SAVED_AT, WORDS = 4, 2, 20
TRAINS_WHAT_IT_SPREADS = Version(transformers.__version__) >= Version("5.23")
"""Before, Trainer puts a model that `from_pretrained` has spread by FSDP2 into DistributedDataParallel, which fails."""
ASKED_FOR = {"save_only_model": True} if TRAINS_WHAT_IT_SPREADS else {}
"""What Trainer demands of those that from_pretrained has spread: it would save no optimizer."""


@dataclass(frozen=True, slots=True)
class Case:
    """How a training is spread."""

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


def model(case: Case, place: Path) -> Any:
    torch.manual_seed(5)
    if case.distributed_config:
        spread = DistributedConfig(**case.distributed_config)
        return LlamaForCausalLM.from_pretrained(place / "start", distributed_config=spread)
    return LlamaForCausalLM(config())


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.2,
    )


def trainer(case: Case, place: Path, run: Path, **arguments: Any) -> Trainer:
    """As a script builds it."""
    known: dict[str, Any] = {
        "output_dir": str(run),
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "save_steps": 2,
        "learning_rate": 0.01,
        "logging_steps": 3,
        "seed": 11,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **case.arguments,
        **arguments,
    }
    args = TrainingArguments(**known)
    if case.needs_gpus and args.world_size > 1:
        count_as_gpus()
    return Trainer(model=model(case, place), args=args, train_dataset=Sentences(), eval_dataset=Sentences())


def everything(trained: Trainer) -> dict[str, str]:
    """All of this rank that two trainings are compared by, bit for bit."""
    parts: Any = trained.model, trained.optimizer, trained.lr_scheduler
    net, optimizer, scheduler = parts
    state = trained.state
    own = {
        "log": timeless_log(trained),
        "step": state.global_step,
        "best": state.best_global_step,
        "flos": state.total_flos,
    }
    of_all = (
        of_model(net),
        of_optimizer(optimizer.optimizer, net, "optimizer"),
        of_scheduler(scheduler),
        of_rngs(),
        flatten(own, "trainer"),
    )
    return {path: value for part in of_all for path, value in part}


def train(case: Case, place: Path, run: Path, resumed_from: str | None = None) -> Trainer:
    trained = trainer(case, place, run)
    checkpoints = CheckpointCallback(**case.callback).attach(trained)
    trained.accelerator.get_state_dict = refuse_whole_state
    newest = checkpoints.latest()
    assert newest == (None if resumed_from is None else str(run / f"checkpoint-{STEPS:08d}"))
    trained.train(resume_from_checkpoint=resumed_from)
    if trained.args.load_best_model_at_end:
        net: Any = trained.model
        best = hfshard.load_state_dict(run / f"checkpoint-{trained.state.best_global_step:08d}")
        assert all(torch.equal(whole(tensor), best[name]) for name, tensor in net.state_dict().items())
    return trained


def run_straight_and_resumed(rank: int, place: Path) -> None:
    for name, case in CASES.items():
        run = place / name
        with as_launched(rank, 2):
            straight = everything(train(case, place, run))
            random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)  # as in no checkpoint
            resumed = everything(train(case, place, run, str(run / f"checkpoint-{SAVED_AT:08d}")))
        assert straight.keys() == resumed.keys(), name
        differing = {path: (value, resumed[path]) for path, value in straight.items() if value != resumed[path]}
        assert differing == {}, name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of all cases, each of which was resumed from its middle."""
    place = tmp_path_factory.mktemp("runs")
    LlamaForCausalLM(config()).save_pretrained(place / "start")
    check_ranks(place / "ranks", 2, run_straight_and_resumed, place)
    return place


def test_a_training_on_two_ranks_is_resumed_exactly(runs: Path) -> None:
    for name in CASES:
        files = {path.name for path in (runs / name / f"checkpoint-{SAVED_AT:08d}").iterdir()}
        assert files == {
            "checkpoint.json",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "optimizer.safetensors",
            "state.safetensors",
            "trainer_state.json",
            "training_state.json",
        }, name


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
        trained = trainer(case, place, place / "elsewhere")
        CheckpointCallback().attach(trained)
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
        with pytest.raises(InvalidArgumentError, match="the first process loads the batches of all"):
            CheckpointCallback().attach(trained)


def test_batches_that_one_rank_loads_for_all_are_refused(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, load_all_batches_on_one_rank, tmp_path)


def train_and_die(rank: int, place: Path, name: str) -> None:
    with as_launched(rank, 2):
        trained = trainer(CASES[name], place, place / "run")
        CheckpointCallback().attach(trained)
        trained.add_callback(Ending(SAVED_AT + 1))
        trained.train()


def resume_and_compare(rank: int, place: Path, name: str) -> None:
    with as_launched(rank, 2):
        case = CASES[name]
        trained = trainer(case, place, place / "run")
        newest = CheckpointCallback().attach(trained).latest()
        assert newest == str(place / "run" / f"checkpoint-{SAVED_AT:08d}")
        trained.train(resume_from_checkpoint=newest)
        resumed = everything(trained)
        assert resumed == everything(train(case, place, place / "straight"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accelerate's fsdp2", "transformers' tp"])
def test_a_training_whose_ranks_were_killed_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    LlamaForCausalLM(config()).save_pretrained(tmp_path / "start")
    ends = run_ranks(tmp_path / "killed", 2, train_and_die, tmp_path, name)
    assert [end.status for end in ends] == [-signal.SIGKILL] * 2, [end.words for end in ends]
    check_ranks(tmp_path / "resumed", 2, resume_and_compare, tmp_path, name)
