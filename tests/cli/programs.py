"""Programs for `hfshard run`, and the two ways to run them: with it, and by Python alone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.helpers import processes

LOOKS = """
import json, os, pickle, sys

class Kept:
    pass

if __name__ == "__main__":
    kept = pickle.loads(pickle.dumps(Kept()))
    print(json.dumps({
        "argv": sys.argv, "path": sys.path, "flags": repr(sys.flags), "warnoptions": sys.warnoptions,
        "xoptions": sys._xoptions, "file": globals().get("__file__"), "package": __package__,
        "kept": type(kept) is Kept and Kept.__module__, "cwd": os.getcwd(), "executable": sys.executable,
        "stdin": sys.stdin.read(), "sitecustomize": "sitecustomize" in sys.modules,
        "modules": sorted(sys.modules), "finders": [type(one).__name__ for one in sys.meta_path][-3:],
        "environment": {k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "HFSHARD_"))},
    }))
"""
"""Prints how it was started, and what has come with it."""


def by_python(
    words: Sequence[object], directory: Path, environment: dict[str, str], stdin: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` in a directory."""
    return processes.run_fresh(words, cwd=directory, env=environment, stdin=stdin)


def by_hfshard(
    words: Sequence[object], directory: Path, environment: dict[str, str], stdin: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `hfshard run WORDS` in a directory."""
    return processes.run(["-m", "hfshard", "run", *words], cwd=directory, env=environment, stdin=stdin)


def without_hfshard_on(environment: dict[str, str]) -> dict[str, str]:
    """An environment without what `hfshard run`, or a launcher of ranks, may have left in it."""
    names = ("HFSHARD_ANNOUNCED", "HFSHARD_RUN", "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
    return {name: value for name, value in environment.items() if name not in names}


def startup_folder() -> str:
    """The folder that `hfshard run` puts first on PYTHONPATH."""
    import hfshard

    return os.path.join(os.path.dirname(hfshard.__file__), "cli", "startup")
