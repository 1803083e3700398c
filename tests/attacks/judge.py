"""Says what is wrong with the way in which an attack was met: nothing, when it was refused as it must be."""

from __future__ import annotations

import re
from typing import Any

LIMIT_SECONDS = 6.0
"""Of processors: one file takes more than 2 on a slow and busy machine; what hangs takes minutes."""
LIMIT_BYTES = 200 * 1024**2
LONGEST_MESSAGE = 4000
"""Characters: a hostile name must not flood a terminal."""

_REMEDY = re.compile(
    r"\b(download|save|run|load|pass|remove|copy|convert|check|compare|rename|install|leave|upgrade|git lfs pull)\b",
    re.I,
)
_REMEDY_CHARACTERS = 240
"""What to do stands at the end of a message."""


def complaints(answer: dict[str, Any]) -> list[str]:
    """All that is wrong with how hfshard met an attack, one line each."""
    found = ["it hung"] if answer["hang"] else []
    if answer["signal"]:
        found.append(f"it was killed by signal {answer['signal']}")
    if not answer["runs"]:
        found.append("nothing was run")
    for entry, run in answer["runs"].items():
        must_refuse = entry.endswith("/full") or not answer["full"]
        problems = [*_harm(run), *(_manner(answer, run) if must_refuse or run["outcome"] == "raised" else [])]
        found += [f"{entry}: {problem}" for problem in problems]
    return found


def control_complaints(answer: dict[str, Any]) -> list[str]:
    """All that is wrong with how a whole checkpoint was loaded."""
    found = _death(answer)
    for entry, run in answer["runs"].items():
        harm = _harm(run) if not entry.startswith("stock") else []
        if run["outcome"] == "raised":
            harm.append(f"refused: {run['type']}: {run['message'][:500]} [{run['where']}]")
        elif not run["truth"] or not run.get("ok", True):
            harm.append(f"loaded, but not well: {run.get('problems', 'wrong weights')}")
        found += [f"{entry}: {problem}" for problem in harm]
    return found


def cli_complaints(answer: dict[str, Any]) -> list[str]:
    """All that is wrong with what the command line says of an attack: it shows what it can, and exits with 1."""
    found = _death(answer)
    for run in answer["runs"].values():
        found += _harm(run)
        if run["outcome"] == "raised":
            found.append(f"a traceback: {run['type']}: {run['message'][:300]} [{run['where']}]")
        elif run["codes"][0] not in (0, 1) or run["codes"][1] != 1:
            found.append(f"inspect and verify exit with {run['codes']}")
        elif answer["file"] not in run["text"] or any(not c.isprintable() and c != "\n" for c in run["text"]):
            found.append(f"it is not named, or not printable: {run['text'][:500]!r}")
    return found


def save_complaints(answer: dict[str, Any]) -> list[str]:
    """All that is wrong with a save into a trap: it may succeed, or be refused."""
    found = _death(answer)
    for run in answer["runs"].values():
        found += _harm(run)
        if run["outcome"] == "raised":
            found += _manner(answer, run)
        elif not run["truth"]:
            found.append("saved, and other weights came back")
    return found


def _death(answer: dict[str, Any]) -> list[str]:
    return ["it did not live"] if answer["hang"] or answer["signal"] or not answer["runs"] else []


def _harm(run: dict[str, Any]) -> list[str]:
    found = []
    if run["touched"]:
        found.append(f"files outside were touched: {run['touched']}")
    if run["audit"]:
        found.append(f"it did what no load does: {run['audit']}")
    if run["executed"]:
        found.append("a payload ran")
    if run["seconds"] > LIMIT_SECONDS:
        found.append(f"it took {run['seconds']:.1f} s")
    if run["peak_bytes"] > LIMIT_BYTES:
        found.append(f"it took {run['peak_bytes'] >> 20} MiB")
    return found


def _manner(answer: dict[str, Any], run: dict[str, Any]) -> list[str]:
    if run["outcome"] == "raised":
        if not run["ours"] or run["ours"][0] == "HfshardError":
            return [f"not an error of hfshard's: {run['type']}: {run['message'][:300]} [{run['where']}]"]
        return _wording(answer, run["message"])
    if "problems" not in run:
        return ["loaded without an error, " + ("and right" if run["truth"] else "and wrong")]
    if run["ok"] or not run["problems"]:
        return ["verify_checkpoint found nothing wrong"]
    worded = [_wording(answer, message) for _, message in run["problems"]]
    return min(worded, key=len) if len(worded) == 1 or not any(not problems for problems in worded) else []


def _wording(answer: dict[str, Any], message: str) -> list[str]:
    found = []
    if answer["file"] and answer["file"] not in message:
        found.append(f"the message does not name {answer['file']}")
    if not re.search(answer["match"], message, re.I):
        found.append(f"the message does not match {answer['match']!r}")
    if not _REMEDY.search(message[-_REMEDY_CHARACTERS:]):
        found.append("the message does not end with something to do")
    if any(not character.isprintable() and character != "\n" for character in message):
        found.append("the message carries control characters")
    if len(message) > LONGEST_MESSAGE:
        found.append(f"the message has {len(message)} characters")
    return [f"{problem}: {message[:300]!r}" for problem in found]
