"""Models of transformers and plain modules that must be signed: from directories, hubs and runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, BertModel

import hfshard
from hfshard.errors import DamagedCheckpointError, InvalidArgumentError, SignatureError
from tests.helpers.peft_versions import peft_of_transformers
from tests.helpers.tiny_bert import SHARDED, Bert, bert, value_of
from tests.signing.conftest import Keys
from tests.signing.helpers import model_signing

pytestmark = pytest.mark.compat

CODE = """
import pathlib
from transformers import BertConfig, BertModel

pathlib.Path({ran!r}).touch()

class MineConfig(BertConfig):
    model_type = "mine"

class Mine(BertModel):
    config_class = MineConfig
"""


@pytest.fixture
def signed_bert(tmp_path: Path, keys: Keys) -> Path:
    """A signed BERT in a dozen files."""
    directory = tmp_path / "bert"
    bert(3).save_pretrained(directory, max_shard_size=SHARDED)
    hfshard.sign_checkpoint(directory, private_key=keys.private)
    return directory


def test_models_load_and_are_refused(signed_bert: Path, keys: Keys) -> None:
    for load in (Bert.from_pretrained, lambda path, **options: hfshard.load_model(AutoModel, path, **options)):
        model = load(signed_bert, public_key=keys.public)
        assert value_of(model) == 3
        assert model.name_or_path == str(signed_bert)
        with pytest.raises(SignatureError, match=r"was not made by the key of '.*other.pub'"):
            load(signed_bert, public_key=keys.other_public)
    with pytest.raises(InvalidArgumentError, match="Leave out state_dict"):
        Bert.from_pretrained(signed_bert, public_key=keys.public, state_dict={})

    shard = max(signed_bert.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    with pytest.raises(SignatureError, match=f"{shard.name}' is not the file that was signed"):
        Bert.from_pretrained(signed_bert, public_key=keys.public, verify="none")
    (signed_bert / "config.json").write_text((signed_bert / "config.json").read_text().replace("gelu", "relu"))
    with pytest.raises(SignatureError, match=r"config.json' is not the file that was signed"):
        hfshard.load_model(AutoModel, signed_bert, public_key=keys.public)


def test_code_does_not_run_before_it_was_compared(tmp_path: Path, keys: Keys, modules_cache: Path) -> None:
    directory, ran = tmp_path / "mine", tmp_path / "ran"
    bert(1).save_pretrained(directory)
    config = (directory / "config.json").read_text()
    auto_map = '"auto_map": {"AutoConfig": "mine.MineConfig", "AutoModel": "mine.Mine"}, "model_type": "mine"'
    (directory / "config.json").write_text(config.replace('"model_type": "bert"', auto_map))
    (directory / "mine.py").write_text(CODE.format(ran=str(ran)))
    (directory / "voices").mkdir()
    (directory / "voices" / "one.pt").write_bytes(b"1")
    hfshard.sign_checkpoint(directory, private_key=keys.private)
    bad = CODE.format(ran=str(tmp_path / "evil"))

    (directory / "mine.py").write_text(bad)
    with pytest.raises(SignatureError, match=r"mine.py' is not the file that was signed"):
        hfshard.load_model(AutoModel, directory, public_key=keys.public, trust_remote_code=True)
    (directory / "mine.py").write_text(CODE.format(ran=str(ran)))
    (directory / "voices" / "one.pt").write_bytes(b"2")
    with pytest.raises(SignatureError, match=r"voices/one.pt' is not the file that was signed"):  # code may read it
        hfshard.load_model(AutoModel, directory, public_key=keys.public, trust_remote_code=True)
    (directory / "voices" / "one.pt").write_bytes(b"1")
    assert not (tmp_path / "evil").exists()
    assert not ran.exists()
    model = hfshard.load_model(AutoModel, directory, public_key=keys.public, trust_remote_code=True)
    assert (type(model).__name__, value_of(model), ran.exists()) == ("Mine", 1, True)

    (directory / "config.json").write_text(
        config.replace('"model_type": "bert"', auto_map.replace('"mine.Mine"', '"org/other--mine.Mine"'))
    )
    hfshard.sign_checkpoint(directory, private_key=keys.private)
    with pytest.raises(SignatureError, match="takes its code from another repo"):
        hfshard.load_model(AutoModel, directory, public_key=keys.public, trust_remote_code=True)
    shutil.move(directory, tmp_path / "whole" / "below")
    (tmp_path / "whole" / "below" / "model.sig").unlink()
    hfshard.save_state_dict({"a": torch.ones(1)}, tmp_path / "whole")
    hfshard.sign_checkpoint(tmp_path / "whole", private_key=keys.private)
    with pytest.raises(SignatureError, match=r"below/config.json' takes its code from another repo"):
        hfshard.load_model(
            AutoModel, tmp_path / "whole", subfolder="below", public_key=keys.public, trust_remote_code=True
        )


def test_files_of_other_places_are_refused(signed_bert: Path, tmp_path: Path, keys: Keys) -> None:
    shutil.copytree(signed_bert, tmp_path / "other")
    given: list[dict[str, Any]] = [
        {"config": str(tmp_path / "other")},
        {"config": tmp_path / "other"},
        {"adapter_kwargs": {"revision": "v1"}},
        {"code_revision": "v1"},
    ]
    for options in given:
        with pytest.raises(InvalidArgumentError, match=r"public_key covers .*names another"):
            Bert.from_pretrained(signed_bert, public_key=keys.public, **options)
        with pytest.raises(InvalidArgumentError, match=r"public_key covers .*names another"):
            hfshard.load_model(AutoModel, signed_bert, public_key=keys.public, **options)
    config = AutoConfig.from_pretrained(tmp_path / "other")
    assert value_of(Bert.from_pretrained(signed_bert, public_key=keys.public, config=config)) == 3


def test_what_transformers_reads_by_itself_is_compared_as_a_whole(
    signed_bert: Path, tmp_path: Path, keys: Keys
) -> None:
    """Quantized, offloaded ...: every file that is there, as nobody knows which of them it reads."""
    for load in (Bert.from_pretrained, lambda path, **options: hfshard.load_model(AutoModel, path, **options)):
        options = {"offload_folder": tmp_path / "offload", "public_key": keys.public}
        assert value_of(load(signed_bert, **options)) == 3
        other = signed_bert / "model-of-another.safetensors"
        shutil.copy(max(signed_bert.glob("*.safetensors")), other)
        with pytest.raises(SignatureError, match=r"model-of-another.safetensors' is not covered by the signature"):
            load(signed_bert, **options)
        other.unlink()
    shard = max(signed_bert.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    with pytest.raises(SignatureError, match=f"{shard.name}' is not the file that was signed"):
        Bert.from_pretrained(signed_bert, offload_folder=tmp_path / "offload", public_key=keys.public)


def test_subfolders_have_the_signature_of_the_whole_or_their_own(signed_bert: Path, tmp_path: Path, keys: Keys) -> None:
    whole = tmp_path / "whole"
    bert(1).save_pretrained(whole)
    bert(2).save_pretrained(whole / "below")
    hfshard.sign_checkpoint(whole, private_key=keys.private)

    assert value_of(Bert.from_pretrained(whole, subfolder="below", public_key=keys.public)) == 2
    assert value_of(Bert.from_pretrained(whole, subfolder="below/", public_key=keys.public)) == 2
    assert hfshard.verify_checkpoint(whole, subfolder="below", public_key=keys.public).ok
    bert(4).save_pretrained(whole / "below")
    with pytest.raises(SignatureError, match=r"below/model.safetensors' is not the file that was signed"):
        Bert.from_pretrained(whole, subfolder="below", public_key=keys.public)
    hfshard.sign_checkpoint(whole / "below", private_key=keys.private)
    assert value_of(Bert.from_pretrained(whole, subfolder="below", public_key=keys.public)) == 4


class Net(hfshard.ShardedModelMixin, nn.Module):
    """A plain module."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)


class Own(Net):
    """One that loads by itself."""

    @classmethod
    def _from_pretrained(cls, **kwargs: Any) -> Any:
        raise AssertionError


def test_plain_modules(tmp_path: Path, keys: Keys) -> None:
    directory = tmp_path / "net"
    Net(width=8).save_pretrained(directory)
    hfshard.sign_checkpoint(directory, private_key=keys.private)

    assert Net.from_pretrained(directory, public_key=keys.public).layer.in_features == 8
    with pytest.raises(SignatureError, match="was not made by"):
        Net.from_pretrained(directory, public_key=keys.other_public)
    with pytest.raises(InvalidArgumentError, match="may read any file"):
        Own.from_pretrained(directory, public_key=keys.public)
    (directory / "config.json").write_text('{"width": 4}')
    with pytest.raises(SignatureError, match=r"config.json' is not the file that was signed"):
        hfshard.load_model(Net, directory, public_key=keys.public)


def test_a_directory_hub_keeps_the_signature(signed_bert: Path, tmp_path: Path, keys: Keys) -> None:
    hub = tmp_path / "hub"
    hfshard.push_checkpoint(signed_bert, hub)

    assert value_of(Bert.from_pretrained(str(hub), public_key=keys.public)) == 3
    assert hfshard.verify_checkpoint(hub, public_key=keys.public).ok
    pulled = Path(hfshard.pull_checkpoint(hub, tmp_path / "pulled"))
    model_signing("verify", "key", pulled, "--public_key", keys.public)
    other = hfshard.verify_checkpoint(hub, public_key=keys.other_public)
    assert "was not made by" in other.problems[0].message


def test_the_checkpoint_of_a_run(tmp_path: Path, keys: Keys) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state = hfshard.training.TrainingState(model=model, optimizer=optimizer)
    with hfshard.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state)
        place = Path(manager.path_of(1))
        hfshard.sign_checkpoint(place, private_key=keys.private)

        assert hfshard.verify_checkpoint(place, public_key=keys.public).ok
        model_signing("verify", "key", place, "--public_key", keys.public)
        assert manager.verify() == {1: []}
        assert manager.restore(state, public_key=keys.public) == 1
        assert manager.restore_latest(state, public_key=keys.public) == 1
        with pytest.raises(SignatureError, match=r"was not made by the key of"):
            manager.restore(state, 1, public_key=keys.other_public)
        hfshard.load_model(nn.Linear(4, 4), place, public_key=keys.public)
        manager.save(2, state)
        assert manager.all_steps() == [1, 2]
        with pytest.raises(SignatureError, match=r"checkpoint-00000002' has no signature"):
            manager.restore_latest(state, public_key=keys.public)


def test_a_checkpoint_of_a_run_that_was_changed_with_its_checksums(tmp_path: Path, keys: Keys) -> None:
    """What somebody does who knows the format: other weights, with a manifest that fits."""
    model = nn.Linear(4, 4)
    state = hfshard.training.TrainingState(model=model)
    with hfshard.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state)
        place = Path(manager.path_of(1))
        hfshard.sign_checkpoint(place, private_key=keys.private)
        signature = (place / "model.sig").read_bytes()
    with torch.no_grad():
        model.weight.fill_(0.5)
    with hfshard.CheckpointManager(tmp_path / "other") as manager:
        manager.save(1, state)
        shutil.rmtree(place)
        shutil.move(manager.path_of(1), place)
        (place / "model.sig").write_bytes(signature)
        torch.nn.init.ones_(model.weight)
    with hfshard.CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(SignatureError, match=r"is not the file that was signed"):
            manager.restore(state, public_key=keys.public)
        assert torch.equal(model.weight, torch.ones(4, 4))
        torch.save({"model": model.state_dict()}, tmp_path / "old.pt")
        with pytest.raises(InvalidArgumentError, match="public_key is only for hfshard checkpoints"):
            manager.restore(state, tmp_path / "old.pt", public_key=keys.public)


def test_auto_config_is_not_affected(signed_bert: Path) -> None:
    """The signature is one more file: stock transformers passes over it."""
    assert AutoConfig.from_pretrained(signed_bert).model_type == "bert"
    assert value_of(AutoModel.from_pretrained(signed_bert)) == 3


@pytest.fixture
def adapter(signed_bert: Path, tmp_path: Path, keys: Keys) -> Path:
    """A signed adapter of `signed_bert`, which is not signed when it has been made."""
    peft = peft_of_transformers()
    model = BertModel.from_pretrained(signed_bert)
    torch.manual_seed(3)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    hfshard.sign_checkpoint(tmp_path / "adapter", private_key=keys.private)
    return tmp_path / "adapter"


LOADS = (Bert.from_pretrained, lambda path, **options: hfshard.load_model(AutoModel, path, **options))


@pytest.mark.parametrize("load", LOADS)
def test_an_adapter_loads_on_a_base_that_is_signed_too(
    adapter: Path, signed_bert: Path, keys: Keys, load: Callable[..., Any]
) -> None:
    theirs: Any = BertModel.from_pretrained(adapter, output_loading_info=True)
    stock, told = theirs

    model, info = load(adapter, public_key=keys.public, output_loading_info=True)

    assert model.state_dict().keys() == stock.state_dict().keys()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in stock.state_dict().items())
    assert any("lora_A" in name for name in stock.state_dict())
    assert model.active_adapters() == stock.active_adapters() == ["default"]
    assert info.keys() == told.keys()
    named = load(adapter, public_key=keys.public, adapter_name="mine")
    assert named.active_adapters() == ["mine"]


@pytest.mark.parametrize("load", LOADS)
def test_an_adapter_is_refused_with_its_base(
    adapter: Path, signed_bert: Path, keys: Keys, load: Callable[..., Any]
) -> None:
    weights = adapter / "adapter_model.safetensors"
    raw = weights.read_bytes()
    weights.write_bytes(raw[:-1] + b"\1")
    with pytest.raises(SignatureError, match=r"adapter_model.safetensors' is not the file that was signed"):
        load(adapter, public_key=keys.public)
    weights.write_bytes(raw)
    with pytest.raises(SignatureError, match="was not made by the key of"):
        load(adapter, public_key=keys.other_public)
    (signed_bert / "modeling_evil.py").write_text("raise SystemExit\n")
    with pytest.raises(SignatureError, match=r"base model of the adapter '.*' cannot be trusted: .*modeling_evil.py"):
        load(adapter, public_key=keys.public)
    (signed_bert / "modeling_evil.py").unlink()
    (signed_bert / "model.sig").unlink()
    with pytest.raises(SignatureError, match=r"base model of the adapter .* has no signature.* model.load_adapter"):
        load(adapter, public_key=keys.public)
    assert any("lora_A" in name for name in load(adapter).state_dict())


def test_an_adapter_that_is_touched_while_its_base_loads_is_noticed(
    adapter: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = BertModel.load_adapter

    def swapped(self: BertModel, *arguments: Any, **options: Any) -> Any:
        weights = adapter / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
        return plain(self, *arguments, **options)

    monkeypatch.setattr(BertModel, "load_adapter", swapped)
    with pytest.raises(SignatureError, match=r"adapter_model.safetensors' is not the file that was signed"):
        Bert.from_pretrained(adapter, public_key=keys.public)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", ["adapter", "other"])
def test_an_adapter_whose_base_is_an_adapter_is_refused(
    adapter: Path, keys: Keys, load: Callable[..., Any], name: str
) -> None:
    if name == "other":
        shutil.copytree(adapter, adapter.parent / name)
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(adapter.parent / name)}))
    hfshard.sign_checkpoint(adapter, private_key=keys.private)

    with pytest.raises(
        DamagedCheckpointError, match=rf"adapter' names '.*/{name}' as its base model, which is also an ad"
    ):
        load(adapter, public_key=keys.public)


def test_what_finds_the_base_by_itself_is_refused(adapter: Path, signed_bert: Path, keys: Keys) -> None:
    peft = pytest.importorskip("peft")
    with pytest.raises(InvalidArgumentError, match="Load it with an Auto class of transformers"):
        hfshard.load_model(peft.AutoPeftModelForFeatureExtraction, adapter, public_key=keys.public)

    (signed_bert / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    hfshard.sign_checkpoint(signed_bert, private_key=keys.private)
    for load in LOADS:
        with pytest.raises(InvalidArgumentError, match="has both an adapter and a model"):
            load(signed_bert, public_key=keys.public)
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": null}')
    hfshard.sign_checkpoint(adapter, private_key=keys.private)
    with pytest.raises(DamagedCheckpointError, match=r"adapter_config.json' names no base model"):
        Bert.from_pretrained(adapter, public_key=keys.public)
