"""What a power cut may leave: the effects of system calls, and a disk that keeps what was flushed, and some more.

A file's bytes are safe once it was flushed; names in a directory once the directory was. Of the rest, any part may
have reached the disk, in any order: a name without the change before it, or a file without its bytes.
"""

from __future__ import annotations

import itertools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.sweeps.child import OPENING, Call
from tests.sweeps.engine import Tree

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


ALL_SUBSETS = 4
"""Up to so many unflushed changes of names, every subset of them is tried: 16."""


@dataclass(slots=True, eq=False)
class File:
    """A file.

    Attributes:
        latest: Its bytes as the running system sees them.
        safe: Its bytes when it was flushed; empty before that.
    """

    latest: bytes = b""
    safe: bytes = b""

    def part(self, share: float) -> bytes:
        """What is left of it when so much of the bytes that were not flushed has reached the disk."""
        if share == 1 or self.safe == self.latest:
            return self.latest
        return self.safe + self.latest[len(self.safe) :][: int(share * (len(self.latest) - len(self.safe)))]


@dataclass(slots=True, eq=False)
class Directory:
    """A directory.

    Attributes:
        names: Name -> file or directory, as the running system sees it.
        durable: The same as it is on the disk for sure.
        pending: Changes that may have reached the disk or not; each is of one or more names that go together.
    """

    names: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def flush(self) -> None:
        """Make its names safe."""
        for change in self.pending:
            for directory, name, node in change:
                set_name(directory.durable, name, node)
        self.pending = []

    def durable_after(self, changes: Iterable[Change]) -> dict[str, Node]:
        """The names on the disk where some changes have reached it."""
        names = dict(self.durable)
        for change in changes:
            for directory, name, node in change:
                if directory is self:
                    set_name(names, name, node)
        return names


Node = Directory | File

Change = Sequence[tuple[Directory, str, Node | None]]
"""(directory, name, what it is then); a rename between directories is of two of them."""


def set_name(names: dict[str, Node], name: str, node: Node | None) -> None:
    """Give a name to a node; None: remove the name."""
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def subsets(count: int, most: int = ALL_SUBSETS) -> Iterator[Sequence[int]]:
    """Which of `count` changes are done: all subsets of up to `most`; of more none, one, all but one, the first ones.

    With `most` 0: none, all, or the first half of them.
    """
    everything = range(count)
    if count <= most:
        for size in range(count + 1):
            yield from itertools.combinations(everything, size)
        return
    yield ()
    yield everything
    if not most:
        yield range(count // 2)
        return
    for place in everything:
        yield [place]
        yield [other for other in everything if other != place]
        yield range(place)


class Disk(ABC):
    """A directory, and what the calls of a process do to it.

    Args:
        template: The directory before; it may be missing.
    """

    def __init__(self, template: Path) -> None:
        self.is_there = template.exists()
        self.root = _read(template) if self.is_there else Directory()
        self.made: list[File] = []

    def take(self, effect: Effect, contents: Mapping[str, bytes]) -> None:
        """Do what a call did.

        Args:
            effect: With paths below the directory; "." is the directory.
            contents: Path -> bytes that it holds now.
        """
        if effect.kind == "mkdir" and effect.path == ".":
            self.is_there = True
        if effect.path.startswith(".."):
            return
        self._take_names(effect)
        for path, file in files_in(self.root):
            file.latest = contents.get(path, file.latest)
        node = self.find(effect.path)
        if effect.kind == "sync" and isinstance(node, File):
            node.safe = node.latest
        elif effect.kind == "sync" and isinstance(node, Directory):
            node.flush()

    def _take_names(self, effect: Effect) -> None:
        path, node = effect.path, self.find(effect.path)
        if effect.kind in ("create", "open") and node is None:
            made = File(self.first_bytes(len(self.made)))
            self.made.append(made)
            self.change((path, made))
        elif effect.kind == "mkdir" and node is None:
            self.change((path, Directory()))
        elif effect.kind in ("unlink", "rmdir"):
            self.change((path, None))
        elif effect.kind == "link" and node is not None:
            self.change((effect.target, node))
        elif effect.kind == "rename" and node is not None:
            self.change((effect.target, node), (path, None))

    def first_bytes(self, number: int) -> bytes:
        """What is in the file that is made as number `number`, from 0."""
        return b""

    @abstractmethod
    def change(self, *names: tuple[str, Node | None]) -> None:
        """Change the nodes of some paths together."""

    def change_of(self, names: Iterable[tuple[str, Node | None]]) -> Change:
        """Change the names as the running system sees them; return the change that may have reached the disk."""
        change = [(self._parent(path), os.path.basename(path), node) for path, node in names]
        for directory, name, node in change:
            set_name(directory.names, name, node)
        return change

    def find(self, path: str) -> Node | None:
        """What a path names now."""
        node: Node | None = self.root
        for part in [] if path == "." else path.split("/"):
            node = node.names.get(part) if isinstance(node, Directory) else None
        return node

    def _parent(self, path: str) -> Directory:
        found = self.find(os.path.dirname(path) or ".")
        if not isinstance(found, Directory):
            raise RuntimeError(f"{path} is not below a directory that the trace has shown.")
        return found

    @abstractmethod
    def cuts(self) -> Iterator[Tree]:
        """Every directory that a power cut may leave now."""


def _read(path: Path) -> Directory:
    names: dict[str, Node] = {}
    for entry in path.iterdir():
        data = b"" if entry.is_dir() else entry.read_bytes()
        names[entry.name] = _read(entry) if entry.is_dir() else File(data, data)
    return Directory(names, dict(names))


def files_in(directory: Directory, above: str = "") -> Iterator[tuple[str, File]]:
    """(path, file) of every file below, as the running system sees them."""
    for name, node in directory.names.items():
        if isinstance(node, Directory):
            yield from files_in(node, f"{above}{name}/")
        else:
            yield f"{above}{name}", node


def below(effect: Effect, directory: Path) -> Effect:
    """The same effect with paths below a directory; "." is that directory."""
    path = os.path.relpath(effect.path, directory)
    return Effect(effect.kind, path, os.path.relpath(effect.target, directory) if effect.target else "")


class SaveDisk(Disk):
    """A save directory. No reader looks below it, so that changes there are taken as done."""

    def change(self, *names: tuple[str, Node | None]) -> None:
        """Change names; those of files in the save directory itself may not have reached the disk."""
        change = self.change_of(names)
        path, node = names[0]
        if "/" in path or isinstance(node, Directory):
            for directory, name, one in change:
                set_name(directory.durable, name, one)
        else:
            self.root.pending.append(change)

    def cuts(self) -> Iterator[Tree]:
        """For each choice of changes: every file as it was written last, and every file as it was flushed last."""
        for chosen in subsets(len(self.root.pending)):
            files = dict(_files_left(self.root, [self.root.pending[place] for place in chosen]))
            yield {path: file.part(1) for path, file in files.items()}
            yield {path: file.part(0) for path, file in files.items()}


def _files_left(directory: Directory, changes: Sequence[Change], above: str = "") -> Iterator[tuple[str, File]]:
    for name, node in directory.durable_after(changes).items():
        if isinstance(node, Directory):
            yield from _files_left(node, changes, f"{above}{name}/")
        else:
            yield f"{above}{name}", node


SHARES = (0.0, 0.5, 1.0)
"""How much of the bytes that were not flushed has reached the disk, of every file of a directory alike."""

_MADE = re.compile(r'"((?:[^"\\]|\\.)*)", \S*O_CREAT')


class RunDisk(Disk):
    """A run's directory.

    Args:
        template: The directory before.
        contents: The bytes that the files get, in the order in which they are made.
    """

    def __init__(self, template: Path, contents: Sequence[bytes] = ()) -> None:
        super().__init__(template)
        self.contents = contents

    def first_bytes(self, number: int) -> bytes:
        """All that it will hold: how it was written bit by bit is not told apart."""
        return self.contents[number] if self.contents else b""

    def change(self, *names: tuple[str, Node | None]) -> None:
        """Change names; they are all of one directory."""
        change = self.change_of(names)
        directory = change[0][0]
        if any(other is not directory for other, _, _ in change):
            raise RuntimeError(f"A rename into another directory: {names}")
        directory.pending.append(change)

    def cuts(self) -> Iterator[Tree]:
        """Choices of changes for each directory on its own, and of so much of the bytes of its files."""
        if self.is_there:
            yield from _cuts_of_each(self.root, "", is_root=True)


def _cuts_of_each(directory: Directory, path: str, *, is_root: bool) -> Iterator[dict[str, bytes | None]]:
    for chosen in subsets(len(directory.pending), ALL_SUBSETS if is_root else 0):
        names = directory.durable_after([directory.pending[place] for place in chosen])
        plain = [_plain(names, path, share) for share in SHARES]
        inner = [
            list(_cuts_of_each(node, f"{path}{name}/", is_root=False))
            for name, node in names.items()
            if isinstance(node, Directory)
        ]
        for trees in itertools.product(plain, *inner):
            yield {key: value for tree in trees for key, value in tree.items()}


def _plain(names: dict[str, Node], path: str, share: float) -> dict[str, bytes | None]:
    """A directory and its files, without the directories in it."""
    tree: dict[str, bytes | None] = {path: None} if path else {}
    for name, node in names.items():
        if isinstance(node, File):
            tree[f"{path}{name}"] = node.part(share)
    return tree


def cuts(
    disk: Disk, effects: Sequence[Effect | None], contents: Callable[[int], Mapping[str, bytes]] = lambda ordinal: {}
) -> Iterator[tuple[int, Tree, bool]]:
    """What a power cut may leave: (place of the effect, directory, whether this is after the last one).

    Args:
        disk: As it is before; it is used up.
        effects: In order; None where a call has none.
        contents: Path -> bytes that it holds after the effect at a place.
    """
    last = max(ordinal for ordinal, effect in enumerate(effects) if effect is not None)
    for ordinal, effect in enumerate(effects):
        if effect is None:
            continue
        disk.take(effect, contents(ordinal))
        for tree in disk.cuts():
            yield ordinal, tree, ordinal == last


def effect_below(call: Call, directory: Path) -> Effect | None:
    """The effect of a call below a directory, of one that another thread's call cuts in two in the trace, too."""
    if call.name in OPENING and "unfinished" in call.text and (made := _MADE.search(call.text)):
        return below(Effect("create", made[1]), directory)
    effect = effect_of(call)
    return below(effect, directory) if effect else None
