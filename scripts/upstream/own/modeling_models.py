"""What transformers' own tests check (test_modeling_utils.py) of models: dtypes, ties, heads, configs, devices.

Written anew: the source archive lacks that file, and it loads models from the Hub; these make tiny ones.
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertForSequenceClassification,
    BertModel,
    CLIPTextModel,
    GenerationConfig,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    T5ForConditionalGeneration,
)

from tests.zoo.models import ZOO
from upstream.own.tiny_bert import bert, names, same, with_info

__all__ = ["bert"]  # the fixture


@pytest.mark.parametrize("dtype", [torch.float16, "float16", "auto", None])
def test_the_dtype_that_is_asked_for(bert: BertModel, tmp_path: Path, dtype: Any) -> None:
    bert.to(torch.bfloat16).save_pretrained(tmp_path)  # type: ignore[arg-type]

    found = BertModel.from_pretrained(tmp_path, dtype=dtype)
    expected = torch.float16 if dtype in (torch.float16, "float16") else found.dtype
    assert found.dtype == expected
    if dtype == "auto":
        assert found.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


def test_auto_dtype_goes_by_the_config_then_by_the_first_floating_tensor(bert: BertModel, tmp_path: Path) -> None:
    bert.half().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert BertModel.from_pretrained(tmp_path, dtype="auto").dtype == torch.float16


def test_a_dtype_that_is_none_is_refused(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path)

    with pytest.raises(ValueError, match=r"."):
        BertModel.from_pretrained(tmp_path, dtype="int64")
    with pytest.raises((ValueError, AttributeError), match=r"."):
        BertModel.from_pretrained(tmp_path, dtype="no_such_type")


def test_modules_kept_in_fp32(tmp_path: Path) -> None:
    ZOO["t5"].build().save_pretrained(tmp_path)

    half: Any = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    assert half.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
    assert half.encoder.block[0].layer[1].DenseReluDense.wi.weight.dtype == torch.float16


def test_tied_weights_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    model = ZOO["gpt2"].build()
    model.save_pretrained(tmp_path)

    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 (it is no dict)
        assert file.metadata()["format"] == "pt"
    found, info = with_info(GPT2LMHeadModel, tmp_path)
    assert found.lm_head.weight is found.transformer.wte.weight
    assert not info["missing_keys"]


def test_untied_in_the_config_stays_untied(tmp_path: Path) -> None:
    model = ZOO["llama_untied"].build()
    model.save_pretrained(tmp_path)

    found = LlamaForCausalLM.from_pretrained(tmp_path)
    assert found.lm_head.weight is not found.model.embed_tokens.weight
    assert same(found, model)


def test_a_head_on_a_base_model_and_back(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path / "base")
    head, info = with_info(BertForSequenceClassification, tmp_path / "base")
    head.save_pretrained(tmp_path / "head")
    base = BertModel.from_pretrained(tmp_path / "head")

    assert set(info["missing_keys"]) == {"classifier.weight", "classifier.bias"}
    assert same(base, bert)


def test_mismatched_sizes(bert: BertModel, tmp_path: Path) -> None:
    BertForSequenceClassification(bert.config).save_pretrained(tmp_path)

    with pytest.raises(RuntimeError):
        BertForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    found, info = with_info(BertForSequenceClassification, tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert found.classifier.weight.shape == (5, 32)
    assert {found[0] for found in info["mismatched_keys"]} == {"classifier.weight", "classifier.bias"}


def test_a_state_dict_and_a_config_without_a_path(bert: BertModel) -> None:
    found = BertModel.from_pretrained(None, config=bert.config, state_dict=bert.state_dict())

    assert same(found, bert)
    with pytest.raises((ValueError, TypeError, OSError), match=r"."):
        BertModel.from_pretrained(None, state_dict=bert.state_dict())


def test_a_state_dict_and_a_path_are_refused_together(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path)

    with pytest.raises(ValueError, match="state_dict"):
        BertModel.from_pretrained(tmp_path, state_dict=bert.state_dict())


def test_a_generation_config_is_saved_and_loaded(tmp_path: Path) -> None:
    model = ZOO["llama_generation"].build()
    model.save_pretrained(tmp_path)

    found = LlamaForCausalLM.from_pretrained(tmp_path)
    assert (tmp_path / "generation_config.json").exists()
    assert found.generation_config.top_k == 7
    assert GenerationConfig.from_pretrained(tmp_path).max_new_tokens == 9


def test_an_invalid_generation_config_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = ZOO["llama_untied"].build()
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = False

    with pytest.raises(ValueError, match=r"."):
        model.save_pretrained(tmp_path)
    assert names(tmp_path) == set()


def test_a_config_that_is_changed_by_arguments(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path)

    found = BertModel.from_pretrained(tmp_path, hidden_dropout_prob=0.3, output_hidden_states=True)
    assert found.config.hidden_dropout_prob == 0.3
    assert found.config.output_hidden_states is True
    with pytest.raises(TypeError):
        BertModel.from_pretrained(tmp_path, no_such_argument=1)


def test_arguments_of_the_class_go_to_its_constructor(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path)

    assert BertModel.from_pretrained(tmp_path, add_pooling_layer=False).pooler is None


def test_a_config_object_and_a_config_path(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path)

    config = AutoConfig.from_pretrained(tmp_path, hidden_dropout_prob=0.4)
    assert BertModel.from_pretrained(tmp_path, config=config).config.hidden_dropout_prob == 0.4
    assert same(BertModel.from_pretrained(tmp_path, config=str(tmp_path)), bert)


def test_the_attention_that_is_asked_for(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path)

    for name in ("eager", "sdpa"):
        assert BertModel.from_pretrained(tmp_path, attn_implementation=name).config._attn_implementation == name
    assert "attn_implementation" not in json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ValueError, match=r"."):
        BertModel.from_pretrained(tmp_path, attn_implementation="no_such_attention")


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, {"": torch.device("cpu")}, "auto"])
def test_a_device_map_of_one_device(bert: BertModel, tmp_path: Path, device_map: Any) -> None:
    bert.save_pretrained(tmp_path, max_shard_size="20KB")

    found = BertModel.from_pretrained(tmp_path, device_map=device_map)
    assert same(found, bert)
    assert {parameter.device.type for parameter in found.parameters()} == {"cpu"}


def test_offloaded_to_the_disk_and_saved_again(tmp_path: Path) -> None:
    model = ZOO["llama_untied"].build()
    model.save_pretrained(tmp_path / "whole", max_shard_size="20KB")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "disk"}
    places |= {"lm_head": "cpu", "model.rotary_emb": "cpu"}
    ids = torch.arange(6, 14)[None]

    found = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", device_map=places, offload_folder=tmp_path / "off")
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)
    found.save_pretrained(tmp_path / "again", max_shard_size="20KB")
    assert same(LlamaForCausalLM.from_pretrained(tmp_path / "again"), model)


def test_a_model_with_extra_state(tmp_path: Path) -> None:
    class Config(PreTrainedConfig):
        model_type = "extra"

    class Extra(PreTrainedModel):
        config_class = Config

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.layer = nn.Linear(2, 2)
            self.some_counter = 0
            self.post_init()  # type: ignore[no-untyped-call]

        def get_extra_state(self) -> torch.Tensor:
            return torch.tensor([self.some_counter])

        def set_extra_state(self, state: torch.Tensor) -> None:
            self.some_counter = int(state.item())

        def _init_weights(self, module: Any) -> None: ...

    model = Extra(Config())
    model.some_counter = 42
    model.save_pretrained(tmp_path)
    assert Extra.from_pretrained(tmp_path).some_counter == 42


def test_loading_does_not_draw_random_numbers(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path)
    torch.manual_seed(3)
    before = torch.get_rng_state()

    BertModel.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loaded_model_is_in_evaluation_mode_and_knows_its_path(bert: BertModel, tmp_path: Path) -> None:
    bert.train().save_pretrained(tmp_path)

    found = BertModel.from_pretrained(str(tmp_path))
    assert not found.training
    assert found.name_or_path == str(tmp_path)


def test_saving_does_not_change_the_model(bert: BertModel, tmp_path: Path) -> None:
    before = copy.deepcopy(bert.state_dict())
    bert.train().save_pretrained(tmp_path)

    assert bert.training
    assert all(torch.equal(value, before[name]) for name, value in bert.state_dict().items())
    assert bert.config.architectures == ["BertModel"]


def test_a_frozen_and_a_trained_parameter(bert: BertModel, tmp_path: Path) -> None:
    bert.pooler.requires_grad_(False)  # type: ignore[union-attr]
    bert.save_pretrained(tmp_path)

    assert all(parameter.requires_grad for parameter in BertModel.from_pretrained(tmp_path).parameters())


def test_auto_classes_pick_the_class_of_the_config(tmp_path: Path) -> None:
    ZOO["gpt2"].build().save_pretrained(tmp_path)

    picked: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(picked) is GPT2LMHeadModel
    found, unused = AutoConfig.from_pretrained(tmp_path, return_unused_kwargs=True, other=1)
    assert unused == {"other": 1}
    assert found.model_type == "gpt2"


def test_a_part_of_a_composite_checkpoint(tmp_path: Path) -> None:
    model = ZOO["clip"].build()
    model.save_pretrained(tmp_path)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = CLIPTextModel.from_pretrained(tmp_path)
    saved = model.text_model.state_dict()
    loaded = {name.removeprefix("text_model."): value for name, value in text.state_dict().items()}
    assert all(torch.equal(value, saved[name]) for name, value in loaded.items())


def test_resized_embeddings_are_saved_with_their_size(tmp_path: Path) -> None:
    model = ZOO["gpt2_resized"].build()
    model.save_pretrained(tmp_path)

    found: Any = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert found.get_input_embeddings().weight.shape[0] == 75
    assert found.config.vocab_size == 75
