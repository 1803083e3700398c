"""The examples in READMEs and docstrings; `python -m tests.helpers.examples README` runs those of one README in order.

It runs them in one namespace, in an empty directory, as a reader would who types one after another.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HUB_REPO = re.compile(r"org/\w+(@\w+)?")
"""The name that our READMEs give a repository of the Hugging Face Hub."""
_DOCSTRING_REPOS = re.compile(r"(?<=\")(?:/srv/models/)?org/(?:name|repo)(?=\")")
"""How docstrings call a repository; there is no network in tests."""


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


def run_python(example: Example, readme: Path, namespace: dict[str, Any]) -> None:
    """Execute a block; a traceback shows the README's own lines."""
    code = compile("\n" * (example.line - 1) + example.text, str(readme), "exec", dont_inherit=True)
    exec(code, namespace)


def run_commands(example: Example) -> None:
    """Run each `hfshard` command of a block, which must not fail; of those that need the network, and
    of `hfshard run`, the arguments are parsed alone.
    """
    from hfshard.cli.main import make_parser
    from hfshard.cli.run_command import split_command_line

    for words in hfshard_commands(example):
        own, program = split_command_line(words[1:])
        if needs_the_network(words) or program:
            make_parser().parse_args(own)
        else:
            run_command(words, example.line)


def run_command(words: list[str], line: int) -> str:
    """Run one `hfshard` command, which must exit with 0 (`diff`: or 1), and return what it prints."""
    from hfshard.cli.main import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(words[1:])
    if code not in ((0, 1) if words[1] == "diff" else (0,)):
        raise SystemExit(f"line {line}: {' '.join(words)}: exit {code}\n{printed.getvalue()}")
    return printed.getvalue()


def check_transcript(example: Example) -> None:
    """Run the command of a block that begins with "$ hfshard"; it must print the lines below, down to a "..."."""
    command, _, shown = example.text.partition("\n")
    expected = shown.partition("\n...")[0].rstrip("\n")
    printed = run_command(command.removeprefix("$ ").split(), example.line)
    if not printed.startswith(expected):
        raise SystemExit(f"line {example.line}: {command} prints\n{printed}")


def run_examples(readme: Path) -> None:
    """Run all blocks of a README, as a reader would who types one after another."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for example in examples_of(readme):
        if example.language == "python":
            run_python(example, readme, namespace)
        elif example.language == "bash":
            run_commands(example)
        elif example.text.startswith("$ hfshard"):
            check_transcript(example)


def example_of(docstring: str | None) -> str:
    """The code of a docstring: its indented paragraphs, with or without a heading `Example:`; "" where it has none."""
    code = []
    for paragraph in re.split(r"\n[ ]*\n", inspect.cleandoc(docstring or "")):
        lines = paragraph.removeprefix("Example:\n").splitlines()
        if all(line.startswith("    ") for line in lines):
            code.append(_without_prompts(textwrap.dedent("\n".join(lines))))
    return "\n\n".join(code)


def _without_prompts(text: str) -> str:
    """Code as it is, or the lines of an interactive session that were typed."""
    if not text.startswith(">>> "):
        return text
    return "\n".join(line[4:] for line in text.splitlines() if line.startswith((">>> ", "... ")))


def with_local_hub(example: str) -> str:
    """The same example with a directory in place of a repository of the Hugging Face Hub."""
    return _DOCSTRING_REPOS.sub("./hub/model", example)


def public_members(package: ModuleType) -> Iterator[tuple[str, Any]]:
    """The public functions and classes of a package, and the public methods of the classes, by their dotted names."""
    for name in package.__all__:
        member = getattr(package, name)
        if inspect.isfunction(member) or inspect.isclass(member):
            yield f"{package.__name__}.{name}", member
        if inspect.isclass(member):
            yield from _methods(f"{package.__name__}.{name}", member)


def _methods(prefix: str, cls: type) -> Iterator[tuple[str, Any]]:
    ours = [base for base in cls.__mro__ if base.__module__.startswith("hfshard.")]
    for name in sorted({name for base in ours for name in vars(base) if not name.startswith("_")}):
        method = inspect.getattr_static(cls, name)
        function = method.__func__ if isinstance(method, classmethod | staticmethod) else method
        if inspect.isfunction(function):
            yield f"{prefix}.{name}", function


if __name__ == "__main__":
    run_examples(Path(sys.argv[1]))
