"""What happened is said in one sentence."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from hfshard.viewing.describe import comparison_method, headline, zero_before
from hfshard.viewing.results import TensorDiff
from tests.viewing.reports import BERT, facts, marked, renamed, report_of, tensor_diff, values_of

LLAMA = [f"model.layers.{n}.self_attn.{part}_proj.weight" for n in range(24) for part in "qkvo"] + ["lm_head.weight"]
ADAPTER = [
    f"base_model.model.model.layers.{n}.self_attn.{part}_proj.lora_{ab}.weight"
    for n in range(24)
    for part in "qv"
    for ab in "AB"
]

ADAPTER_AND_HEAD = [*ADAPTER, "base_model.model.lm_head.weight"]
TRAINED = [
    *(name.replace(".weight", ".default.weight") for name in ADAPTER),
    "base_model.model.lm_head.modules_to_save.default.weight",
]


def wrapped(name: str) -> str:
    """The name of a tensor of LLAMA in a model that PEFT wraps."""
    module = name.removesuffix(".weight")
    part = ".base_layer" if module.endswith(("q_proj", "v_proj")) else ""
    return f"base_model.model.{module}{'.original_module' if module == 'lm_head' else part}.weight"


WRAPPED = [*map(wrapped, LLAMA), *TRAINED]


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ([], "Both are empty."),
        (marked(["w"], changed=["w"]), "The only tensor changed."),
        (marked(BERT), "The same 100 tensors."),
        (marked(BERT, changed=["classifier"]), "Only the head (classifier) changed: 2 of 100 tensors."),
        (marked(BERT, changed=["layer.10.", "layer.11."]), "Only layers 10-11 of 12 changed: 16 of 100 tensors."),
        (
            marked(LLAMA, changed=["q_proj", "v_proj"]),
            "Only q_proj and v_proj of all 24 layers changed: 48 of 97 tensors.",
        ),
        (
            marked(BERT, changed=["query.bias", "key", "pooler"]),
            "Only key and query.bias of all 12 layers and bert.pooler.dense changed: 37 of 100 tensors.",
        ),
        (marked(BERT, changed=["layer.3.self.key.b", "layer.5.self.value.w"]),
         "Only parts of layers 3,5 of 12 changed: 2 of 100 tensors."),
        (marked(BERT, changed=BERT), "All 100 tensors changed."),
        (marked(BERT, changed=[name for name in BERT if "word" not in name]),
         "All but bert.embeddings.word changed: 99 of 100 tensors."),
        (marked(BERT, cast=BERT), "Cast from F32 to BF16, nothing else."),
        (marked(BERT, cast=["layer"]),
         "96 of 100 tensors cast from F32 to BF16 (all 12 layers); the rest is the same."),
        (marked(BERT, only_in_b=["classifier"]), "2 tensors only in B (classifier); the rest is the same."),
        (marked(BERT, reshaped=["word"]),
         "1 tensor in another shape (bert.embeddings.word); the rest is the same."),
        ([renamed(name, f"model.{name}") for name in BERT],
         "The same 100 tensors under other names: with 'model.' in front."),
        (
            [renamed(name, name.removeprefix("bert.")) for name in BERT[:-2]]
            + marked(["classifier.weight", "classifier.bias"], changed=["classifier"]),
            "2 of 100 tensors changed: the head (classifier); 98 tensors renamed: without 'bert.' in front.",
        ),
        (
            [renamed(f"h.{n}.gamma", f"h.{n}.weight") for n in range(3)] + [renamed("h.1.mlp.w", "t.1.mlp.w")],
            "The same 4 tensors under other names: 'gamma' is 'weight'; 'h' is 't'.",
        ),
        (
            marked(LLAMA, only_in_a=LLAMA) + marked(ADAPTER, only_in_b=ADAPTER),
            "No tensor in common; 97 tensors only in A; "
            "B is an adapter (LoRA) for q_proj and v_proj of all 24 layers: 96 tensors.",
        ),
        (
            marked(LLAMA) + marked(ADAPTER, only_in_b=ADAPTER),
            "B has an adapter (LoRA) for q_proj and v_proj of all 24 layers: 96 tensors; the rest is the same.",
        ),
        (
            marked(LLAMA, only_in_a=LLAMA) + marked(ADAPTER_AND_HEAD, only_in_b=ADAPTER_AND_HEAD),
            "No tensor in common; 97 tensors only in A; "
            "B is an adapter (LoRA) for q_proj and v_proj of all 24 layers, with lm_head: 97 tensors.",
        ),
        (
            marked(ADAPTER_AND_HEAD, only_in_a=ADAPTER_AND_HEAD) + marked(LLAMA, only_in_b=LLAMA),
            "No tensor in common; "
            "A is an adapter (LoRA) for q_proj and v_proj of all 24 layers, with lm_head: 97 tensors; "
            "97 tensors only in B.",
        ),
        (
            [renamed(name, wrapped(name)) for name in LLAMA] + marked(TRAINED, only_in_b=TRAINED),
            "97 tensors renamed: with PEFT's additions to names; "
            "B has an adapter (LoRA) for q_proj and v_proj of all 24 layers, with lm_head: 97 tensors.",
        ),
        (
            [renamed(wrapped(name), name) for name in LLAMA] + marked(TRAINED, only_in_a=TRAINED),
            "97 tensors renamed: without PEFT's additions to names; "
            "A has an adapter (LoRA) for q_proj and v_proj of all 24 layers, with lm_head: 97 tensors.",
        ),
        (
            marked(WRAPPED, changed=TRAINED),
            "Only the adapter (LoRA) for q_proj and v_proj of all 24 layers, with lm_head changed: 97 of 194 tensors.",
        ),
        (  # a wrapped model is no adapter
            marked(LLAMA, only_in_a=LLAMA) + marked(WRAPPED, only_in_b=WRAPPED),
            "No tensor in common; 97 tensors only in A; 194 tensors only in B.",
        ),
        (
            [renamed(f"{name}.bias", f"base_model.model.{name}.bias") for name in "ab"],
            "The same 2 tensors under other names: with 'base_model.model.' in front.",
        ),
    ],
)  # fmt: skip
def test_headline_of(tensors: list[TensorDiff], sentence: str) -> None:
    assert headline(report_of(tensors)) == sentence


def test_a_sentence_may_begin_with_a_time() -> None:
    def sentence(*changed: str) -> str:
        return headline(report_of(marked(BERT, changed=changed)), "From step 100 to step 2,000")

    assert sentence("layer.10.", "layer.11.") == (
        "From step 100 to step 2,000, only layers 10-11 of 12 changed: 16 of 100 tensors."
    )
    assert sentence("bert", "classifier") == "From step 100 to step 2,000, all 100 tensors changed."
    assert sentence() == "From step 100 to step 2,000, nothing changed: the same 100 tensors."


def test_what_was_read_to_compare_is_told() -> None:
    found = report_of([*marked("abc"), tensor_diff("only_in_b", "d")])

    assert comparison_method(found) == "Compared by names and digests; no tensor was read."
    some = replace(found, read_bytes=42_600_000, read_tensors=2)
    assert comparison_method(some) == "2 tensors were read: 42.6 MB; digests told the others."
    assert comparison_method(replace(some, read_tensors=3)) == "3 tensors were read: 42.6 MB."
    assert comparison_method(replace(some, read_tensors=1, merged=found)) == (
        "1 tensor was read with the adapter's factors: 42.6 MB."
    )


def test_files_and_ties_are_told() -> None:
    same = marked(["a", "b", "c"])
    moved = [replace(one, b=facts(one.name, file=f"model-{number}")) for number, one in enumerate(same)]
    assert headline(report_of(moved)) == "The same 3 tensors, in 3 files instead of 1."
    assert headline(report_of(same, retied=("lm_head.weight",))) == (
        "Tied to other tensors: lm_head.weight; the rest is the same."
    )


def test_encoder_and_decoder_are_told_apart_and_long_names_shortened() -> None:
    names = [f"{stack}.block.{n}.layer.{part}" for stack in ("encoder", "decoder") for n in (0, 1, 2) for part in "qk"]
    found = marked(names, changed=["decoder.block.2", "encoder.block.1.layer.q"])
    assert headline(report_of(found)) == (
        "Only layer 2 of 3 of decoder.block and layer.q of layer 1 of 3 of encoder.block changed: 3 of 12 tensors."
    )
    long = tensor_diff("changed", "x" * 10_000)
    assert len(headline(report_of([long, *marked(["a", "b"])]))) < 100


def test_what_was_zero_is_a_sentence() -> None:
    def told(*zeros: str) -> str:
        return zero_before(
            report_of(
                tensor_diff("changed", name, values_of(inf if any(part in name for part in zeros) else 0.5))
                for name in BERT
            )
        )

    assert told() == ""
    assert told("pooler") == "1 tensor was zero in A and nonzero in B: bert.pooler.dense."
    assert told("query.bias", "classifier") == (
        "14 tensors were zero in A and nonzero in B: query.bias of all 12 layers and classifier."
    )
