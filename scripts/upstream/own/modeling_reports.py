"""What transformers' own tests check (test_modeling_utils.py) of reports, odd files and odd models.

Written anew: the source archive lacks that file, and it loads models from the Hub; these make tiny ones.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from logging import WARNING
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrizations
from transformers import AutoConfig, AutoModel, BertModel, PreTrainedConfig, PreTrainedModel
from transformers.testing_utils import CaptureLogger, LoggingLevel
from transformers.utils import logging

from tests.zoo.models import ZOO
from upstream.own.tiny_bert import bert, same, with_info

__all__ = ["bert"]  # the fixture


class BaseConfig(PreTrainedConfig):
    model_type = "odd-base"


class Base(PreTrainedModel):
    base_model_prefix = "base"
    config_class = BaseConfig

    def __init__(self, config: BaseConfig) -> None:
        super().__init__(config)
        self.linear = nn.Linear(5, 5)
        self.linear_2 = nn.Linear(5, 5)
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: Any) -> None: ...


class WithHead(PreTrainedModel):
    base_model_prefix = "base"
    config_class = BaseConfig

    def __init__(self, config: BaseConfig) -> None:
        super().__init__(config)
        self.base = Base(config)
        self.decoder = nn.Linear(5, 5)
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: Any) -> None: ...


class Tied(Base):
    _tied_weights_keys = {"linear_2.weight": "linear.weight"}


class Normed(PreTrainedModel):
    config_class = BaseConfig

    def __init__(self, config: BaseConfig) -> None:
        super().__init__(config)
        self.conv = parametrizations.weight_norm(nn.Conv1d(2, 3, 3))
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: Any) -> None: ...


class Buffers(PreTrainedModel):
    config_class = BaseConfig

    def __init__(self, config: BaseConfig) -> None:
        super().__init__(config)
        self.layer = nn.Linear(2, 2)
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("wave", torch.tensor([1 + 2j]))
        self.register_buffer("small", torch.arange(4, dtype=torch.int8))
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: Any) -> None: ...


def test_a_base_loads_into_a_head_and_back(tmp_path: Path) -> None:
    base = Base(BaseConfig())
    base.save_pretrained(tmp_path / "base")
    head, info = with_info(WithHead, tmp_path / "base")

    assert set(info["missing_keys"]) == {"decoder.weight", "decoder.bias"}
    assert same(head.base, base)
    head.save_pretrained(tmp_path / "head")
    again, info = with_info(Base, tmp_path / "head")
    assert set(info["unexpected_keys"]) == {"decoder.weight", "decoder.bias"}
    assert same(again, base)


def test_tied_weights_of_ones_own_class(tmp_path: Path) -> None:
    config: Any = BaseConfig()
    config.tie_word_embeddings = True
    model = Tied(config)
    model.save_pretrained(tmp_path)
    found, info = with_info(Tied, tmp_path)

    assert found.linear.weight is found.linear_2.weight
    assert not info["missing_keys"]
    state = load_file(tmp_path / "model.safetensors")
    assert ("linear.weight" in state) is not ("linear_2.weight" in state)


def test_the_report_names_what_is_missing_and_unexpected(tmp_path: Path) -> None:
    WithHead(BaseConfig()).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["decoder.bias"]
    save_file({**state, "added_key": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with LoggingLevel(WARNING), CaptureLogger(logging.get_logger("transformers.modeling_utils")) as captured:
        WithHead.from_pretrained(tmp_path)
    assert "added_key" in captured.out
    assert "decoder.bias" in captured.out
    assert str(tmp_path) in captured.out


def test_a_whole_checkpoint_loads_without_a_word(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path)

    with LoggingLevel(WARNING), CaptureLogger(logging.get_logger("transformers.modeling_utils")) as captured:
        BertModel.from_pretrained(tmp_path)
    assert captured.out == ""


def test_the_report_of_other_sizes(tmp_path: Path) -> None:
    Base(BaseConfig()).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({**state, "linear.bias": torch.ones(3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(RuntimeError, match=r"ignore_mismatched_sizes"):
        Base.from_pretrained(tmp_path)
    with CaptureLogger(logging.get_logger("transformers.modeling_utils")) as captured:
        found, info = with_info(Base, tmp_path, ignore_mismatched_sizes=True)
    assert "Reinit due to size mismatch" in captured.out
    assert [tuple(entry[1]) for entry in info["mismatched_keys"]] == [(3,)]
    assert found.linear.bias.shape == (5,)


def test_a_reparametrized_weight(tmp_path: Path) -> None:
    model = Normed(BaseConfig())
    model.save_pretrained(tmp_path)

    assert same(Normed.from_pretrained(tmp_path), model)


def test_buffers_of_every_kind(tmp_path: Path) -> None:
    model = Buffers(BaseConfig())
    model.save_pretrained(tmp_path)
    found: Any = Buffers.from_pretrained(tmp_path)

    assert same(found, model)
    assert found.small.dtype == torch.int8


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_of_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    model: Any = Base(BaseConfig())
    model.linear.weight = nn.Parameter(model.linear.weight.detach().to(dtype), requires_grad=False)
    model.save_pretrained(tmp_path)

    assert load_file(tmp_path / "model.safetensors")["linear.weight"].dtype == dtype
    Base.from_pretrained(tmp_path)


def test_parameters_that_are_not_contiguous(tmp_path: Path) -> None:
    model: Any = Base(BaseConfig())
    model.linear.weight = nn.Parameter(torch.arange(25.0).reshape(5, 5).t())
    model.save_pretrained(tmp_path)

    found: Any = Base.from_pretrained(tmp_path)
    assert torch.equal(found.linear.weight, model.linear.weight)


def test_the_dtype_is_in_the_saved_config(bert: Any, tmp_path: Path) -> None:
    bert.half().save_pretrained(tmp_path)

    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"
    assert BertModel.from_pretrained(tmp_path).config.dtype == torch.float16


def test_generation_parameters_are_not_saved_in_the_config(tmp_path: Path) -> None:
    model = ZOO["gpt2"].build()
    model.generation_config.max_new_tokens = 3
    model.save_pretrained(tmp_path)

    assert "max_new_tokens" not in json.loads((tmp_path / "config.json").read_text())
    assert json.loads((tmp_path / "generation_config.json").read_text())["max_new_tokens"] == 3


def test_an_index_without_totals(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path, max_shard_size="20KB")
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": json.loads(path.read_text())["weight_map"]}))

    assert same(BertModel.from_pretrained(tmp_path), bert)


def test_a_shard_with_a_tensor_that_the_index_does_not_name(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path, max_shard_size="20KB")
    path = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    shard = tmp_path / weight_map["pooler.dense.bias"]
    save_file({**load_file(shard), "more": torch.ones(2)}, shard, metadata={"format": "pt"})
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    assert same(BertModel.from_pretrained(tmp_path), bert)


def test_an_index_that_leads_out_of_the_directory(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    path = tmp_path / "in" / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    first = weight_map["pooler.dense.bias"]
    (tmp_path / "in" / first).rename(tmp_path / first)
    moved = {name: f"../{file}" if file == first else file for name, file in weight_map.items()}
    path.write_text(json.dumps({"metadata": {}, "weight_map": moved}))

    with pytest.raises((ValueError, OSError), match=r"."):
        BertModel.from_pretrained(tmp_path / "in")


def test_one_file_beside_a_whole_index(bert: Any, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path, max_shard_size="20KB")
    other = {name: torch.ones_like(value) for name, value in bert.state_dict().items()}
    save_file(other, tmp_path / "model.safetensors", metadata={"format": "pt"})

    assert all((value == 1).all() for value in BertModel.from_pretrained(tmp_path).state_dict().values())


def test_a_renamed_file_of_weights(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "transformers_weights": "other.safetensors"}))

    assert same(BertModel.from_pretrained(tmp_path), bert)


@pytest.mark.parametrize("kind", ["relative", "link", "slash", "bytes_of_int"])
def test_paths_and_sizes(bert: BertModel, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    path: Any = {"relative": "real", "link": tmp_path / "link", "slash": f"{tmp_path}/real/"}.get(kind, tmp_path)
    bert.save_pretrained(path, max_shard_size=20_000)

    assert same(BertModel.from_pretrained(path), bert)


def test_a_directory_that_is_made_with_its_parents(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(str(tmp_path / "a" / "b" / "c"))

    assert same(BertModel.from_pretrained(str(tmp_path / "a" / "b" / "c")), bert)


def test_custom_code_is_saved_and_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    source = tmp_path / "src"
    source.mkdir()
    (source / "modeling_own.py").write_text(
        "import torch\nfrom transformers import PreTrainedConfig, PreTrainedModel\n\n\n"
        "class OwnConfig(PreTrainedConfig):\n    model_type = 'own-odd'\n\n\n"
        "class OwnModel(PreTrainedModel):\n    config_class = OwnConfig\n\n"
        "    def __init__(self, config):\n        super().__init__(config)\n"
        "        self.linear = torch.nn.Linear(3, 3)\n        self.post_init()\n\n"
        "    def _init_weights(self, module): ...\n"
    )
    monkeypatch.syspath_prepend(str(source))
    import modeling_own  # type: ignore[import-not-found]

    modeling_own.OwnConfig.register_for_auto_class()
    modeling_own.OwnModel.register_for_auto_class("AutoModel")
    model = modeling_own.OwnModel(modeling_own.OwnConfig())
    model.save_pretrained(tmp_path / "out")

    assert (tmp_path / "out" / "modeling_own.py").exists()
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=False)
    found = AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(found).__name__ == "OwnModel"
    assert torch.equal(found.linear.weight, model.linear.weight)
    found.save_pretrained(tmp_path / "again")
    assert same(AutoModel.from_pretrained(tmp_path / "again", trust_remote_code=True), model)


def test_a_quantization_that_nobody_knows(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "unknown"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert same(BertModel.from_pretrained(tmp_path), bert)


def test_threads_load_and_save(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path / "in", max_shard_size="20KB")

    def work(number: int) -> bool:
        model = BertModel.from_pretrained(tmp_path / "in")
        model.save_pretrained(tmp_path / f"out-{number}")
        return same(BertModel.from_pretrained(tmp_path / f"out-{number}"), bert)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(8)))


@pytest.mark.parametrize("mode", ["inference", "no_grad", "default_dtype", "device"])
def test_modes_of_torch(bert: BertModel, tmp_path: Path, mode: str) -> None:
    bert.save_pretrained(tmp_path)
    modes: dict[str, Any] = {"inference": torch.inference_mode(), "no_grad": torch.no_grad()}
    before = torch.get_default_dtype()
    if mode == "default_dtype":
        torch.set_default_dtype(torch.float64)
    try:
        with modes.get(mode, torch.device("cpu")):
            found = BertModel.from_pretrained(tmp_path)
    finally:
        torch.set_default_dtype(before)

    assert found.dtype == torch.float32
    assert all(torch.equal(value, bert.state_dict()[name]) for name, value in found.state_dict().items())


def test_a_compiled_model_saves_its_own_names(bert: BertModel, tmp_path: Path) -> None:
    compiled: Any = torch.compile(bert, backend="eager")
    compiled.save_pretrained(tmp_path)

    assert same(BertModel.from_pretrained(tmp_path), bert)


def test_parallel_loading_by_the_environment(bert: BertModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bert.save_pretrained(tmp_path, max_shard_size="20KB")
    monkeypatch.setenv("HF_ENABLE_PARALLEL_LOADING", "true")

    assert same(BertModel.from_pretrained(tmp_path), bert)


def test_a_model_that_is_overwritten_in_its_own_directory(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path, max_shard_size="20KB")
    found: Any = BertModel.from_pretrained(tmp_path)
    with torch.no_grad():
        found.pooler.dense.bias.fill_(3)
    found.save_pretrained(tmp_path, max_shard_size="20KB")

    again: Any = BertModel.from_pretrained(tmp_path)
    assert same(again, found)
    assert again.pooler.dense.bias.tolist() == [3.0] * 32


def test_a_config_of_a_class_that_is_not_the_models(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.num_hidden_layers = 1

    found, info = with_info(BertModel, tmp_path, config=config)
    assert len(found.encoder.layer) == 1
    assert all(name.startswith("encoder.layer.1.") for name in info["unexpected_keys"])


def test_files_can_be_read_by_others_as_the_mask_says(bert: BertModel, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        bert.save_pretrained(tmp_path)
    finally:
        os.umask(before)

    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "config.json").stat().st_mode & 0o777 == 0o644


def test_saving_another_model_drops_nothing_of_a_tokenizer(bert: BertModel, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "vocab.txt", "adapter_model.safetensors", "optimizer.pt"):
        (tmp_path / name).write_text("mine")
    bert.save_pretrained(tmp_path)

    for name in ("tokenizer.json", "vocab.txt", "adapter_model.safetensors", "optimizer.pt"):
        assert (tmp_path / name).read_text() == "mine"
