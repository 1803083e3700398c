#!/usr/bin/env python3
"""What `import hfshard` costs over `import torch`: fresh processes, interleaved, a Markdown table of medians."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

if __name__ == "__main__":  # `bench` is a package of scripts/
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.markdown import markdown_table

LIMIT_SECONDS = 0.2
"""What `import hfshard` may take over `import torch`."""

CASES = {
    "torch": "import torch",
    "torch, hfshard": "import torch, hfshard",
    "torch, hfshard, and its functions": "import torch, hfshard; hfshard.save_state_dict, hfshard.load_state_dict",
    "torch, safetensors.torch": "import torch, safetensors.torch",
    "torch, huggingface_hub's save": "import torch; from huggingface_hub import save_torch_state_dict",
    "torch, transformers.BertModel": "import torch; from transformers import BertModel",
    "torch, BertModel, hfshard's mixin": (
        "import torch; from transformers import BertModel; import hfshard; hfshard.ShardedModelMixin"
    ),
}

TIMER = "import time; start = time.perf_counter()\n{code}\nprint(time.perf_counter() - start)"


def main() -> int:
    """Run each case in new processes, in turns; 1 when hfshard is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9, help="processes for each case (default: 9)")
    runs: int = parser.parse_args().runs
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    for number in range(runs + 1):
        for name, code in CASES.items():
            taken = import_seconds(code)
            if number:  # the first round fills the page cache and writes the .pyc files
                seconds[name].append(taken)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    base = medians["torch"]
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "huggingface_hub"))
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, {versions}")
    print(f"`python scripts/bench/import_time.py --runs {runs}`: seconds in a new process, files cached\n")
    rows = [
        [name, f"{medians[name]:.3f}", f"{min(times):.3f}–{max(times):.3f}", f"{medians[name] - base:+.3f}"]
        for name, times in seconds.items()
    ]
    print(markdown_table(["imports", "median", "spread", "over torch"], rows))
    over = medians["torch, hfshard"] - base
    print(f"\nimport hfshard: {over:+.3f} s over import torch (limit {LIMIT_SECONDS} s)")
    return int(over > LIMIT_SECONDS)


def import_seconds(code: str) -> float:
    """Seconds that the code takes in a new process."""
    root = str(Path(__file__).resolve().parent.parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", TIMER.format(code=code)]
    return float(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)


if __name__ == "__main__":
    sys.exit(main())
