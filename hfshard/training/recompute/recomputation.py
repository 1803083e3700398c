"""Calls a block now and once more in the backward pass, which recomputes its activations exactly.

`torch.utils.checkpoint` runs the block a second time. `block_state.py` puts back what the first run read and changed
before the second one, so that both runs compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hfshard.errors import InvalidArgumentError
from hfshard.training.recompute.block_state import SecondRun, StateBefore


@torch.compiler.disable  # type: ignore[untyped-decorator]  # dynamo would trace one run and not know of the other
def call_recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of modules now, keep no activations, and call it again when the backward pass needs them.

        y = call_recomputed(block.forward, x)

    Args:
        function: A module's method, or a partial of one; it is called with the arguments and nothing else.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        What the function returns.

    Raises:
        InvalidArgumentError: The function changes its inputs or its parameters, so that a second run could not equal
            the first; or (in the backward pass) other code changed its parameters in between.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    while isinstance(function, partial):
        inner: partial[Any] = function
        function = inner.func
        args = (*inner.args, *args)
        kwargs = {**inner.keywords, **kwargs}
    blocks = _blocks(function, args)
    before = StateBefore.of(blocks, (args, kwargs))
    second_run = SecondRun()

    # All tensors go in by position: torch keeps the random state only of the devices that it sees there.
    count, names = len(args), tuple(kwargs)
    values = (*args, *kwargs.values(), *_one_on_each_device(before, (args, kwargs)))

    def run(*given: Any) -> Any:
        return function(*given[:count], **dict(zip(names, given[count : count + len(names)])))

    result = checkpoint(
        run, *values, use_reentrant=False, preserve_rng_state=True, context_fn=lambda: (nullcontext(), second_run)
    )
    before.compare(second_run)
    return result


def _blocks(function: Callable[..., Any], args: tuple[Any, ...]) -> list[nn.Module]:
    """The modules that a call runs: those that the method is bound to, gets as arguments, or holds in its closure."""
    owner = getattr(function, "__self__", function)
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    blocks = [module for module in (owner, *args, *held) if isinstance(module, nn.Module)]
    if not blocks:
        raise InvalidArgumentError(
            f"Gradient checkpointing of {function!r} can't be made exact: it is not a method of a module. "
            "Name the blocks instead: enable_gradient_checkpointing(model, modules=...)."
        )
    return blocks


def _one_on_each_device(before: StateBefore, inputs: Any) -> list[Tensor]:
    """An empty tensor on every device where the block has tensors and its inputs have none."""
    seen = {leaf.device for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
    own = {tensor.device for _, tensor, _ in before.fixed} | {one.value.device for one in before.buffers.values()}
    return [torch.empty(0, device=device) for device in own - seen if device.type not in ("cpu", "meta")]
