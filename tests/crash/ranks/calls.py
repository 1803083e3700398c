"""The calls by which ranks save together, and what each of them leaves: which save, as other readers see it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.crash.ranks.models import (
    Does,
    Harm,
    built_layers,
    built_llama,
    built_state,
    nothing,
    shard,
    values,
    values_of_state,
)

ROWS = 1 << 17
"""Of 8 bytes, in each of the tensors: several files for each rank."""
TENSORS = 8
LIMIT = 2_200_000
"""Bytes of a file."""
INDEX = "model.safetensors.index.json"


class StateDictCall:
    """`save_state_dict`."""

    def ready(self, directory: Path, number: int, harm: Harm) -> Does:
        """Spread tensors, all of which tell the number, over the ranks; gives what saves them."""
        from hfshard.distributed.save_on_ranks import save_here_or_on_ranks
        from hfshard.saving.save_request import SaveOptions, SaveRequest

        tensors: dict[str, Any] = spread_tensors(number)
        if harm.exchange is not nothing:
            tensors["fault"] = _tensor_that(harm.exchange)
        request = SaveRequest(
            tensors=_WatchedMapping(tensors, harm.planning), options=SaveOptions(max_shard_size=LIMIT)
        )
        return lambda: save_here_or_on_ranks(request, directory, _second_time(harm.written))

    def save_alone(self, directory: Path, number: int) -> None:
        """The same save by one process."""
        import hfshard

        hfshard.save_state_dict({name: _rows(number) for name in _names()}, directory, max_shard_size=LIMIT)

    def found(self, directory: Path) -> int:
        """The number of the save that a directory holds, as stock safetensors reads the files of its index.

        Raises:
            ValueError: Its tensors are of several saves, or some are missing.
        """
        tensors = _stored(directory)
        if missing := _names() - tensors.keys():
            raise ValueError(f"missing: {missing}")
        found = set()
        for name in _names():
            number = int(tensors[name][0]) // ROWS
            if not tensors[name].equal(_rows(number)):
                raise ValueError(f"{name} is of several saves")
            found.add(number)
        return _only(found)

    def litter(self, directory: Path) -> list[str]:
        """What lies in a directory and does not belong to its checkpoint."""
        ours = {INDEX, *json.loads((directory / INDEX).read_text())["weight_map"].values()}
        return sorted(set(os.listdir(directory)) - ours)


class DcpCall(StateDictCall):
    """`torch.distributed.checkpoint.save` with hfshard's writer."""

    def ready(self, directory: Path, number: int, harm: Harm) -> Does:
        """As its base does."""
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.state_dict_saver import save

        from hfshard.distributed import StorageWriter

        class Planner(DefaultSavePlanner):
            def create_local_plan(self) -> Any:
                harm.planning()
                return super().create_local_plan()

        tensors = spread_tensors(number)
        writer = StorageWriter(directory, max_shard_size=LIMIT)
        return lambda: save(tensors, storage_writer=writer, planner=Planner())


class PretrainedCall(StateDictCall):
    """`save_pretrained` of a Llama under FSDP2."""

    def ready(self, directory: Path, number: int, harm: Harm) -> Does:
        """As its base does; the model is built like that of another process, and all its weights tell the number."""
        model = built_llama(number)
        shard(model, model.model.layers)
        model.register_state_dict_post_hook(lambda *_: harm.planning())
        return lambda: model.save_pretrained(directory, max_shard_size=LIMIT)

    def save_alone(self, directory: Path, number: int) -> None:
        """As its base does."""
        built_llama(number).save_pretrained(directory, max_shard_size=LIMIT)

    def found(self, directory: Path) -> int:
        """As its base does; transformers loads it."""
        from transformers import LlamaForCausalLM

        model: Any = LlamaForCausalLM
        loaded, info = model.from_pretrained(directory, output_loading_info=True)
        if any(info.values()):
            raise ValueError(f"transformers: {info}")
        return _only({value for tensor in loaded.state_dict().values() for value in values(tensor)})

    def litter(self, directory: Path) -> list[str]:
        """As its base does."""
        return sorted(set(super().litter(directory)) - {"config.json", "generation_config.json"})


class ManagerCall:
    """`CheckpointManager.save` of a model under FSDP2 and its optimizer."""

    def __init__(self, *, blocking: bool = True, is_spread: bool = True) -> None:
        self._blocking = blocking
        self._is_spread = is_spread

    def ready(self, directory: Path, number: int, harm: Harm) -> Does:
        """Build a state whose tensors all tell the number, which is that of the step, too."""
        from hfshard.training import CheckpointManager

        state = self._state(number, harm)

        def save() -> None:
            with CheckpointManager(directory, max_shard_size=LIMIT) as manager:
                manager.save(number, state, blocking=self._blocking)
                manager.wait_until_finished()

        return save

    def _state(self, number: int, harm: Harm) -> Any:
        model = built_layers(number)
        if self._is_spread:
            shard(model, model)
        return built_state(model, number, harm)

    def save_alone(self, directory: Path, number: int) -> None:
        """The same save by one process."""
        from hfshard.training import CheckpointManager

        with CheckpointManager(directory, max_shard_size=LIMIT) as manager:
            manager.save(number, built_state(built_layers(number), number, Harm()))

    def found(self, directory: Path) -> int:
        """The last step; each step that is there is restored, its weights and its momentum.

        Raises:
            ValueError: One is of several steps.
        """
        from hfshard.training import CheckpointManager

        steps = sorted(int(name.rpartition("-")[2]) for name in os.listdir(directory) if _is_step(name))
        for step in steps:
            state = built_state(built_layers(-1), -1, Harm())
            CheckpointManager(directory).restore(state, step)
            if values_of_state(state) != {step}:
                raise ValueError(f"step {step} holds values of {values_of_state(state)}")
        return steps[-1]

    def litter(self, directory: Path) -> list[str]:
        """What is no checkpoint."""
        return sorted(name for name in os.listdir(directory) if not _is_step(name))


def spread_tensors(number: int) -> dict[str, Any]:
    """Tensors of a save, of which each rank has some rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = _rows(number)
    return {name: distribute_tensor(rows, mesh, [Shard(0)], src_data_rank=None) for name in sorted(_names())}


class _WatchedMapping(dict[str, Any]):
    """Does something when its items are listed for the first time."""

    def __init__(self, tensors: Mapping[str, Any], does: Does) -> None:
        super().__init__(tensors)
        self._first = iter([does])

    def items(self) -> Any:
        for does in self._first:
            does()
        return super().items()


def _tensor_that(does: Does) -> Any:
    """A tensor that does something when its bytes are read."""
    from hfshard.tensors.stored_tensor import RawTensor, TensorLayout

    def blocks(_: int) -> Iterator[memoryview]:
        does()
        yield memoryview(b"12345678")

    return RawTensor(TensorLayout("U8", (8,), 8), blocks)


def _second_time(does: Does) -> Callable[[], None]:
    """A check of a save: first it is called when the directory is locked, and then when all files are written."""
    calls = iter((nothing, does))

    def check() -> None:
        next(calls, nothing)()

    return check


def _names() -> set[str]:
    return {f"rows{number}" for number in range(TENSORS)}


def _rows(number: int) -> torch.Tensor:
    return torch.arange(ROWS, dtype=torch.int64) + number * ROWS


def _stored(directory: Path) -> dict[str, torch.Tensor]:
    """What the files of an index hold."""
    from safetensors import safe_open

    found = {}
    for name, file_name in json.loads((directory / INDEX).read_text())["weight_map"].items():
        with safe_open(directory / file_name, "pt") as file:
            found[name] = file.get_tensor(name)
    return found


def _only(numbers: set[int]) -> int:
    if len(numbers) != 1:
        raise ValueError(f"of several saves: {numbers}")
    return numbers.pop()


def _is_step(name: str) -> bool:
    return re.fullmatch(r"checkpoint-\d{8}", name) is not None
