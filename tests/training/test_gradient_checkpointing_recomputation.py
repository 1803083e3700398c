"""A block that is recomputed behaves as if it had run once; and what torch does in the same cases."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from hfshard.errors import InvalidArgumentError
from hfshard.training.gradient_checkpointing import enable_gradient_checkpointing
from tests.training.checkpointed import (
    Model,
    Residual,
    Stack,
    assert_same_results,
    assert_trains_alike,
    bert,
    build,
    gradients_of,
    loss_of,
    residual,
    sequential,
    train,
)


def test_sequential_with_dropout_and_batch_norm_trains_bit_for_bit_as_without() -> None:
    model = assert_trains_alike(sequential)
    assert int(model[0].layers[1].num_batches_tracked) == 6


def test_shared_block_is_recomputed_for_each_of_its_calls() -> None:
    model = assert_trains_alike(lambda: Stack(residual(), residual()), "blocks.*")
    assert int(model.blocks[0].layers[1].num_batches_tracked) == 12


class Stateful(nn.Module):
    """A block that changes something of its own whenever it is called, and whose result depends on it."""

    count: Tensor
    codebook: Tensor
    late: Tensor | None

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kind = kind
        self.calls = 0
        self.register_buffer("count", torch.ones(()))
        self.register_buffer("late", None)
        self.register_buffer("codebook", torch.ones(20_000, 8) if kind == "large codebook" else torch.ones(8))
        self.torch_generator = torch.Generator().manual_seed(1)
        self.numpy_generator = np.random.default_rng(1)
        self.numpy_state = np.random.RandomState(1)
        self.python_generator = random.Random(1)

    def factor(self) -> Any:
        match self.kind:
            case "buffer in place":
                self.count.add_(0.5)
            case "buffer through data":
                self.count.data.add_(0.5)
            case "new buffer":
                self.count = self.count + 0.5
            case "large codebook":
                self.codebook[:6].data.add_(0.5)
                return self.codebook[0].clone()
            case "buffer made at first":
                if self.late is None:
                    self.late = torch.ones(())
                self.late.add_(0.5)
                return self.late.clone()
            case "number":
                self.calls += 1
                return 1.0 / self.calls
            case "attribute made at first":
                self.first = getattr(self, "first", 0) + 1
                return 1.0 / self.first
            case "tensor of the step before":
                before, self.last = getattr(self, "last", 1.0), self.linear.weight.mean()
                return before if isinstance(before, float) else 1.0 + before.detach()
            case "generator of torch":
                return torch.rand((), generator=self.torch_generator)
            case "generators of numpy":
                return self.numpy_generator.random() + self.numpy_state.rand()
            case "generator of python":
                return self.python_generator.random()
            case "random":
                return random.random()
            case "numpy.random":
                return np.random.rand()
        return self.count.clone()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x) * self.factor())


@pytest.mark.parametrize(
    "kind",
    [
        "buffer in place",
        "buffer through data",
        "new buffer",
        "large codebook",
        "buffer made at first",
        "number",
        "attribute made at first",
        "tensor of the step before",
        "generator of torch",
        "generators of numpy",
        "generator of python",
        "random",
        "numpy.random",
    ],
)
def test_what_a_block_changes_is_changed_once(kind: str) -> None:
    model = assert_trains_alike(lambda: Stack(Stateful(kind), Stateful(kind)), "blocks.*", steps=3)
    plain = build(lambda: Stack(Stateful(kind), Stateful(kind)))
    train(plain, 3)
    for one, other in zip(model.blocks, plain.blocks):
        assert one.calls == other.calls
        assert torch.equal(one.torch_generator.get_state(), other.torch_generator.get_state())
        assert one.numpy_generator.bit_generator.state == other.numpy_generator.bit_generator.state
        assert one.python_generator.getstate() == other.python_generator.getstate()


@pytest.mark.parametrize(
    "layer",
    [
        lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
        lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
        lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
        lambda: nn.Sequential(nn.Unflatten(1, (4, 2)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten()),
        lambda: nn.BatchNorm1d(8, momentum=None),
    ],
    ids=["spectral_norm", "spectral_norm of old", "weight_norm", "InstanceNorm", "BatchNorm of all steps"],
)
def test_norm_that_keeps_numbers_trains_bit_for_bit_as_without(layer: Callable[[], Model]) -> None:
    assert_trains_alike(lambda: Stack(Residual(layer(), nn.Dropout(0.2)), residual()), "blocks.*", steps=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_same_gradients(dtype: torch.dtype) -> None:
    def run(model: Model) -> dict[str, Any]:
        with torch.autocast("cpu", dtype):
            loss = loss_of(model)
        loss.backward()
        return gradients_of(model)

    assert_same_results(sequential, run)


def test_a_second_backward_pass_gives_the_same_gradients() -> None:
    def run(model: Model) -> dict[str, Any]:
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()
        return {**gradients_of(model), **dict(model.named_buffers())}

    assert_same_results(lambda: Stack(Stateful("buffer in place"), residual()), run, "blocks.*")


def test_model_in_eval_mode_before_the_backward_pass_is_recomputed_as_it_was() -> None:
    def run(model: Model) -> dict[str, Any]:
        loss = loss_of(model)
        model.eval()
        loss.backward()
        assert not any(module.training for module in model.modules())
        return gradients_of(model)

    assert_same_results(sequential, run)


def smooth() -> Residual:
    return Residual(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 8))


class Counting(nn.Module):
    """Its result depends on numbers that nothing of torch's counts changes of."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kind = kind
        self.array = np.ones(8, dtype=np.float32)
        self.tensor = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.linear(x) * (torch.from_numpy(self.array.copy()) + self.tensor))
        if self.kind == "an array of numpy":
            self.array += 1
        elif self.kind == "a tensor through .data":
            self.tensor.data += 1
        else:
            self.array = self.array + 1
        return y


@pytest.mark.parametrize(
    ("kind", "words"),
    [("an array of numpy", "attribute 'array' of a Counting"), ("a tensor through .data", "attribute 'tensor' of a")],
)
def test_attributes_that_are_written_to_beside_torch_are_refused(kind: str, words: str) -> None:
    model = nn.Sequential(Counting(kind), nn.Linear(8, 1))
    enable_gradient_checkpointing(model, "0")

    with pytest.raises(InvalidArgumentError, match=rf"'Counting' changed its {words}.*\(shape \(8,\)\) in place"):
        model(torch.ones(2, 8))


def test_an_array_that_is_replaced_is_the_old_one_again_in_the_second_run() -> None:
    assert_trains_alike(lambda: nn.Sequential(Counting("replaced"), nn.Linear(8, 1)), "0")


class Failing(nn.Module):
    """A block that fails at its second call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        x = self.norm(x)
        if self.calls == 2:
            raise ArithmeticError("the second call")
        return x


class OwnCheckpoint(nn.Module):
    """A block that checkpoints a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Any:
        return self.norm(checkpoint(self.inner, x, use_reentrant=False))


def with_other_weights(model: Model) -> Any:
    doubled = {name: 2 * parameter for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, doubled, (torch.randn(6, 8),)).square().mean()


def with_second_derivatives(model: Model) -> Any:
    x = torch.randn(6, 8, requires_grad=True)
    loss = model(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


def with_a_call_that_fails(model: Model) -> Any:
    loss = loss_of(model)
    with pytest.raises(ArithmeticError):
        loss_of(model)
    return loss + loss_of(model)


@pytest.mark.parametrize(
    ("block", "loss"),
    [
        (smooth, with_other_weights),
        (smooth, with_second_derivatives),
        (Failing, with_a_call_that_fails),
        (OwnCheckpoint, loss_of),
    ],
)
def test_unusual_pass_gives_the_same_gradients(block: Callable[[], Model], loss: Callable[[Model], Tensor]) -> None:
    def run(model: Model) -> dict[str, Any]:
        loss(model).backward()
        return {**gradients_of(model), **dict(model.named_buffers()), "random state": torch.get_rng_state()}

    assert_same_results(lambda: nn.Sequential(nn.Linear(8, 8), block(), smooth()), run)


def test_keyword_arguments_reach_the_block() -> None:
    def run(model: Model) -> dict[str, Any]:
        x = torch.randn(6, 8, requires_grad=True)
        model[0](scale=0.5, x=x).sum().backward()
        return {"x": x.grad, **gradients_of(model)}

    assert_same_results(lambda: nn.Sequential(residual()), run)


def test_block_that_changes_its_input_is_refused() -> None:
    model = build(lambda: nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))))
    enable_gradient_checkpointing(model)
    with pytest.raises(InvalidArgumentError, match=r"changed its input \(shape \(6, 8\)\) in place, .*inplace=False"):
        loss_of(model)


def test_block_that_changes_a_parameter_is_refused() -> None:
    class Clamped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(x)

    model = build(lambda: nn.Sequential(nn.Sequential(Clamped(8, 8)), nn.Linear(8, 8)))
    enable_gradient_checkpointing(model)
    with pytest.raises(InvalidArgumentError, match="changed its parameter 'weight' of a Clamped"):
        loss_of(model)


def test_optimizer_step_before_the_backward_pass_is_refused() -> None:
    """Without checkpointing torch refuses it as well; its own checkpoint gives the gradients of the new weights."""
    model = build(lambda: nn.Sequential(residual(), residual()))
    enable_gradient_checkpointing(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = loss_of(model), loss_of(model)
    first.backward()
    optimizer.step()
    with pytest.raises(InvalidArgumentError, match=r"of a checkpointed block was changed .* Call backward\(\) first"):
        second.backward()


# --- What the peers do in the same cases: each of these says when it changes.


def test_torch_reentrant_gives_a_first_block_no_gradient() -> None:
    block = build(residual)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        output = checkpoint(block, torch.randn(6, 8), use_reentrant=True)
    assert not output.requires_grad

    model = build(lambda: nn.Sequential(residual()))
    enable_gradient_checkpointing(model)
    gradients, _ = train(model)
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients.values())


def test_torch_counts_batch_norm_twice() -> None:
    block = build(residual)
    checkpoint(block, torch.randn(6, 8), use_reentrant=False).sum().backward()
    assert int(block.layers[1].num_batches_tracked) == 2


def test_torch_draws_from_python_and_numpy_twice() -> None:
    for kind in ("random", "numpy.random"):
        block = build(partial(Stateful, kind))
        x = torch.randn(6, 8)
        block(x).sum().backward()
        alone = block.linear.weight.grad
        block = build(partial(Stateful, kind))
        checkpoint(block, x, use_reentrant=False).sum().backward()
        assert not torch.equal(alone, block.linear.weight.grad)


# --- On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("factory", [sequential, bert])
def test_training_on_a_gpu_is_bit_for_bit_as_without(factory: Callable[[], Model]) -> None:
    with torch.device("cuda"):
        assert_trains_alike(factory)


@pytest.mark.gpu
def test_dropout_on_a_gpu_that_only_keywords_are_on_is_the_same() -> None:
    """torch keeps the random state of the devices of positional arguments alone."""

    def run(model: Model) -> dict[str, Any]:
        model[0](x=torch.ones(6, 8, device="cuda")).sum().backward()
        return gradients_of(model)

    assert_same_results(lambda: nn.Sequential(residual()).cuda(), run)
