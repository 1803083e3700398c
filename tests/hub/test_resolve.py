"""Which files of a repo are pulled with a checkpoint."""

from __future__ import annotations

from functools import partial

import pytest

from hfshard.hub.resolve import CheckpointQuery, companion_files

pytestmark = pytest.mark.compat


def test_pull_brings_modules_in_folders_but_no_other_weights_of_the_checkpoint() -> None:
    listed = dict.fromkeys(
        ["config.json", "tokenizer.json", "model.safetensors", "model.fp16.safetensors", "pytorch_model.bin",
         "adapter_model.safetensors", "consolidated.safetensors", "tf_model.h5", "2_Dense/model.safetensors",
         "2_Dense/config.json", "onnx/model.onnx", "voices/a.pt", "model.safetensors.index.fp16.json"], 100
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
