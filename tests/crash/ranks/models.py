"""What the ranks save and load: models whose values all tell one number, and what does harm meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Does = Callable[[], object]


def nothing() -> None:
    """What most ranks do in most phases."""


@dataclass(frozen=True, slots=True)
class Harm:
    """What a rank does beside its call.

    Attributes:
        planning: When the tensors of a save are listed.
        exchange: When one of them is read.
        written: When all files are.
        assigning: When a load has read everything, and an object takes in what was read.
    """

    planning: Does = nothing
    exchange: Does = nothing
    written: Does = nothing
    assigning: Does = nothing


class Part:
    """A part of a state that does something when it is saved, or restored."""

    def __init__(self, harm: Harm) -> None:
        self._harm = harm

    def state_dict(self) -> dict[str, Any]:
        self._harm.planning()
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._harm.assigning()
        assert state == {"value": 1}


def built_llama(number: int) -> Any:
    """Of 8 MB, as the tensors of the other saves."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import hfshard

    class Model(hfshard.ShardedModelMixin, LlamaForCausalLM):
        pass

    config = LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=16,
    )  # fmt: skip
    return _filled(Model(config), number)


def built_layers(number: int) -> Any:
    """Four layers of 1 MB."""
    return _filled(torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4))), number)


def _filled(model: Any, number: int) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    return model


def shard(model: Any, layers: Any) -> None:
    """FSDP2 over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def built_optimizer(model: Any, number: int) -> Any:
    """SGD whose momentum tells the number."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, number)
    return optimizer


def values(tensor: Any) -> set[int]:
    """The different values of a tensor, or of this rank's part of it."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return {int(value) for value in tensor.unique()}


def built_state(model: Any, number: int, harm: Harm) -> Any:
    """A training state of a model that tells the number."""
    from hfshard.training import TrainingState

    return TrainingState(model=model, optimizer=built_optimizer(model, number), part=Part(harm))


def values_of_state(state: Any) -> set[int]:
    """The different values of its weights and its momentum."""
    momentum = [one["momentum_buffer"] for one in state.components["optimizer"].state.values()]
    return {value for tensor in (*state.components["model"].parameters(), *momentum) for value in values(tensor)}
