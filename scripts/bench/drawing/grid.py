"""A chart of resumes: a row for each case, a cell for each way, with a word in it."""

from __future__ import annotations

from typing import Any

from bench.drawing.svg import MARGIN, SMALL, WIDTH, Drawing, Palette, heading
from bench.resumes.cases import CASES, WAYS

LABELS = {
    "augmentation": "augmentation by three random generators",
    "reordered": "parameters in another order afterwards",
    "user-schedule": "a scheduler that holds its own method",
    "full-disk": "a full disk, one checkpoint kept",
}
"""Cases whose title in RESUME.md is too long for the chart."""
HALVES = {
    "without hfshard": ("torch.save", "Trainer", "Accelerate"),
    "with hfshard": ("alone", "Trainer", "Accelerate"),
}
"""What stands above the columns, which are the ways in their order."""
WORDS = {
    "exact": ("good", "exact"),
    "resumes": ("good", "resumes"),
    "weights exact": ("silent", "RNGs ≠"),
    "differs": ("silent", "differs"),
    "silently wrong": ("silent", "wrong"),
    "error": ("loud", "error"),
    "crash": ("loud", "crash"),
    "–": ("none", "–"),
}
"""How the outcome of a cell begins -> how it looks, and its word."""
LEGEND = (
    ("good", "bit for bit; of damaged ones, the one before"),
    ("silent", "goes on with another result, silently"),
    ("loud", "refuses, or ends by an exception"),
)
GAP, CELL, ROW = 4, 18, 42
COLUMN = (WIDTH - 2 * MARGIN + GAP) / len(WAYS)


def draw_grid(results: dict[str, Any], palette: Palette) -> str:
    """The SVG of all resumes."""
    drawing = Drawing(palette)
    top = heading(drawing, "Which resumes are exact", "trainings, killed and resumed in a new process")
    heads = [(half, words) for half, columns in HALVES.items() for words in columns]
    for number, (half, words) in enumerate(heads):
        left = MARGIN + number * COLUMN
        if words == HALVES[half][0]:
            drawing.text(left, top + 12, half, size=SMALL, bold=True)
        drawing.text(left + (COLUMN - GAP) / 2, top + 28, words, size=SMALL, anchor="middle", fill=palette.muted)
    top += 34
    for name, case in CASES.items():
        drawing.text(MARGIN, top + 14, LABELS.get(name, case.title))
        for number, way in enumerate(WAYS):
            _draw_cell(drawing, name, way, results["cells"][name][way][0], MARGIN + number * COLUMN, top + 19)
        top += ROW
    for look, words in LEGEND:
        top += 18
        drawing.rectangle(MARGIN, top - 10, 12, 12, getattr(palette, look)[0])
        drawing.text(MARGIN + 19, top, words, size=SMALL)
    return drawing.finish(top + MARGIN, "Which resumes are exact", _describe(results["cells"]))


def look_of(outcome: str) -> tuple[str, str]:
    """How a cell looks, and its word.

    Raises:
        KeyError: The outcome is none that is known.
    """
    for beginning, look in WORDS.items():
        if outcome.startswith(beginning):
            return look
    raise KeyError(outcome)


def _draw_cell(drawing: Drawing, case: str, way: str, outcome: str, x: float, y: float) -> None:
    look, word = look_of(outcome)
    fill, text = getattr(drawing.palette, look) if look != "none" else (drawing.palette.page, drawing.palette.muted)
    drawing.begin(case=case, way=way, outcome=outcome)
    drawing.rectangle(round(x, 1), y, COLUMN - GAP, CELL, fill, note=f"{way}: {outcome}")
    drawing.text(round(x + (COLUMN - GAP) / 2, 1), y + 13, word, size=SMALL, anchor="middle", fill=text)
    drawing.end()


def _describe(cells: dict[str, dict[str, list[str]]]) -> str:
    lines = (
        f"{case.title}: " + ", ".join(f"{way} {cells[name][way][0]}" for way in WAYS) for name, case in CASES.items()
    )
    return "; ".join(lines) + "."
