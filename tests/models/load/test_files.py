"""A class of transformers built from one file of weights, with the config beside it or another one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, BertModel

import hfshard
from hfshard.errors import AmbiguousWeightsError, CheckpointNotFoundError, InvalidArgumentError
from tests.helpers.tiny_bert import Bert, bert

pytestmark = pytest.mark.compat


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of ones; beside it, a program's file of twos from DataParallel, and one with an average of threes."""
    bert(1).save_pretrained(tmp_path)
    state_dict = {f"module.{name}": tensor for name, tensor in bert(2).state_dict().items()}
    torch.save({"epoch": 1, "state_dict": state_dict}, tmp_path / "last.pth.tar")
    torch.save({"model": state_dict, "model_ema": bert(3).state_dict()}, tmp_path / "average.pt")
    return tmp_path


def test_a_class_is_built_from_a_file_beside_its_config(folder: Path) -> None:
    for model_class in (BertModel, AutoModel):
        model = hfshard.load_model(model_class, folder / "last.pth.tar", strict=True, verify="full")
        assert type(model) is BertModel
        assert {float(tensor.unique()) for tensor in model.state_dict().values()} == {2}
    assert Bert.from_pretrained(folder / "last.pth.tar").pooler.dense.bias[0].item() == 2
    assert Bert.from_pretrained(folder).pooler.dense.bias[0].item() == 1

    with pytest.raises(AmbiguousWeightsError):
        hfshard.load_model(AutoModel, folder / "average.pt")
    average = hfshard.load_model(AutoModel, folder / "average.pt", key="model_ema", strict=True)
    assert average.pooler.dense.bias[0].item() == 3


def test_a_class_needs_a_config_beside_the_file_or_given(folder: Path) -> None:
    config = bert(1).config
    (folder / "config.json").unlink()

    for model_class in (BertModel, AutoModel):
        with pytest.raises(CheckpointNotFoundError, match=r"no config beside the file '.*last\.pth\.tar'.* config="):
            hfshard.load_model(model_class, folder / "last.pth.tar")
        model = hfshard.load_model(model_class, folder / "last.pth.tar", config=config, strict=True)
        assert model.pooler.dense.bias[0].item() == 2


def test_a_file_that_transformers_has_to_read_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"last\.pth\.tar' is read by transformers itself .* a directory"):
        hfshard.load_model(BertModel, folder / "last.pth.tar", offload_folder=str(folder / "offload"))


def test_a_file_is_loaded_under_install(folder: Path) -> None:
    with hfshard.install():
        assert BertModel.from_pretrained(folder / "last.pth.tar").embeddings.LayerNorm.bias[0].item() == 2
