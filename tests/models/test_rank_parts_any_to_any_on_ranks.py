"""What any layout has saved, any layout loads: bit for bit, and it computes what one process computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.distributed.configuration_utils import DistributedConfig

import hfshard
from tests.distributed.gloo import check_ranks
from tests.models.layouts import CONFIGS, compute, forget_meshes, spread
from tests.models.specimens import KINDS
from tests.models.test_rank_parts_every_file_equal_on_ranks import (
    BATCH,
    FORMS,
    SELECTION,
    Case,
    files_of,
    make,
    save_by_one_process,
    table,
)
from tests.zoo.mixin_classes import with_mixin

FORM = "sharded"
ADDS_PARTS = ("tp", "ep")
"""Layouts that add up what ranks have computed, in an order of their own: their logits are close, all others' equal."""
LOADS_OF_A_GROUP = 40
"""So many take some seconds: a group that hangs is noticed after minutes."""


class Load(NamedTuple):
    """One load: what is loaded, and how."""

    saved: str
    kind: str
    layout: str
    way: str


def bare(model: Any) -> Any:
    """A model without DistributedDataParallel around it."""
    return getattr(model, "module", model)


def save_in_layouts(rank: int, place: Path, cases: Sequence[Case]) -> None:
    """Save as transformers names tensors, and as the model does, for loads into modules."""
    forget_meshes()
    for case in cases:
        model = make(case, place)
        name = f"{dist.get_world_size()}-{case.layout}-{case.kind}"
        dist.barrier()
        bare(model).save_pretrained(place / "saved" / name, **FORMS[FORM])
        dist.barrier()
        bare(model).save_pretrained(place / "saved" / f"{name}-own", save_original_format=False, **FORMS[FORM])


def by_config(saved: Path, kind: str, layout: str) -> Any:
    """Let transformers spread the model."""
    model_class: Any = with_mixin(KINDS[kind].stock_class)
    return model_class.from_pretrained(saved, distributed_config=DistributedConfig(**CONFIGS[layout][1]))


def by_function(saved: Path, kind: str, layout: str) -> Any:
    """Spread the model before it has data."""
    model_class: Any = with_mixin(KINDS[kind].stock_class)
    return model_class.from_pretrained(saved, parallelize=partial(spread, layout=layout))


def into_module(saved: Path, kind: str, layout: str) -> Any:
    """Load into a model that is spread, and has other data."""
    model = zeroed(kind, layout)
    hfshard.load_model(bare(model), f"{saved}-own", strict=not layout.startswith("pp"))
    return model


def into_like(saved: Path, kind: str, layout: str) -> Any:
    """Load new tensors like those of a model that is spread, and put them into it."""
    model = zeroed(kind, layout)
    state_dict = hfshard.load_state_dict(f"{saved}-own", like=bare(model).state_dict())
    bare(model).load_state_dict(state_dict)
    return model


def zeroed(kind: str, layout: str) -> Any:
    """A model that is spread, without its values."""
    model = KINDS[kind].build(with_mixin(KINDS[kind].stock_class))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    return spread(model, layout)


WAYS: dict[str, Callable[[Path, str, str], Any]] = {
    "config": by_config,
    "function": by_function,
    "module": into_module,
    "like": into_like,
}


def loads_of(ranks: int, kind: str) -> Iterator[tuple[str, str]]:
    """Each layout for so many ranks, in each way in which it can be loaded."""
    for layout in dict.fromkeys(case.layout for case in table(ranks, kind)):
        ways = ["config"] if layout in CONFIGS else ["function", "module", "like"]
        if layout == "ddp":
            ways.remove("function")  # torch wraps no model that has no data
        yield from product([layout], ways)


def load_and_compare(rank: int, place: Path, loads: Sequence[Load]) -> None:
    forget_meshes()
    wholes: dict[str, Any] = {}
    saved_again = set[tuple[str, ...]]()
    for load in loads:
        saved = place / "saved" / f"{load.saved}-{load.kind}"
        if load.kind not in wholes:
            wholes[load.kind] = KINDS[load.kind].build()
        model = WAYS[load.way](saved, load.kind, load.layout)
        with torch.no_grad():
            found = gathered(bare(model))
            check_tensors(load, found, wholes[load.kind].state_dict())
            check_logits(load, model.eval(), found, wholes[load.kind])
        if load.way in ("config", "function") and load[1:] not in saved_again:
            save_again(rank, load, model, place)
            saved_again.add(load[1:])


def save_again(rank: int, load: Load, model: Any, place: Path) -> None:
    """Save what was loaded: the files are those of one process that loads and saves."""
    out = place / "again" / "-".join(load)
    dist.barrier()
    model.save_pretrained(out, **FORMS[FORM])
    dist.barrier()
    if rank == 0:
        expected = files_of(place / "loaded" / load.kind / FORM)
        found = files_of(out)
        assert found.keys() == expected.keys(), load
        assert [name for name in found if found[name] != expected[name]] == [], load
    dist.barrier()


def gathered(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a rank has, whole."""
    state_dict = model.state_dict()
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in state_dict.items()}


def check_tensors(load: Load, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare bit for bit; stages have all names together."""
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, (load, name)
        assert torch.equal(tensor, expected[name]), (load, name)
    names = set(found)
    if "pp" in load.layout:
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, names)
        names = set().union(*of_ranks)
        assert len(found) < len(expected), load
    assert names == set(expected), load


def check_logits(load: Load, model: Any, found: dict[str, torch.Tensor], whole: Any) -> None:
    """Compare what is computed: where a layout computes nothing, by the whole model with the tensors found."""
    expected = whole(BATCH).logits
    logits = compute(model, load.layout, BATCH)
    if logits is None and "pp" not in load.layout:
        buffers = dict(bare(model).named_buffers())
        logits = torch.func.functional_call(
            whole, {**buffers, **found}, (BATCH,), tie_weights=False, strict=True
        ).logits
    if logits is None:
        return
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    if load.layout.endswith(ADDS_PARTS):
        torch.testing.assert_close(logits, expected, msg=lambda text: f"{load}: {text}")  # torch's bounds of the dtype
    else:
        assert torch.equal(logits, expected), load


def save_all(place: Path, cases: Sequence[tuple[int, Case]]) -> None:
    """Save in layouts of several numbers of ranks."""
    for kind in {case.kind for _, case in cases}:
        save_by_one_process(kind, FORM, place)
    for ranks in sorted({ranks for ranks, _ in cases}):
        mine = [case for number, case in cases if number == ranks]
        check_ranks(place / f"save-{ranks}", ranks, save_in_layouts, place, mine)


CHOSEN: dict[int, tuple[Load, ...]] = {
    2: (
        Load("4-fsdp_ep", "moe", "ep", "like"),
        Load("4-fsdp_ep", "moe", "their_ep", "config"),
        Load("2-tp", "tied", "their_pp", "config"),
        Load("2-tp", "tied", "tp", "function"),
        Load("2-tp", "tied", "ddp", "module"),
    ),
    4: (
        Load("4-fsdp_tp", "uneven", "hsdp", "like"),
        Load("4-fsdp_tp", "uneven", "pp_fsdp", "module"),
        Load("2-pp", "moe", "fsdp_ep", "function"),
        Load("2-pp", "moe", "their_fsdp_4", "config"),
    ),
}


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.compat), 4])
def test_some_layouts_are_loaded_into_others(ranks: int, tmp_path: Path) -> None:
    mine = CHOSEN[ranks]
    saves = sorted({(int(load.saved[0]), load.saved[2:], load.kind) for load in mine})
    save_all(tmp_path, [(ranks, Case(layout, kind, FORM)) for ranks, layout, kind in saves])
    check_ranks(tmp_path / f"load-{ranks}", ranks, load_and_compare, tmp_path, mine)


@pytest.fixture(scope="module")
def saved_by_all(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[str]]]:
    """Gives the place of what all layouts of 1, 2 and 4 ranks have saved of a kind of model, and the saves' names."""
    done: dict[str, tuple[Path, list[str]]] = {}

    def save(kind: str) -> tuple[Path, list[str]]:
        if kind not in done:
            cases = [(ranks, case) for ranks in SELECTION for case in table(ranks, kind) if case.form == FORM]
            place = tmp_path_factory.mktemp(kind)
            save_all(place, cases)
            done[kind] = place, [f"{ranks}-{case.layout}" for ranks, case in cases]
        return done[kind]

    return save


def cross(ranks: int, kind: str, saves: Sequence[str]) -> list[Load]:
    """Each save into each layout and way; where experts are not converted, each way loads some saves, by turns."""
    ways = list(loads_of(ranks, kind))
    if kind == "moe":
        return [Load(saved, kind, *way) for way, saved in product(ways, saves)]
    step = len(saves) // 3
    return [
        Load(saves[(number + turn * step) % len(saves)], kind, *way)
        for number, way in enumerate(ways)
        for turn in range(3)
    ]


@pytest.mark.compat
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", SELECTION)
def test_all_layouts_are_loaded_into_all_others(
    ranks: int, kind: str, saved_by_all: Callable[[str], tuple[Path, list[str]]]
) -> None:
    place, saves = saved_by_all(kind)
    assert len(saves) >= (21 if kind == "moe" else 20)
    loads = cross(ranks, kind, saves)
    for start in range(0, len(loads), LOADS_OF_A_GROUP):
        mine = loads[start : start + LOADS_OF_A_GROUP]
        check_ranks(place / f"load-{ranks}", ranks, load_and_compare, place, mine)
