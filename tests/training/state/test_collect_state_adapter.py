"""The adapter of a model in a run: PEFT opens a checkpoint as if it had saved the adapter there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertModel, LlamaConfig, LlamaForCausalLM

import hfshard
from hfshard.training import CheckpointManager, TrainingState
from tests.helpers.peft_versions import peft_of_transformers
from tests.helpers.tiny_bert import bert

peft = pytest.importorskip("peft")
# PEFT asks newer versions of transformers for it by its old name.
RENAMED = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
pytestmark = [pytest.mark.compat, RENAMED]

IDS = torch.arange(8)[None]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The directory of a base model."""
    torch.manual_seed(0)
    model = BertModel(bert(0, cls=BertModel).config)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapted(base: Path, *, name: str = "default", **options: Any) -> Any:
    """A base model with an adapter, all of whose weights are set, so that it changes what comes out."""
    options = {"target_modules": ["query", "value"], "r": 2, **options}
    model: Any = BertModel.from_pretrained(base)
    model = peft.get_peft_model(model, peft.LoraConfig(**options), adapter_name=name).eval()
    fill(model)
    return model


def fill(model: Any) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            if "lora_" in key or "modules_to_save" in key:
                parameter.normal_()


def output(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(IDS).last_hidden_state
    return result


def save(model: Any, run: Path, **options: Any) -> Path:
    with CheckpointManager(run) as manager:
        return Path(manager.save(1, TrainingState(model=model), **options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"name": "mine"},
        {"use_dora": True},
        {"modules_to_save": ["pooler"]},
        {"target_modules": ["word_embeddings", "query"]},
        {"task_type": "FEATURE_EXTRACTION"},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_peft_opens_a_checkpoint_as_what_it_saved_itself(base: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    model = adapted(base, **options)
    checkpoint = save(model, tmp_path / "run")
    model.save_pretrained(tmp_path / "by-peft")
    by_peft = tmp_path / "by-peft" / options.get("name", "")

    opened = peft.PeftModel.from_pretrained(BertModel.from_pretrained(base), checkpoint).eval()
    assert torch.equal(output(opened), output(model))
    assert not torch.equal(output(opened), output(BertModel.from_pretrained(base).eval()))
    assert json.loads((checkpoint / CONFIG).read_text()) == json.loads((by_peft / CONFIG).read_text())
    expected, found = load_file(by_peft / WEIGHTS), load_file(checkpoint / WEIGHTS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(not config.inference_mode for config in model.peft_config.values())


@pytest.mark.parametrize("modules", [["embed_tokens", "q_proj"], ".*embed_tokens|.*q_proj", ["lm_head"], "all-linear"])
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")  # by PEFT's own save
def test_embeddings_are_held_where_peft_would_hold_them(tmp_path: Path, modules: Any) -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=modules, r=2, task_type="CAUSAL_LM"))
    checkpoint = save(model, tmp_path / "run")
    model.save_pretrained(tmp_path / "by-peft")

    assert load_file(checkpoint / WEIGHTS).keys() == load_file(tmp_path / "by-peft" / WEIGHTS).keys()


def test_a_vocabulary_that_has_grown_is_held(base: Path, tmp_path: Path) -> None:
    grown: Any = BertModel.from_pretrained(base)
    grown.resize_token_embeddings(12)
    model = peft.get_peft_model(grown, peft.LoraConfig(target_modules=["query"], r=2)).eval()
    fill(model)
    checkpoint = save(model, tmp_path / "run")

    again: Any = BertModel.from_pretrained(base)
    again.resize_token_embeddings(12)
    opened = peft.PeftModel.from_pretrained(again, checkpoint).eval()
    assert torch.equal(output(opened), output(model))
    weights = opened.get_input_embeddings().weight
    assert torch.equal(weights, model.get_input_embeddings().weight)


def test_the_adapter_is_one_file_that_is_checked_like_the_others(base: Path, tmp_path: Path) -> None:
    model = adapted(base)
    run = tmp_path / "run"
    with CheckpointManager(run, max_shard_size=600) as manager:
        checkpoint = Path(manager.save(1, TrainingState(model=model), blocking=False))
        manager.wait_until_finished()
        assert len(list(checkpoint.glob("model-*.safetensors"))) > 1
        assert hfshard.verify_checkpoint(checkpoint).ok
        with (checkpoint / WEIGHTS).open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x7f")
        [problem] = hfshard.verify_checkpoint(checkpoint).problems
        assert Path(problem.file).name == WEIGHTS


def test_a_run_with_an_adapter_goes_on_to_the_bit(base: Path, tmp_path: Path) -> None:
    def made() -> tuple[Any, torch.optim.Optimizer]:
        model = adapted(base).train()
        return model, torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=0.1)

    def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
        model(IDS).last_hidden_state.pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made()
    with CheckpointManager(tmp_path / "run") as manager:
        step(model, optimizer)
        manager.save(1, TrainingState(model=model, optimizer=optimizer))
        step(model, optimizer)
        again, its_optimizer = made()
        assert manager.restore_latest(TrainingState(model=again, optimizer=its_optimizer)) == 1
    step(again, its_optimizer)

    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


def test_an_adapter_that_transformers_added_is_opened_too(base: Path, tmp_path: Path) -> None:
    peft_of_transformers()
    model: Any = BertModel.from_pretrained(base)
    model.add_adapter(peft.LoraConfig(target_modules=["query", "value"], r=2))
    fill(model.eval())
    checkpoint = save(model, tmp_path / "run")

    opened = peft.PeftModel.from_pretrained(BertModel.from_pretrained(base), checkpoint).eval()
    assert torch.equal(output(opened), output(model))
    assert not torch.equal(output(opened), output(BertModel.from_pretrained(base).eval()))


def test_a_config_of_a_users_own_is_no_hindrance(tmp_path: Path) -> None:
    class Config(dict[str, int]):
        vocab_size = 4

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.name_or_path = Config(), "org/mine"
            self.tokens, self.query = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 2)

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.tokens

    config = peft.LoraConfig(target_modules=["query"], r=1, base_model_name_or_path="org/mine")
    checkpoint = save(peft.get_peft_model(Net(), config), tmp_path / "run")
    assert len(load_file(checkpoint / WEIGHTS)) == 2


def test_a_save_changes_nothing_of_a_config(base: Path, tmp_path: Path) -> None:
    model: Any = BertModel.from_pretrained(base)
    config = peft.AdaLoraConfig(target_modules=["query"], init_r=2, target_r=1, total_step=10, tinit=1, tfinal=1)
    model = peft.get_peft_model(model, config)
    names = [name.removeprefix("base_model.model.") for name, one in model.named_modules() if hasattr(one, "lora_E")]
    ranks = {f"{name}.lora_E.default": [True, False] for name in names}
    model.peft_config["default"].rank_pattern = dict(ranks)
    checkpoint = save(model, tmp_path / "run")

    assert model.peft_config["default"].rank_pattern == ranks
    saved = json.loads((checkpoint / CONFIG).read_text())["rank_pattern"]
    assert saved == {name.removesuffix(".default"): one for name, one in ranks.items()}


@pytest.mark.parametrize("kind", ["none", "prompts", "two"])
def test_what_peft_would_save_otherwise_has_no_adapter_files(base: Path, tmp_path: Path, kind: str) -> None:
    model: Any = BertModel.from_pretrained(base)
    if kind == "prompts":
        config = peft.PromptTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=2)
        model = peft.get_peft_model(model, config)
    elif kind == "two":
        model = adapted(base)
        model.add_adapter("other", peft.LoraConfig(target_modules=["query"], r=2))
        model.base_model.set_adapter(["default", "other"])
    checkpoint = save(model, tmp_path / "run")

    assert not [path.name for path in checkpoint.iterdir() if path.name.startswith("adapter")]
    assert hfshard.verify_checkpoint(checkpoint).ok
