"""Models of transformers and plain modules in every place: as their own methods save and load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModel, BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import hfshard
from hfshard.errors import InvalidArgumentError
from tests.helpers.tiny_bert import SHARDED, SINGLE, Bert, bert, read_by_all, value_of
from tests.stores.conftest import DIRECTORY
from tests.stores.suite.conftest import Place
from tests.stores.suite.own_code import PARTS, directory_with_code

COMPAT_S3: Any = pytest.param("s3", marks=pytest.mark.compat)
everywhere = pytest.mark.parametrize("store_place", [DIRECTORY, COMPAT_S3, "gs", "az", "hf"], indirect=True)
in_some_places = pytest.mark.parametrize(
    "store_place",
    [COMPAT_S3, *(pytest.param(place, marks=pytest.mark.slow) for place in (DIRECTORY, "gs", "az", "hf"))],
    indirect=True,
)
"""For what takes long."""


class Net(hfshard.ShardedModelMixin, nn.Module, license="mit"):
    """As a user writes it."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)


class OwnWay(hfshard.ShardedModelMixin, nn.Module):
    """A class that saves in a way of its own."""

    def _save_pretrained(self, save_directory: Any) -> None:
        (save_directory / "mine").touch()


def _assert_all_read(place: Place, value: float) -> None:
    assert set(read_by_all(place.synced()).values()) == {value}
    assert value_of(Bert.from_pretrained(place.path, verify="full")) == value


@in_some_places
def test_saves_of_a_model_replace_each_other_for_every_reader(place: Place) -> None:
    bert(1).save_pretrained(place.path, max_shard_size=SHARDED)
    _assert_all_read(place, 1)
    bert(2).save_pretrained(place.path, max_shard_size=SINGLE)
    _assert_all_read(place, 2)
    bert(3, hidden=16).save_pretrained(place.path, max_shard_size=SHARDED)  # another config
    assert value_of(Bert.from_pretrained(place.path, verify="full")) == 3
    assert value_of(BertModel.from_pretrained(place.synced())) == 3
    assert json.loads(place.files()["config.json"])["hidden_size"] == 16
    bert(4).save_pretrained(place.path, variant="fp16")
    bert(4).save_pretrained(place.path)
    bert(5).half().save_pretrained(place.path, variant="fp16")
    assert value_of(Bert.from_pretrained(place.path)) == 4
    assert value_of(Bert.from_pretrained(place.path, variant="fp16")) == 5
    assert value_of(BertModel.from_pretrained(place.synced(), variant="fp16")) == 5


@everywhere
def test_a_model_with_a_generation_config_and_ties(place: Place) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=4, n_layer=1, n_head=1, n_positions=4)).eval()
    model.generation_config.max_new_tokens = 7
    hfshard.save_model(model, place.path, max_shard_size="1KB")

    loaded = hfshard.load_model(GPT2LMHeadModel, place.path, verify="full")
    auto = hfshard.load_model(AutoModel, place.path)

    assert type(auto).__name__ == "GPT2Model"
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert loaded.generation_config.max_new_tokens == 7
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())


class FolderConfig(BertConfig):
    """A config that saves a folder, too."""

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        super().save_pretrained(save_directory, push_to_hub, **kwargs)
        Path(save_directory, "labels").mkdir()
        Path(save_directory, "labels", "a.txt").write_text(str(self.hidden_size))


@everywhere
def test_a_config_that_saves_a_folder(place: Place) -> None:
    for hidden in (4, 8):
        model = BertModel(FolderConfig.from_dict(bert(1, hidden=hidden).config.to_dict()))
        hfshard.save_model(model, place.path)
        hfshard.CheckpointManager(f"{place.path}/run").save(hidden, hfshard.training.TrainingState(model=model))

        found = {name: raw.decode() for name, raw in place.files().items() if name.endswith("labels/a.txt")}
        assert hfshard.verify_checkpoint(place.path).ok and hfshard.verify_checkpoint(f"{place.path}/run").ok
        assert found["labels/a.txt"] == str(hidden)
        assert found[f"run/checkpoint-{hidden:08d}/labels/a.txt"] == str(hidden)


@everywhere
def test_a_plain_module_with_config_and_card(place: Place) -> None:
    net = Net(width=3)
    net.save_pretrained(place.path, max_shard_size="1KB")
    place.put("README.md", b"edited")
    net.save_pretrained(place.path)

    loaded = Net.from_pretrained(place.path)

    assert torch.equal(loaded.layer.weight, net.layer.weight)
    assert json.loads(place.files()["config.json"]) == {"width": 3}
    assert place.files()["README.md"] == b"edited"


@pytest.mark.parametrize("store_place", [DIRECTORY, "s3", "hf"], indirect=True)
def test_a_model_that_brings_its_own_code(place: Place, tmp_path: Path, modules_cache: Path) -> None:
    directory = directory_with_code(tmp_path / "net")
    net: Any = hfshard.load_model(AutoModel, directory, trust_remote_code=True)
    with torch.no_grad():
        net.part.bias.fill_(7)

    hfshard.save_model(net, place.path)

    assert json.loads(place.files()["config.json"])["auto_map"] == {
        "AutoConfig": "net.NetConfig",
        "AutoModel": "net.Net",
    }
    assert place.files()["parts.py"].decode() == PARTS
    loaded: Any = hfshard.load_model(AutoModel, place.path, trust_remote_code=True, verify="full")
    assert loaded.part.bias.tolist() == [7, 7, 7]
    stock: Any = AutoModel.from_pretrained(place.synced(), trust_remote_code=True)
    assert stock.part.bias.tolist() == [7, 7, 7]
    if place.is_store:
        assert place.bucket is not None
        for name in ("net.py", "parts.py", "config.json"):  # the index has them, too
            place.bucket.delete(f"{place.path.partition('hfshard-tests/')[2]}/{name}")
        loaded = hfshard.load_model(AutoModel, place.path, trust_remote_code=True)
        assert loaded.part.bias.tolist() == [7, 7, 7]


@pytest.mark.compat
@pytest.mark.parametrize("scheme", ["s3"])
def test_push_to_hub_after_a_save_into_a_store(store: Place) -> None:
    hub = store.folder / "hub"
    bert(1).save_pretrained(store.path, push_to_hub=True, repo_id=str(hub))
    Net().save_pretrained(f"{store.path}/net", push_to_hub=True, repo_id=str(store.folder / "net"))

    assert value_of(Bert.from_pretrained(hub)) == value_of(Bert.from_pretrained(store.path)) == 1
    assert torch.equal(
        Net.from_pretrained(store.folder / "net").layer.bias, Net.from_pretrained(f"{store.path}/net").layer.bias
    )


@pytest.mark.compat
@pytest.mark.parametrize("scheme", ["s3"])
def test_install_serves_addresses_too(store: Place) -> None:
    hfshard.install()
    try:
        model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
        model.save_pretrained(store.path)
        loaded = BertModel.from_pretrained(store.path)
    finally:
        hfshard.uninstall()
    name = "pooler.dense.weight"
    assert torch.equal(loaded.state_dict()[name], model.state_dict()[name])


@pytest.mark.parametrize("scheme", ["s3"])
def test_what_writes_by_itself_into_a_directory_is_refused(store: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(store.folder)
    with pytest.raises(InvalidArgumentError, match="OwnWay has its own _save_pretrained"):
        OwnWay().save_pretrained(store.path)
    model = bert(1)
    model.hf_device_map = {"": "disk"}
    with pytest.raises(InvalidArgumentError, match="only into directories"):
        model.save_pretrained(store.path)
    assert store.files() == {}
    assert list(store.folder.iterdir()) == []
