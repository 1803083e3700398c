"""A class that adds the mixin is to transformers what its own class is, under any name; nobody sees an alias class."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertModel,
    CLIPVisionModel,
    LlamaForTokenClassification,
    MixtralForCausalLM,
    ViTModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.bert.modeling_bert import BertPreTrainedModel
from transformers.models.glm_image.modeling_glm_image import GlmImageVQVAE

import hfshard
from hfshard.models import model_builder, model_classes
from hfshard.models.model_classes import architecture_of
from tests.models.conftest import SHARDS, Saves
from tests.zoo.compare import differences, facts_of_load, load, raw_tensors
from tests.zoo.mixin_classes import with_mixin
from tests.zoo.models import ZOO

pytestmark = pytest.mark.compat


class Bert(hfshard.ShardedModelMixin, BertModel):
    """At the module's level, so that it can be pickled."""


def test_the_loaded_model_is_of_the_users_class_and_can_be_copied_and_pickled(saves: Saves) -> None:
    model = Bert.from_pretrained(saves.stock("bert"))

    assert type(model) is Bert
    assert type(copy.deepcopy(model)) is Bert
    assert type(pickle.loads(pickle.dumps(model))) is Bert


def test_a_users_own_constructor_and_methods_are_used(saves: Saves) -> None:
    class Counting(hfshard.ShardedModelMixin, BertModel):
        def __init__(self, config: Any, add_pooling_layer: bool = True) -> None:
            super().__init__(config, add_pooling_layer)
            self.was_built_here = True

        def answer(self) -> int:
            return 42

    model = Counting.from_pretrained(saves.stock("bert"))

    assert type(model) is Counting and model.was_built_here and model.answer() == 42


def test_a_class_of_a_class_with_the_mixin_names_the_same_architecture(saves: Saves, tmp_path: Path) -> None:
    class Vision(with_mixin(ViTModel)):  # type: ignore[misc]
        pass

    Vision.from_pretrained(saves.stock("vit")).save_pretrained(tmp_path)

    assert raw_tensors(tmp_path) == raw_tensors(saves.stock("vit"))
    assert type(Vision.from_pretrained(tmp_path)) is Vision
    assert '"ViTModel"' in (tmp_path / "config.json").read_text()


def test_a_model_written_on_the_mixin_is_its_own_architecture() -> None:
    class Net(hfshard.ShardedModelMixin, BertPreTrainedModel):
        def forward(self) -> None: ...

    class Headless(hfshard.ShardedModelMixin, GlmImageVQVAE):
        """The stock class has no forward either."""

    assert architecture_of(Net) is Net
    assert architecture_of(type("Named", (Net,), {})) is not BertPreTrainedModel
    assert architecture_of(Headless) is GlmImageVQVAE
    assert architecture_of(BertModel) is BertModel


@pytest.mark.parametrize("stock_class", [MixtralForCausalLM, ViTModel, CLIPVisionModel])
def test_it_is_no_custom_code(stock_class: type) -> None:
    assert not with_mixin(stock_class).is_custom_code()


def test_a_model_made_from_a_config_has_the_loss_of_its_stock_class() -> None:
    config = ZOO["llama_untied"].make_config()

    assert with_mixin(LlamaForTokenClassification)(config).loss_type == "ForTokenClassification"


@pytest.mark.parametrize("name", ["mixtral", "bert", "gpt2"])
def test_it_chooses_the_same_attention_and_experts(name: str) -> None:
    ours, theirs = ZOO[name].build(with_mixin(ZOO[name].stock_class)), ZOO[name].build()

    for what in ("_attn_implementation", "_experts_implementation"):
        assert getattr(ours.config, what) == getattr(theirs.config, what)
    ours.set_attn_implementation("eager")
    assert ours.config._attn_implementation == "eager"


def test_adapters_see_the_conversions_of_the_stock_class() -> None:
    model = ZOO["mixtral"].build(with_mixin(MixtralForCausalLM))

    assert get_model_conversion_mapping(model, add_legacy=False)


def test_an_offloaded_model_is_saved_under_its_stock_class(saves: Saves, tmp_path: Path) -> None:
    specimen = ZOO["llama_untied"]
    places = {"model": "cpu", "lm_head": "disk"}
    for who, model_class in (("theirs", specimen.stock_class), ("ours", with_mixin(specimen.stock_class))):
        folder = tmp_path / f"{who}-offloaded"
        model = model_class.from_pretrained(saves.stock("llama_untied"), device_map=places, offload_folder=folder)
        with pytest.warns(UserWarning, match="offloaded modules"):
            model.save_pretrained(tmp_path / who, max_shard_size=SHARDS)

    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert raw_tensors(ours) == raw_tensors(theirs) == raw_tensors(saves.stock("llama_untied"))
    assert (ours / "config.json").read_bytes() == (theirs / "config.json").read_bytes()


def test_two_classes_of_one_name_do_not_disturb_each_other(saves: Saves) -> None:
    for name in ("vit", "mixtral", "vit", "clip_vision"):
        directory = saves.stock(name, SHARDS)
        facts = facts_of_load(load(with_mixin(ZOO[name].stock_class), directory), directory)
        assert differences(facts, saves.stock_facts(name, SHARDS)) == []


@pytest.mark.parametrize("name", ["gpt2", "llama_tied", "mamba", "t5", "whisper", "vision_encoder_decoder"])
def test_it_generates_what_the_stock_class_generates(name: str, saves: Saves) -> None:
    directory = saves.stock(name)
    stock_class: Any = ZOO[name].stock_class
    inputs = {"whisper": torch.ones(1, 8, 24), "vision_encoder_decoder": torch.ones(1, 3, 16, 16)}
    given = inputs.get(name, torch.tensor([[1, 5, 9]]))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1}
    if name == "vision_encoder_decoder":
        options["decoder_start_token_id"] = 1
    theirs = stock_class.from_pretrained(directory).generate(given, **options)

    loaded: Any = with_mixin(stock_class).from_pretrained(directory)
    ours = loaded.generate(given, **options)

    assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_process_that_is_forked_beside_a_load_does_not_wait_for_it() -> None:
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with model_classes._alias_lock.held(), model_builder.building_lock.held():
            is_held.set()
            is_over.wait(120)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert is_held.wait(60)
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # ends one that waits for the locks
        model_classes.alias_class(with_mixin(BertModel))
        with model_builder.building_lock.held():
            os._exit(0)
    status = os.waitpid(pid, 0)[1]
    is_over.set()
    thread.join()
    assert status == 0
