"""What every Python of the process tree runs first: it breaks no program, and stays out of those it is not for."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import xxhash

from tests.cli.programs import by_hfshard, by_python, startup_folder

LOOKS_FOR_TRANSFORMERS = "from importlib.util import find_spec; find_spec('transformers'); print('done')"

HIDDEN = {
    "runs": "import sys\nsys.hidden = __name__, __file__",
    "fails": "raise ValueError('of its own')",
    "lacks something": "import no_such_module",
    "goes": "import sys\ndel sys.modules[__name__]",
}


@pytest.mark.parametrize("text", HIDDEN.values(), ids=HIDDEN)
def test_sitecustomize_of_the_owner_runs_as_by_python(text: str, tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "sitecustomize.py").write_text(text)
    environment = environment | {"PYTHONPATH": f"{tmp_path}:{environment['PYTHONPATH']}"}
    code = "import sys; print(getattr(sys, 'hidden', 0)); import sitecustomize; print(sitecustomize.__file__)"

    expected = by_python(["-c", code], tmp_path, environment)
    found = by_hfshard(["--quiet", "-c", code], tmp_path, environment)

    assert (found.returncode, found.stdout, found.stderr) == (expected.returncode, expected.stdout, expected.stderr)


def command(words: list[str], directory: Path, environment: dict[str, str]) -> tuple[int, str, str]:
    """Run a command: its exit code, stdout and stderr."""
    done = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True, timeout=110)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("settings", ["{", "[]", '{"verify": "nonsense"}'])
def test_what_fails_is_one_line_and_the_program_goes_on(
    settings: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    path = f"{startup_folder()}:{environment['PYTHONPATH']}"
    environment = environment | {"PYTHONPATH": path, "HFSHARD_RUN": settings}

    done = by_python(["-c", LOOKS_FOR_TRANSFORMERS], tmp_path, environment)
    shell = f"exec '{sys.executable}' -c \"{LOOKS_FOR_TRANSFORMERS}\" 2>&-"
    closed = command(["sh", "-c", shell], tmp_path, environment)

    assert (done.returncode, done.stdout) == closed[:2] == (0, "done\n")
    assert done.stderr.startswith("hfshard: inactive in process ")
    assert done.stderr.count("\n") == 1


def test_environment_without_hfshard_is_left_alone(tmp_path: Path, environment: dict[str, str]) -> None:
    venv.create(tmp_path / "other", symlinks=True, with_pip=False)
    words = [str(tmp_path / "other" / "bin" / "python"), "-c", LOOKS_FOR_TRANSFORMERS]
    variables = {"PYTHONPATH": startup_folder(), "HFSHARD_RUN": json.dumps({"prefix": sys.prefix})}

    assert command(words, tmp_path, environment | variables) == (0, "done\n", "")


def test_any_python_3_can_read_it() -> None:
    ast.parse((Path(startup_folder()) / "sitecustomize.py").read_text(encoding="utf-8"), feature_version=(3, 7))


def test_checkout_that_is_not_installed_is_found(tmp_path: Path, environment: dict[str, str]) -> None:
    other = tmp_path / "other"
    venv.create(other, symlinks=True, with_pip=False)
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "xxhash").symlink_to(Path(xxhash.__file__).parent)  # what hfshard needs at once
    path = f"{startup_folder()}:{tmp_path}/packages"
    variables = {"PYTHONPATH": path, "HFSHARD_RUN": json.dumps({"prefix": str(other)})}
    code = f"{LOOKS_FOR_TRANSFORMERS}; import hfshard; print(hfshard.__file__)"

    done = command([str(other / "bin" / "python"), "-c", code], tmp_path, environment | variables)

    assert done == (0, f"done\n{Path(startup_folder()).parents[1] / '__init__.py'}\n", "")


OWN_CALLS = {
    "": "structure",
    "hfshard.install(verify='none')": "none",
    "hfshard.install(); hfshard.uninstall()": None,
    "hfshard.uninstall(); hfshard.install(verify='none')": "none",
    "with hfshard.install(verify='none'): look()": "none structure",
}


@pytest.mark.parametrize(("calls", "verify"), OWN_CALLS.items())
def test_what_the_program_calls_before_transformers_comes_counts_more(
    calls: str, verify: str | None, tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "program.py").write_text(f"""
import hfshard
from importlib.util import find_spec
from hfshard.models.install_settings import current_settings

def look():
    find_spec("transformers")
    settings = current_settings()
    print(settings and settings.verify, end=" ")

{calls}
look()
""")

    done = by_hfshard(["--quiet", "program.py"], tmp_path, environment)

    assert (done.returncode, done.stdout, done.stderr) == (0, f"{verify} ", "")
