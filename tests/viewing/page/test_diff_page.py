"""The page of what differs, as data: it stays small whatever the names are."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.viewing.diff_checkpoints import diff_checkpoints
from hfshard.viewing.model_summary import ModelSummary
from hfshard.viewing.page.diff_page import make_diff_page, short_names
from hfshard.viewing.page.page import render_page
from hfshard.viewing.results import TensorDiff, TensorEntry, ValueDiff
from tests.viewing.adapters import make_adapter, make_base
from tests.viewing.reports import marked, renamed, report_of, tensor_diff, values_of


def test_grids_have_no_more_cells_than_a_browser_draws() -> None:
    names = [f"stack{stack}.{layer}.w" for stack in range(3) for layer in range(200)]
    names += [f"stack{stack}.0.kind{kind}" for stack in range(3) for kind in range(150)]

    page = make_diff_page(report_of(tensor_diff("same", name) for name in names))

    assert [(len(stack["layers"]), len(stack["kinds"])) for stack in page.data["stacks"]] == [(200, 100), (200, 100)]
    assert page.view["more_stacks"] == 1


def test_shades_span_what_changed_however_little() -> None:
    norms = [1e-7, 1e-6, 1e-5, 1e-4, 1e-3, math.inf, 0.0]
    found = [tensor_diff("changed", f"h.{layer}.w", values_of(norm)) for layer, norm in enumerate(norms)]

    page = make_diff_page(report_of([*found, tensor_diff("same", "h.7.w")]))

    [stack] = page.data["stacks"]
    assert stack["shades"] == [[1, 3, 5, 7, 9, 9, 1, 0]]
    assert stack["sides"] == [[0, 0, 0, 0, 0, 1, 0, 0]]
    assert stack["norms"] == [[1e-7, 1e-6, 1e-5, 1e-4, 1e-3, "from 0", 0.0, None]]
    assert page.view["ramp"][::4] == ["1e-05 %", "0.001 %", "0.1 %"]
    assert (page.view["has_below"], page.view["has_above"]) == (False, True)
    assert page.view["signs"] == [("same", "same")]


def test_what_is_not_in_the_grid_does_not_stretch_its_shades() -> None:
    norms = {"h.0.w": 1e-3, "h.1.w": 1e-2, "pooler.w": 5.5}
    page = make_diff_page(report_of(tensor_diff("changed", name, values_of(norm)) for name, norm in norms.items()))

    assert page.data["stacks"][0]["shades"] == [[1, 9]]
    assert (page.view["ramp"][0], page.view["ramp"][-1]) == ("0.1 %", "1 %")
    assert (page.view["has_below"], page.view["has_above"]) == (False, False)


def test_rows_are_in_the_order_of_a_layer_and_experts_share_one() -> None:
    kinds = ["ln.weight", "mlp.down.weight", "attn.k.weight", "attn.q.weight", "mlp.up.weight"]
    names = [f"h.{layer}.{kind}" for layer in (0, 1) for kind in kinds]
    experts = [f"h.{layer}.moe.{expert}.w1" for layer in (0, 1) for expert in range(4)]
    changed = ["h.0.moe.2.", "h.1.moe.", "h.1.ln"]

    [stack] = make_diff_page(report_of(marked([*names, *experts], changed=changed))).data["stacks"]

    assert list(zip(stack["roles"], stack["kinds"], strict=True)) == [
        ("attention", "attn.q.weight"), ("attention", "attn.k.weight"), ("MLP", "moe.*.w1"),
        ("MLP", "mlp.up.weight"), ("MLP", "mlp.down.weight"), ("norms", "ln.weight"),
    ]  # fmt: skip
    assert stack["parts"] == [[0, 0], [0, 0], [(1, 4), (4, 4)], *[[0, 0]] * 3]
    assert stack["worst"] == [[0, 0], [0, 0], [6, 6], [0, 0], [0, 0], [0, 6]]


def test_a_name_in_several_pairs_has_the_largest_norm_on_the_scale() -> None:
    found = [tensor_diff("changed", f"h.{n}.w", values_of(norm)) for n, norm in ((0, 1e-7), (0, 1e-3), (1, 1e-1))]

    page = make_diff_page(report_of(found))

    assert page.data["stacks"][0]["shades"] == [[1, 9]]
    assert page.view["ramp"][::2] == ["0.1 %", "0.32 %", "1 %", "3.2 %", "10 %"]
    assert page.view["measure"] == "|b − a| / |a|, log scale"


def test_the_largest_changes_come_first_and_what_was_zero_is_a_sentence() -> None:
    norms = {"b.bias": math.inf, "b.weight": 0.01, "a.weight": 0.02, "a.bias": math.inf}
    page = make_diff_page(report_of(tensor_diff("changed", name, values_of(norm)) for name, norm in norms.items()))

    facts = [(fact.label, fact.value, fact.note) for fact in page.facts]
    assert facts[1:3] == [
        ("changed", "4", "they hold 100.0 % of B's parameters"),
        ("largest change", "2 %", "relative norm of a.weight"),
    ]
    assert [(row[0], row[8]) for row in page.data["tensors"]] == [
        ("a.weight", 0.02), ("b.weight", 0.01), ("b.bias", "from 0"), ("a.bias", "from 0"),
    ]  # fmt: skip
    assert page.view["sentences"] == [
        "All 4 tensors changed.",
        "2 tensors were zero in A and nonzero in B: a.bias and b.bias.",
    ]


def test_layers_that_changed_alike_share_a_row() -> None:
    names = [f"enc.layer.{layer}.{kind}" for layer in range(6) for kind in ("q.weight", "v.weight")]
    found = marked([*names, "pooler.weight"], changed=[".0.q", ".3.", ".4.", ".5.", "pooler"])

    data = make_diff_page(report_of(found)).data

    assert data["folds"] == ["enc.layer.{0,3-5}.q.weight", "enc.layer.{3-5}.v.weight"]
    assert [(row[0], row[3]) for row in data["tensors"]] == [
        ("enc.layer.0.q.weight", 0), ("enc.layer.3.q.weight", 0), ("enc.layer.3.v.weight", 1),
        ("enc.layer.4.q.weight", 0), ("enc.layer.4.v.weight", 1), ("enc.layer.5.q.weight", 0),
        ("enc.layer.5.v.weight", 1), ("pooler.weight", -1),
    ]  # fmt: skip


def test_a_hundred_thousand_changes_stay_under_five_megabytes() -> None:
    values = ValueDiff(14_680_064, 14_680_001, 1.23456e-3, 1.23456e-2, 0.999912345678, 123, 123, 123, 123)
    names = [f"model.layers.{n // 1000}.mlp.experts.{n % 1000 // 4}.proj{n % 4}.weight" for n in range(100_000)]

    page = make_diff_page(report_of(tensor_diff("changed", name, values) for name in names))

    assert len(page.data["tensors"]) == 20_000
    assert page.view["more"] == 80_000
    assert len(render_page(page)) < 5_000_000


def test_kinds_shapes_and_old_names_keep_rows_apart() -> None:
    names = [f"h.{layer}.w" for layer in range(6)]
    found = [
        *marked(names[:4], cast=[".0", ".1"], changed=[".2", ".3"]),
        renamed("t.4.w", names[4]),
        renamed("u", names[5]),
    ]

    data = make_diff_page(report_of(found)).data

    assert data["folds"] == ["h.{0-1}.w", "h.{2-3}.w"]
    assert [row[3] for row in data["tensors"]] == [0, 0, 1, 1, -1, -1]


def test_experts_of_one_layer_share_a_row() -> None:
    names = [f"h.{layer}.moe.{expert}.w1" for layer in (0, 1) for expert in range(3)]

    data = make_diff_page(report_of(marked(names, changed=["h.1."]))).data

    assert data["folds"] == ["h.1.moe.*.w1"]


def test_a_column_that_says_one_thing_is_a_sentence() -> None:
    values = [values_of(0.5, max_abs=0.25), values_of(0.5, max_abs=0.5, changed=1)]
    found = [tensor_diff("changed", name, one) for name, one in zip("ab", values, strict=True)]

    several = make_diff_page(report_of(found))
    one = make_diff_page(report_of(found[:1]))
    none = make_diff_page(report_of(marked("ab")))

    assert several.data["columns"] == ["max", "share"]
    assert several.view["same_in_all"] == ["changed", "F32", "2", "relative norm 50 %", "1 − cosine 0.0"]
    assert one.data["columns"] == ["norm", "max", "turn", "share", "kind", "dtype", "shape"]
    assert one.view["same_in_all"] == []
    assert (none.data["columns"], none.view["same_in_all"]) == ([], [])


def test_a_small_turn_is_not_rounded_to_a_cosine_of_one() -> None:
    def turn(cosine: float | None, dtype: str) -> object:
        entry = TensorEntry("w", dtype, (2,), 8 if dtype == "F32" else 4, "model.safetensors")
        found = TensorDiff("changed", entry, entry, replace(values_of(0.1), cosine=cosine))
        return make_diff_page(report_of([found])).data["tensors"][0][10]

    assert turn(1 - 2e-9, "F32") == 2e-9
    assert turn(1 - 3e-6, "BF16") == 3e-6
    assert turn(1 - 2e-7, "BF16") == 0.0  # the cosine is known to six digits
    assert turn(1 + 1e-12, "F32") == 0.0
    assert turn(-0.5, "F32") == 1.5
    assert turn(None, "F32") is None


def test_an_adapter_beside_its_base_is_shown_as_what_it_changes_there(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "mine", base_model_name_or_path="/models/org/base")
    found = diff_checkpoints(make_base(tmp_path / "base"), adapter, values=True)

    page = make_diff_page(found)

    assert (page.title, page.view["kind"]) == ("base + mine", "adapter and its base")
    assert page.about == ("LoRA adapter", "of base", "rank 2", "alpha 4", "on q")
    assert page.view["sentences"] == [
        "B is an adapter (LoRA) that changes q.weight of layer 0 of 2 of A: 1 of 6 tensors."
    ]
    assert [(fact.label, fact.value, fact.note) for fact in page.facts[:3]] == [
        ("adapter's parameters", "28", "51.9 % of the base's"),
        ("tensors", "6", "5 are the same"),
        ("weights changed", "1", "they hold 22.2 % of the base's parameters"),
    ]
    assert page.view["measure"] == "|update| / |weight|, log scale; the update includes alpha / rank"
    assert page.view["method"] == "2 tensors were read with the adapter's factors: 208 B."
    [stack] = page.data["stacks"]
    assert (stack["name"], stack["norms"]) == ("h", [[0.5, 0.0], [None, None], [None, None]])
    assert [row[0] for row in page.data["tensors"]] == ["h.0.q.weight"]


def test_an_adapter_and_its_base_are_both_described(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    (base / "config.json").write_text('{"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 4}')
    adapter = make_adapter(tmp_path / "mine", use_rslora=True)

    page = make_diff_page(diff_checkpoints(base, adapter, values=True))
    turned = make_diff_page(diff_checkpoints(adapter, base, values=True))

    assert page.about == turned.about == ("LoRA adapter", "rank 2", "alpha 4", "on q")
    assert [model for _, _, model in page.view["places"]] == [("bert", "2 layers × 4"), ()]
    assert [model for _, _, model in turned.view["places"]] == [(), ("bert", "2 layers × 4")]
    assert page.view["measure"] == "|update| / |weight|, log scale; the update includes alpha / √rank"


def test_the_change_of_the_model_is_a_figure_where_all_tensors_were_read(tmp_path: Path) -> None:
    base = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0, 12.0])}
    for name, tensors in {
        "base": base,
        "all": {"a": base["a"] + torch.tensor([0.5, 0.0]), "b": base["b"] + torch.tensor([1.2, 0.0])},
        "some": base | {"a": base["a"] * 2},
    }.items():
        hfshard.save_state_dict(tensors, tmp_path / name)

    of_all, of_some = (
        make_diff_page(diff_checkpoints(tmp_path / "base", tmp_path / name, values=True)) for name in ("all", "some")
    )

    assert [(fact.label, fact.value, fact.note) for fact in of_all.facts[2:]] == [
        ("change of the model", "10 %", "relative norm of all tensors"),  # 1.3 of 13
        ("largest change", "10 %", "relative norm of b"),
    ]
    assert of_all.view["method"] == "2 tensors were read: 32 B."
    assert [(fact.label, fact.value) for fact in of_some.facts[2:]] == [("largest change", "100 %")]
    assert of_some.view["method"] == "1 tensor was read: 16 B; digests told the others."
    assert make_diff_page(diff_checkpoints(tmp_path / "base", tmp_path / "all")).view["method"] == (
        "Compared by names and digests; no tensor was read."
    )


def test_without_values_an_adapter_is_told_how_to_see_what_it_changes(tmp_path: Path) -> None:
    base, adapter = make_base(tmp_path / "base"), make_adapter(tmp_path / "mine")

    assert make_diff_page(diff_checkpoints(base, adapter)).view["sentences"] == [
        "No tensor in common; 6 tensors only in A; B is an adapter (LoRA) for q of all 2 layers: 4 tensors.",
        "With --values, this page shows what the adapter changes in its base.",
    ]
    assert len(make_diff_page(diff_checkpoints(adapter, adapter)).view["sentences"]) == 1


def test_each_model_is_described_where_they_are_not_alike() -> None:
    bert, llama = ModelSummary(architecture="Bert", layers=2), ModelSummary(architecture="Llama")
    found = report_of(marked("ab"))

    alike = make_diff_page(replace(found, models=(bert, bert)))
    unlike = make_diff_page(replace(found, models=(bert, llama)))

    assert alike.about == ("Bert", "2 layers")
    assert alike.view["places"] == [("A", "/a", ()), ("B", "/b", ())]
    assert unlike.about == ()
    assert unlike.view["places"] == [("A", "/a", ("Bert", "2 layers")), ("B", "/b", ("Llama",))]


# Two places have short names that differ where the places do.


@pytest.mark.parametrize(
    ("a", "b", "names"),
    [
        ("/data/base", "/data/tuned", ("base", "tuned")),
        ("/data/minilm/base", "/data/finetuned/base", ("minilm/base", "finetuned/base")),
        ("/run/checkpoint-10", "/run/checkpoint-20", ("checkpoint-10", "checkpoint-20")),
        ("org/name@v1", "org/name", ("name@v1", "name")),
        ("/models/org/name", "org/name", ("models/org/name", "org/name")),
        ("s3://one/run/out", "s3://two/run/out", ("one/run/out", "two/run/out")),
        ("/data/out", "/data/out", ("out", "out")),
        ("/", "/out", ("/", "out")),
        (f"/1/{'x' * 80}/out", f"/2/{'x' * 80}/out", ("1/…/out", "2/…/out")),
        ("/" + "x" * 99, "/y", ("x" * 30 + "…" + "x" * 29, "y")),
    ],
)
def test_short_names_of(a: str, b: str, names: tuple[str, str]) -> None:
    assert short_names(a, b) == names
