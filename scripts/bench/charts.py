#!/usr/bin/env python3
"""Draw charts/*.svg from results.json, hub_requests.json and resume.json; `--check`: say which are not drawn so."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # `bench` is a package of scripts/
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.drawing.grid import draw_grid
from bench.drawing.ratios import CHARTS, draw_ratios
from bench.drawing.svg import PALETTES
from bench.drawing.wire import SERVERS, draw_wire

HERE = Path(__file__).resolve().parent
DIRECTORY = HERE / "charts"


def main(arguments: list[str]) -> int:
    """Write the charts; or compare them with what would be written: 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a chart is not up to date")
    drawn = draw_all()
    if not parser.parse_args(arguments).check:
        DIRECTORY.mkdir(exist_ok=True)
        for name, text in drawn.items():
            (DIRECTORY / name).write_text(text, encoding="utf-8")
        return 0
    there = {path.name: path.read_text(encoding="utf-8") for path in DIRECTORY.iterdir()}
    different = sorted(name for name in there.keys() | drawn.keys() if there.get(name) != drawn.get(name))
    for name in different:
        print(f"{DIRECTORY / name} is not what is drawn now: python scripts/bench/charts.py", file=sys.stderr)
    return 1 if different else 0


def draw_all() -> dict[str, str]:
    """File name -> SVG."""
    results, counts, resumes = (_read(name) for name in ("results", "hub_requests", "resume"))
    drawn: dict[str, str] = {}
    for palette in PALETTES:
        charts = {name: draw_ratios(chart, results[chart.question], palette) for name, chart in CHARTS.items()}
        charts |= {f"wire-{over}": draw_wire(counts, over, palette) for over in SERVERS}
        charts["resumes"] = draw_grid(resumes, palette)
        drawn |= {f"{name}-{palette.name}.svg": text for name, text in charts.items()}
    return drawn


def _read(name: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
    return figures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
