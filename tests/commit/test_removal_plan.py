"""Plans of removals: which file goes when, what a report adds up to, and removals of one place that are joined."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from hfshard.checkpoint.reports import RemovalReport
from hfshard.commit.removal import (
    FoundFile,
    Removal,
    RemovalPlan,
    in_phases,
    is_of_weights,
    joined,
    phase_of_weights,
    removal_of,
)
from hfshard.errors import CheckpointChangedError
from hfshard.format.file_names import WeightNames


def test_pickles_go_first_and_the_index_goes_after_all_that_it_names() -> None:
    names = WeightNames()
    found = {
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model-hfshard-0123456789abcdef.safetensors",
        "model-hfshard-0123456789abcdef.safetensors.index.json",
        "model-hfshard-placeholder.safetensors",
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model-00001-of-00001.bin",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    }

    assert in_phases(found, lambda name: phase_of_weights(name, names)) == [
        ["pytorch_model-00001-of-00001.bin"],
        ["pytorch_model.bin"],
        ["pytorch_model.bin.index.json"],
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ["model-hfshard-0123456789abcdef.safetensors"],
        ["model.safetensors"],
        ["model-hfshard-0123456789abcdef.safetensors.index.json", "model.safetensors.index.json"],
        ["model-hfshard-placeholder.safetensors"],
        ["config.json"],
    ]


def test_the_single_file_of_another_variant_counts_as_a_shard() -> None:
    assert phase_of_weights("model.fp16.safetensors", WeightNames("fp16")) == 5
    assert phase_of_weights("model.fp16.safetensors", WeightNames()) == 3
    assert phase_of_weights("pytorch_model.fp16.bin", WeightNames("fp16")) == 1
    assert phase_of_weights("pytorch_model.fp16.bin", WeightNames()) == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.gguf", True),
        ("onnx_model.onnx_data", True),
        ("pytorch_model.bin.index.fp16.json", True),
        ("adapter_config.json", True),
        ("__0_0.distcp", True),
        ("config.json", False),
        ("model.safetensors.index-00000007-00112233445566ff.json", False),
        ("model.safetensors.txt", False),
    ],
)
def test_a_config_stays_beside_other_weights_only(name: str, expected: bool) -> None:
    assert is_of_weights(name) is expected


def test_a_report_lists_what_goes_in_its_order_and_what_stays_by_name() -> None:
    found = {"a": FoundFile(300, 1), "b": FoundFile(20, 2), "c": FoundFile(1, 3)}
    report = RemovalPlan("/out", [["c"], ["b", "a"]], found, {"z/": "why z", "notes": "why notes"}, ("u",)).report()

    assert list(report.removed.items()) == [("c", 1), ("b", 20), ("a", 300)]
    assert list(report.kept) == ["notes", "z/"]
    assert (report.size, report.is_empty, report.is_done) == (321, False, False)
    assert RemovalReport("/out", {}, {"notes": "why"}).is_empty
    assert not RemovalReport("/out", {}, {}, ("u",)).is_empty  # an unfinished upload is something to remove


def test_files_that_changed_since_they_were_shown_are_an_error_that_names_the_first() -> None:
    shown = RemovalPlan("/out", [["a", "b", "c"]], {name: FoundFile(1, name) for name in "abc"}, {})
    shown.check_same(RemovalPlan("/out", [["c"], ["a", "b"]], dict(shown.found), {"new": "does not go"}))

    changed = {"a": FoundFile(1, "a"), "b": FoundFile(1, "other"), "d": FoundFile(1, "d")}
    with pytest.raises(
        CheckpointChangedError,
        match=r"^'/out' changed after its files were listed \('b'\)\. Nothing was removed\. Retry when no save",
    ) as raised:
        shown.check_same(RemovalPlan("/out", [["a", "b", "d"]], changed, {}))
    assert raised.value.path == "/out"
    with pytest.raises(CheckpointChangedError, match=r"changed after its files were listed \('c'\)"):
        shown.check_same(RemovalPlan("/out", [["a", "b", "c"]], {**shown.found, "c": FoundFile(1, "other")}, {}))


def test_joined_removals_are_carried_out_in_turn_and_the_first_reason_counts() -> None:
    done: list[str] = []
    report = RemovalReport("/run", {"a": 1}, {"b": "of the first", "both": "first"}, ("u",))
    other = RemovalReport("/run", {"b": 2}, {"a": "of the second", "both": "second"})
    empty = RemovalReport("/run", {}, {"both": "third"})
    reports = {"first": report, "empty": empty, "second": other}

    one = joined([Removal(each, partial(done.append, name)) for name, each in reports.items()], "/run")
    assert done == []
    one.carry_out()

    assert done == ["first", "second"]  # what has found nothing locks nothing
    assert one.report == RemovalReport("/run", {"a": 1, "b": 2}, {"both": "first"}, ("u",))


def test_a_removal_is_planned_again_under_the_lock_and_carried_out_by_the_second_plan() -> None:
    done: list[object] = []
    kept: dict[str, str] = {}

    def make_plan() -> RemovalPlan:
        done.append("plan")
        return RemovalPlan("out", [["a"]], {"a": FoundFile(1, "old")}, dict(kept))

    @contextmanager
    def locked() -> Iterator[None]:
        done.append("lock")
        yield
        done.append("unlock")

    removal = removal_of(make_plan, lambda plan: done.append(plan.kept), locked)
    assert done == ["plan"]
    kept["new"] = "does not go"
    removal.carry_out()

    assert done == ["plan", "lock", "plan", {"new": "does not go"}, "unlock"]
    assert removal.report == RemovalReport("out", {"a": 1}, {})
