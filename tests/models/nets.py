"""Plain modules as users write them, each with hfshard's mixin and with that of huggingface_hub."""

import types
from argparse import Namespace
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Optional

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import nn

import hfshard

# No `from __future__ import annotations`: huggingface_hub decodes by the types of annotations, not by their names.

NOT_JSON = object()
INFINITE = float("inf")


class Size:
    """A type that JSON has not."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and other.width == self.width

    __hash__ = None  # type: ignore[assignment]


@dataclass
class Inner:
    """A part of a config."""

    heads: int = 2
    act: str = "relu"


@dataclass
class Outer:
    """A config."""

    width: int = 4
    inner: Inner = field(default_factory=Inner)


class Simple(nn.Module):
    """Arguments with defaults, tied tensors, a tensor that is not contiguous."""

    def __init__(self, width: int = 4, name: str = "\u00e9", limit: float = INFINITE, other: Any = NOT_JSON) -> None:
        super().__init__()
        self.seen = (width, name, limit, other is NOT_JSON)
        self.layer = nn.Linear(width, width)
        self.tied = self.layer
        self.register_buffer("turned", torch.randn(2, 3).t())


class Bare(nn.Module):
    """No arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen = ()


class Configured(nn.Module):
    """A dataclass as its config."""

    def __init__(self, config: Outer) -> None:
        super().__init__()
        self.seen = config
        self.layer = nn.Linear(config.width, config.width)


class Optionally(nn.Module):
    """A dict as its config, and other arguments with it."""

    def __init__(self, width: int = 3, config: Optional[dict] = None, **kwargs: Any) -> None:  # type: ignore[type-arg]  # noqa: UP045
        super().__init__()
        self.seen = (width, sorted((config or {}).items()), sorted(kwargs.items()))
        self.layer = nn.Linear(width, width)


class Typed(nn.Module):
    """Arguments of types that need a coder, or are dataclasses."""

    def __init__(
        self,
        size: Size,
        more: Size | None,
        args: Namespace,
        inner: Inner,
        default: Size = Size(7),  # noqa: B008
    ) -> None:
        super().__init__()
        self.seen = (size, more, args, inner, default)
        self.layer = nn.Linear(size.width, size.width)


CODERS = {
    Size: (lambda size: {"w": size.width}, lambda data: Size(data["w"])),
    Namespace: (vars, lambda data: Namespace(**data)),
}

CASES: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "defaults": (Simple, {}, {}),
    "given": (Simple, {"width": 5, "name": "x", "limit": 1.5, "other": [1, None]}, {}),
    "not-json": (Simple, {"other": object()}, {}),
    "card": (
        Bare,
        {},
        {
            "license": "other", "license_name": "mine", "license_link": "https://a/b", "library_name": "lib",
            "tags": ["b", "a"], "language": ["en", "zh"], "pipeline_tag": "text-classification",
            "repo_url": "https://r", "paper_url": "https://p", "docs_url": "https://d",
        },
    ),
    "template": (Bare, {}, {"model_card_template": "---\n{{ card_data }}\n---\n# Mine: {{ repo_url }}\n"}),
    "dataclass": (Configured, {"config": Outer(6, Inner(3))}, {}),
    "dict": (Optionally, {"config": {"a": 1}, "b": 2}, {}),
    "no-config": (Optionally, {"width": 2}, {}),
    "coders": (
        Typed,
        {"size": Size(3), "more": None, "args": Namespace(a=1), "inner": Inner(9), "default": Size(8)},
        {"coders": CODERS},
    ),
}  # fmt: skip


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    """A copy: huggingface_hub adds to a list of tags that it is given."""
    return {name: list(value) if isinstance(value, list) else value for name, value in given.items()}


@cache
def ours(case: str) -> Any:
    """The class of a case with hfshard's mixin."""
    plain, _, arguments = CASES[case]
    return types.new_class("Net", (hfshard.ShardedModelMixin, plain), _arguments(arguments))


@cache
def theirs(case: str) -> Any:
    """The same with huggingface_hub's."""
    plain, _, arguments = CASES[case]
    return types.new_class("Net", (plain, PyTorchModelHubMixin), _arguments(arguments))


def build(model_class: Any, case: str) -> Any:
    """A model of a case, always with the same values."""
    torch.manual_seed(len(case))
    return model_class(**CASES[case][1])
