"""The one shape of the Markdown that benchmarks write: tables, sections and the marked blocks of READMEs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

README_END = "<!-- /measured -->"


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out rows of cells below their titles."""
    return "\n".join([_line(titles), "|---" * len(titles) + "|", *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def paragraphs(*parts: str) -> str:
    """Join what is not empty, with an empty line between."""
    return "\n\n".join(filter(None, parts))


def readme_begin(command: str) -> str:
    """The comment that a README's measured block begins with; the command prints the block."""
    return f"<!-- measured: {command} -->"


def readme_block(command: str, head: str, table: str) -> str:
    """A README's measured block, between its comments."""
    return "\n".join([readme_begin(command), head, "", table, README_END])
