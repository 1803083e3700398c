"""Every file that ranks save together is that of one process: layouts x kinds of models x forms of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from transformers.distributed.configuration_utils import DistributedConfig

import hfshard
from tests.distributed.gloo import check_ranks
from tests.models.layouts import CONFIGS, LAYOUTS, forget_meshes, spread
from tests.models.specimens import KINDS, SIX_EXPERTS, SPECIMENS, freeze
from tests.zoo.mixin_classes import with_mixin

FORMS: dict[str, dict[str, Any]] = {
    "single": {},
    "sharded": {"max_shard_size": 12_000},
    "balanced": {"max_shard_size": 12_000, "packing": "balanced"},
}
BATCH = torch.arange(8).view(2, 4)


class Case(NamedTuple):
    """One line of the table."""

    layout: str
    kind: str
    form: str


def layouts_of(ranks: int) -> Iterator[str]:
    """The layouts for so many ranks, but those that this transformers does not have."""
    alone = ("whole", "fsdp", "tp")
    if ranks == 1:
        yield from alone
        return
    for layout in LAYOUTS:
        needs_four = "_" in layout.removeprefix("by_") or layout == "hsdp"
        if layout != "whole" and (ranks == 4 or not needs_four) and (layout, ranks) != ("pp", 4):  # two layers
            yield layout
    yield from (layout for layout, (size, _) in CONFIGS.items() if size == ranks)


def table(ranks: int, kind: str) -> list[Case]:
    """All cases of a kind of model; transformers' expert parallelism wants experts."""
    return [
        Case(layout, kind, form)
        for layout, form in product(layouts_of(ranks), FORMS)
        if kind == "moe" or not (layout in CONFIGS and layout.endswith("ep"))
    ]


SELECTION: dict[int, tuple[tuple[str, str, str], ...]] = {
    1: (("fsdp", "tied", "sharded"), ("tp", "uneven", "single")),
    2: (
        ("ddp", "llama", "single"), ("fsdp", "tied", "sharded"), ("tp", "uneven", "balanced"),
        ("by_turns", "moe", "sharded"), ("ep", "moe", "balanced"), ("pp", "buffers", "sharded"),
        ("their_fsdp", "bf16", "sharded"), ("their_tp", "tied", "single"), ("their_pp", "tied", "balanced"),
        ("their_ep", "moe", "sharded"),
    ),
    4: (
        ("by_turns", "uneven", "sharded"), ("fsdp_tp", "bf16", "single"), ("fsdp_by_turns", "moe", "sharded"),
        ("hsdp", "buffers", "balanced"), ("fsdp_ep", "moe", "sharded"), ("pp_fsdp", "tied", "sharded"),
        ("pp_tp", "moe", "sharded"), ("their_hsdp", "frozen", "balanced"), ("their_fsdp_tp", "moe", "balanced"),
        ("their_fsdp_ep", "moe", "sharded"), ("their_fsdp_4", SIX_EXPERTS, "sharded"),
    ),
}  # fmt: skip
"""Each kind and form at least once, and each layout; on four ranks, what takes one dimension is as on two."""


def files_of(directory: Path) -> dict[str, bytes]:
    """The files of a checkpoint."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def save_by_one_process(kind: str, form: str, place: Path) -> None:
    """Save a model that is built, and the same one when it has been loaded: names may be in another order then."""
    model_class: Any = with_mixin(SPECIMENS[kind].stock_class)
    SPECIMENS[kind].build(model_class).save_pretrained(place / "built" / kind / form, **FORMS[form])
    loaded = model_class.from_pretrained(place / "built" / kind / form)
    loaded.save_pretrained(place / "loaded" / kind / form, **FORMS[form])


def make(case: Case, place: Path) -> Any:
    """This rank's part of a model."""
    specimen = SPECIMENS[case.kind]
    model_class: Any = with_mixin(specimen.stock_class)
    if case.layout not in CONFIGS:
        return spread(specimen.build(model_class), case.layout)
    distributed_config = DistributedConfig(**CONFIGS[case.layout][1])
    saved = place / "built" / case.kind / case.form
    model = model_class.from_pretrained(saved, distributed_config=distributed_config)
    if case.kind == "frozen":
        freeze(model)
    return model


def save_and_compare(rank: int, place: Path, cases: Sequence[Case]) -> None:
    forget_meshes()
    made: tuple[Any, Any] = (None, None)
    for case in cases:
        if made[0] != case[:2]:
            made = case[:2], make(case, place)
        model = made[1]
        out = place / "out" / "-".join(case)
        dist.barrier()  # nothing tells a plain stage from a whole model: its ranks call at the same time

        getattr(model, "module", model).save_pretrained(out, **FORMS[case.form])
        compare(rank, out, case, place)
        is_main_process = rank == 0 or case.layout == "pp"
        index = hfshard.save_model(model, out, is_main_process=is_main_process, **FORMS[case.form])
        compare(rank, out, case, place)

        assert index is None or set(index.files) >= {path.name for path in out.glob("*.safetensors")}, case


def compare(rank: int, out: Path, case: Case, place: Path) -> None:
    """Compare on one rank, before any rank goes on."""
    dist.barrier()
    if rank == 0:
        expected = files_of(place / ("loaded" if case.layout in CONFIGS else "built") / case.kind / case.form)
        found = files_of(out)
        assert found.keys() == expected.keys(), case
        assert ("model.safetensors.index.json" in found) == (case.form != "single"), case
        assert [name for name in found if found[name] != expected[name]] == [], case
    dist.barrier()


def check_stock(place: Path, cases: Sequence[Case]) -> None:
    """Let transformers load each checkpoint, and compute what the model computes that one process has built."""
    expected: dict[str, torch.Tensor] = {}
    for case in cases:
        specimen = SPECIMENS[case.kind]
        if case.kind not in expected:
            expected[case.kind] = specimen.build()(BATCH).logits
        loaded: Any = specimen.stock_class.from_pretrained(place / "out" / "-".join(case))
        assert torch.equal(loaded(BATCH).logits, expected[case.kind]), case


def check(ranks: int, cases: Sequence[Case], place: Path) -> None:
    """Do some cases, all in one group of ranks."""
    for kind, form in sorted({(case.kind, case.form) for case in cases}):
        save_by_one_process(kind, form, place)
    check_ranks(place / "ranks", ranks, save_and_compare, place, cases)
    with torch.no_grad():
        check_stock(place, cases)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.compat), 4])
def test_files_of_some_layouts_are_those_of_one_process(ranks: int, tmp_path: Path) -> None:
    known = set(layouts_of(ranks))
    check(ranks, [Case(*case) for case in SELECTION[ranks] if case[0] in known], tmp_path)


def test_each_layout_kind_and_form_is_selected() -> None:
    for ranks, cases in SELECTION.items():
        alike = {"whole", *(layout for layout, _, _ in SELECTION[2])} if ranks == 4 else {"whole"}
        assert alike | {layout for layout, _, _ in cases} >= set(layouts_of(ranks))
    assert {kind for cases in SELECTION.values() for _, kind, _ in cases} >= set(KINDS)
    assert {form for cases in SELECTION.values() for _, _, form in cases} == set(FORMS)


@pytest.mark.compat
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", SELECTION)
def test_files_of_all_layouts_are_those_of_one_process(ranks: int, kind: str, tmp_path: Path) -> None:
    cases = table(ranks, kind)
    assert len(cases) >= {1: 9, 2: 27, 4: 36}[ranks]
    check(ranks, cases, tmp_path)
