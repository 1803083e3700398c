"""What stock takes, an installed hfshard takes and writes the same; what stock refuses, it refuses, or does better."""

from __future__ import annotations

import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

import hfshard
from hfshard.errors import DamagedCheckpointError, HfshardError, InvalidSizeError, SaveDirectoryError, UnsafePickleError
from tests.helpers.tiny_bert import bert, value_of
from tests.models.conftest import SHARDS, WHOLE, Saves
from tests.saving.helpers import flip
from tests.zoo.compare import (
    INDEX,
    differences,
    facts_of_load,
    facts_of_model,
    file_differences,
    load,
    raw_tensors,
    read_json,
    small_files,
)
from tests.zoo.models import ZOO, scramble
from tests.zoo.parameters import parameters

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("uninstalled")]


class NoTensor:
    """What `weights_only=True` does not load."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of every kind that stock transformers wrote, or might find."""
    root = tmp_path_factory.mktemp("root")
    model = bert(0, cls=BertModel)
    scramble(model)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for name in ("good", "in a/subfolder"):
        model.save_pretrained(root / name)
    model.save_pretrained(root / "good", variant="fp16")
    classifier = BertForSequenceClassification(BertConfig.from_dict({**model.config.to_diff_dict(), "num_labels": 3}))
    scramble(classifier)
    classifier.save_pretrained(root / "classifier")
    (root / "empty").mkdir()
    for name in ("config", "flax", "pickle", "code", "others", "no tensors", "no format"):
        model.config.save_pretrained(root / name)
    (root / "flax" / "flax_model.msgpack").write_bytes(b"x")
    torch.save(tensors, root / "pickle" / "pytorch_model.bin")
    torch.save({**tensors, "more": NoTensor()}, root / "code" / "pytorch_model.bin")
    save_file({"a": torch.zeros(2)}, root / "others" / "model.safetensors", metadata={"format": "pt"})
    save_file({}, root / "no tensors" / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, root / "no format" / "model.safetensors")
    return root


def outcome(model_class: Any, path: Path | None, options: dict[str, Any]) -> Any:
    """What can be seen of a load: facts, or the error; and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            seen: Any = facts_of_load(load(model_class, path, **options), path)
        except Exception as error:
            return error, []
    return seen, sorted({str(warning.message) for warning in caught})


Options = dict[str, Any]
CASES: list[tuple[Any, str | None, Options]] = [
    (BertModel, "good", {}),
    (BertModel, "good", {"low_cpu_mem_usage": True, "_fast_init": True, "mirror": "x", "offload_state_dict": True}),
    (BertModel, "good", {"trust_remote_code": True, "local_files_only": True, "force_download": True, "proxies": {}}),
    (BertModel, "good", {"token": "x", "revision": "abc"}),
    (BertModel, "good", {"dtype": torch.float16}),
    (BertModel, "good", {"torch_dtype": "auto"}),
    (BertModel, "good", {"dtype": "nonsense"}),
    (BertModel, "good", {"variant": "fp16"}),
    (BertModel, "good", {"variant": "nowhere"}),
    (BertModel, "in a", {"subfolder": "subfolder"}),
    (BertModel, "in a", {"subfolder": "nowhere"}),
    (BertModel, "good", {"use_safetensors": False}),
    (BertModel, "pickle", {}),
    (BertModel, "pickle", {"use_safetensors": True}),
    (BertModel, "pickle", {"weights_only": False}),
    (BertModel, "code", {"weights_only": False}),
    (BertModel, "others", {}),
    (BertModel, "no format", {}),
    (BertModel, "no tensors", {}),
    (BertModel, "nowhere", {}),
    (BertModel, "empty", {}),
    (BertModel, "config", {}),
    (BertModel, "flax", {}),
    (BertModel, "flax", {"from_flax": True}),
    (BertModel, "good/config.json", {}),
    (BertModel, None, {}),
    (BertModel, None, {"config": BertConfig(hidden_size=12)}),
    (BertModel, "good", {"state_dict": {}}),
    (BertModel, "good", {"config": GPT2Config(n_embd=8, n_layer=1, n_head=1)}),
    (BertModel, "good", {"add_pooling_layer": False}),
    (BertModel, "good", {"nonsense": 1}),
    (BertModel, "good", {"attn_implementation": "eager"}),
    (BertModel, "good", {"attn_implementation": "nonsense"}),
    (BertModel, "good", {"key_mapping": {"^embeddings": "embeddings"}}),
    (BertModel, "good", {"device_map": "auto"}),
    (BertModel, "good", {"device_map": "auto", "max_memory": {"cpu": 10**9}}),
    (BertModel, "good", {"device_map": {"": "cpu"}}),
    (BertModel, "good", {"device_map": {"embeddings": "cpu"}}),
    (BertModel, "good", {"device_map": "meta"}),
    (BertModel, "good", {"gguf_file": "x.gguf"}),
    (BertModel, "good", {"quantization_config": {"quant_method": "nonsense"}}),
    (BertModel, "good", {"disable_mmap": True}),
    (BertForSequenceClassification, "classifier", {"num_labels": 7}),
    (BertForSequenceClassification, "classifier", {"num_labels": 7, "ignore_mismatched_sizes": True}),
    (BertForSequenceClassification, "good", {"num_labels": 7}),
    (GPT2LMHeadModel, "good", {}),
    (PreTrainedModel, "good", {}),
    (AutoModel, "good", {"variant": "fp16", "dtype": "float16"}),
    (AutoModel, "good", {"hidden_dropout_prob": 0.5}),
    (AutoModel, "flax", {}),
    (AutoModel, "nowhere", {}),
    (AutoModelForMaskedLM, "good", {}),
]


@pytest.mark.parametrize(
    ("model_class", "name", "options"),
    CASES,
    ids=[
        f"{case[0].__name__} {case[1]} {' '.join(f'{key}={value!r:.20}' for key, value in case[2].items())}"
        for case in CASES
    ],
)
def test_a_load_does_what_stock_does(model_class: Any, name: str | None, options: Options, root: Path) -> None:
    path = None if name is None else root / name

    theirs, their_warnings = outcome(model_class, path, options)
    with hfshard.install(quiet=True):
        ours, our_warnings = outcome(model_class, path, options)

    if isinstance(theirs, Exception):
        assert isinstance(ours, type(theirs)), ours
    else:
        assert not isinstance(ours, Exception), ours
        assert differences(ours, theirs) == []
    assert our_warnings == their_warnings


def test_arguments_by_name_and_by_position(root: Path, installed: None) -> None:
    assert BertModel.from_pretrained(pretrained_model_name_or_path=root / "good").pooler is not None
    assert BertModel.from_pretrained(str(root / "good"), False).pooler is None
    with pytest.raises(TypeError, match="pretrained_model_name_or_path"):
        BertModel.from_pretrained()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-8]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        lambda path: path.write_bytes(path.read_bytes().replace(b"pooler", b"qooler")),
        lambda path: flip(path, -3),
    ],
    ids=["cut", "empty", "longer", "renamed", "flipped"],
)
def test_damage_is_refused_by_every_way_in(damage: Callable[[Path], object], tmp_path: Path) -> None:
    with hfshard.install(verify="full", quiet=True):
        bert(1, cls=BertModel).save_pretrained(tmp_path)
        damage(tmp_path / "model.safetensors")
        for load_it in (BertModel.from_pretrained, AutoModel.from_pretrained, AutoModelForMaskedLM.from_pretrained):
            with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors"):
                load_it(tmp_path)
        with pytest.raises(DamagedCheckpointError):  # handed over to transformers after the check
            BertModel.from_pretrained(tmp_path, device_map="auto", max_memory={"cpu": 10**9})


def test_a_pickle_that_asks_for_code_is_refused(root: Path, installed: None) -> None:
    with pytest.raises(UnsafePickleError, match="NoTensor"):
        BertModel.from_pretrained(root / "code")


def test_an_auto_class_loads_by_way_of_hfshard_too(tmp_path: Path, installed: None) -> None:
    model = bert(1, cls=BertModel)
    model.pooler.dense.bias = model.embeddings.LayerNorm.bias  # a tie that the config does not declare
    model.save_pretrained(tmp_path)

    for options in ({}, {"token": "x", "revision": "main"}):
        loaded: Any = AutoModel.from_pretrained(tmp_path, **options)
        assert loaded.pooler.dense.bias is loaded.embeddings.LayerNorm.bias


def test_a_config_that_was_read_amid_a_commit_keeps_nothing_of_it(tmp_path: Path, installed: None) -> None:
    bert(1, cls=BertModel).save_pretrained(tmp_path)
    unique = "model-hfshard-0123456789abcdef.safetensors"
    (tmp_path / "model.safetensors").rename(tmp_path / unique)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "transformers_weights": unique}))

    loaded = AutoModel.from_pretrained(tmp_path)

    assert value_of(loaded) == 1
    assert "transformers_weights" not in loaded.config.to_dict()


@contextmanager
def changed_weight_map(directory: Path) -> Iterator[dict[str, str]]:
    """Gives the weight map of an index, and writes what becomes of it."""
    index = read_json(directory / INDEX)
    yield index["weight_map"]
    (directory / INDEX).write_text(json.dumps(index))


def misplace(directory: Path) -> None:
    """Let the index name another shard for the first tensor."""
    with changed_weight_map(directory) as shards:
        first = min(shards)
        shards[first] = next(shard for shard in shards.values() if shard != shards[first])


def double(name: str) -> Callable[[Path], None]:
    """Give a JSON file a key twice."""

    def change(directory: Path) -> None:
        path = directory / name
        path.write_text(path.read_text().rstrip()[:-1].rstrip() + ', "zz": 1, "zz": 2}')

    return change


def move_shards(directory: Path) -> None:
    """Put the shards into another folder, and a link to it into the directory."""
    away = directory.parent / "away"
    away.mkdir()
    for shard in directory.glob("*.safetensors"):
        shard.rename(away / shard.name)
    (directory / "parts").symlink_to(away)
    with changed_weight_map(directory) as shards:
        shards.update({name: f"parts/{shard}" for name, shard in shards.items()})


ODD: list[tuple[Callable[[Path], None], str]] = [
    (misplace, "Tensor 'embeddings.LayerNorm.bias' of shard '{}/model-00001-of-00004.safetensors' should be in"),
    (double("config.json"), "Config '{}/config.json' is not valid JSON: the key 'zz' occurs twice"),
    (double("model.safetensors.index.json"), "Index '{}/model.safetensors.index.json' is not valid JSON: the key 'zz'"),
    (move_shards, "'{}/parts/model-00001-of-00004.safetensors' is in"),
]


@pytest.mark.parametrize("model_class", [BertModel, AutoModel])
@pytest.mark.parametrize(("make_odd", "words"), ODD, ids=["misplaced", "config", "index", "linked"])
def test_what_is_odd_and_whole_is_loaded_as_stock_loads_it_with_one_warning(
    model_class: Any, make_odd: Callable[[Path], None], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "out"
    model = bert(0, cls=BertModel)
    scramble(model)
    model.save_pretrained(directory, max_shard_size=1000)
    make_odd(directory)

    theirs = outcome(model_class, directory, {})
    caplog.clear()
    with hfshard.install(quiet=True):
        ours = outcome(model_class, directory, {})

    assert not isinstance(ours[0], Exception), ours
    assert differences(ours[0], theirs[0]) == []
    warned = [record.getMessage() for record in caplog.records if record.name.startswith("hfshard")]
    start = "Loading the checkpoint anyway, as stock transformers does: "
    assert len(warned) == 1
    assert warned[0].startswith(start + words.format(directory))
    with pytest.raises(HfshardError):
        hfshard.load_model(model_class, directory)


def test_a_doubled_key_of_a_generation_config_is_passed_over_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, installed: None
) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1)).save_pretrained(tmp_path)
    double("generation_config.json")(tmp_path)

    GPT2LMHeadModel.from_pretrained(tmp_path)

    assert "Generation config" in caplog.text


def test_shards_of_two_saves_are_refused_still(tmp_path: Path) -> None:
    bert(1, cls=BertModel).save_pretrained(tmp_path / "a", max_shard_size=1000)
    bert(2, cls=BertModel).save_pretrained(tmp_path / "b", max_shard_size=1400)
    (tmp_path / "b" / "model-00001-of-00003.safetensors").rename(tmp_path / "a" / "model-00001-of-00004.safetensors")

    with hfshard.install(quiet=True), pytest.raises(DamagedCheckpointError, match="belong to different saves"):
        BertModel.from_pretrained(tmp_path / "a")


def test_what_hfshard_has_saved_is_as_it_was_saved(tmp_path: Path, installed: None) -> None:
    bert(1, cls=BertModel).save_pretrained(tmp_path, max_shard_size=1000)
    misplace(tmp_path)

    with pytest.raises(DamagedCheckpointError, match="should be in"):
        BertModel.from_pretrained(tmp_path)


def plain() -> Any:
    """A model whose tensors all differ."""
    model = bert(0, cls=BertModel)
    scramble(model)
    return model


def with_views() -> Any:
    """One with tensors that lie in one storage, or are not contiguous."""
    model = plain()
    storage = torch.arange(128.0).view(16, 8)
    model.pooler.dense.weight = torch.nn.Parameter(storage[:8])
    model.encoder.layer[0].attention.output.dense.weight = torch.nn.Parameter(storage[8:])
    model.embeddings.word_embeddings.weight = torch.nn.Parameter(torch.arange(80.0).view(8, 10).t())
    return model


def with_buffers() -> Any:
    """One with tensors of other dtypes, and empty and scalar ones."""
    model = plain()
    for dtype in (torch.bool, torch.uint16, torch.complex64, torch.float8_e4m3fn):
        model.register_buffer(str(dtype).partition(".")[2], torch.ones(3).to(dtype))
    model.register_buffer("empty", torch.zeros(0, 3))
    model.register_buffer("scalar", torch.tensor(3.0))
    model.pooler.half()
    return model


def weight_normed() -> Any:
    """One whose weight is computed of two others."""
    model = plain()
    torch.nn.utils.parametrizations.weight_norm(model.pooler.dense)
    return model


SAVES: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (plain, (), {}),
    (plain, (), {"nonsense": 1, "safe_serialization": True, "save_function": torch.save, "repo_id": "a/b"}),
    (plain, (), {"options": 1, "model": 2, "target": 3, "settings": 4}),
    (plain, (), {"safe_serialization": False}),
    (plain, (False,), {}),
    (plain, (True, None, False, "2KB", "fp16", None, True, True, False), {}),
    (plain, (), {"state_dict": {"pooler.dense.bias": torch.ones(8)}}),
    (plain, (), {"state_dict": {"module.pooler.dense.bias": torch.ones(8), "x": torch.ones(1)}}),
    (plain, (), {"max_shard_size": 2000}),
    (plain, (), {"max_shard_size": 1500.5}),
    (plain, (), {"max_shard_size": "2kB"}),
    (plain, (), {"max_shard_size": "1.5KB"}),
    (plain, (), {"max_shard_size": 0}),
    (plain, (), {"max_shard_size": -1}),
    (plain, (), {"state_dict": {"a": torch.ones(2), "a.format": "row"}}),
    (plain, (), {"max_shard_size": -math.inf}),
    (plain, (), {"max_shard_size": math.inf}),
    (plain, (), {"max_shard_size": True}),
    (plain, (), {"max_shard_size": np.int64(2000)}),
    (plain, (), {"max_shard_size": torch.tensor(2000)}),
    (plain, (), {"max_shard_size": " 2KB "}),
    (plain, (), {"max_shard_size": "1TB", "token": "x", "save_peft_format": False, "save_original_format": False}),
    (with_views, (), {}),
    (with_buffers, (), {}),
    (weight_normed, (), {}),
    (lambda: torch.compile(plain(), backend="eager"), (), {}),
    (lambda: torch.nn.DataParallel(plain()).module, (), {}),
]


@pytest.mark.parametrize(("make", "args", "options"), SAVES, ids=range(len(SAVES)))
def test_a_save_writes_what_stock_writes(make: Any, args: tuple[Any, ...], options: Options, tmp_path: Path) -> None:
    def save(directory: Path) -> Any:
        model = make()
        given = {**options, "state_dict": dict(options["state_dict"])} if "state_dict" in options else options
        assert model.save_pretrained(directory, *args, **given) is None
        return model

    theirs = save(tmp_path / "theirs")
    with hfshard.install(quiet=True):
        ours = save(tmp_path / "ours")

    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "theirs"))
    assert small_files(tmp_path / "ours") == small_files(tmp_path / "theirs")
    assert ours.config.to_dict() == theirs.config.to_dict()
    if args != (False,):
        variant = "fp16" if args else None
        found = [{"file": raw_tensors(tmp_path / name, variant)} for name in ("ours", "theirs")]
        assert differences(*found) == []
        found = [facts_of_model(getattr(model, "_orig_mod", model)) for model in (ours, theirs)]
        assert differences(*found) == []


def test_an_empty_state_dict_saves_the_config_alone_and_keeps_weights(tmp_path: Path) -> None:
    model = plain()
    for name in ("theirs", "ours"):
        model.save_pretrained(tmp_path / f"{name} over")
    model.config.chunk_size_feed_forward = 3
    for suffix in ("", " over"):
        model.save_pretrained(tmp_path / f"theirs{suffix}", state_dict={})
        with hfshard.install(quiet=True):
            model.save_pretrained(tmp_path / f"ours{suffix}", state_dict={})

        ours, theirs = tmp_path / f"ours{suffix}", tmp_path / f"theirs{suffix}"
        assert sorted(os.listdir(ours)) == sorted(os.listdir(theirs))
        assert small_files(ours) == small_files(theirs)
    assert raw_tensors(tmp_path / "ours over") == raw_tensors(tmp_path / "theirs over") != {}


def test_no_place_is_named_where_nothing_stays(
    tmp_path: Path, installed: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level("INFO", "transformers"):
        plain().save_pretrained(tmp_path)
        plain().config.save_pretrained(tmp_path / "config")

    assert {record.getMessage() for record in caplog.records if "saved in" in record.getMessage()} == {
        f"Configuration saved in {tmp_path / 'config' / 'config.json'}"
    }


def test_an_object_that_is_no_model_is_stocks(tmp_path: Path, installed: None) -> None:
    with pytest.raises(AttributeError, match="'object' object has no attribute"):
        PreTrainedModel.save_pretrained(object(), tmp_path)  # type: ignore[arg-type]


def test_a_file_in_the_way_is_an_error_and_no_save_that_did_nothing(tmp_path: Path, installed: None) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SaveDirectoryError):
        plain().save_pretrained(tmp_path / "file")
    with pytest.raises(InvalidSizeError):
        plain().save_pretrained(tmp_path / "out", max_shard_size="five")
    assert not (tmp_path / "out").exists()


QUICK = ("t5", "mixtral", "llava")
"""Ties, fused experts, a composite with converted names: what each run looks at; the others by --slow."""
CUT_FROM_ONE = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3")
"""Stock puts all experts that it cuts from one tensor into one file, however large that gets: there shards differ."""
every_model = pytest.mark.parametrize("name", parameters(ZOO, (), [name for name in ZOO if name not in QUICK]))


@every_model
def test_an_installed_hfshard_does_what_stock_does(name: str, saves: Saves, tmp_path: Path) -> None:
    specimen = ZOO[name]
    stock, stock_facts = saves.stock(name, SHARDS), saves.stock_facts(name, SHARDS)
    whole = saves.stock(name, WHOLE)
    ours, theirs = specimen.build(), specimen.build()
    theirs.save_pretrained(tmp_path / "theirs")
    specimen.stock_class.from_pretrained(stock).save_pretrained(tmp_path / "theirs again")

    with hfshard.install(verify="full", quiet=True):
        ours.save_pretrained(tmp_path / "shards", max_shard_size=SHARDS)
        ours.save_pretrained(tmp_path / "ours")
        loads = [load(specimen.stock_class, tmp_path / "shards"), load(specimen.stock_class, tmp_path / "ours")]
    with hfshard.install(quiet=True):
        loads.append(load(specimen.stock_class, stock))
        loads[-1].model.save_pretrained(tmp_path / "again")

    index, stock_index = read_json(tmp_path / "shards" / INDEX), read_json(stock / INDEX)
    assert "hfshard" in index["metadata"] and "hfshard" not in stock_index["metadata"]
    assert (index["weight_map"] == stock_index["weight_map"]) == (name not in CUT_FROM_ONE)
    for mine, other in (("ours", whole), ("shards", whole), ("again", tmp_path / "theirs again")):
        assert file_differences(tmp_path / mine, other) == []
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == sorted(path.name for path in whole.iterdir())
    assert differences(facts_of_model(ours), facts_of_model(theirs)) == []
    for loaded, place in zip(loads, (tmp_path / "shards", tmp_path / "ours", stock), strict=True):
        assert differences(facts_of_load(loaded, place), stock_facts) == []


@every_model
def test_auto_model_builds_the_same_base_model(name: str, saves: Saves) -> None:
    stock = saves.stock(name, SHARDS)
    try:
        theirs = facts_of_load(load(AutoModel, stock), stock)
    except ValueError:
        pytest.skip("no AutoModel knows its config")

    with hfshard.install(quiet=True):
        ours = facts_of_load(load(AutoModel, stock), stock)

    assert differences(ours, theirs) == []
