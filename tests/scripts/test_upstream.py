"""What counts as a difference between upstream's tests stock and under hfshard, and what the README says of them."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from tests import REPOSITORY

sys.path.append(str(REPOSITORY / "scripts"))  # `upstream` is a package of scripts/

from upstream import sources
from upstream.comparison import Outcome, compare, of_suite, read_outcomes
from upstream.main import main
from upstream.report import read_results, readme_block
from upstream.sources import REQUIREMENTS, SourceError, fetch, pins, requirements_of
from upstream.suites import SUITES

INTENDED: dict[str, str] = json.loads((REQUIREMENTS.parent / "intended.json").read_text())

PASSED = Outcome("passed")
FAILED = Outcome("failed", "AssertionError: 1 != 2")


def test_a_test_that_fails_under_hfshard_alone_is_a_difference() -> None:
    found = compare({"a": PASSED, "b": PASSED}, {"a": PASSED, "b": FAILED}, {})

    assert not found.is_as_expected
    assert dict(found.broken) == {"b": FAILED}
    assert (found.stock_passed, found.ours_passed) == (2, 1)


@pytest.mark.parametrize("ours", [{}, {"a": Outcome("skipped")}, {"a": Outcome("died")}])
def test_a_test_that_no_longer_runs_is_a_difference(ours: dict[str, Outcome]) -> None:
    assert set(compare({"a": PASSED}, ours, {}).broken) == {"a"}


def test_what_fails_in_both_does_not_count() -> None:
    found = compare({"a": FAILED, "b": Outcome("skipped"), "c": FAILED}, {"a": FAILED, "b": FAILED, "c": PASSED}, {})

    assert found.is_as_expected
    assert found.not_counted == 2
    assert found.gained == ("c",)


def test_an_intended_difference_is_one_and_one_that_is_gone_is_an_error() -> None:
    reasons = {"a": "because"}

    assert compare({"a": PASSED}, {"a": FAILED}, reasons).is_as_expected
    gone = compare({"a": PASSED}, {"a": PASSED}, reasons)
    assert not gone.is_as_expected
    assert gone.stale == ("a",)


def test_intended_differences_are_of_the_suite_and_of_the_tests_that_ran() -> None:
    reasons = {"one/a": "x", "one/b": "y", "other/a": "z"}

    assert of_suite("one", reasons) == {"a": "x", "b": "y"}
    assert of_suite("one", reasons, {"b"}) == {"b": "y"}


def test_the_worst_report_of_a_test_counts_and_one_without_any_died(tmp_path: Path) -> None:
    lines = [("a", "started"), ("a", "passed"), ("a", "failed"), ("b", "started"), ("c", "passed"), ("c", "skipped")]
    records = [json.dumps({"id": test, "outcome": outcome, "message": ""}) for test, outcome in lines]
    (tmp_path / "outcomes").write_text("\n".join(records))

    found = {test: outcome.outcome for test, outcome in read_outcomes(tmp_path / "outcomes").items()}
    assert found == {"a": "failed", "b": "died", "c": "skipped"}


def test_an_archive_with_another_checksum_is_refused(tmp_path: Path) -> None:
    version = pins()["peft"][0]
    (tmp_path / f"peft-{version}.tar.gz").write_bytes(b"another")

    with pytest.raises(SourceError, match="is pinned"):
        fetch("peft", tmp_path)


def test_the_results_are_of_the_pinned_sources_and_as_intended() -> None:
    results = read_results()

    assert list(results) == list(SUITES)
    assert [record["broken"] for record in results.values()] == [[] for _ in SUITES]
    packages = {f"{name}=={version}" for name, (version, _) in pins().items()}
    assert {record["package"] for record in results.values()} - {None} == packages
    named = {f"{suite}/{test}" for suite, record in results.items() for test in record["intended"]}
    assert named == set(INTENDED)


def test_the_readme_has_the_counts_of_the_results() -> None:
    readme = (REPOSITORY / "scripts" / "upstream" / "README.md").read_text()

    assert readme_block(read_results(), INTENDED) in readme


def test_what_all_suites_need_is_said_before_the_first_one_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    installed = {
        "accelerate": "1.15.0",
        "huggingface_hub": "1.33.0",
        "transformers": "5.23.0",
        "attrs": "1",
        "scipy": "1",
    }

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(sources, "version", version)

    code = main(["modeling", "peft", "hub_mixin", "--results", str(tmp_path / "results.json")])

    assert code == 2
    assert capsys.readouterr().err == (
        "The tests of modeling, peft, hub_mixin need what is not installed here, or in another version. Install it: "
        "pip install huggingface_hub==2.4.0 peft==0.21.2 datasets diffusers parameterized pytest-mock\n"
    )


def test_the_readme_says_what_to_install() -> None:
    readme = (REPOSITORY / "scripts" / "upstream" / "README.md").read_text()

    assert f"pip install {' '.join(requirements_of(SUITES.values()))}\n" in readme
