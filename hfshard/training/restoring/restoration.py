"""Restores a training state from one checkpoint: check every byte, read, plan everything, and only then assign."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hfshard.constants import MAX_INDEX_BYTES
from hfshard.errors import DamagedCheckpointError, HfshardError, StateDictMismatchError
from hfshard.loading.into_module import match_to_model
from hfshard.loading.reading import read_tensors
from hfshard.state_dicts.state_dict import assign, collect_state_dict, unwrap
from hfshard.state_dicts.tied import find_shared_tensors
from hfshard.storage.checkpoint.checkpoint import open_checkpoint
from hfshard.storage.disk.safe_open import read_small
from hfshard.storage.format.names import MODEL_BASE, WeightNames
from hfshard.storage.format.strict_json import parse_json_object
from hfshard.training.collecting import TRAINING_STATE_FORMAT
from hfshard.training.data.external_loader import LoaderTracker
from hfshard.training.parts.gradients import Gradients
from hfshard.training.parts.nested import decode
from hfshard.training.parts.optimizer import plan_optimizer
from hfshard.training.parts.pending_loads import PendingLoad, StatefulLoad, load_all
from hfshard.training.parts.rng import check_rng_state, seed_from_state, set_rng_state
from hfshard.training.parts.scheduler import plan_scheduler
from hfshard.training.ranks import ALONE, Ranks
from hfshard.training.run.manifest import CheckpointManifest
from hfshard.training.run.writing import TRAINING_STATE
from hfshard.training.state import PartKind, TrainingState

logger = logging.getLogger(__name__)

_REMEDY = "Restore another checkpoint, or download it again."

_ORDER: Mapping[PartKind, int] = {"module": 0, "optimizer": 1, "scheduler": 2, "stateful": 3, "loader": 3}
"""What is looked at when: where a model is another one, its optimizer is too, and the model's error says more."""


@dataclass
class Restoration:
    """A checkpoint that was read and compared with a training state, and what remains to be done."""

    pending_loads: list[PendingLoad] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    """What does not fit, in words; with strict nothing is restored then."""
    objects: list[StatefulLoad] = field(default_factory=list)
    """Of the user's own, which may refuse."""
    extra: Any = None
    set_rng: Callable[[], None] = lambda: None
    directory: str = ""
    without_gradients: list[nn.Parameter] = field(default_factory=list)
    trackers: list[LoaderTracker] = field(default_factory=list)
    """Loaders that are not ours: their next `iter()` draws, and what it draws is put back."""

    def apply(self) -> None:
        """Load everything; the random number generators last.

        Raises:
            StateDictMismatchError: Something refused; nothing was changed, but where a model's own hook refuses its
                weights: that is said.
        """
        load_all(self.objects, self.pending_loads, self.directory)
        for parameter in self.without_gradients:
            parameter.grad = None  # of a step that is not the one that is resumed
        self.set_rng()
        for tracker in self.trackers:
            tracker.reset(self.set_rng)


def plan_restoration(
    state: TrainingState, directory: str, manifest: CheckpointManifest, *, strict: bool, ranks: Ranks = ALONE
) -> Restoration:
    """Read a checkpoint whose files were checked, and compare it with a training state, which is not changed.

    Args:
        state: Built as for the run that was saved.
        directory: The checkpoint's.
        manifest: Its own.
        strict: Refuse any difference; else what differs stays as it was built, and is reported.
        ranks: Which one this process is.

    Raises:
        StateDictMismatchError: strict, and something differs.
        DamagedCheckpointError: The files are not what hfshard writes.
    """
    path = os.path.join(directory, TRAINING_STATE)
    saved_state = _read_training_state(path, directory)
    own = saved_state["ranks"][ranks.rank if ranks.rank < len(saved_state["ranks"]) else 0]
    saved = {**saved_state["components"], **own["components"]}
    restoration = Restoration(directory=directory)
    _check_components(state, saved, directory, restoration, strict=strict)
    rest, names = _part(directory, manifest, "state"), state.parameter_names()
    kinds = state.kinds
    common = [name for name in state.components if name in saved and saved[name].get("kind") == kinds[name]]
    for name in sorted(common, key=lambda name: _ORDER[state.kinds[name]]):
        part, kind = state.components[name], state.kinds[name]
        held = rest
        if name == "optimizer":
            held = _part(directory, manifest, name, is_copied=_is_on_accelerators(part))
        value = decode(saved[name]["state"], held, path)
        try:
            if name == "model":
                value |= _part(directory, manifest, MODEL_BASE, is_copied=True)
            if kind in ("stateful", "loader"):
                _check_object(name, part, value, directory)
                restoration.objects.append(StatefulLoad(name, part, value, directory))
            else:
                restoration.pending_loads.append(_plan(name, kind, part, value, names, directory, restoration, strict))
        except HfshardError as error:
            if strict or not isinstance(error, StateDictMismatchError):
                raise
            restoration.differences.append(error.message)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise DamagedCheckpointError(
                f"'{path}' is damaged: the state of '{name}' is not what hfshard writes ({error!r:.200}). {_REMEDY}",
                path=path,
            ) from error
    rng, restoration.extra = decode([own["rng"], saved_state["extra"]], rest, path)
    check_rng_state(rng, path)
    restoration.trackers = [one for name in common if isinstance(one := state.components[name], LoaderTracker)]
    if not any(isinstance(part, Gradients) for part in state.components.values()):
        modules = [state.components[name] for name in common if kinds[name] == "module"]
        restoration.without_gradients = [parameter for module in modules for parameter in module.parameters()]
    restoration.set_rng = _rng_update(rng, len(saved_state["ranks"]), ranks, directory)
    return restoration


def _is_on_accelerators(optimizer: Optimizer) -> bool:
    """Whether none of the parameters is in host memory, so that all of the state is copied to where they are."""
    return all(one.device.type != "cpu" for group in optimizer.param_groups for one in group["params"])


def _rng_update(rng: dict[str, Any], saved_ranks: int, ranks: Ranks, directory: str) -> Callable[[], None]:
    if saved_ranks == ranks.world_size:
        return lambda: set_rng_state(rng)

    def update() -> None:
        logger.warning(
            "The checkpoint '%s' is of %d ranks, and here are %d: their random number generators are seeded anew, "
            "the same way each time.",
            directory,
            saved_ranks,
            ranks.world_size,
        )
        seed_from_state(rng, ranks.rank, ranks.world_size)

    return update


def _read_training_state(path: str, directory: str) -> dict[str, Any]:
    saved_state = parse_json_object(
        read_small(path, directory, MAX_INDEX_BYTES)[0], path=path, what="Training state", remedy=_REMEDY
    )
    if saved_state.get("format") != TRAINING_STATE_FORMAT:
        raise DamagedCheckpointError(
            f"'{path}' is of format {saved_state.get('format')!r:.50}, and this hfshard reads {TRAINING_STATE_FORMAT}. "
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
    if not is_whole:
        raise DamagedCheckpointError(f"'{path}' is damaged: it lacks a component's state. {_REMEDY}", path=path)
    return saved_state


def _part(
    directory: str, manifest: CheckpointManifest, base: str, *, is_copied: bool = False
) -> dict[str, torch.Tensor]:
    """The tensors of one set; in memory of their own where they are to be kept, and not only copied from.

    A mapped file would keep its space on the disk when it is rotated away.
    """
    names = WeightNames(base=base)
    entry = next((name for name in (names.single, names.index) if name in manifest.files), None)
    if entry is None:
        return {}
    with open_checkpoint(directory, use_safetensors=True, base=base, weights_name=entry) as checkpoint:
        return read_tensors(checkpoint, None, "cpu", "auto" if is_copied else "pread")


def _check_components(
    state: TrainingState, saved: Mapping[str, Any], directory: str, restoration: Restoration, *, strict: bool
) -> None:
    for name in state.components:
        if name not in saved:
            restoration.differences.append(
                f"The checkpoint '{directory}' has no '{name}'. Build the state without it, or pass strict=False to "
                "leave it as it was built."
            )
        elif saved[name].get("kind") != state.kinds[name]:
            kind, now = saved[name].get("kind"), state.kinds[name]
            restoration.differences.append(
                f"'{name}' was of the kind {kind!r:.50} in '{directory}', and is a {now}. Pass what it was, or "
                "strict=False to leave it as it was built."
            )
    for name in saved:
        if name not in state.components:
            restoration.differences.append(
                f"The checkpoint '{directory}' has the state of '{name}', which the TrainingState lacks. "
                f"Pass {name}=..., or strict=False to leave it out."
            )
    if strict and restoration.differences:
        missing = tuple(name for name in state.components if name not in saved)
        unexpected = tuple(name for name in saved if name not in state.components)
        raise StateDictMismatchError(
            " ".join(restoration.differences) + " Nothing was restored.",
            path=directory,
            missing_keys=missing,
            unexpected_keys=unexpected,
        )


def _plan(
    name: str,
    kind: PartKind,
    part: Any,
    value: Any,
    names: Mapping[int, str],
    directory: str,
    restoration: Restoration,
    strict: bool,
) -> PendingLoad:
    if kind == "module":
        return _plan_module(name, part, value, directory, restoration, strict=strict)
    if kind == "optimizer":
        return plan_optimizer(part, value, names, name, directory)
    return plan_scheduler(part, value, name, directory)


def _plan_module(
    name: str, module: nn.Module, saved: dict[str, Any], directory: str, restoration: Restoration, *, strict: bool
) -> PendingLoad:
    module, own = unwrap(module), collect_state_dict(module)
    _refuse_untied(name, saved, own, directory)
    tensors, difference = match_to_model(saved, own)
    ignored = getattr(module, "_keys_to_ignore_on_save", None) or ()
    missing = tuple(key for key in difference.missing if key not in ignored)
    dtypes = [
        f"{key} was {tensor.dtype}, and is {own[key].dtype}"
        for key, tensor in tensors.items()
        if isinstance(own.get(key), torch.Tensor) and isinstance(tensor, torch.Tensor)
        if own[key].dtype != tensor.dtype
    ]
    if missing or difference.unexpected or difference.mismatched or dtypes:
        parts = [text for text in (difference.summary(), "; ".join(dtypes[:5])) if text]
        message = (
            f"'{name}' does not fit the checkpoint '{directory}': {'; '.join(parts)}. "
            "Build it as in the run that was saved, or pass strict=False to load what fits."
        )
        if strict:
            raise StateDictMismatchError(
                message + " Nothing was restored.",
                path=directory,
                missing_keys=missing,
                unexpected_keys=difference.unexpected,
                mismatched_keys=difference.mismatched,
            )
        restoration.differences.append(message)
        shaped = {key for key, _, _ in difference.mismatched}
        tensors = {key: tensor for key, tensor in tensors.items() if key in own and key not in shaped}
    return PendingLoad(name, lambda: assign(module, tensors))


def _refuse_untied(name: str, saved: Mapping[str, Any], own: Mapping[str, Any], directory: str) -> None:
    """Of two different tensors, one would be lost where the model has one for both."""
    for alias, kept in find_shared_tensors(own).items():
        if alias not in saved or kept not in saved or saved[alias] is saved[kept]:
            continue
        if not torch.equal(saved[alias], saved[kept]):
            raise StateDictMismatchError(
                f"'{alias}' and '{kept}' of '{name}' are one tensor, and two different ones in the checkpoint "
                f"'{directory}'. Build the model as in the run that was saved (tie_word_embeddings).",
                path=directory,
                fqn=alias,
            )


def _check_object(name: str, part: Any, value: Any, directory: str) -> None:
    if isinstance(part, torch.amp.GradScaler) and part.is_enabled() != bool(value):
        raise StateDictMismatchError(
            f"'{name}' is a GradScaler that is {'on' if part.is_enabled() else 'off'}, and was not when the checkpoint "
            f"'{directory}' was saved. Build it with the enabled= of that run, or pass strict=False.",
            path=directory,
        )
    check = getattr(part, "check_state_dict", None)
    if not callable(check):
        return
    try:
        check(value)
    except StateDictMismatchError as error:
        raise StateDictMismatchError(
            f"'{name}' does not fit the checkpoint '{directory}', and nothing was restored: {error.message}",
            path=directory,
            expected=error.expected,
            actual=error.actual,
        ) from error
