"""Models built from what is checked: their files, ties and adapters of languages, and what verify="full" finds."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    LlamaForCausalLM,
    PreTrainedModel,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

import hfshard
from hfshard.errors import (
    AmbiguousWeightsError,
    CheckpointNotFoundError,
    IntegrityError,
    InvalidArgumentError,
    StateDictMismatchError,
)
from tests.helpers.tiny_bert import Bert, bert, value_of
from tests.zoo.models import ZOO

pytestmark = pytest.mark.compat

BUILT: list[str] = []
DAMAGED = "encoder.layer.0.attention.self.query.weight"


class Recorded(Bert):
    """Says when it is built, and may fail then."""

    error: BaseException | None = None

    def __init__(self, config: Any) -> None:
        BUILT.append("built")
        super().__init__(config)
        if self.error is not None:
            raise self.error


class Interrupted(Recorded):
    """Ctrl-C comes while it is built."""

    error = KeyboardInterrupt()


class Failing(Recorded):
    """As code of a user's that fails."""

    error = ZeroDivisionError("of the user's")


@pytest.fixture(params=["1GB", "50KB"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A checkpoint; whatever loads it, no thread of hfshard stays, though one that has done its work may end later."""
    bert(3, hidden=64).save_pretrained(tmp_path, max_shard_size=request.param)
    BUILT.clear()
    before = threading.enumerate()
    yield tmp_path
    for thread in threading.enumerate():
        if thread.name.startswith("hfshard") and thread not in before:
            thread.join(60)
            assert not thread.is_alive(), thread.name


@pytest.fixture
def damaged(saved: Path) -> Path:
    """The end of a matrix of 16 KB is other bytes than were saved, which no fingerprint sees."""
    for path in saved.glob("*.safetensors"):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        if DAMAGED in header:
            end = 8 + length + header[DAMAGED]["data_offsets"][1]
            path.write_bytes(raw[: end - 4] + b"lost" + raw[end:])
    return saved


def test_a_whole_checkpoint_is_built(saved: Path) -> None:
    assert value_of(Recorded.from_pretrained(saved, verify="full")) == 3


def refuses_damage(directory: Path, model_class: type[Bert] = Recorded, **options: Any) -> BaseException | None:
    with pytest.raises(IntegrityError, match=f"Damaged: tensor '{DAMAGED}'") as raised:
        model_class.from_pretrained(directory, verify="full", **options)
    return raised.value.__context__


def test_a_damaged_one_is_noticed_though_the_model_is_built_meanwhile(damaged: Path) -> None:
    refuses_damage(damaged)
    assert BUILT == ["built"]


def test_damage_is_named_before_what_it_may_have_brought_about(damaged: Path) -> None:
    assert isinstance(refuses_damage(damaged, Failing), ZeroDivisionError)


def test_an_error_of_the_building_is_raised_if_all_is_whole(saved: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="of the user's"):
        Failing.from_pretrained(saved, verify="full")
    with pytest.raises(StateDictMismatchError):
        Bert.from_pretrained(saved, verify="full", config=bert(0, hidden=16).config)


def test_ctrl_c_ends_the_check(damaged: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Interrupted.from_pretrained(damaged, verify="full")


def test_what_is_not_mapped_is_checked_before_it_is_read(damaged: Path) -> None:
    refuses_damage(damaged, read="pread")  # else the disk would be read twice at the same time
    assert BUILT == []


def test_where_no_thread_starts_it_is_checked_before(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    refuses_damage(damaged)
    assert BUILT == []


BERT = BertConfig(
    vocab_size=6, hidden_size=4, num_hidden_layers=2, num_attention_heads=1, intermediate_size=4,
    max_position_embeddings=4,
)  # fmt: skip


def test_two_tensors_that_the_config_ties_are_both_kept_as_in_transformers(tmp_path: Path) -> None:
    saved = ZOO["llama_untied"].build()
    hfshard.save_model(saved, tmp_path)
    config = ZOO["llama_tied"].make_config()
    stock = LlamaForCausalLM.from_pretrained(tmp_path, config=config)
    for loaded in (stock, hfshard.load_model(LlamaForCausalLM, tmp_path, config=config, strict=True)):
        assert torch.equal(loaded.lm_head.weight, saved.lm_head.weight)
        assert torch.equal(loaded.model.embed_tokens.weight, saved.model.embed_tokens.weight)

    with pytest.raises(StateDictMismatchError, match="share memory in the"):
        hfshard.load_model(ZOO["llama_tied"].build(), tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("saved_class, loaded_class", [(BertForMaskedLM, BertModel), (BertModel, BertForMaskedLM)])
def test_a_tie_is_kept_with_and_without_the_head(
    tmp_path: Path, saved_class: type[PreTrainedModel], loaded_class: type[PreTrainedModel], dtype: torch.dtype
) -> None:
    saved: Any = saved_class(BERT)
    layers = getattr(saved, "bert", saved).encoder.layer
    layers[1].output.dense.weight = layers[0].output.dense.weight
    hfshard.save_model(saved, tmp_path)

    loaded: Any = hfshard.load_model(loaded_class, tmp_path, dtype=dtype)

    first, second = (layer.output.dense.weight for layer in getattr(loaded, "bert", loaded).encoder.layer)
    assert first is second


class _InAChain(BertModel):
    """A model that ties a name to one that is tied itself."""

    _tied_weights_keys: Any = {
        "encoder.layer.1.output.dense.weight": "encoder.layer.0.output.dense.weight",
        "encoder.layer.2.output.dense.weight": "encoder.layer.1.output.dense.weight",
    }


@pytest.mark.parametrize("max_shard_size", ["1GB", 100])
def test_ties_in_a_chain_are_declared_and_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, max_shard_size: int | str
) -> None:
    config = BertConfig(**{**BERT.to_dict(), "num_hidden_layers": 3, "tie_word_embeddings": True})
    saved: Any = _InAChain(config)
    index = hfshard.save_model(saved, tmp_path, max_shard_size=max_shard_size)

    stock: Any = _InAChain.from_pretrained(tmp_path)
    first, second, third = (layer.output.dense.weight for layer in stock.encoder.layer)

    assert index is not None and index.undeclared_ties == () and "does not declare" not in caplog.text
    assert first is second is third and torch.equal(first, saved.encoder.layer[0].output.dense.weight)


class _Averaged(BertModel):
    """A model with buffers that are the memory of parameters, as averages and caches are until they are first used."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.register_buffer("a_cache", torch.zeros(4))  # one before, and one behind the parameters in the alphabet
        self.register_buffer("z_cache", torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_buffer_in_a_parameters_memory_is_so_again_and_stays_a_buffer(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = _Averaged(BERT)
    first, last = saved.embeddings.LayerNorm, saved.get_submodule("pooler.dense")
    saved.a_cache, saved.z_cache = torch.arange(1.0, 5), torch.arange(5.0, 9)
    first.bias, last.bias = nn.Parameter(saved.a_cache), nn.Parameter(saved.z_cache)
    hfshard.save_model(saved, tmp_path)

    loaded = hfshard.load_model(_Averaged, tmp_path, dtype=dtype, strict=True)

    buffers, parameters = dict(loaded.named_buffers()), dict(loaded.named_parameters())
    for cache, name, values in (
        ("a_cache", "embeddings.LayerNorm.bias", [1.0, 2.0, 3.0, 4.0]),
        ("z_cache", "pooler.dense.bias", [5.0, 6.0, 7.0, 8.0]),
    ):
        assert cache not in parameters and not buffers[cache].requires_grad and parameters[name].requires_grad
        assert buffers[cache].tolist() == parameters[name].tolist() == values
        assert buffers[cache].data_ptr() == parameters[name].data_ptr()


def test_two_names_that_are_one_without_prefixes_are_refused(tmp_path: Path) -> None:
    BERT.save_pretrained(tmp_path)
    names = {"module.layers.experts.weight": torch.ones(1), "layers.experts.weight": torch.zeros(1)}
    save_file(names, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StateDictMismatchError, match=r"are both 'layers\.experts\.weight' without wrapper prefixes"):
        hfshard.load_model(BertModel, tmp_path)


@pytest.fixture
def weights_files(tmp_path: Path) -> Path:
    """A model of ones; beside it, a program's file of twos from DataParallel, and one with an average of threes."""
    bert(1).save_pretrained(tmp_path)
    state_dict = {f"module.{name}": tensor for name, tensor in bert(2).state_dict().items()}
    torch.save({"epoch": 1, "state_dict": state_dict}, tmp_path / "last.pth.tar")
    torch.save({"model": state_dict, "model_ema": bert(3).state_dict()}, tmp_path / "average.pt")
    return tmp_path


def test_a_class_is_built_from_a_file_beside_its_config(weights_files: Path) -> None:
    for model_class in (BertModel, AutoModel):
        model = hfshard.load_model(model_class, weights_files / "last.pth.tar", strict=True, verify="full")
        assert type(model) is BertModel
        assert {float(tensor.unique()) for tensor in model.state_dict().values()} == {2}
    assert Bert.from_pretrained(weights_files / "last.pth.tar").pooler.dense.bias[0].item() == 2
    assert Bert.from_pretrained(weights_files).pooler.dense.bias[0].item() == 1

    with pytest.raises(AmbiguousWeightsError):
        hfshard.load_model(AutoModel, weights_files / "average.pt")
    average = hfshard.load_model(AutoModel, weights_files / "average.pt", key="model_ema", strict=True)
    assert average.pooler.dense.bias[0].item() == 3


def test_a_class_needs_a_config_beside_the_file_or_given(weights_files: Path) -> None:
    config = bert(1).config
    (weights_files / "config.json").unlink()

    for model_class in (BertModel, AutoModel):
        words = r"The file '.*last\.pth\.tar' has no config next to it.* config="
        with pytest.raises(CheckpointNotFoundError, match=words):
            hfshard.load_model(model_class, weights_files / "last.pth.tar")
        model = hfshard.load_model(model_class, weights_files / "last.pth.tar", config=config, strict=True)
        assert model.pooler.dense.bias[0].item() == 2


def test_a_file_that_transformers_has_to_read_is_refused(weights_files: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"last\.pth\.tar' is read by transformers itself .* a directory"):
        hfshard.load_model(BertModel, weights_files / "last.pth.tar", offload_folder=str(weights_files / "offload"))


def test_a_file_is_loaded_under_install(weights_files: Path) -> None:
    with hfshard.install():
        assert BertModel.from_pretrained(weights_files / "last.pth.tar").embeddings.LayerNorm.bias[0].item() == 2


class SpeechModel(hfshard.ShardedModelMixin, Wav2Vec2ForCTC):
    """As a user writes it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose adapter is full of zeros, and beside it that of English, full of ones."""
    folder = tmp_path_factory.mktemp("speech")
    config = Wav2Vec2Config(
        vocab_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, conv_dim=(8,),
        conv_stride=(5,), conv_kernel=(10,), num_conv_pos_embeddings=2,
        num_conv_pos_embedding_groups=1, adapter_attn_dim=2, do_stable_layer_norm=True,
    )  # fmt: skip
    model: Any = Wav2Vec2ForCTC(config)
    english = {key: torch.ones_like(value) for key, value in model._get_adapters().items()}
    save_file(english, folder / "adapter.eng.safetensors")
    hfshard.save_model(model, folder)
    return folder


def test_the_adapter_is_looked_for_beside_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    stock = Wav2Vec2ForCTC.from_pretrained(folder, target_lang="eng")
    for load in (SpeechModel.from_pretrained, lambda *args, **more: hfshard.load_model(Wav2Vec2ForCTC, *args, **more)):
        model = load(folder.name, target_lang="eng")

        assert all(torch.equal(value, stock.state_dict()[name]) for name, value in model.state_dict().items())
        assert (model.lm_head.weight == 1).all()
        assert model.config.name_or_path == model.name_or_path == folder.name


def test_a_model_in_a_directory_hub_finds_its_adapter_there(folder: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    hfshard.push_checkpoint(folder, hub)
    model = SpeechModel.from_pretrained(hub, target_lang="eng")
    assert (model.lm_head.weight == 1).all()
    assert model.name_or_path == str(hub)
