"""Every order in which the requests of some programs reach a store, with so many faults; each state is checked once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Final, NamedTuple

from hfshard.format.index import CheckpointIndex
from hfshard.format.stored_save import SaveId, StoredSave, save_of_copy, saves_among, split_object_name
from tests.sweeps.exploring.programs import CHANGED, FAILED, Event, Program, Request, RunLister, etag_of

Objects = tuple[tuple[str, bytes], ...]
"""Sorted by name."""

_PLAIN: Final = 0.8
"""How often a random walk takes a step without a fault where it could take one with."""

ENTRIES = ("model.safetensors.index.json", "checkpoint.json")


class Node:
    """The answers that a program has had so far."""

    __slots__ = ("_steps", "answer", "children", "events", "parent", "pending", "program")

    def __init__(self, program: Program, parent: Node | None, answer: Any) -> None:
        self.program, self.parent, self.answer = program, parent, answer
        self.children: dict[Any, Node] = {}
        self._steps: dict[int, tuple[Node, Store]] = {}
        self.pending: Request | None
        self.events: tuple[Event, ...]
        self.pending, self.events = program.advance(self.answers())

    def answers(self) -> list[Any]:
        """All of them, the first one first."""
        found = []
        node = self
        while node.parent is not None:
            found.append(node.answer)
            node = node.parent
        return found[::-1]

    def after(self, answer: Any) -> Node:
        """The program after one more answer."""
        if answer not in self.children:
            self.children[answer] = Node(self.program, self, answer)
        return self.children[answer]

    def step(self, store: Store) -> tuple[Node, Store]:
        """The program and the store after its next request was done and answered."""
        known = self._steps.get(store.number)
        if known is None:
            assert self.pending is not None
            after, answer = store.applied(self.pending)
            known = self._steps[store.number] = self.after(answer), after
        return known


class Store:
    """What a store holds; there is one object for each contents."""

    _known: ClassVar[dict[Objects, Store]] = {}

    def __init__(self, objects: Objects) -> None:
        self.objects = dict(objects)
        self.number = len(self._known)
        self._after: dict[Request, tuple[Store, Any]] = {}
        self.current = current(self.objects)
        self.problem = problem_of(self.objects)
        self.broken = {save_id for save_id, name in _entries(self.objects) if _lacks(self.objects, save_id, name)}
        """Saves whose index is there, and not all of their objects."""

    @cached_property
    def listed(self) -> Mapping[str, SaveId]:
        """The checkpoints that a run lists: folder -> save."""
        value: Any = run(RunLister(), self)[0].events[-1].value
        found: dict[str, SaveId] = value
        return found

    @cached_property
    def whole(self) -> Mapping[str, SaveId]:
        """The highest save in each folder of a run all of whose objects are there."""
        saves = ((save_id, name) for save_id, name in sorted(_entries(self.objects)) if save_id not in self.broken)
        return {name.partition("/")[0]: save_id for save_id, name in saves}

    @classmethod
    def of(cls, objects: Mapping[str, bytes]) -> Store:
        """The one with these objects."""
        key = tuple(sorted(objects.items()))
        if key not in cls._known:
            cls._known[key] = cls(key)
        return cls._known[key]

    def applied(self, request: Request) -> tuple[Store, Any]:
        """The store after a request, and its answer."""
        if request not in self._after:
            objects, answer = _applied(self.objects, request)
            self._after[request] = self if objects is self.objects else Store.of(objects), answer
        return self._after[request]


class State(NamedTuple):
    """A store, what is on its way, and where each program is."""

    store: Store
    late: frozenset[Request]
    """Requests that were not answered, and may be done yet."""
    nodes: tuple[Node, ...]
    faults: int
    """How many may still come."""


class BrokenError(AssertionError):
    """A state that must not be."""


@dataclass
class Explored:
    """What was found."""

    states: int = 0
    stores: set[Store] = field(default_factory=set)
    is_whole: bool = True
    """Whether nothing is left to explore."""


Checker = Callable[[State], None]


def explore(begin: State, check: Checker, seconds: float = 1e9, most_states: int = 10**12) -> Explored:
    """Explore all states that follow from one.

    Raises:
        BrokenError: A check failed; the message has the requests that led there.
    """
    explored = Explored()
    seen: dict[State, tuple[State, str] | None] = {begin: None}
    left = [begin]
    until = time.monotonic() + seconds
    while left:
        if explored.states >= most_states or (explored.states % 1000 == 0 and time.monotonic() > until):
            explored.is_whole = False
            break
        state = left.pop()
        explored.states += 1
        explored.stores.add(state.store)
        try:
            check(state)
        except BrokenError as error:
            raise BrokenError(f"{error}\n{_trace(seen, state)}") from None
        for what, after in successors(state):
            if after not in seen:
                seen[after] = state, what
                left.append(after)
    return explored


def walk(begin: State, check: Checker, draw: random.Random) -> State:
    """Go one random way to its end, which it returns.

    Raises:
        BrokenError: As `explore`.
    """
    state = begin
    steps: list[str] = []
    while True:
        try:
            check(state)
        except BrokenError as error:
            raise BrokenError("\n".join([str(error), *steps])) from None
        choices = list(successors(state))
        if not choices:
            return state
        # Faults are rare among the choices, so that most walks have few, at any time.
        plain = [choice for choice in choices if choice[1].faults == state.faults]
        what, state = draw.choice(plain if plain and draw.random() < _PLAIN else choices)
        steps.append(what)


def successors(state: State) -> Iterator[tuple[str, State]]:
    """Every state that may come next, and how."""
    store, late, nodes, faults = state
    for number, node in enumerate(nodes):
        request = node.pending
        if request is None:
            continue
        before, behind = nodes[:number], nodes[number + 1 :]
        after, changed = node.step(store)
        yield f"{number}: {describe(request)}", State(changed, late, (*before, after, *behind), faults)
        if faults:
            failed = (*before, node.after(FAILED), *behind)
            yield f"{number}: {describe(request)}: not done", State(store, late, failed, faults - 1)
            if request.changes:
                yield f"{number}: {describe(request)}: no answer", State(changed, late, failed, faults - 1)
                yield f"{number}: {describe(request)}: late", State(store, late | {request}, failed, faults - 1)
    for request in late:
        yield f"late: {describe(request)}", State(store.applied(request)[0], late - {request}, nodes, faults)


def _applied(there: dict[str, bytes], request: Request) -> tuple[dict[str, bytes], Any]:
    if request.kind == "list":
        folder, depth = request.names
        names = [name for name in there if name.startswith(folder) and (depth or "/" not in name[len(folder) :])]
        return there, tuple((name, len(there[name]), etag_of(there[name])) for name in sorted(names))
    if request.kind == "read":
        raw = there.get(request.names[0])
        return there, CHANGED if raw is None or etag_of(raw) != request.etag else raw
    after = dict(there)
    if request.kind == "put":
        after[request.names[0]] = request.raw
    elif request.kind == "copy":
        source, target = request.names
        if source not in there or etag_of(there[source]) != request.etag:
            return there, CHANGED
        after[target] = there[source]
    else:
        for name in request.names:
            after.pop(name, None)
    return after, ""


def describe(request: Request) -> str:
    """A request in a trace."""
    return " ".join([request.kind, *request.names])


def current(objects: Mapping[str, bytes]) -> tuple[SaveId, str] | None:
    """The save with the highest index, and the name of that."""
    return max(_entries(objects), default=None)


def _entries(objects: Mapping[str, bytes]) -> list[tuple[SaveId, str]]:
    """The saves whose indexes are there, and the names of these."""
    splits = ((name, split_object_name(name)) for name in objects)
    return [(split[1], name) for name, split in splits if split and split[0].rpartition("/")[2] in ENTRIES]


def problem_of(objects: Mapping[str, bytes]) -> str | None:
    """What is wrong with the checkpoint that readers choose; None: it is complete, or there is none."""
    highest = current(objects)
    if highest is None:
        return _plain_problem(objects)
    lacking = _lacks(objects, *highest)
    return None if lacking is None else f"{highest[1]} names {lacking}, which is not there"


def _lacks(objects: Mapping[str, bytes], save_id: SaveId, entry: str) -> str | None:
    """A file that an index names, and that is not there."""
    folder = entry[: entry.rfind("/") + 1]
    for name, record in StoredSave.from_json(objects[entry], entry, save_id).objects.items():
        raw = objects.get(folder + save_id.object_name(name))
        if raw is None or record.etag not in ("", etag_of(raw)):
            return name
    return None


def _plain_problem(objects: Mapping[str, bytes]) -> str | None:
    raw = objects.get(ENTRIES[0])
    if raw is None:
        return None
    index = CheckpointIndex.from_json(raw, ENTRIES[0])
    lacking = set(index.weight_map.values()) - objects.keys()
    return f"the plain index names {sorted(lacking)}, which are not there" if lacking else None


def events_of(state: State) -> list[Event]:
    """What the programs were told so far."""
    return [event for node in state.nodes for event in node.events]


def check_state(state: State, *, has_begun: bool, values: Mapping[object, object]) -> None:
    """Raise where a state breaks what must hold.

    Args:
        state: Any state.
        has_begun: Whether there was a checkpoint at first.
        values: What a reader may load: value of the weights -> config, or step.
    """
    if state.store.problem is not None:
        raise BrokenError(f"I1: {state.store.problem}")
    highest = state.store.current
    events = events_of(state)
    acknowledged = [event.save_id for event in events if event.kind in ("put", "saved") and event.save_id is not None]
    if acknowledged and (highest is None or highest[0] < max(acknowledged)):
        raise BrokenError(f"I2: {max(acknowledged)} was acknowledged, and {highest} is current")
    for node in state.nodes:
        ids = [event.save_id for event in node.events if event.save_id is not None]
        if node.events and node.events[-1].kind == "saved" and max(ids) != ids[-1]:
            raise BrokenError(f"I2: {ids[-1]} was acknowledged, and an earlier save of its process is {max(ids)}")
    saved = {event.save_id for event in events if event.kind == "saved"}
    if not saved.isdisjoint(state.store.broken):
        raise BrokenError(f"I1: of {sorted(state.store.broken)}, which were acknowledged, objects are gone")
    overtaken = [event.save_id for event in events if event.kind == "overtaken"]
    if highest is not None and highest[0] in overtaken:
        raise BrokenError(f"I3: {highest[0]} was overtaken, and is current")
    for event in events:
        if event.kind == "error":
            raise BrokenError(f"a program ended by {event.value}")
        if event.kind == "nothing" and has_begun:
            raise BrokenError("I4: a reader found nothing")
        if event.kind == "loaded":
            pair: Any = event.value
            if pair[0] not in values or values[pair[0]] != pair[1]:
                raise BrokenError(f"I4: a reader has loaded {event.value}")


def check_listing(state: State) -> None:
    """Raise where a run hides a whole checkpoint, or, at rest, lists one that is not whole.

    A save that was overtaken removes what it has left of itself, which may fail, or never come.
    """
    listed, whole = state.store.listed, state.store.whole
    hidden = {folder: save_id for folder, save_id in whole.items() if listed.get(folder) != save_id}
    if hidden:
        raise BrokenError(f"I7: {hidden} are whole, and {listed} are listed")
    is_resting = not state.late and all(node.pending is None for node in state.nodes)
    is_overtaken = any(event.kind == "overtaken" for event in events_of(state))
    if is_resting and not is_overtaken and listed != whole:
        raise BrokenError(f"I7: {listed} are listed, and {whole} are whole")


def check_rest(state: State, faults: int) -> None:
    """Raise where, without faults, all programs have ended, and plain copies are not those of the newest save."""
    if state.faults != faults or state.late or any(node.pending is not None for node in state.nodes):
        return
    check_copies(state.store)


def check_copies(store: Store) -> None:
    """Raise where the plain copies are not those of the newest save."""
    if store.current is None or not store.current[1].startswith(ENTRIES[0].removesuffix(".json")):
        return
    plain = CheckpointIndex.from_json(store.objects[ENTRIES[0]], ENTRIES[0])
    if save_of_copy(plain) != store.current[0]:
        raise BrokenError(f"I6: {store.current[0]} is current, and the plain index is that of {save_of_copy(plain)}")


def check_last_save(store: Store, program: Program) -> None:
    """Raise where one more save, undisturbed, does not end well, or leaves objects of others."""
    after = _saved_alone(store, program)
    if len(saves := saves_among(after.objects)) != 1:
        raise BrokenError(f"I5: an undisturbed save has left objects of {sorted(saves)}")
    check_copies(after)


def check_last_run_save(store: Store, program: Program) -> None:
    """Raise where one more save into a run, undisturbed and keeping one, does not end well, or leaves other objects."""
    after = _saved_alone(store, program)
    assert after.current is not None
    folder = after.current[1].rpartition("/")[0]
    if len(saves := saves_among(name for name in after.objects if not name.startswith(".saves/"))) != 1:
        raise BrokenError(f"I5: an undisturbed save has left objects of {sorted(saves)}")
    marks = [name for name in after.objects if name.startswith(".saves/")]
    if marks != [f".saves/{folder}-{after.current[0]}"]:
        raise BrokenError(f"I5: an undisturbed save has left {marks}")


def _saved_alone(store: Store, program: Program) -> Store:
    """The store after a save that nothing disturbs."""
    node, after = run(program, store)
    if [event.kind for event in node.events] != ["put", "saved"]:
        raise BrokenError(f"I5: an undisturbed save has ended with {node.events}")
    if after.problem is not None or after.current is None:
        raise BrokenError(f"I5: after an undisturbed save: {after.problem}")
    return after


def run(program: Program, store: Store) -> tuple[Node, Store]:
    """Run a program alone, without faults."""
    node = Node(program, None, None)
    while node.pending is not None:
        node, store = node.step(store)
    return node, store


def begin_state(store: Store, programs: Sequence[Program], faults: int) -> State:
    """The state before any request."""
    return State(store, frozenset(), tuple(Node(program, None, None) for program in programs), faults)


def _trace(seen: Mapping[State, tuple[State, str] | None], state: State) -> str:
    steps = []
    while (before := seen[state]) is not None:
        state, what = before
        steps.append(what)
    return "\n".join(steps[::-1])
