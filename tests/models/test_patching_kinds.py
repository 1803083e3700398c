"""Whether a model is transformers' or one's own, and what lies behind the mixin."""

from __future__ import annotations

import pytest
from huggingface_hub import ModelHubMixin, PyTorchModelHubMixin
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedModel

import hfshard
from hfshard.models.patching import is_plain_class, is_pretrained, is_pretrained_class
from hfshard.models.transformers_methods import without_mixin

CONFIG = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=10)


class Net(hfshard.ShardedModelMixin, nn.Module):
    """A module of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


class Child(Net):
    """A subclass, in which the mixin is one class further back."""


class Bert(hfshard.ShardedModelMixin, BertModel):
    """A model of transformers."""


@pytest.mark.parametrize(
    ("model_class", "pretrained", "plain"),
    [
        (BertModel, True, False),
        (Bert, True, False),
        (Net, False, True),
        (Child, False, True),
        (nn.Linear, False, False),
    ],
)
def test_a_class_is_of_transformers_or_plain_or_neither(model_class: type, pretrained: bool, plain: bool) -> None:
    assert (is_pretrained_class(model_class), is_plain_class(model_class)) == (pretrained, plain)


def test_an_instance_is_of_the_kind_of_its_class_and_is_no_class() -> None:
    assert [is_pretrained(model) for model in (Net(), Bert(CONFIG), Bert, None)] == [False, True, False, False]
    assert not is_plain_class(Net())


@pytest.mark.parametrize("target", [Net, Child, Bert])
def test_behind_the_mixin_are_neither_it_nor_those_of_huggingface_hub(target: type) -> None:
    found = without_mixin(target)

    assert (found.__thisclass__, found.__self__) == (ModelHubMixin, target)
    assert hasattr(found, "push_to_hub") == (target is Bert)  # transformers has its own
    assert not hasattr(found, "_save_pretrained")


def test_methods_behind_the_mixin_are_bound_to_the_model() -> None:
    model = Child()

    assert list(without_mixin(model).state_dict()) == ["layer.weight", "layer.bias"]
    assert without_mixin(Bert).save_pretrained is PreTrainedModel.save_pretrained


class Base(BertModel):
    """A class of one's own between the mixin and a mixin of huggingface_hub."""


class Both(hfshard.ShardedModelMixin, Base, PyTorchModelHubMixin):
    """A class with both mixins, one before and one behind transformers' class."""


def test_a_class_between_two_mixins_is_not_skipped() -> None:
    assert without_mixin(Both).__thisclass__ is not Base
    behind = Both.__mro__[Both.__mro__.index(without_mixin(Both).__thisclass__) + 1]
    assert behind is Base
