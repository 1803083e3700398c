"""Every attack is refused by one clear error, in time and in bounds; every unusual but whole checkpoint loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attacks import catalogue
from tests.attacks.judge import cli_complaints, complaints, control_complaints, save_complaints
from tests.attacks.kinds.saves import SAVES
from tests.attacks.runner import CHUNK, Server

_ALL = catalogue.load_all()
ATTACKS = sorted(_ALL)
VERIFIABLE = [name for name in ATTACKS if "verify" in _ALL[name].entries]
STORED = [name for name in ATTACKS if "state_dict" in _ALL[name].entries]
CONTROLS = sorted(catalogue.CONTROLS)
TRAPS = sorted(SAVES)
PASSED_ON = "header-dtype-that-torch-lacks"
"""No torch is needed to copy its bytes."""
WANTED = 100
"""The least number of attacks that are tried."""

Ask = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests: to start it takes seconds, and each child is of its own."""
    server = Server(tmp_path_factory.mktemp("home"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def ask(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Answers of the runner, by name: a chunk of neighbours is run when the first of them is asked for."""
    answers: dict[str, dict[str, Any]] = {}

    def answer(name: str) -> dict[str, Any]:
        if name not in answers:
            names = next(names for names in (ATTACKS, CONTROLS, TRAPS) if name in names)
            start = names.index(name) // CHUNK * CHUNK
            found = server.run(names[start : start + CHUNK], tmp_path_factory.mktemp("place"))
            answers.update({each["name"]: each for each in found})
        return answers[name]

    return answer


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_refused(name: str, ask: Ask) -> None:
    assert complaints(ask(name)) == []


def test_command_line_names_what_is_damaged(server: Server, tmp_path: Path) -> None:
    """Every seventh attack, for the sake of time."""
    found = {}
    for answer in server.run(VERIFIABLE[::7], tmp_path, entries=["cli"]):
        found[answer["name"]] = cli_complaints(answer)
    assert {name: problems for name, problems in found.items() if problems} == {}
    assert len(found) > 80


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_no_attack_is_resharded(step: int, server: Server, tmp_path: Path) -> None:
    """Every third attack, for the sake of time; all with --slow."""
    found = {}
    names = [name for name in STORED if not _ALL[name].full and name != PASSED_ON][::step]
    for answer in server.run(names, tmp_path, entries=["reshard"]):
        found[answer["name"]] = complaints(answer)
    for answer in server.run(CONTROLS, tmp_path / "whole", entries=["reshard"]):
        found[answer["name"]] = control_complaints(answer)
    assert {name: problems for name, problems in found.items() if problems} == {}
    assert len(found) > WANTED


@pytest.mark.parametrize("name", CONTROLS)
def test_whole_checkpoint_loads(name: str, ask: Ask) -> None:
    assert control_complaints(ask(name)) == []


@pytest.mark.parametrize("name", TRAPS)
def test_save_into_a_trap_touches_nothing_outside(name: str, ask: Ask) -> None:
    assert save_complaints(ask(name)) == []


def test_nothing_escapes_those_who_watch(server: Server, tmp_path: Path) -> None:
    (answer,) = server.run([CONTROLS[0]], tmp_path, entries=["careless"])
    found = complaints(answer)
    wanted = ("files outside", "'model.safetensors'", "os.system", "/etc/hostname", "a payload ran", "MiB", "and wrong")
    assert [words for words in wanted if not any(words in complaint for complaint in found)] == []


def test_there_are_as_many_attacks_as_were_asked_for() -> None:
    assert len(ATTACKS) >= WANTED
