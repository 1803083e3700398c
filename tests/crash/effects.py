"""What the system calls of a trace do to a directory: files made, written, flushed, named, unnamed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tests.crash.tracer import OPENING, Call

_FD = re.compile(r"^\d+<([^>]*)>")
_RESULT_FD = re.compile(r"= \d+<([^>]*)>$")
_PATH = re.compile(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"((?:[^"\\]|\\.)*)"')

WRITES = {"write", "pwrite64", "writev", "pwritev", "pwritev2", "ftruncate", "fallocate", "copy_file_range", "sendfile"}


@dataclass(frozen=True, slots=True)
class Effect:
    """One change, or one flush.

    Attributes:
        kind: "open" (for writing), "create", "write", "sync", "rename", "link", "unlink", "mkdir" or "rmdir".
        path: What it happens to.
        target: The new name, of a rename or a link.
    """

    kind: str
    path: str
    target: str = ""

    def __str__(self) -> str:
        words = os.path.basename(self.path)
        return f"{self.kind} {words} -> {os.path.basename(self.target)}" if self.target else f"{self.kind} {words}"


def effect_of(call: Call) -> Effect | None:
    """The effect of one call; None where it failed or changes nothing of a file's bytes or names."""
    text, name = call.text, call.name
    if " = -1 " in text or text.endswith("= ?"):
        return None
    if name in OPENING:
        found = _RESULT_FD.search(text)
        if found is None or re.search(r"O_(WRONLY|RDWR|TRUNC|CREAT)", text) is None:
            return None
        return Effect("create" if "O_CREAT" in text and "O_EXCL" in text else "open", found[1])
    if name in WRITES or name in ("fsync", "fdatasync"):
        found = _FD.match(text)
        # copy_file_range and sendfile name the file that they read too; which is which does not matter for one save
        return None if found is None else Effect("write" if name in WRITES else "sync", found[1])
    paths = [os.path.normpath(os.path.join(base or "/", path)) for base, path in _PATH.findall(text)]
    if name.startswith(("rename", "link")) and len(paths) == 2:
        return Effect("rename" if name.startswith("rename") else "link", paths[0], paths[1])
    if name.startswith("unlink"):
        return Effect("rmdir" if "AT_REMOVEDIR" in text else "unlink", paths[0])
    if name.startswith("mkdir") or name == "rmdir":
        return Effect("rmdir" if name == "rmdir" else "mkdir", paths[0])
    return None


def effects_of(calls: Iterable[Call]) -> list[Effect]:
    """The effects of a trace, in order."""
    return [effect for effect in map(effect_of, calls) if effect is not None]


def disorder(effects: Iterable[Effect], directory: str, existing: set[str]) -> list[str]:
    """Where a power cut could undo what a later step relies on; empty when nowhere.

    Args:
        effects: Of one whole save.
        directory: The save directory.
        existing: Paths of the files that lay in it before.

    Returns:
        A sentence for every breach of one of these rules: a file has its bytes on disk before it gets a name in the
        directory; new names are on disk before a file is replaced, and before the weights that an index names; all
        names are on disk before a file that was there is removed, and at the end; a directory that was made is on disk
        before anything is put into it; and nothing that was there is opened for writing.
    """
    found: list[str] = []
    unflushed: set[str] = set()
    pending: list[tuple[Effect, bool]] = []  # a change of names, and whether it gave a name that was free
    made: list[str] = []
    names = set(existing)
    for effect in effects:
        if effect.kind == "open" and effect.path in names:
            found.append(f"opens {effect.path} for writing, which a live model may have mapped")
        if effect.kind in ("create", "open", "write"):
            unflushed.add(effect.path)
        elif effect.kind == "sync":
            unflushed.discard(effect.path)
            made = [path for path in made if os.path.dirname(path) != effect.path]
            if effect.path == directory:
                pending = []
        elif effect.kind == "mkdir" and (directory == effect.path or directory.startswith(effect.path + "/")):
            made.append(effect.path)
        elif effect.kind in ("rename", "link") and os.path.dirname(effect.target) == directory:
            found += _breaches_of_naming(effect, unflushed, pending, made, names)
            pending.append((effect, effect.target not in names))
            names.add(effect.target)
            if effect.kind == "rename":
                names.discard(effect.path)
        elif effect.kind == "unlink" and os.path.dirname(effect.path) == directory:
            found += [f"{effect} before '{one}' is on disk" for one, _ in pending if one.kind != "unlink"]
            pending.append((effect, False))
            names.discard(effect.path)
    found += [f"at the end '{one}' is not on disk" for one, _ in pending]
    found += [f"at the end '{os.path.basename(path)}' is not on disk" for path in made]
    return found


def _breaches_of_naming(
    effect: Effect, unflushed: set[str], pending: list[tuple[Effect, bool]], made: list[str], names: set[str]
) -> list[str]:
    found = [f"{effect} before its bytes are on disk"] if effect.path in unflushed else []
    found += [f"{effect} before the directory {path} is on disk" for path in made]
    for one, was_free in pending:
        is_part = effect.target in names and was_free and one.target.endswith(".safetensors")
        is_guard = effect.target.endswith(".safetensors") and one.target.endswith(".json")
        if is_part or is_guard:
            found.append(f"{effect} before '{one}' is on disk")
    return found
