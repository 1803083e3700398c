"""Which files of a repo are pulled with a checkpoint."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import transformers

from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.hub.resolve import companion_files

pytestmark = pytest.mark.compat


def test_pull_brings_modules_in_folders_but_no_other_weights_of_the_checkpoint() -> None:
    listed = dict.fromkeys(
        ["config.json", "tokenizer.json", "model.safetensors", "model.fp16.safetensors", "pytorch_model.bin",
         "adapter_model.safetensors", "consolidated.safetensors", "tf_model.h5", "2_Dense/model.safetensors",
         "2_Dense/config.json", "onnx/model.onnx", "voices/a.pt", "model.safetensors.index.fp16.json", "model.pt"], 100
    )  # fmt: skip
    files = partial(companion_files, listed)
    beside = ["config.json", "tokenizer.json", "adapter_model.safetensors", "2_Dense/model.safetensors",
              "2_Dense/config.json"]  # fmt: skip
    assert files(CheckpointQuery()) == beside
    asked = CheckpointQuery(allow_patterns=["voices/*", "*.safetensors"])
    assert files(asked) == [
        "adapter_model.safetensors",
        "consolidated.safetensors",
        "2_Dense/model.safetensors",
        "voices/a.pt",
    ]


READ_BY_MODELS = ["spk_dict.pt", "head.safetensors", "readout.safetensors"]


def test_pull_brings_what_a_class_of_transformers_reads_beside_its_weights() -> None:
    listed = dict.fromkeys([*READ_BY_MODELS, "thinker.pt", "voices/spk_dict.pt"], 100)
    assert companion_files(listed, CheckpointQuery()) == READ_BY_MODELS
    assert companion_files({"spk_dict.pt": 2**40}, CheckpointQuery()) == []


@pytest.mark.slow
def test_these_are_all_that_transformers_reads_beside_its_weights() -> None:
    text = "\n".join(path.read_text() for path in (Path(transformers.__file__).parent / "models").glob("*/*.py"))
    assert set(re.findall(r"""^\s*['"]([\w.]+\.(?:pt|pth))['"],$""", text, re.MULTILINE)) == {"spk_dict.pt"}
    extra = re.findall(r"extra_files.*= \((.+)\)", text)
    assert {name for line in extra for name in re.findall(r'"(.+?)"', line)} <= set(READ_BY_MODELS)
