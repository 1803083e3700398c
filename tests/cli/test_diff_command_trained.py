"""What was trained is what a diff shows: the real MiniLM, in part frozen, with an adapter, in another dtype."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import BertModel

import hfshard
from hfshard.viewing.describe import headline
from tests.cli.conftest import Run


def train(model: torch.nn.Module) -> None:
    """Two steps of the parameters that are not frozen."""
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        output = model(input_ids=torch.arange(1000, 1016).reshape(2, 8) + step)
        (output.last_hidden_state.square().mean() + output.pooler_output.square().mean()).backward()
        optimizer.step()


def trained(minilm: Path, *parts: str) -> BertModel:
    """MiniLM after two steps of the parameters with one of these parts in their names."""
    model = BertModel.from_pretrained(minilm)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in parts))
    train(model)
    return model


@pytest.mark.compat
def test_trained_layers_are_those_that_are_shown(minilm: Path, tmp_path: Path, run: Run) -> None:
    model = trained(minilm, "layer.4.", "layer.5.")
    hfshard.save_model(model, tmp_path / "tuned", max_shard_size="20MB")

    done = run("diff", minilm, tmp_path / "tuned", "--values", COLUMNS="80")

    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    # position_ids is in the old file alone: transformers no longer saves it.
    assert lines[0] == "Only layers 4-5 of 6 changed: 32 of 103 tensors; 1 tensor only in A (embeddings.position_ids)."
    rows = [line.split() for line in lines if line.startswith(("changed", "only", "same"))]
    assert [(row[0], row[-1]) for row in rows] == [
        ("only", "embeddings.position_ids"), ("changed", "encoder.layer.{4-5}"), ("same", "rest"),
    ]  # fmt: skip
    assert (rows[1][1], rows[2][1]) == ("32", "71")
    drawn = {words[0]: words[1] for line in lines[-18:-2] if len(words := line.split()) == 2}
    assert len(drawn) == 16
    assert {row[:4] for row in drawn.values()} == {"...."}
    assert all(level in "123456789" for row in drawn.values() for level in row[4:])


def test_a_head_a_cast_and_a_prefix_are_told_in_a_sentence(minilm: Path, tmp_path: Path) -> None:
    base = BertModel.from_pretrained(minilm).state_dict()
    hfshard.save_state_dict(base, tmp_path / "base")
    head = trained(minilm, "pooler").state_dict()
    cast = {name: tensor.bfloat16() for name, tensor in base.items()}
    prefixed = {f"model.{name}": tensor for name, tensor in base.items()}

    def said(state_dict: dict[str, torch.Tensor]) -> str:
        hfshard.save_state_dict(state_dict, tmp_path / "b")
        return headline(hfshard.diff_checkpoints(tmp_path / "base", tmp_path / "b"))

    assert said(head) == "Only pooler.dense changed: 2 of 103 tensors."
    assert said(cast) == "Cast from F32 to BF16, nothing else."
    assert said(prefixed) == "The same 103 tensors under other names: with 'model.' in front."


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it
def test_an_adapter_and_what_it_was_merged_into(minilm: Path, tmp_path: Path, run: Run) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
    model = peft.get_peft_model(BertModel.from_pretrained(minilm), config)
    hfshard.save_state_dict(BertModel.from_pretrained(minilm).state_dict(), tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    hfshard.save_model(model.merge_and_unload(), tmp_path / "merged")

    merged = run("diff", tmp_path / "base", tmp_path / "merged")
    adapter = run("diff", tmp_path / "base", tmp_path / "adapter" / "adapter_model.safetensors", "--format", "json")

    assert merged.stdout.startswith("Only query.weight and value.weight of all 6 layers changed: 12 of 103 tensors.\n")
    assert "changed           6  encoder.layer.{0-5}.attention.self.query.weight\n" in merged.stdout
    found = json.loads(adapter.stdout)
    assert found["headline"] == (
        "No tensor in common; 103 tensors only in A; "
        "B is an adapter (LoRA) for query and value of all 6 layers: 24 tensors."
    )
    assert (merged.returncode, adapter.returncode, found["counts"]["only_in_b"]) == (1, 1, 24)
