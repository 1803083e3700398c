"""Modules that are alike are one, and a table of them stays short."""

from __future__ import annotations

import time

import pytest

from hfshard.viewing.module_tree import fold_names, fold_rows, number_ranges, parts_of_model


def rows(marks: dict[str, str], most: int = 30) -> list[tuple[str, dict[str, int]]]:
    found = fold_rows(fold_names(marks), hidden="same", most=most)
    return [(row.path, dict(row.marks)) for row in found]


NAMES = [f"h.{layer}.attn.{part}.{tensor}" for layer in range(12) for part in "qkv" for tensor in ("weight", "bias")]


def test_layers_with_the_same_marks_share_a_row() -> None:
    marks = {name: "changed" if ".q." in name else "same" for name in NAMES}
    marks |= {name: "new" for name in NAMES if name.startswith(("h.3.", "h.11."))}
    assert rows(marks) == [
        ("h.{0-2,4-10}.attn.q", {"changed": 20}),
        ("h.{3,11}.attn", {"new": 12}),
    ]


def test_siblings_with_one_mark_share_a_row() -> None:
    marks = {name: "changed" if ".q." in name or ".v." in name else "same" for name in NAMES}
    assert rows(marks) == [("h.{0-11}.attn.{q,v}", {"changed": 48})]


def test_modules_that_differ_inside_share_the_row_of_their_numbers() -> None:
    marks = {"h.0.dense": "new", "h.1.a": "new", "h.2.a": "new", "h.3.a": "same", "g.weight": "same"}
    assert rows(marks) == [("h.{0-2}", {"new": 3})]


def test_rows_stay_few_and_count_what_they_hide() -> None:
    marks = {name: "changed" if index % 7 < 3 else "same" for index, name in enumerate(NAMES)}
    marks["z"] = "new"
    assert rows(marks, most=3) == [("h", {"changed": 32, "same": 40}), ("z", {"new": 1})]
    assert len(rows(marks, most=100)) > 12


def test_a_tensor_and_a_module_of_the_same_name_are_two() -> None:
    assert rows({"a": "new", "a.b": "changed", "": "new", ".": "changed"}) == [
        ("", {"new": 1}),
        ("a", {"new": 1}),
        ("", {"changed": 1}),
        ("a", {"changed": 1}),
    ]


def test_tensors_of_a_row_are_known() -> None:
    (row,) = fold_rows(fold_names({"h.0.w": "new", "h.1.w": "new", "g": "same"}), hidden="same", most=9)
    assert [name for module in row.modules for name in module.tensors()] == ["h.0.w", "h.1.w"]


def test_many_names_and_deep_ones_take_linear_time() -> None:
    experts = {f"layers.{n // 1000}.experts.{n // 4 % 250}.w{n % 4}": str(n % 1000 < 4) for n in range(20_000)}
    began = time.process_time()
    found = rows(experts)
    deep = rows({"a." * 20_000: "new", "0." * 20_000: "new"})
    assert time.process_time() - began < 10
    assert found == [("layers.{0-19}.experts.0", {"True": 80}), ("layers.{0-19}.experts.{1-249}", {"False": 19_920})]
    assert len(deep) == 2


def test_ranges_of_numbers() -> None:
    assert number_ranges([3, 1, 2, 7, 9, 10]) == "1-3,7,9-10"
    assert number_ranges(range(0, 100, 2)) == "0,2,4,6,8,10,12,…"


def test_tensors_are_sorted_into_the_parts_of_a_model() -> None:
    layers = {"attn.q.weight": "attention", "mlp.up.weight": "MLP", "norm.weight": "norms", "scale": "other"}
    parts = {f"h.{layer}.{kind}": part for layer in (0, 1) for kind, part in layers.items()}
    parts |= {"wte.weight": "embeddings", "embed_tokens.weight": "embeddings", "ln_f.weight": "norms"}
    parts |= {"lm_head.weight": "head", "pooler.dense.weight": "other"}

    found = parts_of_model(list(parts))

    assert found == parts
    assert list(dict.fromkeys(found.values())) == ["embeddings", "attention", "MLP", "norms", "head", "other"]


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (
            [f"h.{layer}.attn.{one}.lora_{side}.weight" for layer in (0, 1) for one in "vq" for side in "AB"],
            ["attn.q", "attn.v"],
        ),
        ([f"h.{layer}.attn.{one}.weight" for layer in (0, 1) for one in "abcdefghij"], ["attention"]),  # too many
        (["x.weight", "y.weight"], ["other"]),
        ([], []),
    ],
)
def test_one_part_is_sorted_by_a_few_modules(names: list[str], parts: list[str]) -> None:
    assert list(dict.fromkeys(parts_of_model(names).values())) == parts
