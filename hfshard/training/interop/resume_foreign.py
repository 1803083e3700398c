"""Resume a run from another program's checkpoint: on all ranks, or on none."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from hfshard._util.call_ranks import Session
from hfshard._util.text import shorten_list
from hfshard.errors import (
    CheckpointChangedError,
    DamagedCheckpointError,
    HfshardError,
    InvalidArgumentError,
    StateDictMismatchError,
)
from hfshard.pickles.plain_values import NotStored
from hfshard.tensors.parameter_names import match_prefixes
from hfshard.tensors.state_dict import collect_state_dict
from hfshard.training.data.dataloader import ResumableDataLoader
from hfshard.training.data.external_loader import LoaderTracker
from hfshard.training.interop.foreign_checkpoint import ForeignCheckpoint, ForeignRequest
from hfshard.training.interop.foreign_optimizer import named_optimizer_state
from hfshard.training.interop.foreign_readers import is_partitioned_directory, reader_of
from hfshard.training.interop.named_run import NamedRun, is_unread
from hfshard.training.pipeline_stages import find_stage
from hfshard.training.restoring.part_planner import (
    PART_ORDER,
    PartPlanner,
    Restoration,
    check_components,
    unsaved_components,
)
from hfshard.training.restoring.spread_read import StateLayouts
from hfshard.training.run.find_checkpoint import Level
from hfshard.training.state.nested import find_in
from hfshard.training.state.rng import check_rng_state, set_rng_state
from hfshard.training.state.step import RestoredStep
from hfshard.training.state.training_state import TrainingState, is_spread_state, name_prefix

logger = logging.getLogger(__name__)

_SHOWN = 20


@torch.inference_mode(False)  # what is restored will be trained
def resume_foreign(
    state: TrainingState,
    place: str,
    *,
    keys: Mapping[str, str] | None,
    strict: bool,
    verify: Level,
    session: Session,
    must_be_signed: bool = False,
) -> RestoredStep | None:
    """Restore another program's checkpoint. Every rank must call, and must see the same files.

    Args:
        state: It is changed if every rank can restore it.
        place: The requested place; the first rank's decides whether it is another program's.
        keys: Name of a part -> where its state is; None: under the usual keys.
        strict, verify: As in `CheckpointManager.restore`.
        session: That of the ranks that restore.
        must_be_signed: Reject it, because such files have no signature to check.

    Returns:
        The step; None if the place is not another program's.

    Raises:
        InvalidArgumentError: The state is spread over ranks, and what is restored is by position; or it must be signed.
        UnsafePickleError, StateDictMismatchError, DamagedCheckpointError: Nothing was changed.
        RankFailedError: Another rank has one of these errors; nothing was changed.
    """
    reader = session.each(lambda: reader_of(place))
    is_foreign = session.all_of(reader is not None)
    if not any(is_foreign):
        return None
    differing = InvalidArgumentError(f"All ranks must restore the same place, but this one got {place!r:.500}.")
    session.agree(None if all(is_foreign) else differing)
    if must_be_signed:
        raise InvalidArgumentError(
            f"public_key is only for hfshard checkpoints, but {place!r:.500} is another program's. Check it with "
            "model_signing verify, and leave out the key."
        )
    assert reader is not None  # every rank has one
    is_spread = any(session.all_of(session.each(lambda: is_spread_state(state))))
    stage = None if session.is_alone else find_stage(state, session)
    is_stage = stage is not None and stage.names.own != stage.names.everywhere
    has_names = is_partitioned_directory(place)
    if any(session.all_of(is_stage or (is_spread and not has_names))):
        raise InvalidArgumentError(
            f"'{place}' is another program's checkpoint, but the model is spread over ranks. Restore it in one "
            "process, with the whole model: manager.restore(state, path); manager.save(step, state). Then restore that "
            "step on all ranks.",
            path=place,
        )
    request = ForeignRequest(state.kinds, keys or {}, strict, verify, session.position, session.world_size)

    def planned() -> tuple[ForeignCheckpoint, Restoration, str]:
        foreign = with_positions(reader(place, request), state)
        restoration = plan_foreign(state, foreign, strict=strict, layouts=StateLayouts(state) if is_spread else None)
        foreign.confirm()
        return foreign, restoration, foreign.fingerprint()

    foreign, restoration, fingerprint = session.each(planned)
    if len(set(session.all_of(fingerprint))) > 1:
        raise CheckpointChangedError(
            f"The ranks see different files in '{place}'. Nothing was restored. Make all ranks see the same files.",
            path=place,
        )
    if restoration.lacking:
        logger.warning("'%s' lacks %s.", place, shorten_list(restoration.lacking, _SHOWN))
    restoration.apply(session)
    return restoration.restored(foreign.step or 0, foreign.path, {})


# Comparison of another program's checkpoint with a training state, by the checks for an hfshard checkpoint.


def plan_foreign(
    state: TrainingState, foreign: ForeignCheckpoint, *, strict: bool, layouts: StateLayouts | None = None
) -> Restoration:
    """Compare another program's checkpoint with a training state, which is not changed.

    What such a file never has is no difference: random number generators, a loader's position, gradients.

    Args:
        state: Built as for the run that was saved.
        foreign: What a reader returned for its checkpoint.
        strict: Reject any difference; else what differs stays as it was built, and is reported.
        layouts: Those of a state that is spread over ranks; only for a checkpoint whose tensors are by name.

    Raises:
        StateDictMismatchError: strict, and something differs.
        DamagedCheckpointError: The state of a part is not what such a part saves.
    """
    absent = unsaved_components(state) - foreign.components.keys()
    restoration = Restoration(
        directory=foreign.path,
        extra=foreign.extra,
        differences=list(foreign.differences),
        lacking=foreign.lacking + tuple(f"the state of '{name}'" for name in state.components if name in absent),
    )
    kinds: dict[str, Any] = dict(state.kinds)
    saved = {name: {"kind": kinds.get(name), "state": value} for name, value in foreign.components.items()}
    check_components(state, saved, restoration, (), strict=strict, may_lack=unsaved_components(state))
    planner = PartPlanner(state, saved, restoration, strict=strict)
    common = [name for name in state.components if name in saved]
    for name in sorted(common, key=lambda name: PART_ORDER[state.kinds[name]]):
        _plan(planner, name, foreign, layouts)
    restoration.follow(state, common)
    if foreign.rng is not None:
        rng = foreign.rng
        check_rng_state(rng, foreign.path)
        restoration.set_rng = lambda: set_rng_state(rng)
    return restoration


def _plan(planner: PartPlanner, name: str, foreign: ForeignCheckpoint, layouts: StateLayouts | None) -> None:
    """Convert the state of one part to hfshard's form, and plan it."""
    part = planner.state.components[name]
    kind = planner.state.kinds[name]
    value = foreign.components[name]
    try:
        if kind != "scheduler" and (place := find_in(value, lambda one: isinstance(one, NotStored))) is not None:
            raise StateDictMismatchError(
                f"'{name}' was left as built: '{place}' in its state in '{foreign.path}' was not read.",
                path=foreign.path,
            )
        if kind == "optimizer":
            kept_of = _kept_names(planner.state)
            in_file = list(dict.fromkeys(_names_in_file(planner.state, foreign, kept_of))) if foreign.has_order else []
            value = named_optimizer_state(part, value, planner.parameter_names, kept_of, in_file, name, foreign.path)
            if foreign.named is not None:
                value["state"] = _read_slots(foreign.named, name, value["state"], layouts)
        elif kind == "scheduler":
            value = {"class": None, "state": dict(value)}
        elif kind == "module" and foreign.named is not None:
            own = collect_state_dict(part)
            names = match_prefixes(value, own.keys())
            value = foreign.named.read(name, {names[before]: one for before, one in value.items()}, layouts)
            value = {key: _as_wide(tensor, own.get(key)) for key, tensor in value.items()}
            _reject_narrow(value, own, foreign)
        planner.saved[name]["state"] = value
        planner.plan(name, value)
    except HfshardError as error:
        if planner.strict or not isinstance(error, StateDictMismatchError):
            raise
        planner.restoration.differences.append(error.message)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DamagedCheckpointError(
            f"'{foreign.path}' is damaged: its '{name}' is not what a {type(part).__name__} saves ({error!r:.200}). "
            "Use another checkpoint, or leave this part out of the TrainingState.",
            path=foreign.path,
        ) from error


def _read_slots(
    run: NamedRun, base: str, state: Mapping[str, Mapping[str, Any]], layouts: StateLayouts | None
) -> dict[str, dict[str, Any]]:
    """Read the tensors of an optimizer's state: this rank's part of each."""
    unread = {(name, slot): one for name, slots in state.items() for slot, one in slots.items() if is_unread(one)}
    found = run.read(base, {f"{name}/{slot}": one for (name, slot), one in unread.items()}, layouts)
    read = {place: found["/".join(place)] for place in unread}
    return {name: {slot: read.get((name, slot), one) for slot, one in slots.items()} for name, slots in state.items()}


def _as_wide(tensor: torch.Tensor, own: Any) -> torch.Tensor:
    """Cast a frozen weight of 16 bits, as frameworks train with, to the float32 of a model: no value changes."""
    is_float = isinstance(own, torch.Tensor) and own.is_floating_point() and tensor.is_floating_point()
    return tensor.to(own.dtype) if is_float and torch.promote_types(tensor.dtype, own.dtype) == own.dtype else tensor


def _reject_narrow(tensors: Mapping[str, torch.Tensor], own: Mapping[str, Any], foreign: ForeignCheckpoint) -> None:
    """Reject a model with fewer bits than the masters, which is another one than was trained."""
    for name, tensor in tensors.items():
        now = own[name].dtype if isinstance(own.get(name), torch.Tensor) else tensor.dtype
        if tensor.is_floating_point() and now.is_floating_point and now.itemsize < tensor.dtype.itemsize:
            raise StateDictMismatchError(
                f"'{foreign.path}' has '{name}' as {tensor.dtype}, of which the 16 bits that were trained with are a "
                f"copy, but the model has {now}. Nothing was restored. Restore into model.float(), and train with "
                "autocast.",
                path=foreign.path,
                fqn=name,
                expected=tensor.dtype,
                actual=now,
            )


def _kept_names(state: TrainingState) -> dict[str, str]:
    """Return each name of a tied parameter -> the one by which optimizers know it."""
    known = set(state.parameter_names().values())
    return {name: kept for names in state.tied_parameters() for kept in known.intersection(names) for name in names}


def _names_in_file(state: TrainingState, foreign: ForeignCheckpoint, kept_of: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of parameters, as optimizers know them, in the order in which the file has the weights."""
    known = set(state.parameter_names().values())
    for component, module in state.of_kind("module").items():
        tensors = foreign.components.get(component)
        if not isinstance(tensors, Mapping):
            continue
        names = [name for name, value in tensors.items() if isinstance(value, torch.Tensor)]
        matched = match_prefixes(names, collect_state_dict(module).keys())
        full = [name_prefix(component) + matched[name] for name in names]
        yield from (own for name in full if (own := kept_of.get(name, name)) in known)


# Position of a data loader, from the epochs that another program counted.


_NEAR: Final = 1e-6
"""A fraction of a batch: epochs are a float64, whose fraction is rounded."""


def with_positions(foreign: ForeignCheckpoint, state: TrainingState) -> ForeignCheckpoint:
    """Convert the positions of loaders to hfshard's form; a number of epochs is enough.

    Args:
        foreign: It is not changed.
        state: The state that is restored; it is not changed either.
    """
    components = dict(foreign.components)
    lacking = list(foreign.lacking)
    for name, loader in state.of_kind("loader").items():
        if name in components and isinstance(loader, LoaderTracker):
            components[name] = loader.with_state(components[name])
        elif name not in components and foreign.epochs is not None and isinstance(loader, ResumableDataLoader):
            position, missing = position_after(loader, foreign.epochs)
            components |= {name: position} if position is not None else {}
            lacking += [missing] if missing else []
    return replace(foreign, components=components, lacking=tuple(lacking))


def position_after(loader: ResumableDataLoader[Any], epochs: float) -> tuple[dict[str, Any] | None, str]:
    """Find the state in which a loader continues after a number of epochs, whole ones and a part of one.

        state, lacking = position_after(loader, 1.25)  # of 8 batches: the third one of the second epoch comes next

    Args:
        loader: It is not changed.
        epochs: The number of epochs that the run has trained.

    Returns:
        The state for its `load_state_dict`, and a description of what is missing for its batches to equal the run's; no
        state if the position does not fit this loader.
    """
    state = loader.state_dict()
    batches = state["batches"]
    epoch = int(epochs)
    exact = (epochs - epoch) * (batches or 0)
    batch = round(exact)
    if not batches or abs(exact - batch) > _NEAR * batches:
        return None, f"batches like this loader's, of which {epochs:.6g} epochs are no whole number"
    if batch == batches:
        epoch, batch = epoch + 1, 0
    lacking = (
        "" if state["sampler"] == "SequentialSampler" else "the order of shuffled data, which is this loader's own"
    )
    return {**state, "epoch": epoch, "batch": batch, "indexes_crc32": None}, lacking
