"""Models of transformers and plain modules come out of a store as they come out of a directory."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hfshard
from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError, StateDictMismatchError
from hfshard.stores.open_store import open_store
from tests.stores.reading.conftest import put_directory

pytestmark = pytest.mark.compat


class Llama(hfshard.ShardedModelMixin, transformers.LlamaForCausalLM):
    pass


class _Looking(transformers.LlamaForCausalLM):
    """Looks at the config before it lets transformers load."""

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        config = transformers.AutoConfig.from_pretrained(path, subfolder=kwargs.get("subfolder", ""))
        return super().from_pretrained(path, *args, config=config, **kwargs)


class Overriding(hfshard.ShardedModelMixin, _Looking):
    pass


class Plain(hfshard.ShardedModelMixin, nn.Module):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 3)


class PlainByItself(Plain):
    @classmethod
    def _from_pretrained(cls, **kwargs: Any) -> Any:
        return super()._from_pretrained(**kwargs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Llama]:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        tie_word_embeddings=True,
    )
    directory = tmp_path_factory.mktemp("llama")
    model = Llama(config)
    assert model.generation_config is not None
    model.generation_config.max_new_tokens = 17
    model.save_pretrained(directory, max_shard_size="20KB")
    return directory, model


@pytest.mark.parametrize(
    "load",
    [
        Llama.from_pretrained,
        Overriding.from_pretrained,
        lambda path, **which: hfshard.load_model(transformers.AutoModelForCausalLM, path, verify="full", **which),
    ],
    ids=["mixin", "override", "auto"],
)
def test_models_of_transformers(
    load: Callable[..., Any],
    saved: tuple[Path, Llama],
    store_address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, model = saved
    put_directory(directory, store_address)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    loaded = load(store_address)

    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.generation_config.max_new_tokens == 17
    assert loaded.config.name_or_path == store_address
    place, _, name = store_address.rpartition("/")
    below = load(place, subfolder=name)
    assert below.config.hidden_size == 32
    assert below.generation_config.max_new_tokens == 17
    del below
    gc.collect()
    assert list(tmp_path.glob("hfshard-*")) == []


@pytest.mark.parametrize("name", ["n" * 300, "é" * 200, "a-" * 127])
def test_a_name_that_no_directory_can_have_loads(
    saved: tuple[Path, Llama], store_address: str, modules_cache: Path, name: str
) -> None:
    directory, model = saved
    address = f"{store_address}/{name}"
    put_directory(directory, address)

    assert len(hfshard.load_state_dict(address)) == len(hfshard.load_state_dict(directory))
    loaded = Llama.from_pretrained(address)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert loaded.config.name_or_path == address

    place = f"{address}/{name}"
    hfshard.save_state_dict({"part.weight": torch.ones(3, 2), "part.bias": torch.arange(3.0)}, place)
    store = open_store(place)
    store.put("config.json", json.dumps({"model_type": "net_of_its_own", "auto_map": AUTO_MAP}).encode())
    store.put("net_code.py", CODE.encode())
    store.put("net_parts.py", PARTS.encode())
    net = hfshard.load_model(transformers.AutoModel, place, trust_remote_code=True)
    assert torch.equal(net.part.bias, torch.arange(3.0))


def test_a_subfolder_that_no_directory_can_be_is_for_the_address(saved: tuple[Path, Llama], store_address: str) -> None:
    put_directory(saved[0], f"{store_address}/{'n' * 300}")
    assert "lm_head.weight" in hfshard.load_state_dict(store_address, subfolder="n" * 300, keys=["lm_head.weight"])
    with pytest.raises(InvalidArgumentError, match=r"300 bytes, .* at most 255\. Make it part of the address"):
        Llama.from_pretrained(store_address, subfolder="n" * 300)


CODE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .net_parts import Part


class NetConfig(PreTrainedConfig):
    model_type = "net_of_its_own"


class Net(PreTrainedModel):
    config_class = NetConfig

    def __init__(self, config):
        super().__init__(config)
        self.part = Part()
        self.post_init()
"""
PARTS = """
from torch import nn


class Part(nn.Linear):
    def __init__(self):
        super().__init__(2, 3)
"""
AUTO_MAP = {"AutoConfig": "net_code.NetConfig", "AutoModel": "net_code.Net"}


def _names_below(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else set()


def test_code_of_a_checkpoint_runs_where_it_is_trusted(store_address: str, modules_cache: Path) -> None:
    before = _names_below(modules_cache / "transformers_modules")
    place = f"{store_address}/net"
    weights = {"part.weight": torch.ones(3, 2), "part.bias": torch.arange(3.0)}
    hfshard.save_state_dict(weights, place)
    store = open_store(place)
    store.put("config.json", json.dumps({"model_type": "net_of_its_own", "auto_map": AUTO_MAP}).encode())
    store.put("net_code.py", CODE.encode())
    store.put("net_parts.py", PARTS.encode())

    for _ in range(2):
        net = hfshard.load_model(transformers.AutoModel, place, trust_remote_code=True)
        assert torch.equal(net.part.bias, torch.arange(3.0))
    assert _names_below(modules_cache / "transformers_modules") - before - {"__pycache__"} == {"net"}
    with pytest.raises(ValueError, match="trust_remote_code"):
        hfshard.load_model(transformers.AutoModel, place)


def test_install_reaches_stores(saved: tuple[Path, Llama], store_address: str) -> None:
    put_directory(saved[0], store_address)
    hfshard.install()
    try:
        loaded = transformers.LlamaForCausalLM.from_pretrained(store_address)
    finally:
        hfshard.uninstall()
    assert torch.equal(loaded.lm_head.weight, saved[1].lm_head.weight)


def test_what_needs_a_disk_is_refused(saved: tuple[Path, Llama], store_address: str, tmp_path: Path) -> None:
    put_directory(saved[0], store_address)
    with pytest.raises(InvalidArgumentError, match=r"reads itself.*hfshard pull s3://"):
        Llama.from_pretrained(store_address, device_map={"": "disk"}, offload_folder=str(tmp_path))
    open_store(store_address).delete(["config.json"])
    name = next(path.name for path in saved[0].glob("*.safetensors"))
    with pytest.raises(CheckpointNotFoundError, match=r"The file 's3://.* has no config next to it"):
        Llama.from_pretrained(f"{store_address}/{name}")
    with pytest.raises(StateDictMismatchError, match="does not fit"):
        hfshard.load_model(nn.Linear(2, 2), store_address)


@pytest.mark.parametrize("model_class", [Plain, PlainByItself])
def test_plain_modules(model_class: type[Plain], store_address: str, tmp_path: Path) -> None:
    model = model_class(width=5)
    model.save_pretrained(tmp_path)
    put_directory(tmp_path, store_address)

    loaded = model_class.from_pretrained(store_address, verify="full", strict=True)
    assert torch.equal(loaded.layer.weight, model.layer.weight)
    assert json.loads((tmp_path / "config.json").read_bytes()) == {"width": 5}


def test_a_report_names_what_is_damaged(saved: tuple[Path, Llama], store_address: str) -> None:
    put_directory(saved[0], store_address)
    store = open_store(store_address)
    report = hfshard.verify_checkpoint(store_address)
    assert report.ok
    assert report.directory == store_address
    assert report.checked_bytes == sum(path.stat().st_size for path in saved[0].glob("*.safetensors"))

    gone, name = sorted(path.name for path in saved[0].glob("*.safetensors"))[:2]
    found = store.list_objects()[name]
    raw = bytearray(store.read(found))
    raw[-1] ^= 1
    store.put(name, bytes(raw))
    store.delete([gone])
    assert not hfshard.verify_checkpoint(store_address, level="structure").ok
    problems = hfshard.verify_checkpoint(store_address).problems
    assert [problem.file.rpartition("/")[2] for problem in problems] == [gone, name]
    assert problems[0].message.startswith(f"File '{store_address}/{gone}' is missing.")
    assert problems[1].tensor is not None
