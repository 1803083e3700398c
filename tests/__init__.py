"""The tests of hfshard; a package, so that `tests.sweeps` is ours and no installed `tests`."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
