"""What any layout saves is what one process saves, and any layout loads it, bit for bit, reading its part alone."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import hfshard
from tests.distributed.gloo import check_ranks
from tests.distributed.test_save_on_ranks_costs import number_in
from tests.helpers.memory import file_mapped_at
from tests.models.layouts import CONFIGS, LAYOUTS, compute, forget_meshes, spread
from tests.models.specimens import KINDS, SIX_EXPERTS, SPECIMENS, freeze
from tests.saving.helpers import files_in
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


def class_of(kind: str) -> Any:
    return with_mixin(SPECIMENS[kind].stock_class)


def save_by_one_process(kind: str, form: str, place: Path) -> None:
    """Save a model that is built, and the same one when it has been loaded: names may be in another order then."""
    model_class = class_of(kind)
    SPECIMENS[kind].build(model_class).save_pretrained(place / "built" / kind / form, **FORMS[form])
    loaded = model_class.from_pretrained(place / "built" / kind / form)
    loaded.save_pretrained(place / "loaded" / kind / form, **FORMS[form])


def make(case: Case, place: Path) -> Any:
    """This rank's part of a model."""
    if case.layout not in CONFIGS:
        return spread(SPECIMENS[case.kind].build(class_of(case.kind)), case.layout)
    distributed_config = DistributedConfig(**CONFIGS[case.layout][1])
    saved = place / "built" / case.kind / case.form
    model = class_of(case.kind).from_pretrained(saved, distributed_config=distributed_config)
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
    made_by = "loaded" if case.layout in CONFIGS else "built"
    compare_files(rank, out, place / made_by / case.kind / case.form, case)
    assert (out / "model.safetensors.index.json").exists() == (case.form != "single"), case
    dist.barrier()


def compare_files(rank: int, out: Path, expected_at: Path, case: Any) -> None:
    dist.barrier()
    if rank == 0:
        expected, found = files_in(expected_at), files_in(out)
        assert found.keys() == expected.keys(), case
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


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.compat), pytest.param(4, marks=pytest.mark.slow)]
)
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


def load_by(way: str, model_class: Any, saved: Path, layout: str, make_spread: Callable[[], Any]) -> Any:
    """Let transformers spread the model; spread it before it has data; or load into one that is spread."""
    if way == "config":
        sizes = {"tp_size": dist.get_world_size()} if layout == "their_tp" else CONFIGS[layout][1]
        return model_class.from_pretrained(saved, distributed_config=DistributedConfig(**sizes))
    if way == "function":
        return model_class.from_pretrained(saved, parallelize=partial(spread, layout=layout))
    model = make_spread()
    if way == "module":
        hfshard.load_model(bare(model), saved, strict=not layout.startswith("pp"))
    else:
        bare(model).load_state_dict(hfshard.load_state_dict(saved, like=bare(model).state_dict()))
    return model


def zeroed(kind: str, layout: str) -> Any:
    """A model that is spread, without its values."""
    model = KINDS[kind].build(class_of(kind))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    return spread(model, layout)


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
        own = "-own" if load.way in ("module", "like") else ""
        saved = place / "saved" / f"{load.saved}-{load.kind}{own}"
        if load.kind not in wholes:
            wholes[load.kind] = KINDS[load.kind].build()
        make_zeroed = partial(zeroed, load.kind, load.layout)
        model = load_by(load.way, class_of(load.kind), saved, load.layout, make_zeroed)
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
    compare_files(rank, out, place / "loaded" / load.kind / FORM, load)


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


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.compat), pytest.param(4, marks=pytest.mark.slow)])
def test_some_layouts_are_loaded_into_others(ranks: int, tmp_path: Path) -> None:
    mine = CHOSEN[ranks]
    saves = sorted({(int(load.saved[0]), load.saved[2:], load.kind) for load in mine})
    save_all(tmp_path, [(ranks, Case(layout, kind, FORM)) for ranks, layout, kind in saves])
    check_ranks(tmp_path / f"load-{ranks}", ranks, load_and_compare, tmp_path, mine)


SavedByAll = Callable[[str], tuple[Path, list[str]]]


@pytest.fixture(scope="module")
def saved_by_all(tmp_path_factory: pytest.TempPathFactory) -> SavedByAll:
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
def test_all_layouts_are_loaded_into_all_others(ranks: int, kind: str, saved_by_all: SavedByAll) -> None:
    place, saves = saved_by_all(kind)
    assert len(saves) >= (21 if kind == "moe" else 20)
    loads = cross(ranks, kind, saves)
    for start in range(0, len(loads), LOADS_OF_A_GROUP):
        mine = loads[start : start + LOADS_OF_A_GROUP]
        check_ranks(place / f"load-{ranks}", ranks, load_and_compare, place, mine)


MIB = 1 << 20
SIDE = 256


CLASSES: dict[str, Any] = {"llama": with_mixin(LlamaForCausalLM), "moe": with_mixin(Qwen3MoeForCausalLM)}


def build(kind: str, mebibytes: int) -> Any:
    """A model of so many MiB, nearly all of it in matrices that layouts split."""
    sizes: dict[str, Any] = {"hidden_size": SIDE, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64}
    features = mebibytes * MIB // (4 * 4 * 3 * SIDE) // 64 * 64  # of four layers, in three matrices of float32
    if kind == "llama":
        return CLASSES[kind](LlamaConfig(**sizes, num_hidden_layers=4, intermediate_size=features))
    sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": features // 8, "head_dim": 64}
    return CLASSES[kind](Qwen3MoeConfig(**sizes, num_hidden_layers=4, intermediate_size=SIDE))


def on_meta(saved: Path, kind: str, layout: str) -> Any:
    with torch.device("meta"):
        model = CLASSES[kind](CLASSES[kind].config_class.from_pretrained(saved))
    return spread(model, layout)


def load_part(saved: Path, kind: str, layout: str, way: str) -> Any:
    make_on_meta = partial(on_meta, saved, kind, layout)
    if way == "like":
        return hfshard.load_state_dict(saved, like=make_on_meta().state_dict())
    return load_by(way, CLASSES[kind], saved, layout, make_on_meta)


LOADS = [
    ("llama", "fsdp", "function"),
    ("llama", "tp", "function"),
    ("llama", "tp", "module"),
    ("llama", "by_turns", "like"),
    ("llama", "hsdp", "function"),
    ("llama", "hsdp", "like"),
    ("llama", "fsdp_tp", "module"),
    ("llama", "pp_fsdp", "function"),
    ("llama", "pp_tp", "like"),
    ("llama", "their_tp", "config"),
    ("llama", "their_hsdp", "config"),
    ("llama", "their_fsdp_tp", "config"),
    ("moe", "ep", "function"),
    ("moe", "ep", "like"),
    ("moe", "fsdp_ep", "function"),
    ("moe", "fsdp_ep", "module"),
    ("moe", "their_fsdp_4", "config"),
    ("moe", "their_fsdp_ep", "config"),
]
"""Rows and columns of tensor parallel layers, replicas, stages, experts."""
OF_ROWS = ("fsdp", "hsdp", "pp_fsdp", "their_hsdp")
"""Layouts in which each part of a Llama is rows of what is stored, so that all of them are mapped."""


def parts_of(loaded: Any) -> list[torch.Tensor]:
    """What a rank has."""
    tensors = loaded.values() if isinstance(loaded, dict) else loaded.state_dict(keep_vars=True).values()
    return [one.to_local() if isinstance(one, DTensor) else one for one in {id(one): one for one in tensors}.values()]


def load_and_count(rank: int, place: Path, loads: list[tuple[str, str, str]], mebibytes: int) -> None:
    forget_meshes()
    for kind, layout, way in loads:
        name = name_of(kind, way)
        load_part(place / "small" / name, kind, layout, way)  # what is imported and made once

        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        resident = number_in("/proc/self/status", "VmRSS")
        read = number_in("/proc/self/io", "rchar")
        loaded = load_part(place / "large" / name, kind, layout, way)
        read = number_in("/proc/self/io", "rchar") - read
        peak = (number_in("/proc/self/status", "VmHWM") - resident) * 1024

        parts = parts_of(loaded)
        part = sum(one.nbytes for one in parts)
        mapped = sum(one.nbytes for one in parts if file_mapped_at(one.data_ptr()))
        copied = part - mapped
        words = f"{kind} {layout} {way}: of {part} bytes, {mapped / part:.3f} mapped, "
        words += f"{read / part:.3f} read, {peak / part:.3f} in memory"
        assert part < 0.6 * mebibytes * MIB, words
        assert kind == "moe" or (mapped == part) == (layout in OF_ROWS), words
        assert 0.99 * copied < read < copied + 0.1 * part, words
        assert 0.9 * copied <= peak < 1.15 * part + 0.06 * mebibytes * MIB, words
        del loaded, parts


def name_of(kind: str, way: str) -> str:
    """A module's own names are others than those that transformers stores, where there are experts."""
    return f"{kind}-own" if kind == "moe" and way in ("module", "like") else kind


def check_costs(place: Path, loads: list[tuple[str, str, str]], mebibytes: int) -> None:
    """Save what is needed, in one process, and load it."""
    for name in sorted({name_of(kind, way) for kind, _, way in loads}):
        for size, number in (("small", 1), ("large", mebibytes)):
            kind, _, own = name.partition("-")
            with torch.device("meta"):
                model = build(kind, number)
            model.to_empty(device="cpu").save_pretrained(
                place / size / name, max_shard_size="20MB", checksum="xxh3", save_original_format=not own
            )
    check_ranks(place / "ranks", 4, load_and_count, place, loads, mebibytes)


def test_a_rank_reads_its_rows_columns_and_experts(tmp_path: Path) -> None:
    loads = [("llama", "tp", "function"), ("llama", "hsdp", "like"), ("moe", "ep", "function")]
    check_costs(tmp_path, loads, 64)


@pytest.mark.compat
@pytest.mark.slow
def test_a_rank_reads_its_part_in_every_layout(tmp_path: Path) -> None:
    known = [load for load in LOADS if not load[1].startswith("their") or load[1] in {*CONFIGS, "their_tp"}]
    check_costs(tmp_path, known, 256)
