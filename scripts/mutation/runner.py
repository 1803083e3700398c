"""The command line of scripts/mutants: each mutant in a copy of a checkout, its tests, and the verdicts."""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from mutation.mutants import MUTANTS, Mutant

CHECKOUT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = "hfshard"

Verdict = Literal["killed", "survived", "invalid", "timeout"]

_MOST_SECONDS: Final = 900
"""Limit for the tests of one mutant, unless --timeout sets another: ten times what they take on a busy machine."""

_FAILED: Final = 1
"""pytest's exit status if a test has failed; 2 to 5 say that tests could not be collected, or that there were none."""

_SHOWN_LINES: Final = 12


class NotPlantedError(Exception):
    """A mutant's text is not in the package, is there twice, or does not give a module that can be imported."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tests of one mutant said."""

    verdict: Verdict
    file: str
    """The mutated file, relative to the checkout; empty if the text was not found."""
    failed: tuple[str, ...]
    """Node ids of the tests that failed."""
    seconds: float
    reason: str
    """Last lines of the output, unless the mutant was killed."""
    key: str
    """Digest of the mutant and its tests: a result with another one is out of date."""


def main(arguments: Sequence[str]) -> int:
    """Run the mutants that were asked for; return 1 if one was not killed, 2 if the arguments name none."""
    options = _parser().parse_args(arguments)
    mutants = [one for one in MUTANTS if not options.names or one.name in options.names]
    unknown = set(options.names) - {one.name for one in MUTANTS}
    if unknown:
        print(f"There is no mutant {', '.join(sorted(unknown))}. To list them: scripts/mutants --list", file=sys.stderr)
        return 2
    if options.list:
        for one in mutants:
            print(f"{one.name:32} {one.meaning}")
        return 0
    tests = _tests_by_mutant(mutants, options)
    results = _read_results(options.results)
    waiting = [one for one in mutants if results.get(one.name, {}).get("key") != _key_of(one, tests[one.name])]
    with ThreadPoolExecutor(options.jobs) as pool:
        running = {
            pool.submit(
                try_mutant, one, tests[one.name], options.tree, workers=options.workers, timeout=options.timeout
            ): one
            for one in waiting
        }
        try:
            for done in as_completed(running):
                name = running[done].name
                results[name] = asdict(done.result())
                _write_results(results, options.results)
                print(_line(name, results[name]), flush=True)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            return 130
    return _report(mutants, results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mutants",
        description="Plant bugs one by one, each in a copy of a checkout, and check that tests fail.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to run; all by default")
    parser.add_argument("--list", action="store_true", help="list the mutants, and run none")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once, each in its own copy (default: 1)")
    parser.add_argument("--workers", type=int, default=0, help="processes of pytest for each (default: its own)")
    parser.add_argument("--timeout", type=float, default=_MOST_SECONDS, help="seconds for the tests of one mutant")
    parser.add_argument("--all", action="store_true", help="run all tests, not only those named for a mutant")
    parser.add_argument("--results", type=Path, help="JSON of the results: those that it has are not run again")
    parser.add_argument("--tree", type=Path, default=CHECKOUT, help="another checkout of hfshard to run on")
    parser.add_argument(
        "--tests-from", type=Path, help="JSON: name of a mutant -> its tests, for a tree that has others"
    )
    return parser


def _tests_by_mutant(mutants: Sequence[Mutant], options: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    if options.all:
        return {one.name: ("tests",) for one in mutants}
    if options.tests_from is None:
        return {one.name: one.tests for one in mutants}
    named = json.loads(options.tests_from.read_text(encoding="utf-8"))
    return {one.name: tuple(named.get(one.name, ())) for one in mutants}


def try_mutant(
    mutant: Mutant, tests: Sequence[str], tree: Path, *, workers: int = 0, timeout: float = _MOST_SECONDS
) -> Outcome:
    """Run tests in a copy of a checkout that has a mutant, until the first one fails.

    Args:
        mutant: The bug.
        tests: Paths or node ids, in order.
        tree: The checkout, which stays as it is.
        workers: Processes of pytest; 0: no further one.
        timeout: Seconds after which the tests are ended.
    """
    begin = time.monotonic()
    file, reason = "", ""
    failed: tuple[str, ...] = ()
    try:
        file = find_file(read_package(tree), mutant.old)
        if not tests:
            raise NotPlantedError("no tests are named for it")
        with _copy_of(tree) as copy:
            (copy / file).write_text(mutated((copy / file).read_text(encoding="utf-8"), mutant), encoding="utf-8")
            status, output = _run_tests(copy, tests, workers, timeout)
        if re.search(rf"\b{re.escape(file)}:\d+: in <module>", output) is not None:
            raise NotPlantedError(f"with its text, the module cannot be imported:\n{_end_of(output)}")
        failed = tuple(_failed_tests(output))
        verdict: Verdict = "killed" if status == _FAILED and failed else "survived" if status == 0 else "invalid"
        reason = "" if verdict == "killed" else _end_of(output)
    except NotPlantedError as error:
        verdict, reason = "invalid", str(error)
    except subprocess.TimeoutExpired:
        verdict, reason = "timeout", f"its tests took more than {timeout:g} seconds"
    return Outcome(verdict, file, failed, round(time.monotonic() - begin, 1), reason, _key_of(mutant, tests))


def read_package(tree: Path) -> dict[str, str]:
    """Read the package of a checkout: path of each module, relative to the checkout -> its text."""
    paths = sorted((tree / PACKAGE).rglob("*.py"))
    return {path.relative_to(tree).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def find_file(package: Mapping[str, str], text: str) -> str:
    """Find the only module that has a text, and has it once.

    Raises:
        NotPlantedError: The text is not there, or more than once.
    """
    found = [file for file, source in package.items() for _ in range(source.count(text))]
    if len(found) != 1:
        raise NotPlantedError(
            f"its text is in the package {len(found)} times, not once: {', '.join(found) or 'nowhere'}"
        )
    return found[0]


def mutated(source: str, mutant: Mutant) -> str:
    """Return a module's text with the bug.

    Raises:
        NotPlantedError: The result is not Python.
    """
    changed = source.replace(mutant.old, mutant.new)
    try:
        ast.parse(changed)
    except SyntaxError as error:
        raise NotPlantedError(f"with its text, the module is not Python: {error}") from error
    return changed


@contextmanager
def _copy_of(tree: Path) -> Iterator[Path]:
    """Copy a checkout with its changed and new files, and what Python has compiled, into a temporary directory."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=tree,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as directory:
        copy = Path(directory).resolve() / "checkout"
        files = [name for name in filter(None, listed.split("\0")) if (tree / name).is_file()]
        for folder in sorted({os.path.dirname(name) for name in files}):
            (copy / folder).mkdir(parents=True, exist_ok=True)
            compiled = os.path.join(folder, "__pycache__")
            if (tree / compiled).is_dir():
                shutil.copytree(tree / compiled, copy / compiled)
        for name in files:
            shutil.copy2(tree / name, copy / name)  # with its time, by which Python knows what is compiled of it
        yield copy


def _environment(copy: Path) -> dict[str, str]:
    """Return the environment in which the copy is imported, and compiled files are not mixed with the original's."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(copy)}


def _run_tests(copy: Path, tests: Sequence[str], workers: int, timeout: float) -> tuple[int, str]:
    """Run tests in the copy; return pytest's exit status and its output.

    Raises:
        subprocess.TimeoutExpired: They took too long; they, and what they have started, were ended.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "-p", "no:cacheprovider", *tests]
    if workers:
        command += ["-n", str(workers)]
    running = subprocess.Popen(
        command,
        cwd=copy,
        env=_environment(copy),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = running.communicate(timeout=timeout)
    except BaseException:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
        raise
    return running.returncode, output


def _failed_tests(output: str) -> Iterator[str]:
    """Yield the node ids in pytest's short summary."""
    for line in output.splitlines():
        kind, _, rest = line.partition(" ")
        if kind in ("FAILED", "ERROR") and rest.startswith("tests/"):
            yield rest.partition(" - ")[0]


def _end_of(output: str) -> str:
    return "\n".join(output.splitlines()[-_SHOWN_LINES:])


def _key_of(mutant: Mutant, tests: Sequence[str]) -> str:
    raw = json.dumps([mutant.old, mutant.new, *tests]).encode()
    return hashlib.sha256(raw).hexdigest()[:16]


def _read_results(path: Path | None) -> dict[str, dict[str, object]]:
    if path is None or not path.exists():
        return {}
    found: dict[str, dict[str, object]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _write_results(results: Mapping[str, Mapping[str, object]], path: Path | None) -> None:
    """Replace the file of results, so that a run that is stopped goes on from there."""
    if path is None:
        return
    aside = path.with_name(f"{path.name}.tmp")
    aside.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    aside.replace(path)


def _line(name: str, result: Mapping[str, object]) -> str:
    failed = result["failed"]
    first = failed[0] if isinstance(failed, list | tuple) and failed else result["file"]
    return f"{result['verdict']!s:9} {name:32} {result['seconds']:>6} s  {first}"


def _report(mutants: Sequence[Mutant], results: Mapping[str, Mapping[str, object]]) -> int:
    left = [one for one in mutants if results[one.name]["verdict"] != "killed"]
    for one in left:
        print(f"\n{results[one.name]['verdict']}: {one.name}, {one.meaning}\n{results[one.name]['reason']}")
    counts = Counter(str(results[one.name]["verdict"]) for one in mutants)
    print(f"\n{len(mutants)} mutants: " + ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    return 1 if left else 0
