"""Small models with everything that a reader can get wrong, and the few steps that they are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

WORDS = 11
BATCH = 8
STEPS = 2
LEARNING_RATE = 0.03
MILESTONES = [30, 60]
"""Of a scheduler that changes nothing before."""


class Norm(nn.BatchNorm1d):
    """BatchNorm whose statistics stay float32 in a model of fewer bits."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize in float32."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        weight, bias = self.weight.float(), self.bias.float()
        normalized = nn.functional.batch_norm(
            hidden.float(), self.running_mean, self.running_var, weight, bias, training=True
        )
        return normalized.to(hidden.dtype)


class Nasty(nn.Module):
    """Tied, frozen, unused and one-element parameters of odd sizes, statistics, and buffers of several dtypes."""

    calls: torch.Tensor
    scale: torch.Tensor
    temporary: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6)
        self.up = nn.Linear(6, 7)
        self.norm = Norm(7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.down = nn.Linear(7, 6, bias=False)
        self.gain = nn.Parameter(torch.tensor([0.7]))
        self.unused = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(6, WORDS)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("scale", torch.tensor(1.3))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("temporary", torch.ones(2), persistent=False)
        for parameter in self.norm.parameters():
            nn.init.normal_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        self.calls += 1
        hidden = self.frozen(torch.relu(self.norm(self.up(self.embed(tokens)))))
        logits: torch.Tensor = self.head(self.down(hidden) * self.gain * self.scale)
        return logits


class Plain(nn.Module):
    """Two layers without a bias, whose sizes are multiples of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 5)
        self.head = nn.Linear(5, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        logits: torch.Tensor = self.head(self.embed(tokens))
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {"nasty": Nasty, "plain": Plain}


def build(name: str) -> nn.Module:
    """Build a model; the same on each rank."""
    torch.manual_seed(len(name))
    return MODELS[name]()


def own_name(name: str) -> str:
    """The name of a parameter without FSDP1's wrappers."""
    return name.replace("_fsdp_wrapped_module.", "")


def groups(model: nn.Module, like: nn.Module | None = None) -> list[dict[str, Any]]:
    """The optimizer's groups: matrices, vectors, and one-element parameters, which are fewer than the ranks.

    Args:
        model: The model.
        like: The same one without FSDP1, whose parameters have other shapes; None: it has none.
    """
    shapes = {own_name(name): one.shape for name, one in (like or model).named_parameters()}
    trained = [(shapes[own_name(name)], one) for name, one in model.named_parameters() if one.requires_grad]
    kinds = [
        [parameter for shape, parameter in trained if len(shape) > 1],
        [parameter for shape, parameter in trained if len(shape) == 1 and shape[0] > 1],
        [parameter for shape, parameter in trained if len(shape) == 1 and shape[0] == 1],
    ]
    decays = (0.1, 0.0, 0.0)
    return [{"params": kind, "weight_decay": decay} for kind, decay in zip(kinds, decays) if kind]


def optimizer_of(model: nn.Module, like: nn.Module | None = None) -> torch.optim.Optimizer:
    """AdamW with several groups, as `groups` makes them."""
    return torch.optim.AdamW(groups(model, like), lr=LEARNING_RATE)


def losses(model: Callable[[torch.Tensor], torch.Tensor], seed: int = 0) -> Iterable[torch.Tensor]:
    """The loss of each step; ranks with other seeds have other data, and then other statistics."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        tokens, targets = torch.randint(0, WORDS, (2, BATCH), generator=generator)
        yield nn.functional.cross_entropy(model(tokens).float(), targets)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: Sequence[int] = (0,)) -> None:
    """Train in plain torch, or under FSDP; with several seeds, each step is on the mean of their losses."""
    for of_step in zip(*(losses(model, seed) for seed in seeds), strict=True):
        for loss in of_step:
            (loss / len(seeds)).backward()
        optimizer.step()
        optimizer.zero_grad()
