"""Tiny models whose every tensor tells which save it is from, and who saves them: hfshard, or stock writers."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

ACTIVATIONS = ("gelu", "relu", "gelu_new", "silu", "gelu_fast", "tanh")
"""`hidden_act` by generation where configs differ: it changes no tensor's name or shape."""

OFFSET_STEP = 1 / 256
"""From one tensor to the next: fewer than 128 tensors stay within half a generation, and fp16 holds it up to 8."""


@dataclass(frozen=True, slots=True)
class Content:
    """What one save puts into a checkpoint.

    Attributes:
        generation: Counts saves from 1; the value that fills the tensors.
        arch: "bert" (an encoder), "gpt2" (tied weights, and a generation_config.json) or "net" (a plain module).
        own_config: The config differs from that of other generations.
        layers: More layers are more keys (and another config).
        hidden: Another width is other shapes (and another config).
        kept: Of the sorted names, so many tensors have the values of generation 1.
        no_config: A plain module that has none: a config.json that is there goes.
        half: Cast to float16, as one does for a variant: the config's dtype changes with it.
    """

    generation: int
    arch: str = "bert"
    own_config: bool = False
    layers: int = 1
    hidden: int = 8
    half: bool = False
    no_config: bool = False
    kept: int = 0

    @property
    def activation(self) -> str:
        """The config's `hidden_act`."""
        return ACTIVATIONS[self.generation if self.own_config else 0]


class PlainNet(nn.Module):
    """Its arguments have the names that the sweep looks for in a config, which it keeps like a transformers model."""

    def __init__(self, hidden_act: str = "gelu", num_hidden_layers: int = 1, hidden_size: int = 8) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            hidden_act=hidden_act, num_hidden_layers=num_hidden_layers, hidden_size=hidden_size
        )
        self.first = nn.Embedding(32, hidden_size)
        self.second = nn.Embedding(32, hidden_size)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden_size, 16), nn.Linear(16, hidden_size)) for _ in range(num_hidden_layers)
        )
        self.head = nn.Linear(hidden_size, 32)
        self.tied = self.first


@cache
def stock_class() -> Any:
    """With huggingface_hub's mixin."""
    return type("PlainNet", (PlainNet, PyTorchModelHubMixin), {"__module__": __name__})


def _config(content: Content) -> Any:
    import transformers

    config: Any
    if content.arch == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=32,
            n_positions=16,
            n_embd=content.hidden,
            n_layer=content.layers,
            n_head=2,
            activation_function=content.activation,
            bos_token_id=0,
            eos_token_id=1,
        )
    else:
        config = transformers.BertConfig(
            vocab_size=32,
            hidden_size=content.hidden,
            num_hidden_layers=content.layers,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=16,
            hidden_act=content.activation,
        )
    return config


def model_class(arch: str) -> Any:
    """The stock class of an architecture; of a plain module, the one without a mixin."""
    import transformers

    if arch == "net":
        return PlainNet
    return {"bert": transformers.BertModel, "gpt2": transformers.GPT2LMHeadModel}[arch]


def build_model(content: Content, cls: Any) -> Any:
    """A model of class `cls` with every tensor filled by its generation and its place in the sorted names."""
    if content.arch == "net":
        model = cls(content.activation, content.layers, content.hidden)
        if content.no_config:
            model._hub_mixin_config = None
    else:
        model = cls(_config(content))
    with torch.no_grad():
        for place, (_, parameter) in enumerate(sorted(model.named_parameters())):
            parameter.fill_(2 * (1 if place < content.kept else content.generation) + 0.5 + place * OFFSET_STEP)
    if content.arch == "gpt2" and content.own_config:
        model.generation_config.max_new_tokens = 10 * content.generation
    return model.half() if content.half else model.eval()


@dataclass(frozen=True)
class Expected:
    """What a reader must see of one generation: all names, the names without ties, and the config's marks."""

    full: Mapping[str, Tensor]
    stored: frozenset[str]
    marks: Mapping[str, Any]
    new_tokens: Any


def config_marks(config: Any) -> dict[str, Any]:
    """The fields of a config that differ between generations that have configs of their own."""
    fields = ("hidden_act", "activation_function", "num_hidden_layers", "hidden_size", "n_layer", "n_embd")
    return {field: getattr(config, field) for field in fields if hasattr(config, field)}


@cache
def expected(content: Content) -> Expected:
    """The values of one generation, in float32."""
    model = build_model(content, model_class(content.arch))
    full = {name: tensor.detach().float().clone() for name, tensor in model.state_dict().items()}
    generation_config = getattr(model, "generation_config", None)
    return Expected(
        full=full,
        stored=frozenset(full) - {"lm_head.weight", "tied.weight"},
        marks=config_marks(model.config),
        new_tokens=getattr(generation_config, "max_new_tokens", None),
    )


def matches(state_dict: Mapping[str, Tensor], content: Content) -> bool:
    """Whether a state dict is wholly of one generation (tied names may be left out)."""
    want = expected(content)
    if not want.stored <= state_dict.keys() <= want.full.keys():
        return False
    return all(torch.equal(tensor.float(), want.full[name]) for name, tensor in state_dict.items())


def plain_module(content: Content) -> torch.nn.Module:
    """A module that is not a transformers model, with the stored tensors of one generation, all zero."""
    root = torch.nn.Module()
    want = expected(content)
    for name in sorted(want.stored):
        *parents, leaf = name.split(".")
        module = root
        for part in parents:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_parameter(leaf, torch.nn.Parameter(torch.zeros_like(want.full[name])))
    return root


ALIGNED_HEADER = 4096
"""Bytes of the smallest header that hfshard writes; a limit counts it."""

DATA_LIMITS = {"whole": 10**8, "single": 10**6, "two": 3200, "three": 2000, "many": 700}
"""Bytes of tensors to a file, by layout; the small BERT has 4,352."""


@cache
def sharded_class(arch: str) -> Any:
    """The stock class with `ShardedModelMixin`."""
    import hfshard

    stock = model_class(arch)
    return type(stock.__name__, (hfshard.ShardedModelMixin, stock), {"__module__": __name__})


@cache
def stock_model(content: Content) -> Any:
    """The model of a content; always the same one."""
    return build_model(content, model_class(content.arch))


@cache
def sharded_model(content: Content) -> Any:
    """The model of a content, with `ShardedModelMixin`; always the same one."""
    return build_model(content, sharded_class(content.arch))


def limit_of(content: Content, layout: str) -> int:
    """Bytes of tensors to a file."""
    return DATA_LIMITS[layout] // 2 if content.half else DATA_LIMITS[layout]


def aligned_limit_of(content: Content, layout: str) -> int:
    """`max_shard_size` by which hfshard makes the same files."""
    return limit_of(content, layout) + ALIGNED_HEADER


class Target:
    """A writer of checkpoints: hfshard's mixin and its functions."""

    name = "hfshard"

    def model(self, content: Content) -> Any:
        """The model; built once, so that a save does nothing but save."""
        return sharded_model(content)

    def save(self, content: Content, directory: Path, layout: str, variant: str | None) -> None:
        """Save a model with its config, by its `save_pretrained`."""
        limit = aligned_limit_of(content, layout)
        self.model(content).save_pretrained(directory, max_shard_size=limit, variant=variant)

    def save_weights(self, content: Content, directory: Path, layout: str) -> None:
        """Save a bare state dict, without a config."""
        import hfshard

        limit = aligned_limit_of(content, layout)
        hfshard.save_state_dict(self.model(content).state_dict(), directory, max_shard_size=limit)


class TransformersTarget(Target):
    """transformers' save_pretrained and huggingface_hub's save_torch_state_dict."""

    name = "transformers"

    def model(self, content: Content) -> Any:
        """As its base does, without hfshard."""
        return stock_model(content)

    def save(self, content: Content, directory: Path, layout: str, variant: str | None) -> None:
        """`PreTrainedModel.save_pretrained`, or that of huggingface_hub's mixin, which does not shard."""
        if content.arch == "net":
            build_model(content, stock_class()).save_pretrained(directory)
            return
        limit = limit_of(content, layout)
        self.model(content).save_pretrained(directory, max_shard_size=limit, variant=variant)

    def save_weights(self, content: Content, directory: Path, layout: str) -> None:
        """`huggingface_hub.save_torch_state_dict`."""
        from huggingface_hub import save_torch_state_dict

        directory.mkdir(exist_ok=True)
        limit = limit_of(content, layout)
        save_torch_state_dict(self.model(content).state_dict(), directory, max_shard_size=limit)


def prepare_libraries() -> None:
    """Import everything, and have one thread write: with more, calls come in another order each time."""
    os.environ.setdefault("HFSHARD_WRITERS", "1")
    os.environ.setdefault("HFSHARD_DIRECT", "1")  # the path of large files, for the small ones here too
    be_quiet()


def be_quiet() -> None:
    """Let transformers say nothing, and torch start no threads."""
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()


TARGETS: Mapping[str, Target] = {"hfshard": Target(), "transformers": TransformersTarget()}
