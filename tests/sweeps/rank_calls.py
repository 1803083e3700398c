"""The calls by which ranks save and load together, and which save each of them leaves, as other readers see it."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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
        from hfshard.distributed.save_on_ranks import save_together
        from hfshard.places.place import place_to_save
        from hfshard.saving.save_request import SaveOptions, SaveRequest

        tensors: dict[str, Any] = spread_tensors(number)
        if harm.exchange is not nothing:
            tensors["fault"] = _tensor_that(harm.exchange)
        request = SaveRequest(
            tensors=_WatchedMapping(tensors, harm.planning), options=SaveOptions(max_shard_size=LIMIT)
        )
        return lambda: save_together(request, place_to_save(directory), _second_time(harm.written))

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


BEFORE = 0
"""What all values are before a load."""


class LoadModelCall(StateDictCall):
    """`load_model` into a model under FSDP2, one of whose layers takes in its tensors by a hook."""

    may_be_half = True
    """Whether some values may be those of the checkpoint, when the call fails after all ranks have confirmed it."""

    def __init__(self) -> None:
        self.values: Callable[[], set[int]] = lambda: {BEFORE}

    def ready(self, directory: Path, number: int, harm: Harm) -> Does:
        """Build what is loaded into."""
        import hfshard

        model = self._model(harm)
        return lambda: hfshard.load_model(model, directory)

    def save_alone(self, directory: Path, number: int) -> None:
        import hfshard

        hfshard.save_model(built_layers(number), directory, max_shard_size=LIMIT)

    def found(self, directory: Path) -> int:
        import hfshard

        model = built_layers(BEFORE)
        hfshard.load_model(model, directory, verify="full")
        [number] = _values_of_model(model)
        return number

    def _model(self, harm: Harm) -> Any:
        model = built_layers(BEFORE)
        shard(model, model)
        model[-1].register_load_state_dict_pre_hook(lambda *_: harm.assigning())
        self.values = lambda: _values_of_model(model)
        return model


class LoadLikeCall(LoadModelCall):
    """`load_state_dict(like=)`."""

    may_be_half = False

    def ready(self, directory: Path, number: int, harm: Harm) -> Does:
        import hfshard

        like = self._model(harm).state_dict()
        loaded: dict[str, Any] = {}
        self.values = lambda: {value for tensor in (loaded or like).values() for value in values(tensor)}
        return lambda: loaded.update(hfshard.load_state_dict(directory, like=like))


class RestoreCall(ManagerCall):
    """`CheckpointManager.restore`."""

    may_be_half = False

    def __init__(self, *, is_spread: bool = True) -> None:
        super().__init__(is_spread=is_spread)
        self.values: Callable[[], set[int]] = lambda: {BEFORE}

    def ready(self, directory: Path, number: int, harm: Harm) -> Does:
        """Build what is restored."""
        from hfshard.training import CheckpointManager

        state = self._state(BEFORE, harm)
        self.values = lambda: values_of_state(state)
        return lambda: CheckpointManager(directory).restore(state)


Call = StateDictCall | ManagerCall
Load = LoadModelCall | RestoreCall

CALLS: dict[str, Call] = {
    "state_dict": StateDictCall(),
    "pretrained": PretrainedCall(),
    "manager": ManagerCall(),
    "async": ManagerCall(blocking=False),
    "ddp": ManagerCall(is_spread=False),
    "dcp": DcpCall(),
    "load_model": LoadModelCall(),
    "load_like": LoadLikeCall(),
    "restore": RestoreCall(),
    "ddp_restore": RestoreCall(is_spread=False),
}


def warm(place: Path, names: Collection[str]) -> None:
    """Make some of the calls once, so that no fork has to import what they need."""
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401

    import hfshard.distributed.save_on_ranks
    import hfshard.training.spread_save  # noqa: F401

    for name in names:
        call = CALLS[name]
        call.save_alone(place / name, 1)
        assert (call.found(place / name), call.litter(place / name)) == (1, [])


def _values_of_model(model: Any) -> set[int]:
    return {value for parameter in model.parameters() for value in values(parameter)}


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


_GROUP_SECONDS = timedelta(seconds=100)


def join(port: int, rank: int, world_size: int, *, keeps_store: bool | None = None, file: Path | None = None) -> None:
    """Join a gloo group; rank 0 keeps the store, unless told otherwise.

    The store's thread makes no calls that are counted among those of files, as libuv does.

    Args:
        port: Of the store; 0: it is a file.
        rank: This one.
        world_size: How many there are.
        keeps_store: Whether this one keeps the store; None: rank 0 does.
        file: The store, where there is no port.
    """
    is_master = rank == 0 if keeps_store is None else keeps_store
    kind: Any = dist.FileStore  # type: ignore[attr-defined]  # torch lists it in its documentation only
    store = _store(port, is_master) if port else kind(str(file), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_GROUP_SECONDS)


def keep_store(port: int) -> None:
    """Keep the store for others, until a signal comes."""
    store = _store(port, is_master=True)
    while store is not None:
        signal.pause()


def _store(port: int, is_master: bool) -> Any:
    kind: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch lists it in its documentation only
    return kind("127.0.0.1", port, is_master=is_master, timeout=_GROUP_SECONDS, wait_for_workers=False, use_libuv=False)
