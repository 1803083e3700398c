"""A checkpoint whose config names code of its own, in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import hfshard

CODE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .parts import Part


class NetConfig(PreTrainedConfig):
    model_type = "net_in_a_folder"


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
CONFIG = {
    "model_type": "net_in_a_folder",
    "auto_map": {"AutoConfig": "code/net.NetConfig", "AutoModel": "code/net.Net"},
}


def directory_with_code(directory: Path) -> Path:
    """Save one."""
    hfshard.save_state_dict({"part.weight": torch.ones(3, 2), "part.bias": torch.arange(3.0)}, directory)
    (directory / "code").mkdir()
    (directory / "code" / "net.py").write_text(CODE)
    (directory / "code" / "parts.py").write_text(PARTS)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory
