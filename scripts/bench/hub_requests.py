#!/usr/bin/env python3
"""Count requests and bytes on the wire: hfshard and stock transformers against the same Hub server on this machine."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(REPOSITORY / "scripts"), str(REPOSITORY)]

from bench.markdown import markdown_table
from tests.hubserver.hub_server import HubServer

SETUP = """
import torch, hfshard
from transformers import BertConfig, BertModel

class Bert(hfshard.ShardedModelMixin, BertModel): ...

torch.manual_seed(0)
config = BertConfig(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512, vocab_size=512)
model = {class_name}(config).eval()
"""
CHANGED = "with torch.no_grad(): model.pooler.dense.bias += 1\n"
EIGHT = 550_000
"""A limit that gives 8 shards (of hfshard; stock's plan with the same limit differs by the headers)."""
FOUR = 1_200_000
"""A limit that gives 4 shards."""
ONE = 10**9
"""A limit that gives a single file."""


@dataclass(frozen=True)
class Action:
    """One line of the table: what a new process does, in the state that the line before left."""

    title: str
    code: str
    home: str = "home"
    shows_weights: bool = True


def push(limit: int, before: str = "") -> str:
    """The code of a push."""
    return f"{before}model.push_to_hub('org/m', max_shard_size={limit})"


ACTIONS = (
    Action("push, new repo", push(EIGHT)),
    Action("push, unchanged", push(EIGHT)),
    Action("from_pretrained, empty cache", "{class_name}.from_pretrained('org/m')", "fresh", False),
    Action("from_pretrained, main in the cache", "{class_name}.from_pretrained('org/m')", "fresh", False),
    Action("from_pretrained, a commit in the cache", "{class_name}.from_pretrained('org/m', revision='{head}')",
           "fresh", False),
    Action("push, one tensor changed", push(EIGHT, CHANGED)),
    Action("push with another shard size", push(FOUR, CHANGED)),
    Action("push as a single file", push(ONE, CHANGED)),
    Action("push in 8 shards again", push(EIGHT)),
)  # fmt: skip


def main() -> int:
    """Run every action by both, and print a Markdown table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    names = ("torch", "transformers", "huggingface_hub")
    print(f"Python {platform.python_version()}, " + ", ".join(f"{name} {version(name)}" for name in names))
    print("Stock runs with HF_HUB_DISABLE_XET=1: with hf_xet its uploads to a server without Xet fail.\n")
    titles = [
        "stock: requests",
        "bytes up",
        "bytes down",
        "weights there",
        "hfshard: requests",
        "up",
        "down",
        "weights",
    ]
    rows = zip(ACTIONS, measured("BertModel"), measured("Bert"), strict=True)
    print(markdown_table(["", *titles], [[action.title, *stock, *ours] for action, stock, ours in rows]))
    return 0


def measured(class_name: str) -> list[list[str]]:
    """The cells of each action for the clients that use one class."""
    cells: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix="hfshard-bench-") as temporary, HubServer(Path(temporary) / "hub") as hub:
        for action in ACTIONS:
            head = hub.repo("org/m").commits()[0].oid if cells else ""
            code = SETUP.format(class_name=class_name) + action.code.format(class_name=class_name, head=head)
            environment = hub.environment(home=Path(temporary) / action.home)
            if class_name == "BertModel":
                environment["HF_HUB_DISABLE_XET"] = "1"
            hub.clear_log()
            subprocess.run(
                [sys.executable, "-c", code], env=environment, cwd=temporary, check=True, stderr=subprocess.DEVNULL
            )
            weights = sum(path.endswith(".safetensors") for path in hub.repo("org/m").files())
            shown = f"{weights} files" if action.shows_weights else ""
            cells.append([str(len(hub.log)), f"{hub.bytes_up():,}", f"{hub.bytes_down():,}", shown])
    return cells


if __name__ == "__main__":
    sys.exit(main())
