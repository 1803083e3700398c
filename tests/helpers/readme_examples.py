"""The fenced blocks of a README, and the commands in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HUB_REPO = re.compile(r"org/\w+(@\w+)?")
"""The name that our READMEs give a repository of the Hugging Face Hub."""


@dataclass(frozen=True)
class Example:
    """One fenced block."""

    language: str
    text: str
    line: int
    """Number of its first line in the README, from 1."""


def examples_of(readme: Path) -> list[Example]:
    """All fenced blocks that name a language, in order."""
    text = readme.read_text(encoding="utf-8")
    return [
        Example(found[1], found[2], line=text.count("\n", 0, found.start(2)) + 1) for found in _BLOCK.finditer(text)
    ]


def blocks_of(readme: Path, language: str) -> list[str]:
    """The texts of the blocks of one language."""
    return [example.text for example in examples_of(readme) if example.language == language]


def command_lines(example: Example) -> list[list[str]]:
    """The words of each command of a block, without comments."""
    joined = example.text.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def hfshard_commands(example: Example) -> list[list[str]]:
    """Those that run hfshard."""
    return [words for words in command_lines(example) if words[0] == "hfshard"]


def needs_the_network(words: list[str]) -> bool:
    """Whether a command speaks to a repository of the Hub."""
    return any(_HUB_REPO.fullmatch(word) for word in words)
