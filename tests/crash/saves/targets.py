"""Who saves: hfshard, or transformers and huggingface_hub, whose saves the sweep must find failures in."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from tests.crash.saves.generations import Content, build_model, model_class
from tests.crash.saves.plain_net import stock_class

ALIGNED_HEADER = 4096
"""Bytes of the smallest header that hfshard writes; a limit counts it."""

DATA_LIMITS = {"whole": 10**8, "single": 10**6, "two": 3200, "three": 2000, "many": 700}
"""Bytes of tensors to a file, by layout; the small BERT has 4,352."""


class Target(Protocol):
    """One writer of checkpoints."""

    name: str

    def save(self, content: Content, directory: Path, layout: str, variant: str | None) -> None:
        """Save a model with its config."""

    def save_weights(self, content: Content, directory: Path, layout: str) -> None:
        """Save a bare state dict: no config."""

    def warm(self, content: Content) -> None:
        """Build the model, so that a save does nothing but save."""


@cache
def sharded_class(arch: str) -> Any:
    """The stock class with `ShardedModelMixin`."""
    import hfshard

    stock = model_class(arch)
    return type(stock.__name__, (hfshard.ShardedModelMixin, stock), {"__module__": __name__})


@cache
def _model(content: Content, by_hfshard: bool) -> Any:
    return build_model(content, sharded_class(content.arch) if by_hfshard else model_class(content.arch))


def sharded_model(content: Content) -> Any:
    """The model of a content, with `ShardedModelMixin`; always the same one."""
    return _model(content, True)


def limit_of(content: Content, layout: str) -> int:
    """Bytes of tensors to a file."""
    return DATA_LIMITS[layout] // 2 if content.half else DATA_LIMITS[layout]


class HfshardTarget:
    """hfshard's mixin and its functions."""

    name = "hfshard"

    def save(self, content: Content, directory: Path, layout: str, variant: str | None) -> None:
        """`ShardedModelMixin.save_pretrained`."""
        limit = limit_of(content, layout) + ALIGNED_HEADER
        _model(content, True).save_pretrained(directory, max_shard_size=limit, variant=variant)

    def save_weights(self, content: Content, directory: Path, layout: str) -> None:
        """`hfshard.save_state_dict`."""
        import hfshard

        limit = limit_of(content, layout) + ALIGNED_HEADER
        hfshard.save_state_dict(_model(content, True).state_dict(), directory, max_shard_size=limit)

    def warm(self, content: Content) -> None:
        """Build the model."""
        _model(content, True)


class TransformersTarget:
    """transformers' save_pretrained and huggingface_hub's save_torch_state_dict."""

    name = "transformers"

    def save(self, content: Content, directory: Path, layout: str, variant: str | None) -> None:
        """`PreTrainedModel.save_pretrained`, or that of huggingface_hub's mixin, which does not shard."""
        if content.arch == "net":
            build_model(content, stock_class()).save_pretrained(directory)
            return
        _model(content, False).save_pretrained(directory, max_shard_size=limit_of(content, layout), variant=variant)

    def save_weights(self, content: Content, directory: Path, layout: str) -> None:
        """`huggingface_hub.save_torch_state_dict`."""
        from huggingface_hub import save_torch_state_dict

        directory.mkdir(exist_ok=True)
        save_torch_state_dict(_model(content, False).state_dict(), directory, max_shard_size=limit_of(content, layout))

    def warm(self, content: Content) -> None:
        """Build the model."""
        _model(content, False)


TARGETS: Mapping[str, Target] = {"hfshard": HfshardTarget(), "transformers": TransformersTarget()}
