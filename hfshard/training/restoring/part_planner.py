"""Comparison of each part of a training state with its saved state; all parts are applied on every rank, or none."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from hfshard._util.call_ranks import Session
from hfshard._util.text import shorten_list
from hfshard._util.threads import delay_interrupt
from hfshard.checkpoint.into_module import match_names, reject_expanded
from hfshard.errors import DamagedCheckpointError, HfshardError, StateDictMismatchError, UnstorableTensorError
from hfshard.tensors.parameter_names import unwrap
from hfshard.tensors.state_dict import (
    assign,
    is_dtensor,
    local_tensor,
    reject_freed,
    reject_offloaded,
)
from hfshard.training.data.dataloader import ResumableDataLoader
from hfshard.training.data.external_loader import LoaderTracker, kept_attributes
from hfshard.training.run_ranks import stage_digest
from hfshard.training.state.flat_optimizer import local_states
from hfshard.training.state.nested import decode, encode, find_in
from hfshard.training.state.optimizer import (
    group_names,
    link_inner_optimizers,
    match_gradients,
    plan_optimizer,
    regroup,
    reject_sharded_state,
    trained_parameters,
    zero_gradient,
)
from hfshard.training.state.pending_loads import PendingLoad
from hfshard.training.state.reordering import (
    PER_GROUP,
    Reordering,
    held_optimizers,
    is_per_parameter,
    related_positions,
)
from hfshard.training.state.rng import Gradients, rng_state, set_rng_state
from hfshard.training.state.scheduler import plan_scheduler
from hfshard.training.state.step import RestoredStep
from hfshard.training.state.training_state import PartKind, TrainingState, collect_run_tensors
from hfshard.training.state.zero_runs import Masters, assign_run_tensors, keep_parts

logger = logging.getLogger(__name__)

PART_ORDER: Final[Mapping[PartKind, int]] = {"module": 0, "optimizer": 1, "scheduler": 2, "stateful": 3, "loader": 3}
"""The order of comparison: if the model differs, its optimizer does too, and the model's error is clearer."""

Undo = Callable[[], None]
"""Restores the state of a part before a load."""


@dataclass(frozen=True, slots=True)
class StatefulLoad:
    """A user's own object, and the state that it is about to load."""

    name: str
    part: Any
    state: Any
    directory: str
    """The checkpoint's directory, for messages."""

    @property
    def is_copied(self) -> bool:
        """True if `keep` copies the state; False for loaders, of which it notes the position."""
        return not isinstance(self.part, ResumableDataLoader | LoaderTracker)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in the state.

        Raises:
            DamagedCheckpointError: The state is not one that a save writes.
        """
        tensors: dict[str, torch.Tensor] = {}
        try:
            encode(self.state, self.name, tensors)
        except UnstorableTensorError as error:
            raise DamagedCheckpointError(
                f"The state of '{self.name}' in the checkpoint '{self.directory}' is not what hfshard writes: "
                f"{error.message} Restore another checkpoint, or download it again.",
                path=self.directory,
            ) from error
        return sum(tensor.nbytes for tensor in tensors.values())

    def load(self) -> None:
        """Load the state.

        Raises:
            StateDictMismatchError: The object raised an error of any kind.
        """
        try:
            self.part.load_state_dict(self.state)
        except HfshardError:
            raise
        except Exception as error:
            raise StateDictMismatchError(
                f"'{self.name}' ({type(self.part).__name__}) refused its state in the checkpoint '{self.directory}': "
                f"{error}. Nothing else was restored. Build it as in the saved run.",
                path=self.directory,
            ) from error

    def keep(self) -> Undo:
        """Note the object's current state, and return a function that restores it."""
        if isinstance(self.part, ResumableDataLoader):
            return kept_attributes(self.part)
        return self.part.keep() if isinstance(self.part, LoaderTracker) else partial(self.put_back, self.now())

    def now(self) -> Any:
        """Copy the object's current state."""
        tensors: dict[str, torch.Tensor] = {}
        nested = encode(self.part.state_dict(), self.name, tensors)
        return decode(nested, {name: tensor.clone() for name, tensor in tensors.items()}, self.name)

    def put_back(self, before: Any) -> None:
        """Load what `now` returned; if the object refuses that too, it stays as it is, which is logged."""
        try:
            self.part.load_state_dict(before)
        except Exception as error:  # noqa: BLE001 - the first refusal is being raised
            logger.error("Cannot undo the load of '%s' (%s): %s", self.name, type(self.part).__name__, error)


@dataclass
class Restoration:
    """A checkpoint that was read and compared with a training state, and the changes that remain to be made."""

    pending_loads: list[PendingLoad] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    """Descriptions of what does not fit. Always empty with strict."""
    objects: list[StatefulLoad] = field(default_factory=list)
    """The user's own objects, each of which may refuse its state."""
    extra: Any = None
    lacking: tuple[str, ...] = ()
    """Descriptions of what another program's checkpoint lacks, as in `RestoredStep.lacking`."""
    set_rng: Callable[[], None] = lambda: None
    directory: str = ""
    frozen: list[str] = field(default_factory=list)
    """Names of parameters that have a state in the checkpoint's optimizers, but are frozen here."""
    stale_gradients: list[nn.Parameter] = field(default_factory=list)
    """Parameters whose gradients belong to another step than the restored one."""
    sparse_dims: dict[int, int] = field(default_factory=dict)
    """The ids of parameters that had a gradient at the save -> its number of sparse dimensions; it becomes zero."""
    scalers: list[torch.amp.GradScaler] = field(default_factory=list)
    trackers: list[LoaderTracker] = field(default_factory=list)
    """Loaders of other libraries: their next `iter()` draws random numbers, after which the RNG is restored again."""

    def follow(self, state: TrainingState, names: Collection[str]) -> None:
        """Note what changes along with the parts of these names: the next `iter()` of loaders, and old gradients."""
        self.scalers = [one for name in names if isinstance(one := state.components[name], torch.amp.GradScaler)]
        self.trackers = [one for name in names if isinstance(one := state.components[name], LoaderTracker)]
        if not any(isinstance(part, Gradients) for part in [*state.components.values(), *state.left_out.values()]):
            modules = [state.components[name] for name in names if state.kinds[name] == "module"]
            self.stale_gradients = [parameter for module in modules for parameter in module.parameters()]

    def apply(self, session: Session) -> None:
        """Report the differences, and load everything on all ranks, the generators last. Every rank must call.

        Raises:
            StateDictMismatchError: An object refused its state, and nothing was changed.
            RankFailedError: An object refused its state on another rank.
            KeyboardInterrupt: Ctrl-C was pressed during the load, and everything is restored: all of it was in memory.
        """
        for difference in self.differences:
            logger.warning("%s", difference)
        with delay_interrupt():
            self._load_all(session)
            with all_or_nothing(session):
                for parameter in self.stale_gradients:
                    sparse_dim = self.sparse_dims.get(id(parameter))
                    parameter.grad = None if sparse_dim is None else zero_gradient(parameter, sparse_dim)
                for scaler in self.scalers:
                    with suppress(AssertionError):  # torch's, before the first use
                        scaler.update(scaler.get_scale())  # this forgets which gradients were unscaled
                self.set_rng()
                for tracker in self.trackers:
                    tracker.reset(self.set_rng)
        if self.frozen:
            logger.warning(
                "The checkpoint '%s' has an optimizer state of %s, which %s frozen here (requires_grad=False): a "
                "restore does not change that. Unfreeze what the saved run was training.",
                self.directory,
                shorten_list(self.frozen, _SHOWN, quote=True),
                "is" if len(self.frozen) == 1 else "are",
            )

    def _load_all(self, session: Session) -> None:
        """Load everything on every rank, or nothing on any."""
        undo: list[Undo] = [partial(set_rng_state, rng_state())]  # a part may draw while it loads
        weights = [one for one in self.pending_loads if one.undo is None]
        is_kept = any(session.all_of(any(one.may_refuse for one in weights)))
        with all_or_nothing(session, undo):
            # The largest object comes last: if nothing can refuse after it, no copy of its state is needed.
            in_order = sorted(self.objects, key=lambda one: (one.is_copied, one.nbytes))
            is_last = session.world_size == 1 and not is_kept
            last = [one for one in in_order[-1:] if is_last and one.is_copied]
            for one in in_order[: len(in_order) - len(last)]:
                undo.append(one.keep())
                one.load()
            for pending_load in self.pending_loads:
                if pending_load.undo is not None:
                    undo.append(pending_load.undo)
                    _run(pending_load, self.directory)
            for one in last:
                one.load()
        with all_or_nothing(session, undo):
            if is_kept:  # weights that nothing can refuse need no copy
                undo += [load.keep() for load in weights if load.keep is not None]
            for load in weights:
                _run(load, self.directory, "Nothing was restored" if is_kept else "It may be half restored")

    def restored(self, step: int, path: str, metrics: dict[str, float]) -> RestoredStep:
        """Return the step that `CheckpointManager.restore` returns.

        Args:
            step, path, metrics: Those of the checkpoint.
        """
        restored = RestoredStep(step)
        restored.path = path
        restored.extra = self.extra
        restored.metrics = metrics
        restored.differences = tuple(self.differences)
        restored.lacking = self.lacking
        return restored


@dataclass
class PartPlanner:
    """Compares the decoded states of parts with those that were built, and notes how they are loaded."""

    state: TrainingState
    """Built as for the run that was saved; it is not changed."""
    saved: Mapping[str, dict[str, Any]]
    """Name of a part -> its entry: `kind`, `state`, and for some parts `order`."""
    restoration: Restoration
    """Receives the loads, and without strict the differences."""
    strict: bool = field(kw_only=True)
    """Reject any difference."""

    def __post_init__(self) -> None:
        self.parameter_names = self.state.parameter_names()
        self.directory = self.restoration.directory

    def plan(self, name: str, value: Any) -> None:
        """Plan one part.

        Args:
            name: The part's name.
            value: Its state, decoded.

        Raises:
            StateDictMismatchError: strict, and the state does not fit.
            KeyError, IndexError, TypeError, ValueError, AttributeError: The value is not what such a part saves.
        """
        try:
            self._plan(name, self.state.components[name], value)
        except StateDictMismatchError as error:
            if self.strict:
                raise
            self.restoration.differences.append(error.message)

    def _plan(self, name: str, part: Any, value: Any) -> None:
        kind = self.state.kinds[name]
        restoration = self.restoration
        if kind in ("stateful", "loader"):
            _check_object(self, name, value)
            if kind == "stateful":
                value = _reordered_state(self, name, value)
            restoration.objects.append(StatefulLoad(name, part, value, self.directory))
            return
        if kind == "module":
            load = _plan_module(self, name, value)
        elif kind == "optimizer":
            reject_sharded_state(part, name)
            value = regroup(value, part, self.parameter_names, name, self.directory)
            self.saved[name]["state"] = {**self.saved[name]["state"], "groups": value["groups"]}
            if self.state.is_flattened:
                value = local_states(self.state, name, value, self.parameter_names, self.directory)
            load = plan_optimizer(part, value, self.parameter_names, name, self.directory)
            frozen = [self.parameter_names[id(one)] for one in trained_parameters(part) if not one.requires_grad]
            restoration.frozen += [parameter for parameter in frozen if value["state"].get(parameter)]
            if not (self.state.is_flattened or self.state.named_optimizers):  # which keep gradients of their own
                restoration.sparse_dims |= match_gradients(part, self.parameter_names, value.get("gradients", {}))
            if name in self.state.named_optimizers:
                load = self.state.named_optimizers[name].linked(load, name, self.directory)
            load = link_inner_optimizers(load, part, self.state.of_kind("optimizer").values())
        else:
            load = plan_scheduler(part, value, name, self.directory, _find_reorderings(self, name))
        restoration.pending_loads.append(load)


# Application of a restoration on all ranks, or on none: if anything refuses, every part gets its old state back.


@contextmanager
def all_or_nothing(session: Session, undo: Sequence[Undo] = ()) -> Iterator[None]:
    """Raise on every rank what the block raises on one, after undoing what was done. Every rank must call.

    Args:
        session: That of the ranks that restore.
        undo: All are called in reverse if a rank fails, even if one of them raises; the block may add to it.

    Raises:
        RankFailedError: Another rank failed. A rank that failed raises its own error.
    """
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:  # noqa: BLE001 - raised by `agree`, when all ranks know
        error = caught
    try:
        session.agree(error)
    except BaseException:
        for put_back in reversed(undo):
            try:
                put_back()
            except Exception as failure:  # noqa: BLE001 - the first refusal is being raised, and the others are left
                logger.error("Cannot undo the load of a part of the state, which is now mixed: %s", failure)
        raise


def _run(pending_load: PendingLoad, directory: str, outcome: str = "Nothing was restored") -> None:
    """Load a part; `outcome` describes what an error of any kind leaves behind."""
    try:
        pending_load.load()
    except HfshardError:
        raise
    except Exception as error:
        raise StateDictMismatchError(
            f"'{pending_load.name}' refused its state in the checkpoint '{directory}': {error}. {outcome}. Build it as "
            "in the saved run.",
            path=directory,
        ) from error


# Comparison of the parts of a training state with a checkpoint's: which ones exist, and of which kind.


def match_gradient_kind(state: TrainingState, saved: dict[str, Any], saved_ranks: int, world_size: int) -> None:
    """Accept gradients of one process for ranks that share a model, and the other way round."""
    for name, part in state.components.items():
        kinds = saved.get(name, {}).get("kind"), state.kinds[name]
        if isinstance(part, Gradients) and kinds in (("loader", "stateful"), ("stateful", "loader")):
            processes = world_size if state.kinds[name] == "loader" else saved_ranks
            if processes == 1:
                saved[name] = {**saved[name], "kind": state.kinds[name]}


def take_converted(state: TrainingState, saved: dict[str, Any]) -> None:
    """Accept a dict of tensors as a module's, and the other way round: converted old files do not distinguish them."""
    alike = ("module", "stateful")
    for name, kind in state.kinds.items():
        if name != "model" and kind in alike and saved.get(name, {}).get("kind") in alike:
            saved[name] = {**saved[name], "kind": kind}


def parts_of_other_ranks(state: TrainingState, own: Mapping[str, Any], *, is_same_number: bool) -> set[str]:
    """List what each rank saved for itself and cannot be this rank's.

    With another stage of a pipeline, or the full model, that is everything but the loader; among another number of
    ranks, optimizers, which then step other parameters on each.
    """
    optimizers = {name for name, entry in own["components"].items() if entry.get("kind") == "optimizer"}
    alone = {name for name, entry in own["components"].items() if entry.get("kind") != "loader"}
    alone |= {name for name, part in state.components.items() if isinstance(part, Gradients)} & own["components"].keys()
    if alone and own.get("stage") not in (None, stage_digest(state)):
        return alone
    return set() if is_same_number else optimizers


def check_components(
    state: TrainingState,
    saved: Mapping[str, Any],
    restoration: Restoration,
    elsewhere: Collection[str],
    *,
    strict: bool,
    may_lack: Collection[str] = (),
) -> None:
    """Find parts that the checkpoint or the state lacks, or that differ in kind.

    Args:
        state: The state that is restored.
        saved: The components of the checkpoint.
        restoration: Receives descriptions of them.
        elsewhere: Parts that other ranks have saved for themselves.
        strict: Reject any of them.
        may_lack: Parts that the checkpoint need not have.

    Raises:
        StateDictMismatchError: strict, and there is a difference.
    """
    directory, differences = restoration.directory, restoration.differences
    wanted = [name for name in state.components if name in saved or name not in may_lack]
    for name in wanted:
        if name in elsewhere:
            differences.append(
                f"Each rank saved its own '{name}' in '{directory}', but there are more or fewer ranks now, or this "
                "one has other layers of the model. Restore on as many ranks with the same pipeline stages, or pass "
                "strict=False to leave it as built."
            )
        elif name not in saved:
            differences.append(
                f"The checkpoint '{directory}' has no '{name}'. Build the state without it, or pass strict=False to "
                "leave it as built."
            )
        elif saved[name].get("kind") != state.kinds[name]:
            differences.append(
                f"'{name}' has kind {saved[name].get('kind')!r:.50} in '{directory}', but is a {state.kinds[name]} "
                "here. Pass the kind of object that was saved, or strict=False to leave it as built."
            )
    for name in saved:
        if name not in state.components:
            differences.append(
                f"The checkpoint '{directory}' has the state of '{name}', which the TrainingState lacks. "
                f"Pass {name}=..., or strict=False to leave it out."
            )
    if strict and differences:
        missing = tuple(name for name in wanted if name not in saved)
        unexpected = tuple(name for name in saved if name not in state.components)
        raise StateDictMismatchError(
            " ".join(differences) + " Nothing was restored.",
            path=directory,
            missing_keys=missing,
            unexpected_keys=unexpected,
        )


def unsaved_components(state: TrainingState) -> frozenset[str]:
    """List the parts that other programs do not save: positions of loaders, gradients between micro-batches."""
    gradients = {name for name, part in state.components.items() if isinstance(part, Gradients)}
    return frozenset(gradients.union(state.of_kind("loader")))


def _check_object(planner: PartPlanner, name: str, value: Any) -> None:
    """Check that an object would accept its state."""
    part, directory = planner.state.components[name], planner.directory
    if isinstance(part, torch.amp.GradScaler) and part.is_enabled() != bool(value):
        raise StateDictMismatchError(
            f"'{name}' is a GradScaler that is {'on' if part.is_enabled() else 'off'}, but was not when the checkpoint "
            f"'{directory}' was saved. Build it with the saved run's enabled=, or pass strict=False.",
            path=directory,
        )
    check = getattr(part, "check_state_dict", None)
    if not callable(check):
        return
    try:
        check(value)
    except StateDictMismatchError as error:
        raise StateDictMismatchError(
            f"'{name}' does not fit the checkpoint '{directory}': {error.message}"
            f"{' Nothing was restored.' if planner.strict else ''}",
            path=directory,
            expected=error.expected,
            actual=error.actual,
        ) from error


# Comparison of a saved module with the one that was built, and the plan of how its tensors are assigned.


_SHOWN: Final = 5
"""The number of dtypes or names that a message lists."""


def _plan_module(planner: PartPlanner, name: str, saved: dict[str, Any]) -> PendingLoad:
    """Compare a module's tensors with the saved ones by name, and return the load that assigns them."""
    module, directory, masters = unwrap(planner.state.components[name]), planner.directory, planner.state.masters
    reject_offloaded(module)
    own = collect_run_tensors(module, masters)
    reject_freed(own)
    tensors, difference = match_names(saved, own, directory, model_name=f"'{name}' that was built")
    reject_expanded(module, tensors, directory)
    ignored = getattr(module, "_keys_to_ignore_on_save", None) or ()
    missing = tuple(key for key in difference.missing if key not in ignored)
    dtypes = [
        f"{key} was {tensor.dtype}, and is {current.dtype}"
        for key, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor) and isinstance(current := own.get(key), torch.Tensor)
        if current.dtype != tensor.dtype
    ]
    if missing or difference.unexpected or difference.mismatched or dtypes:
        parts = [text for text in (difference.summary(), "; ".join(dtypes[:_SHOWN])) if text]
        message = (
            f"'{name}' does not fit the checkpoint '{directory}': {'; '.join(parts)}. Build it as in the saved run, or "
            "pass strict=False to load what fits."
        )
        if planner.strict:
            raise StateDictMismatchError(
                message + " Nothing was restored.",
                path=directory,
                missing_keys=missing,
                unexpected_keys=difference.unexpected,
                mismatched_keys=difference.mismatched,
            )
        planner.restoration.differences.append(message)
        mismatched = {key for key, _, _ in difference.mismatched}
        tensors = {key: tensor for key, tensor in tensors.items() if key in own and key not in mismatched}
    is_of_deepspeed = "deepspeed" in sys.modules
    load = (
        partial(assign_run_tensors, module, tensors, masters) if is_of_deepspeed else partial(assign, module, tensors)
    )
    return PendingLoad(name, load, keep=partial(keep_module, module, masters), may_refuse=may_refuse(module))


# Copies of a module's tensors in host memory, in case a hook of the module refuses those of a checkpoint.


_METHODS: Final = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
"""Methods that may refuse a state; those of torch's own layers do not."""


def may_refuse(module: nn.Module) -> bool:
    """Return whether a hook, or a method that is not torch's, takes part in loading the module, and may raise."""
    return any(_is_loaded_by_user(one) for one in module.modules())


def keep_module(module: nn.Module, masters: Masters) -> Callable[[], None]:
    """Copy a module's tensors and extra states, and return a function that restores them."""
    held = [
        (owner, name, tensor)
        for owner in module.modules()
        for named in (owner.named_parameters, owner.named_buffers)
        for name, tensor in named(recurse=False, remove_duplicate=False)
    ]
    copies = {id(tensor): _own_part(tensor).to("cpu", copy=True) for _, _, tensor in held if not tensor.is_meta}
    parts = keep_parts(module, masters)
    has_state = [one for one in module.modules() if type(one).get_extra_state is not nn.Module.get_extra_state]
    extras = [(one, copy.deepcopy(one.get_extra_state())) for one in has_state]

    def put_back() -> None:
        for owner, name, tensor in held:
            if getattr(owner, name) is not tensor:
                setattr(owner, name, tensor)
            if id(tensor) in copies:
                with torch.no_grad():
                    _own_part(tensor).copy_(copies[id(tensor)])
        for part, before in parts:
            part.copy_(before)
        for owner, state in extras:
            try:
                owner.set_extra_state(state)
            except Exception as error:  # noqa: BLE001 - the first refusal is being raised
                logger.error("Cannot undo the load of a %s's extra state: %s", type(owner).__name__, error)

    return put_back


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    return local_tensor(tensor) if is_dtensor(tensor) else tensor.detach()


def _is_loaded_by_user(module: nn.Module) -> bool:
    hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    if not all(_is_harmless(hook) for hook in hooks):
        return True
    return any(
        name in vars(module) or not getattr(type(module), name).__module__.startswith("torch.nn.") for name in _METHODS
    )


def _is_harmless(hook: Any) -> bool:
    """Return whether a hook is torch's: it renames for weight_norm, or releases what `fully_shard` has gathered."""
    module = getattr(getattr(hook, "hook", hook), "__module__", None)
    return module == weight_norm.__module__ or str(module).startswith("torch.distributed.fsdp.")


# Comparison of the orders of groups and parameters with a checkpoint's, for everything that is matched by position.


def _find_reorderings(planner: PartPlanner, name: str) -> list[Reordering]:
    """Find the optimizers of a scheduler, or of another object, whose groups are in another order than when saved."""
    state, saved = planner.state, planner.saved
    part = state.components[name]
    components = {id(one): component for component, one in state.of_kind("optimizer").items()}
    held = held_optimizers(part)
    if not held and state.kinds[name] == "scheduler":  # it may have one that was not found
        held = list(state.of_kind("optimizer").values())
    own = getattr(part, "optimizer", None)
    found: list[Reordering] = []
    for optimizer in held:
        component = components.get(id(optimizer), "")
        before = saved[component]["state"]["groups"] if saved.get(component, {}).get("kind") == "optimizer" else None
        if before is not None:
            now = group_names(optimizer, planner.parameter_names, component)
            positions = related_positions(now, [group["params"] for group in before])
            is_same = positions == tuple(range(len(now)))
            counts = frozenset({len(now), len(before)})
        else:
            positions = None
            is_same = _is_same_order(planner, name)
            counts = frozenset({len(optimizer.param_groups)})
        if not is_same:
            known = PER_GROUP if len(held) == 1 or own is optimizer else frozenset[str]()
            owners = f"groups of '{component}'" if component else "groups of its optimizer"
            found.append(Reordering(name, owners, planner.directory, positions, counts, known))
    return found


def _reordered_state(planner: PartPlanner, name: str, value: Any) -> Any:
    """Return the state of a user's object in the current order; reject entries by position if that is unknown."""
    path = planner.directory
    for reordering in _find_reorderings(planner, name):
        value = reordering.apply(value, planner.state.components[name].state_dict())
    if _is_same_order(planner, name):
        return value
    models = [list(module.parameters()) for module in planner.state.of_kind("module").values()]
    tests = [is_per_parameter(parameters) for parameters in models]
    place = find_in(value, lambda one: any(is_one_each(one) for is_one_each in tests))
    if place is not None:
        raise StateDictMismatchError(
            f"'{place}' of '{name}' has entries by parameter position in the checkpoint '{path}', but the parameters "
            "are in another order now. Build the model (or the optimizer that it holds) with them in the order of the "
            "saved run, make its state_dict store them by name, or pass strict=False to leave it as built.",
            path=path,
        )
    return value


def _is_same_order(planner: PartPlanner, name: str) -> bool:
    """Return whether the orders that an object's positions may refer to equal the checkpoint's, if it states them."""
    before = planner.saved[name].get("order")
    return before is None or before == planner.state.order_digest(name)
