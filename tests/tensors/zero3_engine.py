"""Run hfshard's calls on the parameters of a DeepSpeed engine, in a process of its own.

    python -m tests.tensors.zero3_engine FOLDER

Writes found.json: call -> the error, or "done"; and what is then in the files.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import BertModel

import hfshard
from hfshard.training import CheckpointManager, TrainingState
from tests.foreign.producers.deepspeed_on_cpu import warm_up
from tests.helpers.tiny_bert import bert
from tests.tensors import zero3
from tests.tensors.zero3 import Net

deepspeed: Any = import_module("deepspeed")

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
"""With it, the biases of one element stay whole, as in `zero3.partition`."""


def one_line(call: Callable[[], object]) -> str:
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def engine_of(model: torch.nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    return engine, optimizer


def trained(model: Net) -> tuple[Any, torch.optim.Optimizer]:
    engine, optimizer = engine_of(model)
    engine.backward(engine(torch.ones(1, 2, dtype=torch.bfloat16)).sum())
    engine.step()
    return engine, optimizer


def outcomes(folder: Path, model: Net, engine: Any, optimizer: Any) -> dict[str, str]:
    """What every call says of a partitioned module."""
    torch.save({"model": Net().state_dict()}, folder / "old.pt")
    out = folder / "out"
    state = TrainingState(model=model, optimizer=optimizer)
    installed = bert(3, cls=BertModel)
    engine_of(installed)
    calls = {
        **zero3.saves(model, out),
        **{f"copies: {name}": call for name, call in zero3.saves_of_copies(model, out).items()},
        **zero3.loads(model, folder / "whole"),
        **{f"run: {name}": call for name, call in zero3.saves_of_runs(model, folder / "runs").items()},
        **zero3.restores(model, folder / "run", folder / "old.pt"),
        "save_model of an engine": lambda: hfshard.save_model(engine, out),
        "run: with an optimizer": lambda: CheckpointManager(folder / "optimized").save(2, state),
        "run: of an optimizer": lambda: CheckpointManager(out).save(1, TrainingState(optimizer=engine.optimizer)),
        "born so": lambda: born_partitioned(folder / "whole"),
        "born so, loaded after it": lambda: born_and_loaded(folder / "whole"),
        "installed": lambda: installed.save_pretrained(out),
    }
    with hfshard.install(quiet=True):
        return {name: one_line(call) for name, call in calls.items()}


def born_partitioned(saved: Path) -> None:
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        Net.from_pretrained(saved)


def born_and_loaded(saved: Path) -> None:
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = Net()
    hfshard.load_model(model, saved)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        assert all(bool((one == 1).all()) for one in model.state_dict().values())


def uses(folder: Path, model: Net, engine: Any) -> dict[str, object]:
    """What a gathered module, and what was gathered, become."""
    found: dict[str, object] = {}
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        hfshard.save_model(model, folder / "gathered")
        CheckpointManager(folder / "gathered run").save(1, TrainingState(model=model))
    weights = engine._zero3_consolidated_16bit_state_dict()
    hfshard.save_model(model, folder / "passed", state_dict=weights)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        hfshard.load_model(model, folder / "whole")
    engine.optimizer.refresh_fp32_params()
    found["loaded"] = {name: float(one.sum()) for name, one in engine._zero3_consolidated_16bit_state_dict().items()}
    for place in ("gathered", "gathered run/checkpoint-00000001", "passed"):
        found[place] = {name: list(one.shape) for name, one in hfshard.load_state_dict(folder / place).items()}
    return found


def main(folder: Path) -> None:
    warm_up()  # nothing is compiled, which takes minutes
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    deepspeed.init_distributed("gloo", verbose=False)
    whole = Net()
    for tensor in whole.state_dict().values():
        tensor.fill_(1)
    whole.save_pretrained(folder / "whole")
    CheckpointManager(folder / "run").save(1, TrainingState(model=whole))
    model = Net()
    engine, optimizer = trained(model)
    said = outcomes(folder, model, engine, optimizer)
    used = uses(folder, model, engine)
    engine.save_checkpoint(str(folder / "zero3"))
    Path(folder / "found.json").write_text(json.dumps([said, used]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
