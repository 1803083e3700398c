"""The calls by which ranks load together, into models whose values tell that they are as they were."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from tests.crash.ranks.calls import LIMIT, DcpCall, ManagerCall, PretrainedCall, StateDictCall
from tests.crash.ranks.models import Does, Harm, built_layers, shard, values, values_of_state

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
        """As its base does."""
        import hfshard

        hfshard.save_model(built_layers(number), directory, max_shard_size=LIMIT)

    def found(self, directory: Path) -> int:
        """As its base does."""
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
        """As its base does."""
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
