"""The examples in docstrings, and the public functions and methods that may have one."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_HUB_REPOS = re.compile(r"(?<=\")(?:/srv/models/)?org/(?:name|repo)(?=\")")
"""How docstrings call a repository; there is no network in tests."""


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
    return _HUB_REPOS.sub("./hub/model", example)


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
