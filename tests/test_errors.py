"""Every error has the bases and the data that its callers expect, and a message that a terminal can show."""

from __future__ import annotations

import builtins
import errno
import re
from pathlib import Path

import pytest

from hfshard import errors
from hfshard.errors import (
    AccessDeniedError,
    CommitUndoneError,
    FileError,
    HfshardError,
    NotEnoughSpaceError,
    StateDictMismatchError,
    StoreConnectionError,
    escaped,
    printable_message,
    repair_hint,
)


def tree() -> dict[str, list[str]]:
    """Error -> its bases, as the docstring of `errors.py` draws them."""
    above = ["HfshardError"]
    drawn = {}
    for stem, name, builtin in re.findall(r"^([│ ]*)[├└]── (\w+)(?: \((\w+)\))? ", errors.__doc__ or "", re.MULTILINE):
        depth = len(stem) // 4 + 1
        drawn[name] = [above[depth - 1], *filter(None, [builtin])]
        above[depth:] = [name]
    return drawn


def test_the_tree_in_the_docstring_is_that_of_the_classes() -> None:
    classes = [cls for cls in vars(errors).values() if getattr(cls, "__module__", None) == errors.__name__]
    raised = [cls for cls in classes if isinstance(cls, type) and cls is not HfshardError]

    assert tree() == {cls.__name__: [base.__name__ for base in cls.__bases__] for cls in raised}
    assert all(hasattr(builtins, bases[1]) for bases in tree().values() if len(bases) == 2)


def test_an_error_carries_its_data_and_is_shown_by_its_message_alone() -> None:
    error = FileError("it is full", path=Path("/ckpt/x"), fqn="a.b", expected=1, actual=2)

    assert (error.path, error.fqn, error.expected, error.actual) == ("/ckpt/x", "a.b", 1, 2)
    assert str(error) == error.message == "it is full"
    assert HfshardError("text").path is None


def test_errors_of_the_system_have_its_numbers() -> None:
    assert NotEnoughSpaceError("full").errno == errno.ENOSPC
    assert AccessDeniedError("no").errno == errno.EACCES
    assert CommitUndoneError("failed", error_number=errno.EIO).errno == errno.EIO
    assert CommitUndoneError("failed").errno is None


def test_a_mismatch_names_nothing_unless_told_and_a_store_may_not_have_done_it() -> None:
    mismatch = StateDictMismatchError("no", missing_keys=("a",), fqn="a")

    assert (mismatch.missing_keys, mismatch.unexpected_keys, mismatch.mismatched_keys) == (("a",), (), ())
    assert mismatch.fqn == "a"
    assert StoreConnectionError("no answer").may_be_done is False


def test_what_moves_the_cursor_is_escaped_and_lines_stay_lines() -> None:
    message = "first\nit is \x1b[31mred\u202e and \udcff, é stays\t"

    assert str(HfshardError(message)) == "first\nit is \\x1b[31mred\\u202e and \\udcff, é stays\\t"
    assert escaped("a\nb", keep="") == "a\\nb"


def test_a_word_of_1200_characters_is_cut_in_the_middle() -> None:
    assert printable_message("x" * 1199) == "x" * 1199
    assert (
        printable_message("see " + "x" * 700 + "y" * 500 + " there") == "see " + "x" * 200 + "…" + "y" * 100 + " there"
    )


def test_a_message_of_more_than_4000_characters_keeps_its_ends() -> None:
    head, tail = "head " * 600, "tail " * 180  # 3,000 and 900

    assert printable_message(head + "x " * 50 + tail) == head + "x " * 50 + tail
    assert printable_message(head + "x " * 51 + tail) == head + " … " + tail


@pytest.mark.parametrize(
    ("path", "folder"), [("/ckpt/model.safetensors", "/ckpt"), ("model.safetensors", "."), ("s3://b/p/x", "s3://b/p")]
)
def test_the_remedy_is_to_check_the_folder_of_the_file(path: str, folder: str) -> None:
    assert repair_hint(path) == f"Download or save it again, or run 'hfshard verify {folder}'."
