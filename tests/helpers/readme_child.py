"""Run the examples of one README in order, in one namespace: `readme_child.py README`, in an empty directory."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

from tests.helpers.readme_examples import Example, examples_of, hfshard_commands, needs_the_network


def run_python(example: Example, readme: Path, namespace: dict[str, Any]) -> None:
    """Execute a block; a traceback shows the README's own lines."""
    code = compile("\n" * (example.line - 1) + example.text, str(readme), "exec", dont_inherit=True)
    exec(code, namespace)


def run_commands(example: Example) -> None:
    """Run each `hfshard` command of a block, which must not fail; of those that need the network, and
    of `hfshard run`, the arguments are parsed alone.
    """
    from hfshard.cli.arguments import make_parser
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


if __name__ == "__main__":
    run_examples(Path(sys.argv[1]))
