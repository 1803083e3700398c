"""What the runs are made of: tiny models, data and losses."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

SAMPLES = 10
Pair = tuple[torch.Tensor, torch.Tensor]


def mlp() -> nn.Module:
    return nn.Sequential(OrderedDict(first=nn.Linear(4, 8), act=nn.Tanh(), last=nn.Linear(8, 1)))


def mlp_bf16() -> nn.Module:
    return mlp().to(torch.bfloat16)


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def with_spectral_norm() -> nn.Module:
    """A parametrization: its power iteration moves buffers at every forward."""
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 1))


class ChannelsLast(nn.Module):
    """Weights, and so the optimizer's averages, that do not lie in memory as their shapes say."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 2)
        self.deeper = nn.Conv2d(3, 2, 2, padding=1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's annotation lacks it

    def forward(self, x: torch.Tensor) -> Any:
        return self.deeper(torch.tanh(self.conv(x.reshape(-1, 1, 2, 2)))).mean((1, 2, 3)).unsqueeze(1)


def frozen() -> nn.Module:
    model = mlp()
    model.get_submodule("first").requires_grad_(False)
    return model


class Unused(nn.Module):
    """A head that no loss ever reaches, and a frozen scale between."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.head = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x) * self.scale


class Alternating(nn.Module):
    """Two branches that take turns, so that each has a gradient now and then only."""

    turn: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([mlp(), mlp()])
        self.register_buffer("turn", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> Any:
        self.turn += 1
        return self.branches[int(self.turn) % 2](x)


class Tied(nn.Module):
    """An embedding whose weight is the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(torch.tanh(self.mix(self.embed(ids))))


class Sparse(nn.Module):
    """An embedding with sparse gradients, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, sparse=True)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.embed(ids).sum(-1)


class Remembering(nn.Module):
    """State that is no tensor, by torch's own hooks for it; and a buffer that is not to be saved."""

    scratch: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.seen: dict[int, float] = {}
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]

    def forward(self, x: torch.Tensor) -> Any:
        self.seen[len(self.seen)] = float(x.sum())
        return self.body(x) * (1 + 0.01 * len(self.seen))


class Complex(nn.Module):
    """Weights with an imaginary part."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 1, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> Any:
        return (x.to(torch.complex64) @ self.weight).abs()


class Honest(nn.Module):
    """A child that is really called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = mlp()
        self.head = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.module(x))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8, tie_word_embeddings=True, attention_dropout=0.1,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config).train()
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


class Points(Dataset[Pair]):
    """Numbers that no two samples share."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Pair:
        x = torch.sin(torch.arange(1.0, 5.0) * (index + 1))
        return x, x.sum().reshape(1) * 0.5


class Augmented(Points):
    """Samples with noise, as a transform draws it: from python's, numpy's or torch's global generator."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source

    def __getitem__(self, index: int) -> Pair:
        x, y = super().__getitem__(index)
        noise = 0.0
        if self.source in ("python", "all"):
            noise += random.random()
        if self.source in ("numpy", "all"):
            noise += float(np.random.rand())
        if self.source in ("torch", "all"):
            noise += float(torch.rand(()))
        return x + noise, y


class Tokens(Dataset[torch.Tensor]):
    """Short sequences of ids."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index % 6, (index * 3 + 1) % 6, (index // 2) % 6])


def squared_error(model: nn.Module, batch: Pair) -> torch.Tensor:
    x, y = batch
    dtype = next(model.parameters()).dtype
    out = model(x if dtype.is_complex else x.to(dtype))
    return nn.functional.mse_loss(out.float(), y)


def mixed_up(model: nn.Module, batch: Pair) -> torch.Tensor:
    """Augmentation in the main process, from all three generators."""
    x, y = batch
    # One number of a pair each: Python and numpy keep the other for the next call.
    share = random.random() * float(np.random.beta(0.4, 0.4)) + 0.01 * (random.gauss(0, 1) + float(np.random.randn()))
    x = x * (1 - share) + x[torch.randperm(len(x))] * share
    return nn.functional.mse_loss(model(x + 0.1 * torch.randn_like(x)), y)


def next_token(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def sum_of_rows(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(ids) ** 2).sum()
    return loss


def causal_lm(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def overflowing(model: nn.Module, batch: Pair) -> torch.Tensor:
    """Infinite where one certain sample is in the batch, so that a GradScaler skips the step and backs off."""
    loss = squared_error(model, batch)
    third = torch.sin(torch.tensor(3.0))
    return loss * torch.inf if bool((batch[0][:, 0] == third).any()) else loss


class Keeps:
    """An object of the user's own, with one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.tensor = state_dict["tensor"]
