"""Prints what stock transformers and hfshard make of every attack, as a Markdown table by theme.

python -m tests.attacks.report [--entry stock] [--only REGEX] [--list]
"""

from __future__ import annotations

import argparse
import collections
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.attacks import catalogue
from tests.attacks.judge import LIMIT_BYTES, LIMIT_SECONDS
from tests.attacks.registry import Attack
from tests.attacks.runner import CHUNK, Server

KINDS = {
    "wrong": "loaded, no error, wrong weights",
    "right": "loaded, no error, right weights",
    "nameless": "error that does not name the file",
    "clear": "error that names the file",
    "outside": "opened or ran something outside",
    "slow": f"over {LIMIT_SECONDS:g} s or {LIMIT_BYTES >> 20} MiB",
    "dead": "hung, or killed by a signal",
}
"""What came of an attack, worst last wins."""


def kind_of(answer: dict[str, Any]) -> str:
    """The row of `KINDS` that an answer of the runner belongs to."""
    if answer["hang"] or answer["signal"]:
        return "dead"
    run: dict[str, Any] = next(iter(answer["runs"].values()))
    if run["touched"] or run["executed"] or run["audit"]:
        return "outside"
    if run["seconds"] > LIMIT_SECONDS or run["peak_bytes"] > LIMIT_BYTES:
        return "slow"
    if run["outcome"] == "returned":
        return "right" if run["truth"] else "wrong"
    return "clear" if answer["file"] and answer["file"] in run["message"] else "nameless"


def main() -> None:
    """Run the attacks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--entry", default="stock", choices=("stock", "pretrained", "module", "state_dict"))
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--list", action="store_true", help="print every attack and what came of it")
    arguments = parser.parse_args()
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    accepted = total = 0
    for answer in _answers(arguments.entry, arguments.only):
        kind = kind_of(answer)
        run: dict[str, Any] = next(iter(answer["runs"].values()), {})
        counts[answer["name"].split("-")[0]][kind] += 1
        accepted += run.get("outcome") == "returned"
        total += 1
        if arguments.list:
            print(f"{kind:9} {answer['name']}  {run.get('type', '')}: {run.get('message', '')[:100]!r}")
    who = "stock transformers" if arguments.entry == "stock" else f"hfshard, {arguments.entry}"
    print(f"\n{total} attacks loaded by {who}: {accepted} accepted without an error\n")
    _print(counts)


def _answers(entry: str, only: str) -> Iterator[dict[str, Any]]:
    attacks = catalogue.load_all().values()
    # A full check is not to be had from stock transformers: what only that finds is counted all the same.
    names = [attack.name for attack in attacks if re.search(only, attack.name) and _takes(attack, entry)]
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "home")
        for start in range(0, len(names), CHUNK):
            yield from server.run(names[start : start + CHUNK], Path(folder) / str(start), entries=[entry])
        server.close()


def _takes(attack: Attack, entry: str) -> bool:
    return ("pretrained" if entry == "stock" else entry) in attack.entries


def _print(counts: dict[str, collections.Counter[str]]) -> None:
    print("| theme | " + " | ".join(KINDS.values()) + " |")
    print("|---" * (len(KINDS) + 1) + "|")
    rows = [*sorted(counts.items()), ("all", sum(counts.values(), collections.Counter[str]()))]
    for theme, counter in rows:
        print(f"| {theme} | " + " | ".join(str(counter[kind] or "") for kind in KINDS) + " |")


if __name__ == "__main__":
    main()
