"""results.json, the raw figures, and RESULTS.md, which is rendered from it alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.harness.figures import (
    GIGABYTE,
    MEGABYTE,
    Data,
    Target,
    markdown_table,
    paragraphs,
    ratio,
    readme_block,
    runs_of,
    seconds,
    show_ratio,
    skipped,
    spread,
)
from bench.harness.question import QUESTIONS, question_of

README_COMMAND = "python scripts/bench/run.py --readme"
SYNCED = "transformers fsync"
SPLIT = "read alone/cold + write alone/cold"
README_LINES = (
    ("save", "save, sha256 of every file, flushed to disk", "hfshard sha256", SYNCED, "save", "limit | hash"),
    ("save", "save, no checksum, flushed to disk", "hfshard none", SYNCED, "save", "limit"),
    ("load", "load from disk, to every byte read", "hfshard/cold", "transformers/cold", "read", "limit/cold"),
    ("load", "load from the page cache, to ready", "hfshard/warm", "transformers/warm", "ready", ""),
    ("reshard", "re-shard to files of twice the size, from disk", "hfshard none/cold", "transformers/cold", "", SPLIT),
)
"""(question, what, our peer, its base, phase, its limit) of the lines of the README's table."""
README_LIMITS = (
    ("save", "limit", "a plain flushed O_DIRECT write of the same bytes"),
    ("save", "hash", "sha256 of them on all cores"),
    ("load", "limit/cold", "a plain O_DIRECT read"),
)
"""(question, peer, what) of the sentence below that table."""


def read_results(path: Path) -> dict[str, Any]:
    """{question: figures}; empty where there is no such file."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def write_results(results: dict[str, Any], markdown: Path) -> None:
    """Write results.json beside RESULTS.md, and RESULTS.md of it."""
    markdown.parent.mkdir(parents=True, exist_ok=True)
    raw_path(markdown).write_text(dump(results), encoding="utf-8")
    markdown.write_text(render(results), encoding="utf-8")


def raw_path(markdown: Path) -> Path:
    """Locate the raw figures of a RESULTS.md."""
    return markdown.parent / "results.json"


def dump(results: dict[str, Any]) -> str:
    """JSON with a line for each run, so that it stays small and can be compared."""
    raw = json.dumps({name: results[name] for name in QUESTIONS if name in results}, indent=1, ensure_ascii=False)
    return _one_line_each(raw) + "\n"


def render(results: dict[str, Any]) -> str:
    """All of RESULTS.md."""
    known = [name for name in QUESTIONS if name in results]
    parts = [
        "# Measured",
        "Written by `python scripts/bench/run.py`; the raw figures are in [results.json](results.json), and"
        " [measuring.py](harness/measuring.py) says how each column is measured. Every run is a fresh process; peers"
        " take turns, and a ratio is the median of the ratios of the same round (lowest–highest). The limits are plain"
        " O_DIRECT reads and writes of as many bytes, and sha256 on all cores, in the same rounds. Before each measured"
        " step as much memory is held, touched and freed as its section says: a virtual machine may give freed memory"
        " back to its host, and then takes 50 times as long to touch it ([reserve.py](machine/reserve.py)).",
        "## Targets",
        _targets(known, results),
    ]
    machines: list[dict[str, str]] = []
    for name in known:
        data, question = results[name], question_of(name)
        parts += [f"## {question.title}", f"`{data['command']}`, {data['date']}"]
        if data["machine"] not in machines:
            machines.append(data["machine"])
            rows = [list(line) for line in data["machine"].items()]
            parts.append(markdown_table([f"machine {len(machines)}", ""], rows))
        else:
            parts.append(f"On machine {machines.index(data['machine']) + 1}.")
        if data.get("held"):
            parts.append(f"Held and freed before each measured step: {data['held'] / GIGABYTE:.2f} GB.")
        parts += [question.render(data), skipped(data)]
    return paragraphs(*parts) + "\n"


def _targets(known: list[str], results: dict[str, Any]) -> str:
    words = {True: "yes", False: "**no**", None: "–"}
    rows = [
        [target.text, target.measured, words[target.is_met], results[name]["params"]]
        for name in known
        for target in question_of(name).targets(results[name])
    ]
    return markdown_table(["target", "measured", "met", "model"], rows)


def readme_table(results: dict[str, Any]) -> str:
    """The top README's table, between its comments; "" where nothing for it was measured."""
    lines = {line: _readme_row(results[line[0]], *line[1:]) for line in README_LINES if line[0] in results}
    rows = [row for row in lines.values() if row]
    if not rows:
        return ""
    used = list(dict.fromkeys(line[0] for line, row in lines.items() if row))
    data = results[used[0]]
    machine = data["machine"]
    command = f"python scripts/bench/run.py {' '.join(used)} --params {data['params']} --rounds {data['rounds']}"
    head = (
        f"A Llama of {data['bytes'] / GIGABYTE:.2f} GB in bfloat16, fresh processes in turns, medians of"
        f" {data['rounds']} rounds: `{command}` ({machine['CPU']}, {machine['file system'].split()[0]}, torch"
        f" {machine['torch']}, transformers {machine['transformers']}; all of it in"
        " [RESULTS.md](scripts/bench/RESULTS.md)):"
    )
    titles = ["", "hfshard", "transformers", "ratio", "× the limit", "hfshard's peak memory"]
    return readme_block(README_COMMAND, head, paragraphs(markdown_table(titles, rows), _readme_limits(results)))


def _readme_limits(results: dict[str, Any]) -> str:
    """Explain the limits, with their times."""
    found = []
    for question, name, what in README_LIMITS:
        taken = spread(seconds(run) for run in runs_of(results.get(question, {"peers": {}}), name))
        if taken:
            found.append(f"{what} {taken.median:.2f} s")
    if not found:
        return ""
    return (
        f"The limits, measured in the same rounds: {', '.join(found)}; for a save with sha256 the larger of both"
        " counts, for a re-shard the sum of reading and writing. transformers does not hash what it saves, nor flush"
        " it: its files were flushed for it."
    )


def _readme_row(data: Data, what: str, ours: str, base: str, phase: str, limit: str) -> list[str]:
    """The cells of a line; none where it was not measured."""
    mine = spread(seconds(run, phase) for run in runs_of(data, ours))
    theirs = spread(seconds(run, phase) for run in runs_of(data, base))
    pair = ratio(data, ours, base, phase)
    if mine is None or theirs is None or pair is None:
        return []
    peak = max(run["peak"] for run in runs_of(data, ours))
    to_limit = show_ratio(data, ours, limit, phase)
    return [what, f"{mine.median:.2f} s", f"{theirs.median:.2f} s", pair.show(), to_limit, f"+{peak / MEGABYTE:.0f} MB"]


def unmet(results: dict[str, Any]) -> list[Target]:
    """The targets that were measured and not met."""
    targets = [target for name, data in results.items() for target in question_of(name).targets(data)]
    return [target for target in targets if target.is_met is False]


def _one_line_each(raw: str) -> str:
    lines: list[str] = []
    depth_of_runs = -1
    for line in raw.splitlines():
        depth = len(line) - len(line.lstrip())
        if depth_of_runs < 0 and line.strip() == '"runs": [':
            depth_of_runs = depth
            lines.append(line)
        elif depth_of_runs >= 0 and depth == depth_of_runs + 1 and line.strip() == "{":
            lines.append(line)
        elif depth_of_runs >= 0 and depth > depth_of_runs:
            lines[-1] += line.strip() + (" " if line.endswith((",", ":")) else "")
        else:
            depth_of_runs = -1
            lines.append(line)
    return "\n".join(lines)
