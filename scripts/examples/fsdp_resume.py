#!/usr/bin/env python3
"""Train a Llama with FSDP2 x TP on four ranks, kill one, and resume on four ranks and on two; compare all losses.

Run it plainly, or under torchrun, whose first worker does the same: a group that lost a rank is over, so each run gets
a new group, from the launcher that torchrun itself consists of. The ranks are forked, which spares their imports.
"""

from __future__ import annotations

import importlib
import math
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

STEPS = 10
SAVE_EVERY = 3
KILLED_AT = 8
"""The step in which the rank dies: its forward pass is done, and the others wait for its gradients."""
KILLED_RANK = 2
SAVED = (KILLED_AT - 1) // SAVE_EVERY * SAVE_EVERY
"""The last step that was saved before."""
SAMPLES = 48
BATCH_SIZE = 8
MICRO_BATCHES = 2
TOKENS = 16
WORDS = 64
BOUND = 1e-5
"""How far a loss may be off, as a part of it, where matrices are whole: sums have another order then."""
IMPORTED_BEFORE_FORKS = (
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.launcher.api",
    "transformers.models.llama.modeling_llama", "hfshard.training.manager", "hfshard.training.spread_save",
)  # fmt: skip
"""All of it would be imported anyway: here once, and not by every rank."""


class Layout(NamedTuple):
    """A mesh of ranks: how many share the batches (FSDP2), and how many the matrices of each layer (TP)."""

    fsdp: int
    tp: int

    @property
    def words(self) -> str:
        """For a heading."""
        return f"{self.fsdp * self.tp} ranks ({self.fsdp} x {self.tp})"


FOUR = Layout(2, 2)
RESUMED = (FOUR, Layout(fsdp=1, tp=2), Layout(fsdp=2, tp=1))


def spread_llama(layout: Layout) -> Any:
    """A small Llama with the same first values everywhere, and its mesh; each rank has a part of it."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=TOKENS,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    mesh = init_device_mesh("cpu", layout, mesh_dim_names=("fsdp", "tp"))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    for layer in model.model.layers:
        if layout.tp > 1:
            parallelize_module(layer, mesh["tp"], {name: ColwiseParallel() for name in columns})
            parallelize_module(layer, mesh["tp"], {name: RowwiseParallel() for name in rows})
        fully_shard(layer, mesh=mesh["fsdp"])
    return fully_shard(model, mesh=mesh["fsdp"]), mesh


def count_up(index: int) -> Any:
    """A sequence to learn, with noise that is drawn again whenever it is read: words that count up, a few wrong."""
    import torch

    words_T = (torch.arange(TOKENS) * (1 + index % 3) + index) % WORDS
    return torch.where(torch.rand(TOKENS) < 0.05, torch.randint(WORDS, (TOKENS,)), words_T)


def train(layout: Layout, run: str, killed_at: int | None) -> None:
    """What each rank does: train from the last checkpoint, or from the beginning; the first one notes the losses."""
    import torch
    import torch.distributed as dist

    from hfshard.training import CheckpointManager, ResumableDataLoader, TrainingState

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, mesh = spread_llama(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    numbers: Any = range(SAMPLES)
    # Every rank reads the whole batches, so a position means the same on each layout.
    loader = ResumableDataLoader(numbers, batch_size=BATCH_SIZE, shuffle=True, seed=0, collate_fn=collate)
    manager = CheckpointManager(run, max_shard_size="20KB")
    state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

    step = manager.restore_latest(state) or 0
    if step and dist.get_rank() == 0:
        print(f"{layout.words}: resumed at step {step}, epoch {loader.epoch}, batch {loader.batch}", flush=True)
    while step < STEPS:
        for batch_BT in loader:
            is_last = step + 1 == killed_at and dist.get_rank() == KILLED_RANK
            loss = one_step(model, mesh["fsdp"], batch_BT, dies_in=run if is_last else None)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if dist.get_rank() == 0:
                note_loss(run, step, loss)
            if step % SAVE_EVERY == 0 or step == STEPS:
                manager.save(step, state)
            if step == STEPS:
                break
    manager.close()
    dist.destroy_process_group()


def collate(indexes: list[int]) -> Any:
    """A batch."""
    import torch

    return torch.stack([count_up(index) for index in indexes])


def one_step(model: Any, mesh: Any, batch_BT: Any, *, dies_in: str | None) -> float:
    """Add up the gradients of this rank's micro-batches; gives the mean loss of those of all ranks.

    Four ranks have one micro-batch each, two that share the matrices have both, one after the other. Two numbers have
    one sum in either order, and halves are exact, so the gradients are equal to the bit.
    """
    import torch
    import torch.distributed as dist

    losses_M = torch.zeros(MICRO_BATCHES)
    for number in range(mesh.get_local_rank(), MICRO_BATCHES, mesh.size()):
        rows_BT = batch_BT.chunk(MICRO_BATCHES)[number]
        loss = model(input_ids=rows_BT, labels=rows_BT, use_cache=False).loss
        if dies_in is not None:
            Path(f"{dies_in}.killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        (loss * mesh.size() / MICRO_BATCHES).backward()
        losses_M[number] = loss.detach()
    dist.all_reduce(losses_M, group=mesh.get_group())
    return float(losses_M.mean())


def note_loss(run: str, step: int, loss: float) -> None:
    """Append a loss, every bit of it."""
    with open(f"{run}.losses", "a", encoding="ascii") as losses:
        print(step, loss.hex(), file=losses)


def losses_of(run: Path) -> dict[int, float]:
    """Step -> loss; a step that was done twice counts as it was done last."""
    lines = Path(f"{run}.losses").read_text(encoding="ascii").splitlines()
    return {int(step): float.fromhex(loss) for step, loss in map(str.split, lines)}


def launch(layout: Layout, run: Path, killed_at: int | None = None) -> dict[int, int]:
    """Train on a new group of ranks; gives the ranks whose failure was seen first, and how they ended.

    Where one is killed, that may be another one, which lost its connection.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        1, 1, layout.fsdp * layout.tp, DefaultLogsSpecs(log_dir=f"{run}-logs"), run_id=run.name, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, start_method="fork",
    )  # fmt: skip
    try:
        elastic_launch(config, train)(layout, str(run), killed_at)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


def copy_run(run: Path, copy: Path) -> Path:
    """A run to be resumed on its own."""
    shutil.copytree(run, copy)
    shutil.copy(f"{run}.losses", f"{copy}.losses")
    return copy


def weights_of(run: Path) -> dict[str, bytes]:
    """The files of the last step's model."""
    return {path.name: path.read_bytes() for path in Path(run, f"checkpoint-{STEPS:08d}").glob("model*")}


def compare(straight: Path, resumed: dict[Layout, Path]) -> bool:
    """Print the losses side by side, and what is equal; gives whether all is as it should be."""
    theirs = losses_of(straight)
    ours = {layout: losses_of(run) for layout, run in resumed.items()}
    print(f"\n{'step':>4}  {'straight':<22}" + "".join(f"{layout.words:<22}" for layout in ours))
    for step in range(1, STEPS + 1):
        print(f"{step:>4}  " + "".join(f"{losses.get(step)!r:<22}" for losses in (theirs, *ours.values())))
    print()
    are_good = [theirs.keys() == set(range(1, STEPS + 1))]
    for layout, losses in ours.items():
        if layout.tp == FOUR.tp:
            are_good.append(losses == theirs and weights_of(resumed[layout]) == weights_of(straight))
            what = "losses and final weights are equal, bit for bit"
        else:  # the products of whole matrices are added up in another order
            is_complete = losses.keys() == theirs.keys()
            off = max(abs(losses[step] - loss) / loss for step, loss in theirs.items()) if is_complete else math.inf
            are_good.append(off <= BOUND)
            what = f"losses are off by at most {off:.1e}, of {BOUND:g} that are allowed"
        print(f"{layout.words}: {what}: {'yes' if are_good[-1] else 'NO'}")
    return all(are_good)


def main() -> int:
    """Run five groups of ranks; 0 if all losses are as they should be, else 1."""
    if os.environ.get("RANK", "0") != "0":
        return 0  # the first of torchrun's workers starts all groups
    for name in IMPORTED_BEFORE_FORKS:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="hfshard-example-") as work:
        straight, killed = Path(work, "straight"), Path(work, "killed")
        failed = launch(FOUR, straight)
        ends = launch(FOUR, killed, KILLED_AT)
        if failed or not ends or not Path(f"{killed}.killed").exists():
            print(f"Ranks of the straight run that failed: {failed}; of that where one is killed: {ends}")
            return 1
        print(f"rank {KILLED_RANK} of 4 was killed by SIGKILL in step {KILLED_AT}", flush=True)
        resumed = {layout: copy_run(killed, Path(work, f"resumed-{layout.fsdp}-{layout.tp}")) for layout in RESUMED}
        for layout, run in resumed.items():
            failed |= launch(layout, run)
        if failed:
            print(f"Ranks of a resumed run that failed: {failed}")
            return 1
        return 0 if compare(straight, resumed) else 1


if __name__ == "__main__":
    sys.exit(main())
