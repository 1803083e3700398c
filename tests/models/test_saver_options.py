"""Every argument of `save_pretrained` does what transformers' does, of adapters too, on disk and for what loads it."""

from __future__ import annotations

import shutil
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import hfshard
from hfshard.errors import InvalidArgumentError
from tests.helpers.peft_versions import peft_of_transformers
from tests.models.conftest import SHARDS, WHOLE
from tests.zoo.compare import (
    INDEX,
    contents,
    differences,
    facts_of_load,
    file_differences,
    load,
    raw_tensors,
    read_json,
    with_variant,
)
from tests.zoo.mixin_classes import with_mixin
from tests.zoo.models import ZOO

pytestmark = pytest.mark.compat


def save_both(name: str, at: Path, **options: Any) -> tuple[Path, Path]:
    """Save a specimen by hfshard and by stock transformers; (ours, theirs)."""
    specimen = ZOO[name]
    specimen.build(with_mixin(specimen.stock_class)).save_pretrained(at / "ours", **options)
    specimen.build().save_pretrained(at / "theirs", **options)
    return at / "ours", at / "theirs"


@pytest.mark.parametrize("size", [WHOLE, SHARDS])
@pytest.mark.parametrize("variant", ["fp16", "v2.1"])
def test_a_variant_is_named_as_transformers_names_it_and_loads_by_both(size: str, variant: str, tmp_path: Path) -> None:
    ours, theirs = save_both("bert", tmp_path, max_shard_size=size, variant=variant)

    assert file_differences(ours, theirs, variant) == []
    if size == SHARDS:
        names = set(read_json(ours / with_variant(INDEX, variant))["weight_map"].values())
        assert all(name.startswith(f"model.{variant}-0000") for name in names)
    expected, *found = (
        facts_of_load(load(model_class, directory, variant=variant), directory)
        for model_class, directory in product((BertModel, with_mixin(BertModel)), (theirs, ours))
    )
    assert [differences(facts, expected) for facts in found] == [[], [], []]


def test_two_variants_and_the_plain_weights_live_side_by_side(tmp_path: Path) -> None:
    model = ZOO["bert"].build(with_mixin(BertModel))
    model.save_pretrained(tmp_path, max_shard_size=SHARDS)
    model.to(torch.float16).save_pretrained(tmp_path, max_shard_size=SHARDS, variant="fp16")
    model.to(torch.bfloat16).save_pretrained(tmp_path, variant="bf16")

    dtypes = [BertModel.from_pretrained(tmp_path, variant=v, dtype="auto").dtype for v in (None, "fp16", "bf16")]
    stored = [next(iter(raw_tensors(tmp_path, v).values()))[0] for v in (None, "fp16", "bf16")]

    assert stored == ["torch.float32", "torch.float16", "torch.bfloat16"]
    assert dtypes == [torch.bfloat16] * 3  # what config.json says, as transformers


@pytest.mark.parametrize("name", ["bert", "llama_tied", "mixtral", "t5"])
def test_a_state_dict_that_is_given_is_saved_in_place_of_the_models(name: str, tmp_path: Path) -> None:
    specimen = ZOO[name]
    ours, theirs = specimen.build(with_mixin(specimen.stock_class)), specimen.build()
    given = {key: value + 1 for key, value in specimen.build().state_dict().items()}
    theirs.save_pretrained(tmp_path / "theirs", state_dict=dict(given), max_shard_size=SHARDS)
    before = list(given)

    ours.save_pretrained(tmp_path / "ours", state_dict=given, max_shard_size=SHARDS)

    assert file_differences(tmp_path / "ours", tmp_path / "theirs") == []
    assert list(given) == before


def test_a_part_of_a_state_dict_is_saved_alone(tmp_path: Path) -> None:
    ours, theirs = ZOO["bert"].build(with_mixin(BertModel)), ZOO["bert"].build()
    part = {key: value for key, value in theirs.state_dict().items() if "layer.0" in key}
    theirs.save_pretrained(tmp_path / "theirs", state_dict=dict(part))

    ours.save_pretrained(tmp_path / "ours", state_dict=part)

    assert file_differences(tmp_path / "ours", tmp_path / "theirs") == []


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "llava", "wav2vec2", "vit", "clip_vision"])
@pytest.mark.parametrize("original", [True, False])
def test_weights_are_saved_in_the_original_format_or_as_they_are(name: str, original: bool, tmp_path: Path) -> None:
    ours, theirs = save_both(name, tmp_path, save_original_format=original, max_shard_size=SHARDS)

    assert file_differences(ours, theirs) == []
    stock_class = ZOO[name].stock_class
    expected = facts_of_load(load(stock_class, theirs), theirs)
    for model_class in (stock_class, with_mixin(stock_class)):
        assert differences(facts_of_load(load(model_class, ours), ours), expected) == []


def test_the_experts_of_a_mixture_are_fused_in_memory_and_apart_on_disk(tmp_path: Path) -> None:
    ours, _ = save_both("mixtral", tmp_path)

    model = with_mixin(ZOO["mixtral"].stock_class).from_pretrained(ours)

    assert model.model.layers[0].mlp.experts.gate_up_proj.shape == (4, 96, 32)
    assert sum(".experts." in name for name in raw_tensors(ours)) == 2 * 4 * 3


@pytest.mark.parametrize(
    "options",
    [
        {"safe_serialization": True},
        {"max_shard_size": 20_000},
        {"max_shard_size": "20kb"},
        {"is_main_process": True, "save_peft_format": True, "push_to_hub": False, "token": None},
    ],
    ids=str,
)
def test_an_option_of_older_or_other_code_is_taken(options: dict[str, Any], tmp_path: Path) -> None:
    specimen = ZOO["bert"]
    specimen.build().save_pretrained(tmp_path / "theirs")

    specimen.build(with_mixin(BertModel)).save_pretrained(tmp_path / "ours", **options)

    assert file_differences(tmp_path / "ours", tmp_path / "theirs") == []


class FolderConfig(BertConfig):
    """A config that saves a folder, too, and notes where."""

    saved_in: ClassVar[list[Path]] = []

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        super().save_pretrained(save_directory, push_to_hub, **kwargs)
        directory = Path(save_directory)
        (directory / "labels" / directory.name).mkdir(parents=True, exist_ok=True)
        (directory / "labels" / directory.name / "a.txt").write_text("a")
        self.saved_in.append(directory)


@pytest.mark.parametrize("free", [0, 2**30])
def test_configs_are_collected_in_memory_if_there_is_room(
    free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    hfshard.save_model(BertModel(FolderConfig.from_dict(ZOO["bert"].make_config().to_dict())), tmp_path / "out")

    assert FolderConfig.saved_in[-1].is_relative_to("/dev/shm" if free else tmp_path)


def test_a_config_may_save_folders_and_sees_the_targets_name(tmp_path: Path) -> None:
    model = BertModel(FolderConfig.from_dict(ZOO["bert"].make_config().to_dict()))
    model.save_pretrained(tmp_path / "theirs" / "out")
    directory = tmp_path / "ours" / "out"

    for size in (WHOLE, SHARDS):  # new and replaced
        hfshard.save_model(model, directory, max_shard_size=size)

        assert (directory / "labels" / "out" / "a.txt").read_text() == "a"
        assert hfshard.verify_checkpoint(directory).ok
    assert file_differences(directory, tmp_path / "theirs" / "out") == []


def test_arguments_are_taken_by_position_in_transformers_order(tmp_path: Path) -> None:
    model = ZOO["bert"].build(with_mixin(BertModel))
    state_dict = {key: value * 2 for key, value in model.state_dict().items()}

    result = model.save_pretrained(tmp_path, True, state_dict, False, SHARDS, "fp16", None, True, True, False)

    assert result is None
    index = read_json(tmp_path / with_variant(INDEX, "fp16"))
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in state_dict.values())


def test_another_process_than_the_main_one_writes_nothing(tmp_path: Path) -> None:
    ZOO["bert"].build(with_mixin(BertModel)).save_pretrained(tmp_path / "out", is_main_process=False)

    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(("typo", "meant"), [("max_shard_sizes", "max_shard_size"), ("varient", "variant")])
def test_an_unknown_keyword_names_the_nearest_and_writes_nothing(typo: str, meant: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"{typo}.*Did you mean '{meant}'"):
        ZOO["bert"].build(with_mixin(BertModel)).save_pretrained(tmp_path / "out", **{typo: "1MB"})

    assert not (tmp_path / "out").exists()


def test_a_frozen_model_in_training_mode_stays_so(tmp_path: Path) -> None:
    model = ZOO["bert"].build(with_mixin(BertModel)).train()
    model.embeddings.requires_grad_(False)

    model.save_pretrained(tmp_path)

    assert model.training and not model.embeddings.word_embeddings.weight.requires_grad
    assert model.encoder.layer[0].output.dense.weight.requires_grad


def test_the_saved_directory_is_whole(tmp_path: Path) -> None:
    ours, theirs = save_both("clip", tmp_path, max_shard_size=SHARDS)

    assert hfshard.verify_checkpoint(ours).ok
    assert hfshard.verify_checkpoint(theirs, level="structure").ok


class Llama(hfshard.ShardedModelMixin, LlamaForCausalLM):
    """As a user writes it."""


def _with_adapter(model_class: type[LlamaForCausalLM], base: Path) -> Any:
    config = LlamaConfig(vocab_size=6, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    hfshard.save_model(LlamaForCausalLM(config), base)
    model: Any = model_class.from_pretrained(base)
    model.add_adapter(peft_of_transformers().LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    return model


@pytest.mark.parametrize("model_class", [LlamaForCausalLM, Llama])
def test_the_adapter_is_saved_as_by_transformers(tmp_path: Path, model_class: type[LlamaForCausalLM]) -> None:
    model = _with_adapter(model_class, tmp_path / "base")
    assert hfshard.save_model(torch.nn.DataParallel(model), tmp_path / "ours") is None
    model.save_pretrained(tmp_path / "theirs")

    ours, theirs = (contents(tmp_path / name) for name in ("ours", "theirs"))
    assert set(ours) == {"adapter_config.json", "adapter_model.safetensors", "generation_config.json"}
    assert ours == theirs

    loaded = hfshard.load_model(model_class, tmp_path / "ours")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_metadata_for_an_adapter_is_refused(tmp_path: Path) -> None:
    model = _with_adapter(LlamaForCausalLM, tmp_path / "base")
    with pytest.raises(InvalidArgumentError, match="Leave out metadata="):
        hfshard.save_model(model, tmp_path / "ours", metadata={"step": 1})
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("model_class", [LlamaForCausalLM, Llama])
def test_an_adapter_goes_into_no_store(tmp_path: Path, model_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _with_adapter(model_class, tmp_path / "base")
    monkeypatch.chdir(tmp_path)

    with pytest.raises(InvalidArgumentError, match=r"to 's3://bucket/adapter': .* only into directories"):
        hfshard.save_model(model, "s3://bucket/adapter")

    assert [path.name for path in tmp_path.iterdir()] == ["base"]
