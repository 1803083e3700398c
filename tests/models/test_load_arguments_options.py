"""Every argument of `from_pretrained` does what it does in transformers: same model, same report, same errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import BertConfig, BertModel, GenerationConfig

from hfshard.checkpoint.open_checkpoint import open_checkpoint
from hfshard.models.load_arguments import device_of
from tests.models.conftest import SHARDS, WHOLE, Saves
from tests.zoo.compare import fails_alike, loads_alike
from tests.zoo.mixin_classes import with_mixin
from tests.zoo.models import TEXT, ZOO

Options = dict[str, Any]
OPTIONS: list[tuple[str, Options]] = [
    ("bert", {"dtype": torch.float16}),
    ("bert", {"dtype": "float16"}),
    ("bert", {"dtype": "auto"}),
    ("bert", {"dtype": torch.float64}),
    ("bert", {"torch_dtype": torch.bfloat16}),
    ("bert", {"torch_dtype": "auto"}),
    ("llama_bf16", {"dtype": "auto"}),
    ("llama_bf16", {"dtype": torch.float32}),
    ("llama_mixed_dtypes", {"dtype": "auto"}),
    ("llama_mixed_dtypes", {"dtype": "float32"}),
    ("resnet", {"dtype": torch.float16}),
    ("mixtral", {"dtype": torch.bfloat16}),
    ("t5", {"dtype": torch.float16}),
    ("t5", {"dtype": torch.bfloat16}),
    ("t5_fp16", {"dtype": "auto"}),
    ("ernie_bf16", {"dtype": torch.float16}),
    ("llava", {"dtype": {"text_config": "bfloat16", "vision_config": "float32", "": "float16"}}),
    ("llava", {"dtype": torch.bfloat16}),
    ("bert", {"device_map": "cpu"}),
    ("bert", {"device_map": {"": "cpu"}}),
    ("bert", {"device_map": torch.device("cpu")}),
    ("llama_tied", {"device_map": "auto"}),
    ("llama_untied", {"device_map": "auto", "max_memory": {"cpu": "1GB"}}),
    ("gpt2", {"device_map": {"transformer": "cpu", "lm_head": "cpu"}}),
    ("mixtral", {"device_map": "auto", "dtype": torch.float16}),
    ("bert", {"low_cpu_mem_usage": True}),
    ("bert", {"low_cpu_mem_usage": False}),
    ("bert", {"attn_implementation": "eager"}),
    ("bert", {"attn_implementation": "sdpa"}),
    ("llava", {"attn_implementation": {"text_config": "eager", "vision_config": "sdpa"}}),
    ("mixtral", {"experts_implementation": "eager"}),
    ("bert", {"hidden_dropout_prob": 0.3}),
    ("bert", {"output_attentions": True}),
    ("bert_head", {"id2label": {0: "no", 1: "yes", 2: "maybe"}}),
    ("bert", {"add_pooling_layer": False}),
    ("bert", {"add_pooling_layer": False, "hidden_dropout_prob": 0.3}),
    ("bert_head", {"num_labels": 5, "ignore_mismatched_sizes": True}),
    ("bert", {"vocab_size": 99, "ignore_mismatched_sizes": True}),
    ("llama_tied", {"vocab_size": 99, "ignore_mismatched_sizes": True}),
    ("bert", {"num_hidden_layers": 1}),
    ("bert", {"num_hidden_layers": 3}),
    ("mixtral", {"num_hidden_layers": 3}),
    ("llama_untied", {"tie_word_embeddings": True}),
    ("bert", {"key_mapping": {"^encoder.layer.0.": "encoder.layer.1."}}),
    ("bert", {"key_mapping": {r"^encoder\.layer\.(\d+)\.output": r"encoder.layer.\1.nowhere"}}),
    ("bert", {"use_safetensors": True}),
    ("bert", {"use_safetensors": None}),
    ("bert", {"weights_only": True}),
    ("bert", {"weights_only": False}),
    ("bert", {"disable_mmap": True}),
    ("bert", {"disable_mmap": False}),
    ("bert", {"local_files_only": True}),
    ("bert", {"force_download": True, "proxies": None, "token": None, "cache_dir": None}),
    ("bert", {"revision": "main"}),
    ("bert", {"revision": "nowhere", "subfolder": ""}),
    ("bert", {"trust_remote_code": True}),
    ("bert", {"adapter_kwargs": None}),
    ("bert", {"use_kernels": False}),
    ("bert", {"mirror": "x", "_fast_init": True, "from_tf": False, "from_flax": False, "offload_state_dict": True}),
    ("bert", {"variant": None}),
    ("llama_generation", {"generation_config": GenerationConfig(max_new_tokens=3)}),
    ("llama_generation", {"generation_config": GenerationConfig(top_k=4), "use_cache": False}),
    ("gpt2", {"use_cache": False}),
]
ids = [f"{name}-{','.join(f'{key}={value}' for key, value in options.items())}"[:90] for name, options in OPTIONS]
_READING = {
    "dtype", "device_map", "low_cpu_mem_usage", "ignore_mismatched_sizes", "num_hidden_layers", "tie_word_embeddings",
    "key_mapping", "use_safetensors", "weights_only", "disable_mmap", "variant",
}  # fmt: skip
OF_WEIGHTS = {
    f"{name}-{'-'.join(options)}": (name, options) for name, options in reversed(OPTIONS) if _READING & options.keys()
}
"""Of the options that say how weights are read, one value of each for each model: the first."""
_FIRST = {"-".join(options): f"{name}-{'-'.join(options)}" for name, options in reversed(OPTIONS)}
_ON_OLDEST = {*_FIRST.values(), "llama_mixed_dtypes-dtype", "llava-dtype"}
"""One case of each option, and models of several dtypes."""


def _cases(cases: Mapping[str, tuple[str, Options]], are_others_slow: bool) -> list[Any]:
    """Parameters, of which those that a version may change are marked for the oldest, once each."""
    left, found = set(_ON_OLDEST), []
    for case_id, (name, options) in cases.items():
        key = f"{name}-{'-'.join(options)}"
        others = [pytest.mark.slow] if are_others_slow else []
        found.append(pytest.param(name, options, id=case_id, marks=pytest.mark.compat if key in left else others))
        left.discard(key)
    return found


@pytest.mark.parametrize(("name", "options"), _cases(dict(zip(ids, OPTIONS, strict=True)), are_others_slow=False))
def test_an_option_does_what_transformers_does(name: str, options: Options, saves: Saves) -> None:
    loads_alike(ZOO[name].stock_class, saves.stock(name, SHARDS), **options)


@pytest.mark.parametrize(("name", "options"), _cases(OF_WEIGHTS, are_others_slow=True))
def test_an_option_does_what_transformers_does_on_our_single_file(name: str, options: Options, saves: Saves) -> None:
    loads_alike(ZOO[name].stock_class, saves.ours(name, WHOLE), **options)


@pytest.mark.parametrize(
    ("device_map", "device"),
    [("cuda", "cuda:1"), ({"": "cuda:2"}, "cuda:2"), ("xpu:0", "cpu"), ("mps", "cpu"), ("auto", "cpu")],
)
def test_tensors_are_read_to_the_gpu_that_transformers_chooses(
    device_map: Any, device: str, saves: Saves, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)

    with open_checkpoint(str(saves.stock("bert"))) as checkpoint:
        config = BertConfig(dtype="float32")

        assert device_of(checkpoint, config, {"device_map": device_map}) == torch.device(device)


FAILURES: list[tuple[str, Options]] = [
    ("bert_head", {"num_labels": 5}),
    ("bert_head", {"num_labels": 5, "ignore_mismatched_sizes": False}),
    ("bert", {"vocab_size": 99}),
    ("bert", {"dtype": "float17"}),
    ("bert", {"dtype": 3.5}),
    ("bert", {"attn_implementation": "telepathy"}),
    ("bert", {"state_dict": {}}),
    ("bert", {"nonsense": 1}),
    ("llama_generation", {"temperature": 0.2}),
    ("bert", {"variant": "fp16"}),
    ("bert", {"subfolder": "nowhere"}),
    ("bert", {"use_safetensors": False}),
    ("bert", {"device_map": "everywhere"}),
    ("bert", {"device_map": {"": "nonsense"}}),
    ("bert", {"device_map": -1}),
    ("bert", {"config": "/nowhere"}),
]


@pytest.mark.compat
@pytest.mark.parametrize(("name", "options"), FAILURES, ids=[f"{name}-{options}"[:60] for name, options in FAILURES])
def test_what_transformers_refuses_hfshard_refuses_likewise(name: str, options: Options, saves: Saves) -> None:
    fails_alike(ZOO[name].stock_class, saves.stock(name), **options)


@pytest.mark.compat
def test_a_config_given_as_an_object_is_used_and_not_changed(saves: Saves) -> None:
    sizes: Options = TEXT
    config = transformers.BertConfig(**sizes, hidden_act="relu")
    before = config.to_dict(), config.name_or_path

    loads_alike(BertModel, saves.stock("bert"), config=config)

    assert (config.to_dict(), config.name_or_path) == before


@pytest.mark.compat
def test_a_config_given_as_a_path_is_read_from_there(saves: Saves) -> None:
    for form in (Path, str):
        ours = loads_alike(BertModel, saves.stock("bert"), config=form(saves.stock("bert_head")))
        assert "id2label" in ours["config"]


@pytest.mark.compat
def test_a_positional_argument_goes_to_the_model(saves: Saves) -> None:
    ours = loads_alike(BertModel, saves.stock("bert"), False)

    assert "pooler.dense.weight" not in ours["state dict"]


@pytest.mark.compat
@pytest.mark.parametrize("name", ["bert", "llama_tied", "mixtral", "llama_bf16"])
def test_a_state_dict_without_a_path_builds_the_same_model(name: str) -> None:
    model = ZOO[name].build()

    loads_alike(ZOO[name].stock_class, None, config=model.config, state_dict=model.state_dict())


@pytest.mark.compat
@pytest.mark.parametrize("form", [str, Path, lambda path: f"{path}/", lambda path: os.path.relpath(path)])
def test_a_path_in_any_form_is_taken_and_named_as_transformers_does(form: Callable[[Path], Any], saves: Saves) -> None:
    loads_alike(BertModel, form(saves.stock("bert", SHARDS)))


@pytest.mark.compat
@pytest.mark.parametrize("form", ["./llama", "llama/", Path("llama")])
@pytest.mark.parametrize(
    "options", [{"offload_folder": "off"}, {"device_map": "auto", "max_memory": {"cpu": "1GB"}}], ids=str
)
def test_a_path_is_named_likewise_where_transformers_reads_the_files(
    form: Any, options: Options, saves: Saves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").symlink_to(saves.stock("llama_untied"))

    loads_alike(ZOO["llama_untied"].stock_class, form, **options)


@pytest.mark.compat
def test_parameters_that_were_loaded_in_inference_mode_can_be_trained(saves: Saves) -> None:
    for model_class in (BertModel, with_mixin(BertModel)):
        with torch.inference_mode():
            model = model_class.from_pretrained(saves.stock("bert"))

        assert not any(parameter.is_inference() for parameter in model.parameters())


@pytest.mark.compat
def test_without_output_loading_info_only_the_model_is_returned(saves: Saves) -> None:
    assert isinstance(with_mixin(BertModel).from_pretrained(saves.stock("bert")), with_mixin(BertModel))


@pytest.mark.compat
@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("ignore_mismatched_size", "ignore_mismatched_sizes"),
        ("dtpye", "dtype"),
        ("output_loading_infos", "output_loading_info"),
    ],
)
def test_an_unknown_keyword_is_an_error_that_names_the_nearest(typo: str, meant: str, saves: Saves) -> None:
    unknown: Options = {typo: True}
    with pytest.raises(TypeError, match=f"{typo}.*Did you mean '{meant}'"):
        with_mixin(BertModel).from_pretrained(saves.stock("bert"), **unknown)


@pytest.mark.compat
def test_weights_on_the_disk_are_offloaded_as_transformers_does(saves: Saves, tmp_path: Path) -> None:
    directory, stock_class = saves.stock("llama_untied", SHARDS), ZOO["llama_untied"].stock_class
    places = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    tokens = torch.tensor([[1, 5, 9]])
    theirs = stock_class.from_pretrained(directory, device_map=places, offload_folder=tmp_path / "theirs")

    ours = with_mixin(stock_class).from_pretrained(directory, device_map=places, offload_folder=tmp_path / "ours")

    assert ours.hf_device_map == theirs.hf_device_map
    assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


@pytest.mark.compat
@pytest.mark.parametrize("name", ["gpt2", "llama_untied", "mixtral", "llava"])
def test_the_loaded_model_computes_what_transformers_computes(name: str, saves: Saves) -> None:
    directory, stock_class = saves.stock(name, SHARDS), ZOO[name].stock_class
    tokens = torch.tensor([[1, 7, 9, 11]])

    ours = with_mixin(stock_class).from_pretrained(directory)(input_ids=tokens).logits

    assert torch.equal(ours, stock_class.from_pretrained(directory)(input_ids=tokens).logits)
