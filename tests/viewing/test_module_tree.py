"""Modules that are alike are one, and a table of them stays short."""

from __future__ import annotations

import time

import pytest

from hfshard.viewing.module_tree import (
    fold_names,
    fold_rows,
    kinds_by_role,
    layer_grid,
    natural_order,
    number_ranges,
    parts_of_model,
)


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


# Layers are found in names of real architectures, and in names that nobody would give.


def test_layers_and_kinds_of_a_llama_in_natural_order() -> None:
    names = ["model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"]
    names += [
        f"model.layers.{layer}.{kind}" for layer in (10, 2, 0) for kind in ("self_attn.q.weight", "mlp.up.weight")
    ]

    grid = layer_grid(names)

    assert grid.others == ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight")
    (stack,) = grid.stacks
    assert (stack.name, stack.layers) == ("model.layers", (0, 2, 10))
    assert stack.kinds == ("mlp.up.weight", "self_attn.q.weight")
    assert stack.cells[10, "mlp.up.weight"] == ("model.layers.10.mlp.up.weight",)
    assert list(stack.cells) == [(layer, kind) for layer in (0, 2, 10) for kind in stack.kinds]


def test_experts_are_one_kind() -> None:
    names = [f"layers.{layer}.mlp.experts.{expert}.w1" for layer in (0, 1) for expert in range(11)]
    (stack,) = layer_grid([*names, "layers.0.mlp.gate", "layers.1.mlp.gate"]).stacks
    assert stack.kinds == ("mlp.experts.*.w1", "mlp.gate")
    assert stack.cells[1, "mlp.experts.*.w1"] == tuple(f"layers.1.mlp.experts.{expert}.w1" for expert in range(11))


@pytest.mark.parametrize(
    "kinds",
    [
        {
            "attention": ["attention.self.query.weight", "attention.self.query.bias", "attention.self.key.weight",
                          "attention.self.value.weight", "attention.output.dense.weight"],
            "MLP": ["intermediate.dense.weight", "output.dense.weight", "output.dense.bias"],
            "norms": ["attention.output.LayerNorm.weight", "output.LayerNorm.weight", "output.LayerNorm.bias"],
        },
        {
            "attention": ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
                          "self_attn.o_proj.weight"],
            "MLP": ["mlp.experts.*.gate_proj.weight", "mlp.gate.weight", "mlp.experts.*.up_proj.weight",
                    "mlp.experts.*.down_proj.weight"],
            "norms": ["input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_norm.weight"],
        },
        {
            "attention": ["attn.c_attn.weight", "attn.c_proj.weight"],
            "MLP": ["mlp.c_fc.weight", "mlp.c_proj.weight"],
            "norms": ["ln_1.weight", "ln_2.weight"],
        },
        {
            "attention": ["layer.0.SelfAttention.q.weight", "layer.0.SelfAttention.o.weight",
                          "layer.1.EncDecAttention.q.weight", "layer.1.EncDecAttention.o.weight"],
            "MLP": ["layer.2.DenseReluDense.wi.weight", "layer.2.DenseReluDense.wo.weight"],
            "norms": ["layer.0.layer_norm.weight"],
        },
        {"other": ["w", "mixer.A_log", "mixer.conv1d.weight"]},
    ],
)  # fmt: skip
def test_kinds_are_in_the_order_in_which_a_layer_computes(kinds: dict[str, list[str]]) -> None:
    alphabetical = sorted(kind for members in kinds.values() for kind in members)

    found = kinds_by_role(alphabetical)

    assert [(role, list(members)) for role, members in found] == list(kinds.items())


def test_numbers_that_end_a_name_are_those_of_tensors() -> None:
    grid = layer_grid([f"layers.{layer}.scales.{number}" for layer in (0, 1) for number in (0, 1)])
    assert [(stack.name, stack.layers, stack.kinds) for stack in grid.stacks] == [
        ("layers", (0, 1), ("scales.0", "scales.1"))
    ]


def test_parts_of_a_layer_that_differ_keep_their_numbers() -> None:
    kinds = ["layer.0.SelfAttention.q", "layer.0.norm", "layer.1.DenseReluDense.wi", "layer.1.norm"]
    names = [f"{stack}.block.{layer}.{kind}" for stack in ("encoder", "decoder") for layer in (0, 1) for kind in kinds]
    decoder, encoder = layer_grid(names).stacks
    assert (decoder.name, encoder.name) == ("decoder.block", "encoder.block")
    assert encoder.kinds == tuple(kinds)


@pytest.mark.parametrize(
    ("names", "stacks"),
    [
        (["0.auto.layer.0.q", "0.auto.layer.1.q", "2.linear.weight"], {"0.auto.layer": (0, 1)}),
        (["0.weight", "2.weight", "2.bias"], {"": (0, 2)}),
        (["h.0.attn.weight"], {}),  # one layer is no stack
        (["h.0.a", "h.1.b"], {}),  # they have nothing in common
        (["h.00.a", "h.1.a", "h.2.a", f"h.{'9' * 5000}.a", "h.².a", "h.-1.a"], {"h": (1, 2)}),
        (["", ".", "..", "0", "1", "0.", "*.0.a", "3.0.a", "3.1.a"], {"*": (0,), "3": (0, 1)}),
        (["h.weights.0", "h.weights.1"], {}),  # tensors in a list are no layers
        ([], {}),
    ],
)
def test_what_is_a_stack(names: list[str], stacks: dict[str, tuple[int, ...]]) -> None:
    grid = layer_grid(names)
    assert {stack.name: stack.layers for stack in grid.stacks} == stacks
    placed = [name for stack in grid.stacks for cell in stack.cells.values() for name in cell]
    assert sorted([*placed, *grid.others]) == sorted(names)


def test_natural_order_of_names() -> None:
    names = ["layer.10.b", "layer.2.b", "layer.2.a", "layer", f"layer.{'9' * 5000}", "layer.02.a", "a1b2", "a1b10"]
    assert sorted(names, key=natural_order) == [
        "a1b2", "a1b10", "layer", "layer.2.a", "layer.02.a", "layer.2.b", "layer.10.b", f"layer.{'9' * 5000}",
    ]  # fmt: skip


def test_layers_of_many_names_and_deep_ones_take_linear_time() -> None:
    experts = [f"model.layers.{n // 1000}.mlp.experts.{n // 4 % 250}.w{n % 4}.weight" for n in range(20_000)]
    began = time.process_time()
    (stack,) = layer_grid(experts).stacks
    grid = layer_grid([".".join("1" * 20_000), "1." * 20_000])
    assert time.process_time() - began < 10
    assert (len(stack.layers), stack.kinds) == (20, tuple(f"mlp.experts.*.w{n}.weight" for n in range(4)))
    assert (len(grid.stacks), len(grid.others)) == (0, 2)
