"""One case of the fuzzer: a number that decides what is changed, and how it is read."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from hfshard.errors import HfshardError
from hfshard.format.strict_json import dump_json
from hfshard.hub.directory.commit_graph import commit_id
from tests.attacks.files import raw
from tests.attacks.fuzz.bases import Base
from tests.attacks.fuzz.mutators import mutated
from tests.attacks.fuzz.readers import read
from tests.attacks.watch import where
from tests.training.run import hostile

CPU_SECONDS = 10.0
"""Of one case; a good one takes a few milliseconds."""


class TooSlowError(BaseException):
    """A reader went on computing; not an Exception, so that nothing takes it for damage."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case."""

    number: int
    base: str
    file: str
    reader: str
    kind: str
    """"refused", "right", "wrong", "raw" (another error) or "slow"."""
    detail: str = ""


class Fuzzer:
    """The bases in a directory, to be damaged case by case."""

    def __init__(self, bases: dict[str, Base], folder: Path, seed: int) -> None:
        self.bases = list(bases.values())
        self.folder = folder
        self.seed = seed
        self.contents = [content for base in self.bases for content in base.files.values()]
        self.restore()

    def restore(self) -> None:
        """Write all files of all bases anew."""
        for base in self.bases:
            shutil.rmtree(self.folder / base.name, ignore_errors=True)
            raw.write(self.folder / base.name, base.files)

    def run(self, number: int) -> Outcome:
        """Change one file, read, and put it back."""
        random = Random(self.seed * 1_000_003 + number)
        base = random.choice(self.bases)
        reader = random.choice(base.readers)
        file = random.choice(base.targets)
        with self._damaged(random, base, file) as file, _cpu_limit():
            return _outcome(number, base, file, reader, self.folder / base.name)

    def describe(self, number: int) -> dict[str, bytes]:
        """The files that a case changes, as it changes them."""
        random = Random(self.seed * 1_000_003 + number)
        base = random.choice(self.bases)
        random.choice(base.readers)
        with self._damaged(random, base, random.choice(base.targets)):
            found = raw.files_in(self.folder / base.name)
        return {name: content for name, content in found.items() if base.files.get(name) != content}

    def _put(self, base: Base, name: str) -> None:
        raw.write(self.folder / base.name, {name: base.files[name]})

    @contextmanager
    def _damaged(self, random: Random, base: Base, file: str) -> Iterator[str]:
        root = self.folder / base.name
        if base.sealed:
            with self._sealed(random, base, root) as file:
                yield file
            return
        (root / file).write_bytes(mutated(random, base.files[file], self.contents))
        try:
            yield file
        finally:
            self._put(base, file)

    @contextmanager
    def _sealed(self, random: Random, base: Base, root: Path) -> Iterator[str]:
        """Change what stands in JSON, with every checksum over it right."""
        commits = [name for name in base.files if name.startswith("commits/")]
        if commits:
            with self._sealed_commit(random, base, root, commits[0]) as file:
                yield file
            return
        (checkpoint,) = {root / name.split("/")[0] for name in base.files if name.endswith(hostile.MANIFEST)}
        below = checkpoint.name
        file = random.choice((hostile.MANIFEST, hostile.TRAINING_STATE))
        if file == hostile.MANIFEST:
            hostile.write_manifest(checkpoint, _changed(random, hostile.manifest_of(checkpoint)))
        else:
            hostile.write_training_state(checkpoint, _changed(random, hostile.training_state_of(checkpoint)))
        try:
            yield f"{below}/{file}"
        finally:
            for name in (hostile.MANIFEST, hostile.TRAINING_STATE):
                self._put(base, f"{below}/{name}")

    @contextmanager
    def _sealed_commit(self, random: Random, base: Base, root: Path, file: str) -> Iterator[str]:
        old = Path(file).stem
        changed = mutated(random, base.files[file], self.contents)
        new = commit_id(changed)
        (root / f"commits/{new}.json").write_bytes(changed)
        if new != old:
            (root / f"snapshots/{old}").rename(root / f"snapshots/{new}")
            (root / file).unlink()
        refs = [name for name in base.files if name.startswith("refs/")]
        for name in refs:
            (root / name).write_text(f"{new}\n")
        try:
            yield file
        finally:
            if new != old:
                (root / f"snapshots/{new}").rename(root / f"snapshots/{old}")
                (root / f"commits/{new}.json").unlink()
            for name in (*refs, file):
                self._put(base, name)


def _changed(random: Random, value: dict[str, Any]) -> dict[str, Any]:
    """A changed object whose checksum can be taken."""
    for _ in range(20):
        if random.random() < 0.5:
            made: Any = hostile.mutated(value, random)[0]
        else:
            try:
                made = json.loads(mutated(random, json.dumps(value).encode(), [b"{}"]))
            except (ValueError, RecursionError):
                continue
        if isinstance(made, dict):
            try:
                dump_json(made)
            except (ValueError, RecursionError):
                continue
            if "files" not in value or isinstance(made.get("files", {}), dict):
                return made
    return value


def _outcome(number: int, base: Base, file: str, reader: str, directory: Path) -> Outcome:
    def made(kind: str, detail: str = "") -> Outcome:
        return Outcome(number, base.name, file, reader, kind, detail)

    try:
        problem = read(reader, directory, base)
    except HfshardError as error:
        if str(directory) not in str(error) and "pulled" not in str(error):
            return made("raw", f"the message does not name the file: {error!s:.300}")
        return made("refused")
    except TooSlowError:
        return made("slow")
    except Exception as error:
        return made("raw", f"{type(error).__name__}: {error!s:.200} [{where(error)}]")
    return made("right") if problem is None else made("wrong", problem)


@contextmanager
def _cpu_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
