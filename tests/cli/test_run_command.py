"""Which words are hfshard's, and which are Python's and the program's."""

from __future__ import annotations

import pytest

from hfshard.cli.run_command import split_command_line, split_python_options


@pytest.mark.parametrize(
    ("words", "own", "program"),
    [
        ("run train.py --verify full", "run", "train.py --verify full"),
        ("run --quiet --verify full train.py --quiet", "run --quiet --verify full", "train.py --quiet"),
        ("run --verify=full -m pkg -h", "run --verify=full", "-m pkg -h"),
        ("run --checksum xxh3 -- train.py -- x", "run --checksum xxh3", "train.py -- x"),
        ("run -- --odd.py", "run", "--odd.py"),
        ("run -h train.py", "run -h", "train.py"),
        ("run -", "run", "-"),
        ("run", "run", ""),
        ("run --verify", "run --verify", ""),
        ("verify run --format json", "verify run --format json", ""),
        ("", "", ""),
    ],
)
def test_own_words_end_where_the_program_begins(words: str, own: str, program: str) -> None:
    assert split_command_line(words.split()) == (own.split(), program.split())


@pytest.mark.parametrize(
    ("words", "options", "program", "letters"),
    [
        ("train.py -I", "", "train.py -I", ""),
        ("-X dev -Werror -u train.py", "-X dev -Werror -u", "train.py", "XWu"),
        ("-uW error - -E", "-uW error", "- -E", "uW"),
        ("-XE -Im pkg.module -S", "-XE -I", "-m pkg.module -S", "XI"),
        ("-bbmpkg x", "-bb", "-mpkg x", "bb"),
        ("-c print() -c", "", "-c print() -c", ""),
        ("-u -- -m", "-u", "-m", "u"),
        ("-W", "-W", "", "W"),
    ],
)
def test_options_of_python_end_as_python_reads_them(words: str, options: str, program: str, letters: str) -> None:
    assert split_python_options(words.split()) == (options.split(), program.split(), letters)
