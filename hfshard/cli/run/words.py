"""Which words of `hfshard run` are hfshard's own, which are Python's options, and which are the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

COMMAND: Final = "run"
OPTIONS_WITH_VALUE: Final = ("--verify", "--checksum")
"""hfshard's own; all others, such as `--quiet`, stand alone."""
_PROGRAM_LETTERS: Final = "mc"
"""Options of Python that end its options: what follows is the program's."""
_LETTERS_WITH_VALUE: Final = "WX"


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cut `run --quiet train.py --verify` behind hfshard's own words; those of the program may look like them.

    Args:
        words: The arguments of `hfshard`.

    Returns:
        Those for hfshard, and those for Python, which are none for any command but `run`.
    """
    if list(words[:1]) != [COMMAND]:
        return list(words), []
    end = 1
    while end < len(words) and (words[end].startswith("--") or words[end] == "-h"):
        if words[end] == "--":
            return list(words[:end]), list(words[end + 1 :])
        end += 2 if words[end] in OPTIONS_WITH_VALUE else 1
    return list(words[:end]), list(words[end:])


def split_python_options(words: Sequence[str]) -> tuple[list[str], list[str], str]:
    """Cut the words for Python behind its options.

    Args:
        words: As Python takes them: `-X dev -um MODULE`, `-W error SCRIPT`.

    Returns:
        The options alone; the program, beginning with `-m`, `-c`, `-` or a path; the letters of the options
        (`XuW`). A program's letter that stands with others (`-um`) is cut from them.
    """
    options: list[str] = []
    letters = ""
    left = list(words)
    while left and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        if word == "--":
            break
        for position, letter in enumerate(word[1:], start=1):
            if letter in _PROGRAM_LETTERS:
                if position > 1:
                    options.append(word[:position])
                return options, ["-" + word[position:], *left], letters
            letters += letter
            if letter in _LETTERS_WITH_VALUE:
                value = [] if word[position + 1 :] else left[:1]
                options += [word, *value]
                left = left[len(value) :]
                break
        else:
            options.append(word)
    return options, left, letters
