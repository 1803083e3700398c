#!/usr/bin/env python3
"""Count requests and bytes on the wire: hfshard and stock transformers against the same Hub server on this machine."""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(REPOSITORY / "scripts"), str(REPOSITORY)]

from bench.harness.figures import markdown_table, paragraphs
from tests.servers.hub.hub_server import HubServer

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


LOAD = "{class_name}.from_pretrained('org/m"


def push(limit: int, before: str = "") -> str:
    """The code of a push."""
    return f"{before}model.push_to_hub('org/m', max_shard_size={limit})"


ACTIONS = {
    "new": Action("`push_to_hub`, new repo", push(EIGHT)),
    "unchanged": Action("the same, unchanged", push(EIGHT)),
    "load": Action("`from_pretrained`, empty cache", LOAD + "')", "fresh", False),
    "load main": Action("the same, `main` in the cache", LOAD + "')", "fresh", False),
    "load commit": Action("the same, a commit in the cache", LOAD + "', revision='{head}')", "fresh", False),
    "tensor": Action("push, one tensor changed", push(EIGHT, CHANGED)),
    "size": Action("push, another shard size", push(FOUR, CHANGED)),
    "single": Action("push, a single file", push(ONE, CHANGED)),
    "again": Action("push, 8 shards again", push(EIGHT)),
}
CLASSES = {"transformers": "BertModel", "hfshard": "Bert"}
"""Client -> the class of the model."""
WIRES = {
    "xet": {"HFSHARD_XET": "1"},  # as on the Hugging Face Hub: without it, hfshard takes a server for one of LFS
    "lfs": {"HF_HUB_DISABLE_XET": "1"},  # huggingface_hub goes over Xet wherever hf_xet is installed, or fails
}
"""Transport of weights -> the environment of the clients."""
TITLES = {"xet": "Xet, as on the Hugging Face Hub", "lfs": "LFS"}
COLUMNS = {"requests": "requests", "bytes up": "up", "bytes down": "down", "weights": "weights"}
"""Column -> the key of its counts; "weights" are the files of weights that the repo has then."""
RAW = Path(__file__).resolve().with_suffix(".json")
PAGE = RAW.with_name("REQUESTS.md")


def main(arguments: list[str]) -> int:
    """Run every action by both over LFS and over Xet, and rewrite hub_requests.json and REQUESTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--render", action="store_true", help="only print REQUESTS.md of the last hub_requests.json")
    if parser.parse_args(arguments).render:
        print(render(read_counts()), end="")
        return 0
    found = {over: {who: measured(over, who) for who in CLASSES} for over in WIRES}
    versions = {name: version(name) for name in ("torch", "transformers", "huggingface_hub", "hf_xet")}
    results = {"date": datetime.date.today().isoformat(), "versions": versions, "over": found}
    RAW.write_text(dump(results), encoding="utf-8")
    PAGE.write_text(render(results), encoding="utf-8")
    return 0


def measured(over: str, who: str) -> dict[str, dict[str, int]]:
    """Count what each action takes of a client, in a new process, on a Hub of its own."""
    counts: dict[str, dict[str, int]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="hfshard-bench-") as temporary,
        HubServer(Path(temporary) / "hub", has_xet=over == "xet") as hub,
    ):
        for name, action in ACTIONS.items():
            head = hub.repo("org/m").commits()[0].oid if counts else ""
            code = SETUP.format(class_name=CLASSES[who]) + action.code.format(class_name=CLASSES[who], head=head)
            environment = hub.environment(home=Path(temporary) / action.home) | WIRES[over]
            hub.clear_log()
            subprocess.run(
                [sys.executable, "-c", code], env=environment, cwd=temporary, check=True, stderr=subprocess.DEVNULL
            )
            weights = sum(path.endswith(".safetensors") for path in hub.repo("org/m").files())
            counts[name] = {"requests": len(hub.log), "up": hub.bytes_up(), "down": hub.bytes_down()}
            counts[name] |= {"weights": weights} if action.shows_weights else {}
    return counts


def read_counts() -> dict[str, Any]:
    """Read the last counts."""
    counts: dict[str, Any] = json.loads(RAW.read_text(encoding="utf-8"))
    return counts


def dump(results: dict[str, Any]) -> str:
    """JSON with a line for each action."""
    return re.sub(r"\{\s+(\"requests\"[^}]*?)\s+\}", _one_line, json.dumps(results, indent=1)) + "\n"


def _one_line(found: re.Match[str]) -> str:
    return "{" + re.sub(r"\s+", " ", found[1]) + "}"


def render(results: dict[str, Any]) -> str:
    """Return REQUESTS.md."""
    versions = results["versions"]
    head = (
        "A BERT of 3.8 MB in 8 shards (then 4, then one file), against the same Hub server on the same machine, each"
        f" line by a new process: `python scripts/bench/hub_requests.py`, with transformers {versions['transformers']},"
        f" huggingface_hub {versions['huggingface_hub']} and hf_xet {versions['hf_xet']}."
    )
    lfs = "On a server without Xet (transformers with `HF_HUB_DISABLE_XET=1`: else its uploads fail there):"
    sections = [
        "# Requests and bytes, measured",
        head,
        f"## Over {TITLES['xet']}",
        *_section("xet", results["over"]["xet"]),
        f"## Over {TITLES['lfs']}",
        lfs,
        *_section("lfs", results["over"]["lfs"]),
    ]
    return paragraphs(*sections) + "\n"


def _section(over: str, counts: dict[str, dict[str, dict[str, int]]]) -> tuple[str, str]:
    chart = f"charts/wire-{over}"
    picture = (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{chart}-dark.svg">'
        f'<img alt="Requests and bytes over {TITLES[over]}" src="{chart}-light.svg" width="380" align="top"></picture>'
    )
    return _table(counts), picture


def _table(counts: dict[str, dict[str, dict[str, int]]]) -> str:
    titles = [f"{who}: {what}" if what == "requests" else what for who in CLASSES for what in COLUMNS]
    rows = [
        [action.title, *(_cell(counts[who][name], what) for who in CLASSES for what in COLUMNS)]
        for name, action in ACTIONS.items()
    ]
    return markdown_table(["", *titles], rows)


def _cell(counts: dict[str, int], what: str) -> str:
    return f"{counts[COLUMNS[what]]:,}" if COLUMNS[what] in counts else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
