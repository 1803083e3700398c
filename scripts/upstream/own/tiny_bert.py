"""What the tests of saving and loading share: a tiny model and comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertModel

from tests.zoo.models import ZOO


def bert_config() -> Any:
    """A new config of a tiny Bert."""
    return ZOO["bert"].make_config()


@pytest.fixture
def bert() -> BertModel:
    torch.manual_seed(0)
    return BertModel(bert_config())


def same(first: nn.Module, second: nn.Module) -> bool:
    one, other = first.state_dict(), second.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def names(directory: Path, suffix: str = ".safetensors") -> set[str]:
    return {path.name for path in directory.iterdir() if path.name.endswith(suffix)}


def with_info(model_class: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Load a model, with the report of the names that are missing, unexpected or of another shape."""
    found: tuple[Any, dict[str, Any]] = model_class.from_pretrained(*args, output_loading_info=True, **kwargs)
    return found
