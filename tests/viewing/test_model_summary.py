"""What a checkpoint is, by the config beside its weights: models, adapters, and configs that lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hfshard
from hfshard.viewing.inspection import inspect_checkpoint
from hfshard.viewing.model_summary import ModelSummary, summary_of_adapter, summary_of_model
from hfshard.viewing.show import show_checkpoint

BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "num_hidden_layers": 6,
    "hidden_size": 384,
    "vocab_size": 30_522,
    "torch_dtype": "float32",
}
LORA = {
    "peft_type": "LORA",
    "base_model_name_or_path": "/home/somebody/models/bert",
    "r": 8,
    "lora_alpha": 16.5,
    "target_modules": ["value", "query"],
}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (BERT, ("BertModel (bert)", "6 layers × 384", "vocabulary 30,522", "float32")),
        ({"model_type": "gpt2", "n_layer": 1, "n_embd": 768}, ("gpt2", "1 layer × 768")),
        ({"d_model": 512, "num_layers": 6, "num_decoder_layers": 8}, ("6 + 8 layers × 512",)),
        (
            {
                "architectures": ["Llama4ForConditionalGeneration"],
                "dtype": "torch.bfloat16",
                "text_config": {"num_hidden_layers": 48, "num_local_experts": 16, "vocab_size": 202_048},
                "quantization_config": {"quant_method": "fp8"},
            },
            (
                "Llama4ForConditionalGeneration",
                "48 layers",
                "16 experts a layer",
                "vocabulary 202,048",
                "bfloat16",
                "quantized: fp8",
            ),
        ),
        ({"_class_name": "UNet2DConditionModel"}, ("UNet2DConditionModel",)),
    ],
)
def test_a_model_is_described_by_its_config(config: dict[str, Any], words: tuple[str, ...]) -> None:
    summary = summary_of_model(config)

    assert summary is not None
    assert summary.describe() == words


def test_what_is_no_number_or_text_is_unknown() -> None:
    lies = {
        "architectures": [["x"]],
        "model_type": {"a": 1},
        "num_hidden_layers": True,
        "hidden_size": "384",
        "vocab_size": -1,
        "num_experts": 10**400,
        "text_config": [],
        "quantization_config": "fp8",
    }
    assert summary_of_model(lies) is None
    assert summary_of_model({}) is None
    assert summary_of_model({"model_type": "x" * 1000}) == ModelSummary(model_type="x" * 80 + "…")
    liar = summary_of_adapter({"r": "8", "lora_alpha": 10**400, "target_modules": [1, "a"], "peft_type": []})
    assert liar == ModelSummary(adapter="PEFT", targets=("a",))


def test_an_adapter_is_described_by_its_base_and_rank() -> None:
    assert summary_of_adapter(LORA).describe() == (
        "LoRA adapter",
        "of /home/somebody/models/bert",
        "rank 8",
        "alpha 16.5",
        "on query, value",
    )
    many = summary_of_adapter({"peft_type": "OFT", "target_modules": ["f", "a", "e", "b", "d", "c"]})
    assert many.describe() == ("OFT adapter", "on a, b, c, d and 2 more")


def test_the_config_beside_the_weights_is_read_and_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    hfshard.save_state_dict({"a": torch.ones(3)}, tmp_path)
    assert inspect_checkpoint(tmp_path).model is None
    config = tmp_path / "config.json"
    config.write_text(json.dumps(BERT))

    found = inspect_checkpoint(tmp_path)

    assert found.model is not None
    assert (found.model.architecture, found.model.layers, found.model.width) == ("BertModel", 6, 384)
    assert found.as_json()["model"]["vocabulary"] == 30_522
    html = Path(show_checkpoint(tmp_path, tmp_path / "page.html")).read_text(encoding="utf-8")
    assert '<span class="name">BertModel (bert)</span><span class="name">6 layers × 384</span>' in html


def test_the_page_of_an_adapter_has_its_base_without_the_folders_above(tmp_path: Path) -> None:
    save_file({"base_model.model.q.lora_A.weight": torch.ones(8, 4)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({**LORA, "target_modules": "<b>.*"}))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 4}))

    html = Path(show_checkpoint(tmp_path, tmp_path / "page.html")).read_text(encoding="utf-8")

    assert '<p class="kind">adapter</p>' in html
    assert '<span class="name">of bert</span><span class="name">rank 8</span>' in html
    assert "/home/somebody" not in html
    assert "on &lt;b&gt;." in html
