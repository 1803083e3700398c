"""Gradient checkpointing changes no bit of a training: gradients, buffers, random numbers; and what upstream does."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BitConfig,
    BitForImageClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MobileViTConfig,
    MobileViTForImageClassification,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import hfshard
from hfshard.errors import InvalidArgumentError
from hfshard.training.gradient_checkpointing import enable_gradient_checkpointing

WORDS, LENGTH = 97, 16
Model = Any  # a module, whose children are reached by name
Random = tuple[Tensor, Any, Any]


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            attention_dropout=0.1,
            tie_word_embeddings=True,
        )
    )


def bert() -> PreTrainedModel:
    return BertForMaskedLM(
        BertConfig(vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
    )


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=3, n_head=4, n_positions=LENGTH))


def t5(dropout: float = 0.1) -> PreTrainedModel:
    config: Any = T5Config
    return T5ForConditionalGeneration(
        config(
            vocab_size=WORDS,
            d_model=64,
            d_kv=32,
            d_ff=128,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            dropout_rate=dropout,
        )
    )


def t5_without_dropout() -> PreTrainedModel:
    return t5(0.0)


LANGUAGE_MODELS = [llama, bert, gpt2, t5, t5_without_dropout]


class Residual(nn.Module):
    """A block of layers beside a shortcut."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return x + scale * self.layers(x)


class Stack(nn.Module):
    """Blocks in a list, the first of them called once more at the end."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.blocks[0](x)


def residual() -> Residual:
    return Residual(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 8))


def sequential() -> nn.Sequential:
    return nn.Sequential(*(residual() for _ in range(4)), nn.Linear(8, 3))


def build(factory: Callable[[], Model]) -> Model:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return factory().train()


def loss_of(model: Model) -> Any:
    if isinstance(model, PreTrainedModel) and model.main_input_name == "input_ids":
        ids = torch.randint(0, WORDS, (2, LENGTH))
        return model(input_ids=ids, labels=ids).loss
    if isinstance(model, PreTrainedModel):
        return model(pixel_values=torch.randn(2, 3, 64, 64), labels=torch.tensor([0, 1])).loss
    return model(torch.randn(6, 8)).square().mean()


def random_state() -> Random:
    name, words, *rest = np.random.get_state()
    return torch.get_rng_state(), random.getstate(), (name, np.asarray(words).tolist(), *rest)


def train(model: Model, steps: int = 1) -> tuple[dict[str, Any], Random]:
    """Train, and return the last gradients and the states of the random number generators."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, random_state()


def assert_same_tensors(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        assert (value is None) == (other[name] is None), name
        assert value is None or torch.equal(value, other[name]), name


def assert_trains_alike(factory: Callable[[], Model], modules: str | None = None, steps: int = 6) -> Model:
    """Train with and without; return the model that was trained with it."""
    plain = build(factory)
    gradients, state = train(plain, steps)
    model = build(factory)
    handle = enable_gradient_checkpointing(model, modules)
    assert handle.names
    again, state_again = train(model, steps)
    assert_same_tensors(gradients, again)
    assert_same_tensors(plain.state_dict(), model.state_dict())
    assert torch.equal(state[0], state_again[0])
    assert state[1:] == state_again[1:]
    return model


# --- The same bits, with transformers' models.


@pytest.mark.compat
@pytest.mark.parametrize("factory", LANGUAGE_MODELS)
def test_language_model_trains_bit_for_bit_as_without(factory: Callable[[], Model]) -> None:
    assert_trains_alike(factory)


@pytest.mark.compat
@pytest.mark.parametrize("factory", [llama, gpt2])
def test_blocks_named_in_a_language_model_train_bit_for_bit_as_without(factory: Callable[[], Model]) -> None:
    assert_trains_alike(factory, modules={"llama": "model.layers.*", "gpt2": "transformer.h.*"}[factory.__name__])


@pytest.mark.compat
def test_batch_norm_within_transformers_layers_counts_once() -> None:
    config: Any = MobileViTConfig
    config = config(
        num_channels=3,
        image_size=64,
        hidden_sizes=[8, 12, 16],
        neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 16],
        expand_ratio=2.0,
        num_attention_heads=2,
        num_labels=2,
    )

    def factory() -> Model:
        return MobileViTForImageClassification(config)

    model = assert_trains_alike(factory, steps=2)
    counts = [buffer for name, buffer in model.named_buffers() if name.endswith("num_batches_tracked")]
    assert counts
    assert all(int(count) == 2 for count in counts)


@pytest.mark.compat
def test_transformers_model_within_a_module_is_found() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = bert()

    handle = enable_gradient_checkpointing(Classifier())
    assert handle.names == tuple(f"encoder.bert.encoder.layer.{number}" for number in range(3))


@pytest.mark.compat
def test_frozen_first_layers_are_not_worked_for() -> None:
    def factory() -> Model:
        model: Any = bert()
        for part in (model.bert.embeddings, model.bert.encoder.layer[:2]):
            part.requires_grad_(False)
        return model

    model = assert_trains_alike(factory, steps=2)
    calls: list[str] = []
    for number, layer in enumerate(model.bert.encoder.layer):
        layer.output.dense.register_forward_hook(lambda *_, number=number: calls.append(f"layer {number}"))
    loss_of(model).backward()
    assert calls == ["layer 0", "layer 1", "layer 2", "layer 2"]


@pytest.mark.compat
def test_upstream_gives_t5_other_gradients_in_the_last_bits() -> None:
    """Its attention lets a zero bias require a gradient while checkpointing, so torch takes another kernel."""
    plain, _ = train(build(t5_without_dropout))
    model = build(t5_without_dropout)
    upstreams_enable(model)
    theirs, _ = train(model)
    difference = max(float((plain[name] - theirs[name]).abs().max()) for name in plain)
    assert 0 < difference < 1e-6


@pytest.mark.compat
def test_remove_gives_transformers_model_back_as_it_was() -> None:
    model = build(llama)
    handle = enable_gradient_checkpointing(model)
    assert handle.names == ("model.layers.0", "model.layers.1", "model.layers.2")
    assert saved_bytes(model) < 0.5 * saved_bytes(build(llama))
    handle.remove()
    handle.remove()
    assert saved_bytes(model) == saved_bytes(build(llama))
    assert not model.get_input_embeddings()._forward_hooks


@pytest.mark.compat
def test_model_that_upstream_can_not_checkpoint_is_refused() -> None:
    model = BitForImageClassification(BitConfig(embedding_size=4, hidden_sizes=[8, 8], depths=[1, 1], num_groups=1))
    with pytest.raises(InvalidArgumentError, match=r"BitForImageClassification does not support .* modules=\.\.\."):
        enable_gradient_checkpointing(model)


def upstreams_enable(model: Any, **arguments: Any) -> None:
    """Gradient checkpointing as transformers alone turns it on."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, **arguments})


# --- The same bits, with modules of any kind.


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

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kind = kind
        self.calls = 0
        self.register_buffer("count", torch.ones(()))
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
    results = []
    for is_on in (False, True):
        model = build(sequential)
        if is_on:
            enable_gradient_checkpointing(model)
        with torch.autocast("cpu", dtype):
            loss = loss_of(model)
        loss.backward()
        results.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert_same_tensors(*results)


def test_a_second_backward_pass_gives_the_same_gradients() -> None:
    results = []
    for is_on in (False, True):
        model = build(lambda: Stack(Stateful("buffer in place"), residual()))
        if is_on:
            enable_gradient_checkpointing(model, "blocks.*")
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()
        results.append({**{name: one.grad for name, one in model.named_parameters()}, **dict(model.named_buffers())})
    assert_same_tensors(*results)


def test_model_in_eval_mode_before_the_backward_pass_is_recomputed_as_it_was() -> None:
    results = []
    for is_on in (False, True):
        model = build(sequential)
        if is_on:
            enable_gradient_checkpointing(model)
        loss = loss_of(model)
        model.eval()
        loss.backward()
        assert not any(module.training for module in model.modules())
        results.append({name: one.grad for name, one in model.named_parameters()})
    assert_same_tensors(*results)


def test_keyword_arguments_reach_the_block() -> None:
    results = []
    for is_on in (False, True):
        block = build(lambda: nn.Sequential(residual()))
        if is_on:
            enable_gradient_checkpointing(block)
        x = torch.randn(6, 8, requires_grad=True)
        block[0](scale=0.5, x=x).sum().backward()
        results.append({"x": x.grad, **{name: one.grad for name, one in block.named_parameters()}})
    assert_same_tensors(*results)


# --- When it runs, and what it saves.


def count_calls(block: Model) -> list[int]:
    calls: list[int] = []
    block.layers[0].register_forward_hook(lambda *_: calls.append(1))
    return calls


def test_eval_and_no_grad_run_a_block_once() -> None:
    model = build(sequential)
    enable_gradient_checkpointing(model)
    calls = count_calls(model[0])
    with torch.no_grad():
        model(torch.randn(6, 8))
    model.eval()
    model(torch.randn(6, 8)).sum().backward()
    assert len(calls) == 2
    model.train()
    model(torch.randn(6, 8)).sum().backward()
    assert len(calls) == 4


def saved_bytes(model: Model) -> int:
    """Bytes of the tensors that one forward pass keeps for the backward pass, parameters aside; each storage once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, tuple[int, Tensor]] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss_of(model)
    return sum(size for size, _ in found.values())


@pytest.mark.compat
@pytest.mark.parametrize(
    ("factory", "most"), [(llama, 0.45), (bert, 0.45), (gpt2, 0.55), (t5, 0.45), (sequential, 0.25)]
)
def test_fewer_bytes_of_activations_are_kept(factory: Callable[[], Model], most: float) -> None:
    model = build(factory)
    enable_gradient_checkpointing(model)
    assert saved_bytes(model) < most * saved_bytes(build(factory))


# --- What it refuses.


def test_block_that_changes_its_input_is_refused() -> None:
    model = build(lambda: nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))))
    enable_gradient_checkpointing(model)
    with pytest.raises(InvalidArgumentError, match=r"changes its input \(shape \(6, 8\)\) in place .*inplace=False"):
        loss_of(model)


def test_block_that_changes_a_parameter_is_refused() -> None:
    class Clamped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(x)

    model = build(lambda: nn.Sequential(nn.Sequential(Clamped(8, 8)), nn.Linear(8, 8)))
    enable_gradient_checkpointing(model)
    with pytest.raises(InvalidArgumentError, match="changes its parameter 'weight' of a Clamped"):
        loss_of(model)


def test_optimizer_step_before_the_backward_pass_is_refused() -> None:
    """Without checkpointing torch refuses it as well; its own checkpoint gives the gradients of the new weights."""
    model = build(lambda: nn.Sequential(residual(), residual()))
    enable_gradient_checkpointing(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = loss_of(model), loss_of(model)
    first.backward()
    optimizer.step()
    with pytest.raises(InvalidArgumentError, match=r"of a block .* was changed between .* Call backward\(\) first"):
        second.backward()


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([residual(), residual()])
        self.head = nn.Linear(8, 3)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (None, "A Named is no transformers model and no Sequential: name the blocks .* modules='blocks.*'"),
        ("blcks.0", "no module of this Named is called so: the nearest names are 'blocks.0'"),
        ("*.*.*.*.*", "no module of this Named is called so: see model.named_modules"),
        ("blocks", "names 'blocks', a ModuleList, which is never called itself: name what is in it, 'blocks.*'"),
        (["blocks.0", "blocks.0.layers"], "'blocks.0' holds 'blocks.0.layers', which is checkpointed as well"),
        ([], "modules= is empty"),
        ([nn.Linear(1, 1)], "takes names such as 'blocks.*', not a Linear"),
    ],
)
def test_blocks_that_can_not_be_are_refused_and_nothing_changes(modules: Any, message: str) -> None:
    model = Named()
    with pytest.raises(InvalidArgumentError, match=message):
        enable_gradient_checkpointing(model, modules)
    assert {type(module) for module in model.modules()} == {type(module) for module in Named().modules()}


def test_sequential_of_layers_alone_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"no blocks: each child is a layer alone, .* Group its layers"):
        enable_gradient_checkpointing(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))


def test_compiled_block_is_refused() -> None:
    model: Model = Named()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    with pytest.raises(InvalidArgumentError, match=r"'blocks.0' .* enable gradient checkpointing before those"):
        enable_gradient_checkpointing(model, "blocks.*")


@pytest.mark.compat
def test_block_around_transformers_checkpointing_is_refused() -> None:
    model = nn.ModuleDict({"encoder": bert()})
    enable_gradient_checkpointing(model)
    with pytest.raises(InvalidArgumentError, match=r"'encoder.bert.encoder' holds 'encoder.bert.encoder.*', which is"):
        enable_gradient_checkpointing(model, "encoder.bert.encoder")


# --- It is still the same module.


def test_enabling_twice_is_enabling_once() -> None:
    model = build(sequential)
    enable_gradient_checkpointing(model)
    handle = enable_gradient_checkpointing(model, ["0", "1"])
    calls = count_calls(model[0])
    loss_of(model).backward()
    assert len(calls) == 2
    handle.remove()
    assert type(model[0]) is Residual
    assert type(model[2]) is not Residual


def test_names_and_looks_of_the_model_do_not_change(tmp_path: Path) -> None:
    plain, model = build(sequential), build(sequential)
    enable_gradient_checkpointing(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert repr(model) == repr(plain)
    hfshard.save_model(plain, tmp_path / "plain")
    hfshard.save_model(model, tmp_path / "model")
    assert (tmp_path / "model/model.safetensors").read_bytes() == (tmp_path / "plain/model.safetensors").read_bytes()
    hfshard.load_model(model, tmp_path / "plain")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("factory", [sequential, bert])
def test_copy_is_checkpointed_and_stands_alone(copied: Callable[[Model], Model], factory: Callable[[], Model]) -> None:
    plain = build(factory)
    gradients, _ = train(plain)
    model = build(factory)
    enable_gradient_checkpointing(model)
    other = copied(model)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    build(factory)
    again, _ = train(other)
    assert_same_tensors(gradients, again)
    assert_same_tensors(plain.state_dict(), other.state_dict())
    assert saved_bytes(other) < 0.5 * saved_bytes(plain)


def test_replica_of_data_parallel_runs_its_own_parameters() -> None:
    block: Model = residual()
    model = nn.Sequential(block)
    enable_gradient_checkpointing(model)
    replica = block._replicate_for_data_parallel()
    replica.layers = nn.Identity()
    assert torch.equal(replica(torch.ones(2, 8)), torch.full((2, 8), 2.0))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks, at a break
def test_compiled_model_trains_bit_for_bit_as_without() -> None:
    plain = build(sequential)
    gradients, _ = train(plain, 2)
    model = build(sequential)
    enable_gradient_checkpointing(model)
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        compiled(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
    assert_same_tensors(gradients, {name: parameter.grad for name, parameter in model.named_parameters()})
    assert_same_tensors(plain.state_dict(), model.state_dict())


def test_wrapped_model_is_unwrapped() -> None:
    model: Model = torch.compile(build(sequential), backend="eager")
    assert enable_gradient_checkpointing(model).names == ("0", "1", "2", "3")


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
    results = []
    for is_on in (False, True):
        model = build(lambda: nn.Sequential(residual())).cuda()
        if is_on:
            enable_gradient_checkpointing(model)
        model[0](x=torch.ones(6, 8, device="cuda")).sum().backward()
        results.append({name: one.grad for name, one in model.named_parameters()})
    assert_same_tensors(*results)
