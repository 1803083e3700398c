"""Gradient checkpointing of transformers' models changes no bit of a training; and what upstream does alone."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import BitConfig, BitForImageClassification, MobileViTConfig, MobileViTForImageClassification

from hfshard.errors import InvalidArgumentError
from hfshard.training.gradient_checkpointing import enable_gradient_checkpointing
from tests.training.checkpointed import (
    LANGUAGE_MODELS,
    Model,
    assert_same_tensors,
    assert_trains_alike,
    bert,
    build,
    gpt2,
    gradients_of,
    llama,
    loss_of,
    saved_bytes,
    sequential,
    t5,
    t5_without_dropout,
    train,
    without_cache,
)
from tests.zoo.models import ZOO

UNSUPPORTED = {"levit", "resnet"}
MIXED_DTYPES = {"llama_mixed_dtypes"}  # upstream can't train it
TEXT_ALONE = {"llama4"}  # transformers 5.24 asks its text model for outputs of images


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


@pytest.mark.parametrize("name", sorted(ZOO.keys() - MIXED_DTYPES))
def test_every_architecture_has_the_gradients_that_it_has_without(name: str) -> None:
    results = []
    for is_on in (False, True):
        model: Model = without_cache(ZOO[name].build().train())
        if is_on and name in UNSUPPORTED:
            with pytest.raises(InvalidArgumentError, match="does not support gradient checkpointing"):
                enable_gradient_checkpointing(model)
            return
        if is_on:
            assert enable_gradient_checkpointing(model).names
        torch.manual_seed(0)
        np.random.seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        reads: Model = model.language_model if name in TEXT_ALONE else model
        output = reads(**inputs_of(reads), output_hidden_states=True)
        leaves = [leaf for leaf in tree_leaves(dict(output)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        torch.stack([leaf.float().square().mean() for leaf in leaves]).sum().backward()
        results.append({**gradients_of(model), **dict(model.named_buffers()), "random state": torch.get_rng_state()})
    assert sum(value is not None for value in results[0].values()) > 3
    assert_same_tensors(*results)


def inputs_of(model: Model) -> dict[str, Any]:
    """Something that a model of the zoo takes."""
    names = inspect.signature(model.forward).parameters
    main = model.main_input_name
    given: dict[str, Any] = {}
    if main == "input_ids" or "return_loss" in names:
        given["input_ids"] = torch.randint(6, 60, (2, 9))
    if main == "pixel_values" or "return_loss" in names:
        config = getattr(model.config, "encoder", model.config)
        size = getattr(config, "image_size", 16 if "return_loss" in names else 64)
        given["pixel_values"] = torch.randn(2, 3, size, size)
    if main == "input_values":
        given["input_values"] = torch.randn(2, 400)
    if main == "input_features":
        given["input_features"] = torch.randn(2, 8, 24)
    if "decoder_input_ids" in names:
        given["decoder_input_ids"] = torch.randint(6, 60, (2, 7))
    return given


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
def test_upstream_lets_t5_take_another_attention_kernel() -> None:
    """Its attention lets a zero bias require a gradient while checkpointing, which torch's fused kernel does not take.

    Whether the other kernel's gradients differ in their last bits depends on the processor; the kernel itself does not.
    """
    plain, ours, theirs = build(t5_without_dropout), build(t5_without_dropout), build(t5_without_dropout)
    enable_gradient_checkpointing(ours)
    upstreams_enable(theirs)
    expected = operations_of(loss_of(plain))
    assert operations_of(loss_of(ours)) == expected
    assert operations_of(loss_of(theirs)) != expected


@pytest.mark.compat
def test_upstreams_gradients_of_t5_differ_in_the_last_bits_at_most() -> None:
    plain, _ = train(build(t5_without_dropout))
    model = build(t5_without_dropout)
    upstreams_enable(model)
    theirs, _ = train(model)
    assert max(float((plain[name] - theirs[name]).abs().max()) for name in plain) < 1e-6


def operations_of(loss: Tensor) -> Counter[str]:
    """How often each operation is in the graph that a backward pass goes through."""
    found: Counter[str] = Counter()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found[node.name()] += 1
            waiting += [following for following, _ in node.next_functions]
    return found


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


@pytest.mark.compat
@pytest.mark.parametrize(
    ("factory", "most"), [(llama, 0.45), (bert, 0.45), (gpt2, 0.55), (t5, 0.45), (sequential, 0.25)]
)
def test_fewer_bytes_of_activations_are_kept(factory: Callable[[], Model], most: float) -> None:
    model = build(factory)
    enable_gradient_checkpointing(model)
    assert saved_bytes(model) < most * saved_bytes(build(factory))


@pytest.mark.compat
def test_block_around_transformers_checkpointing_is_refused() -> None:
    model = nn.ModuleDict({"encoder": bert()})
    enable_gradient_checkpointing(model)
    with pytest.raises(InvalidArgumentError, match=r"'encoder.bert.encoder' contains 'encoder.bert.encoder.*', which"):
        enable_gradient_checkpointing(model, "encoder.bert.encoder")
