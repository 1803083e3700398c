"""`python -m tests.foreign.producers DIRECTORY PATTERN...` makes the cases whose names match, to be looked at."""

from __future__ import annotations

import sys
from fnmatch import fnmatch
from pathlib import Path

from tests.foreign.producers.cases import CASES, made


def main(directory: str, *patterns: str) -> None:
    """Make cases."""
    cases = [case for case in CASES if any(fnmatch(case.name, pattern) for pattern in patterns)]
    for case in cases:
        print(made(case, cases, Path(directory).absolute()))


main(*sys.argv[1:])
