"""The command line of `scripts/explore_stores`."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections.abc import Sequence

from tests.sweeps.exploring.explorer import BrokenError, explore, walk
from tests.sweeps.exploring.mutants import mutants
from tests.sweeps.exploring.programs import one_thread
from tests.sweeps.exploring.spaces import check_stores, spaces

MOST_STORES = 3000
"""Stores of a space over which one more save is done."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Explore, and print a table; 1 if something was found, or a mutant was not."""
    parser = argparse.ArgumentParser(prog="scripts/explore_stores", description=__doc__)
    parser.add_argument("--space", nargs="*", default=[""], help="parts of the names of spaces; without it, all")
    parser.add_argument("--seconds", type=float, default=1800, help="for each space")
    parser.add_argument("--walks", type=int, default=0, help="random walks through each space, in place of all states")
    parser.add_argument("--seed", type=int, default=1, help="of random walks")
    parser.add_argument("--mutants", action="store_true", help="leave out each rule; it must be found")
    asked = parser.parse_args(arguments)
    logging.getLogger("hfshard").setLevel(logging.ERROR)
    with one_thread():
        if asked.mutants:
            return _find_mutants()
        print("| space | states | stores | seconds | found |\n|---|---|---|---|---|")
        is_fine = True
        for name in spaces():
            if any(part in name for part in asked.space):
                is_fine &= _walk(name, asked) if asked.walks else _explore(name, asked.seconds)
    return int(not is_fine)


def _explore(name: str, seconds: float) -> bool:
    space = spaces()[name]
    begin = time.monotonic()
    try:
        explored = explore(space.begin(), space.check(), seconds)
        check_stores(
            space,
            random.Random(1).sample(
                sorted(explored.stores, key=lambda one: one.number), min(MOST_STORES, len(explored.stores))
            ),
        )
        found = "nothing" if explored.is_whole else "nothing, not to its end"
        states, stores = f"{explored.states:,}", f"{len(explored.stores):,}"
    except BrokenError as error:
        print(error, file=sys.stderr)
        found, states, stores = str(error).splitlines()[0], "", ""
    print(f"| {name} | {states} | {stores} | {time.monotonic() - begin:.0f} | {found} |", flush=True)
    return found.startswith("nothing")


def _walk(name: str, asked: argparse.Namespace) -> bool:
    space = spaces()[name]
    begin, draw, ends = time.monotonic(), random.Random(asked.seed), set()
    first, check = space.begin(), space.check()
    found = "nothing"
    try:
        for _ in range(asked.walks):
            ends.add(walk(first, check, draw).store)
        check_stores(space, sorted(ends, key=lambda one: one.number)[:MOST_STORES])
    except BrokenError as error:
        print(error, file=sys.stderr)
        found = str(error).splitlines()[0]
    print(f"| {name} | {asked.walks:,} walks | {len(ends):,} | {time.monotonic() - begin:.0f} | {found} |", flush=True)
    return found == "nothing"


def _find_mutants() -> int:
    is_fine = True
    print("| rule left out | found |\n|---|---|")
    for name, mutant in mutants().items():
        found = "not found"
        with mutant.change():
            try:
                explore(mutant.space.begin(), mutant.space.check(), 300)
            except BrokenError as error:
                found = str(error).splitlines()[0]
        is_fine &= found.startswith(mutant.broken)
        print(f"| {name} | {found} |", flush=True)
    return int(not is_fine)
