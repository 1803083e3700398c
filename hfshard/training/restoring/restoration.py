"""Read one checkpoint, compare all of it with a training state, and only then change that state."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from hfshard._util.call_ranks import Session
from hfshard.checkpoint.folder import Folder
from hfshard.checkpoint.load_options import read_tensors
from hfshard.checkpoint.open_checkpoint import open_checkpoint
from hfshard.constants import MAX_INDEX_BYTES
from hfshard.errors import DamagedCheckpointError, HfshardError
from hfshard.format.file_names import MODEL_BASE, WeightNames
from hfshard.format.index import Verify
from hfshard.format.strict_json import parse_json_object
from hfshard.training.pipeline_stages import StageNames
from hfshard.training.restoring.part_planner import (
    PART_ORDER,
    PartPlanner,
    Restoration,
    check_components,
    match_gradient_kind,
    parts_of_other_ranks,
    take_converted,
    unsaved_components,
)
from hfshard.training.restoring.spread_read import StateLayouts, read_local_parts
from hfshard.training.run.manifest import TRAINING_STATE, CheckpointManifest
from hfshard.training.state.collect_state import STATE_BASE, TRAINING_STATE_FORMAT
from hfshard.training.state.flat_optimizer import with_flat_groups
from hfshard.training.state.nested import as_damage_of, decode, tensor_names
from hfshard.training.state.optimizer import trained_parameters
from hfshard.training.state.rng import check_rng_state, reject_unreduced, seed_from_state, set_rng_state
from hfshard.training.state.training_state import TrainingState

logger = logging.getLogger(__name__)

_REMEDY = "Restore another checkpoint, or download it again."


def plan_restoration(
    state: TrainingState,
    folder: Folder,
    manifest: CheckpointManifest,
    *,
    strict: bool,
    is_spread: bool,
    session: Session,
    stage: StageNames | None = None,
    without: Collection[str] = (),
) -> Restoration:
    """Read a checkpoint whose files were checked, and compare it with a training state, which is not changed.

    Args:
        state: Built as for the run that was saved.
        folder: The checkpoint's folder.
        manifest: The checkpoint's manifest.
        strict: Reject any difference; else what differs stays as it was built, and is reported.
        is_spread: Whether the state is spread over ranks: then this rank's parts are read.
        session: That of the ranks that restore.
        stage: The names that its modules have, if other ranks have the rest; None: all.
        without: Parts of the checkpoint to leave out; they were removed from the state already.

    Raises:
        StateDictMismatchError: strict, and something differs.
        DamagedCheckpointError: The files are not what hfshard writes.
        InvalidArgumentError: A module has gradients that are not reduced over the ranks yet.
    """
    for module in state.of_kind("module").values():
        reject_unreduced(module, "restore")
    directory = folder.path
    path = os.path.join(directory, TRAINING_STATE)
    saved_state = _parse_training_state(folder.read_small(TRAINING_STATE, MAX_INDEX_BYTES), path)
    saved_ranks = saved_state["ranks"]
    own_rank = session.position if session.position < len(saved_ranks) else 0
    own = saved_ranks[own_rank]
    components = {**saved_state["components"], **own["components"]}
    saved = {name: entry for name, entry in components.items() if name not in without}
    if state.is_flattened:
        saved = with_flat_groups(state, saved)
    match_gradient_kind(state, saved, 1 if "stage" in own else len(saved_ranks), 1 if stage else session.world_size)
    restoration = Restoration(directory=directory, lacking=tuple(saved_state.get("lacking", ())))
    if restoration.lacking:
        take_converted(state, saved)
    elsewhere = parts_of_other_ranks(state, own, is_same_number=len(saved_ranks) == session.world_size)
    may_lack = unsaved_components(state) if restoration.lacking else frozenset[str]()
    check_components(state, saved, restoration, elsewhere, strict=strict, may_lack=may_lack)
    read = partial(read_set, folder, manifest, own_rank, StateLayouts(state) if is_spread else None)
    wanted = None
    if stage is not None:
        saved = stage.of_this_rank(saved, path)
        wanted = _names_in([saved, own["rng"], own.get("buffers"), saved_state["extra"]], path).__contains__
    tensors = read(STATE_BASE, wanted)
    planner = PartPlanner(state, saved, restoration, strict=strict)
    if (
        stage is None
        and len(saved_ranks) != session.world_size
        and ("buffers" in own or any(saved[name].get("kind") != "loader" for name in own["components"].keys() & saved))
    ):
        logger.warning(
            "The checkpoint '%s' has separate buffers and objects for %d ranks, but there are %d here: additional "
            "ranks get the first one's.",
            directory,
            len(saved_ranks),
            session.world_size,
        )
    common = [
        name
        for name in state.components
        if name in saved and saved[name].get("kind") == state.kinds[name] and name not in elsewhere
    ]
    for name in sorted(common, key=lambda name: PART_ORDER[state.kinds[name]]):
        _plan_component(planner, name, read, path, tensors, stage, own.get("buffers"))
    rng, restoration.extra = decode([own["rng"], saved_state["extra"]], tensors, path)
    restoration.follow(state, common)
    if rng is not None or not restoration.lacking:
        check_rng_state(rng, path)
        restoration.set_rng = _rng_update(rng, len(saved_ranks), session, directory)
    return restoration


# The tensors of the checkpoint, one set of files after another.


def read_set(
    folder: Folder,
    manifest: CheckpointManifest,
    own_rank: int,
    layouts: StateLayouts | None,
    base: str,
    is_wanted: Callable[[str], bool] | None = None,
    *,
    is_copied: bool = False,
) -> dict[str, torch.Tensor]:
    """Read the tensors of one set of files, by name.

    Tensors with which the training continues are read into memory: a mapped file would keep its disk space after its
    checkpoint was removed by rotation.

    Args:
        folder: The checkpoint's folder.
        manifest: The checkpoint's manifest.
        own_rank: The rank whose own random numbers and positions are read.
        layouts: Those of a state that is spread over ranks, of which this rank's parts are read.
        base: The set.
        is_wanted: Selects names; None: all.
        is_copied: Whether the tensors are only copied from, and may be mapped files.
    """
    verify: Verify = "full" if folder.traits.verifies_reads else "structure"
    names = WeightNames(base=base)
    entry = next((name for name in (names.single, names.index) if name in manifest.files), None)
    if entry is None:
        return {}
    with open_checkpoint(folder, use_safetensors=True, base=base, weights_name=entry, verify=verify) as checkpoint:
        if layouts is not None:
            return read_local_parts(checkpoint, base, layouts, own_rank, is_wanted)
        return read_tensors(checkpoint, is_wanted, "cpu", "auto" if is_copied else "pread")


def _plan_component(
    planner: PartPlanner,
    name: str,
    read: Callable[..., dict[str, torch.Tensor]],
    path: str,
    tensors: Mapping[str, torch.Tensor],
    stage: StageNames | None,
    buffers: Any,
) -> None:
    """Decode the saved state of one component, and plan it.

    Args:
        planner, name, path, stage: The plan's; the path is that of the training state.
        read: `read_set`, for this checkpoint.
        tensors: Those of `STATE_BASE`.
        buffers: Buffers that this rank has saved for itself, encoded, by the names of their modules; or None.
    """
    saved = planner.saved[name]["state"]
    if name == planner.state.kinds[name] == "optimizer":
        is_wanted = None if stage is None else _names_in(saved, path).__contains__
        parameters = trained_parameters(planner.state.components[name])
        is_copied = all(one.device.type != "cpu" for one in parameters)  # then all of the state is copied elsewhere
        tensors = {**tensors, **read(name, is_wanted, is_copied=is_copied)}
    value = decode(saved, tensors, path)
    try:
        if name == "model":
            is_here = None if stage is None else partial(stage.is_here, name)
            value |= read(MODEL_BASE, is_here, is_copied=True)
        if buffers is not None and planner.state.kinds[name] == "module":
            own = decode(buffers, tensors, path).get(name, {})
            value |= {key: one for key, one in own.items() if stage is None or stage.is_here(name, key)}
        planner.plan(name, value)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, HfshardError):
            raise
        raise DamagedCheckpointError(
            f"'{path}' is damaged: the state of '{name}' is not what hfshard writes ({error!r:.200}). {_REMEDY}",
            path=path,
        ) from error


def _rng_update(rng: dict[str, Any], saved_ranks: int, session: Session, directory: str) -> Callable[[], None]:
    if saved_ranks == session.world_size:
        return lambda: set_rng_state(rng)

    def update() -> None:
        logger.warning(
            "The checkpoint '%s' was saved by %d ranks, but there are %d here: their random number generators are "
            "seeded from it, the same way each time.",
            directory,
            saved_ranks,
            session.world_size,
        )
        seed_from_state(rng, session.position, session.world_size)

    return update


def _parse_training_state(raw: bytes, path: str) -> dict[str, Any]:
    saved_state = parse_json_object(raw, path=path, what="Training state", remedy=_REMEDY)
    if saved_state.get("format") != TRAINING_STATE_FORMAT:
        raise DamagedCheckpointError(
            f"'{path}' has format {saved_state.get('format')!r:.50}, but this version reads {TRAINING_STATE_FORMAT}. "
            "Run: pip install --upgrade hfshard",
            path=path,
        )
    ranks = saved_state.get("ranks")
    is_whole = "extra" in saved_state and isinstance(ranks, list) and len(ranks) > 0
    parts = [saved_state, *(ranks or [])] if is_whole else []
    for part in parts:
        components = part.get("components") if isinstance(part, dict) else None
        is_whole = is_whole and isinstance(components, dict) and (part is saved_state or "rng" in part)
        is_whole = is_whole and all(isinstance(one, dict) and "state" in one for one in (components or {}).values())
    lacking = saved_state.get("lacking", [])
    is_whole = is_whole and isinstance(lacking, list) and all(isinstance(words, str) for words in lacking)
    if not is_whole:
        raise DamagedCheckpointError(f"'{path}' is damaged: it lacks a component's state. {_REMEDY}", path=path)
    return saved_state


def _names_in(nested: Any, path: str) -> frozenset[str]:
    with as_damage_of(path):
        return frozenset(tensor_names(nested))
