"""What is explored: some programs, from some contents of a store, with so many faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hfshard.saving.save_request import SaveRequest
from tests.stores.saving.checkpoints import config, request, stock_shards
from tests.sweeps.exploring.explorer import (
    BrokenError,
    State,
    Store,
    begin_state,
    check_last_run_save,
    check_last_save,
    check_listing,
    check_rest,
    check_state,
    run,
)
from tests.sweeps.exploring.programs import Manager, Program, Reader, RunReader, Writer

LOW, HIGH, THIRD, FOURTH = "1" * 16, "f" * 16, "2" * 16, "e" * 16
"""Ids of saves: of two saves with one number, the higher id counts."""
_FIRST, _LAST = "0" * 16, "7" * 16


@dataclass(frozen=True)
class Space:
    """Programs over a store, from its first contents on."""

    programs: Sequence[Program]
    faults: int = 0
    begins: str = "saved"
    """nothing, saved (by hfshard), or uploaded (by another tool)."""
    has_config: bool = False

    @property
    def is_run(self) -> bool:
        """Whether it is that of a training run."""
        return any(isinstance(program, Manager | RunReader) for program in self.programs)

    def begin(self) -> State:
        """The state before any request of the programs."""
        store = Store.of({})
        if self.begins == "uploaded":
            store = Store.of(stock_shards(9) | ({"config.json": config(9)} if self.has_config else {}))
        elif self.begins == "saved" and self.is_run:
            store = run(Manager([(1, 9.0)], [_FIRST], None), store)[1]
        elif self.begins == "saved":
            store = run(Writer([wanted(9, self.has_config)], [_FIRST]), store)[1]
        return begin_state(store, self.programs, self.faults)

    def check(self) -> Callable[[State], None]:
        """Raises where a state must not be."""
        values = self._values()
        has_begun = self.begins != "nothing"

        def check(state: State) -> None:
            check_state(state, has_begun=has_begun, values=values)
            if self.is_run:
                check_listing(state)
            else:
                check_rest(state, self.faults)

        return check

    def check_store(self, store: Store) -> None:
        """Raise where one more save, undisturbed, would leave litter, or not end well."""
        if self.is_run:
            check_last_run_save(store, Manager([(9, 5.0)], [_LAST], 1))
        else:
            check_last_save(store, Writer([wanted(5, self.has_config)], [_LAST]))

    def _values(self) -> Mapping[Any, Any]:
        """What a reader may find: value -> config, or step."""
        if self.is_run:
            steps = [one for program in self.programs if isinstance(program, Manager) for one in program.steps]
            return {9.0: 1} | {value: step for step, value in steps}
        saves = [one for program in self.programs if isinstance(program, Writer) for one in program.requests]
        found = {float(next(iter(one.tensors.values()))[0]): one.config for one in saves}  # type: ignore[index]
        return found | {9.0: config(9) if self.has_config else None}


def wanted(value: int, has_config: bool = False) -> SaveRequest:
    """A checkpoint of one shard."""
    return request(value, value if has_config else None, limit="1MB")


def writer(*values: int, ids: Sequence[str], has_config: bool = False) -> Writer:
    """Saves checkpoints one after another."""
    return Writer([wanted(value, has_config) for value in values], ids)


def spaces() -> dict[str, Space]:
    """All spaces, the small ones first."""
    two = [writer(1, ids=[LOW]), writer(2, ids=[HIGH])]
    turned = [writer(1, ids=[HIGH]), writer(2, ids=[LOW])]
    each_two = [writer(1, 3, ids=[LOW, THIRD]), writer(2, 4, ids=[HIGH, FOURTH])]
    configs = [writer(1, ids=[LOW], has_config=True), writer(2, ids=[HIGH], has_config=True)]
    managers = [Manager([(2, 1.0)], [LOW], 1), Manager([(3, 2.0)], [HIGH], 1)]
    again = [Manager([(2, 1.0), (3, 3.0)], [LOW, THIRD], 2), Manager([(2, 2.0)], [HIGH], 2)]
    return {
        "two writers, 1 fault": Space(two, 1),
        "two writers from nothing, 1 fault": Space(two, 1, "nothing"),
        "two writers over an upload, 1 fault": Space(two, 1, "uploaded"),
        "two writers, the other ids, 2 faults": Space(turned, 2),
        "two writers with configs, 1 fault": Space(configs, 1, has_config=True),
        "two writers and a reader, no fault": Space([*two, Reader()], 0),
        "one manager, 1 fault": Space([Manager([(2, 1.0), (3, 3.0)], [LOW, THIRD], None)], 1),
        "one manager that saves a step again, 2 faults": Space(
            [Manager([(2, 1.0), (2, 4.0), (3, 3.0)], [LOW, HIGH, THIRD], None)], 2
        ),
        "two managers, 1 fault": Space(managers, 1),
        "two managers of one step, 1 fault": Space(again, 1),
        "two managers and a reader, no fault": Space([*managers, RunReader()], 0),
        "two writers and a reader, 1 fault": Space([*two, Reader()], 1),
        "two writers with configs and a reader, no fault": Space([*configs, Reader()], 0, has_config=True),
        "two writers and a reader over an upload, no fault": Space([*two, Reader()], 0, "uploaded"),
        "two writers of two saves each, no fault": Space(each_two, 0),
        "two writers of two saves each, 1 fault": Space(each_two, 1),
        "two writers of two saves each and a reader, 3 faults": Space([*each_two, Reader()], 3),
        "two managers and a reader, 2 faults": Space([*again, RunReader()], 2),
    }


def check_stores(space: Space, stores: Sequence[Store]) -> None:
    """Do one more save, undisturbed, over each of some stores.

    Raises:
        BrokenError: It left litter, or failed.
    """
    for store in stores:
        try:
            space.check_store(store)
        except BrokenError as error:
            raise BrokenError(f"{error}\nfrom {sorted(store.objects)}") from None
