"""Plan and report of a removal: files that go, in which order, and files that stay, with the reasons."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final

from hfshard.constants import (
    ADAPTER_CONFIG_NAME,
    BIN_SUFFIX,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    SAFETENSORS_SUFFIX,
    SIGNATURE_NAME,
    WEIGHTS_SUFFIXES,
)
from hfshard.errors import CheckpointChangedError
from hfshard.format.file_names import INDEX_FILE, WeightNames

SMALL_FILES: Final = (CONFIG_NAME, GENERATION_CONFIG_NAME, SIGNATURE_NAME)
"""Files that go along with the weights, unless other weights stay next to them."""

OTHER_FILES: Final = 8
"""The phase of files that are neither weights nor an index."""

NOT_ITS_OWN: Final = "not part of the checkpoint"
SHARED: Final = "other weights stay, and may need it"
MAY_BE_UNDER_WAY: Final = "of a save that is running, or was killed: --unfinished removes it, if no save is running"


@dataclass(frozen=True, slots=True)
class RemovalReport:
    """Report of a removal that was done, or would be."""

    place: str
    """The directory or address."""
    removed: Mapping[str, int]
    """Path in the place -> bytes."""
    kept: Mapping[str, str]
    """Path of a file or folder that stays in the place -> why; a folder's ends in "/"."""
    unfinished_uploads: tuple[str, ...] = ()
    """Names of objects with unfinished uploads; services do not report the sizes of those."""
    is_done: bool = False
    """Whether it was removed; False for a dry run."""

    @property
    def size(self) -> int:
        """Bytes of all files that were removed, or would be."""
        return sum(self.removed.values())

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to remove."""
        return not self.removed and not self.unfinished_uploads


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file or object that goes."""

    size: int
    identity: Hashable
    """Differs if the contents differ."""


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """Files that go and files that stay, as they were found in a place."""

    place: str
    phases: Sequence[Sequence[str]]
    """Paths in the place, in the order in which they go; those of one phase in any order."""
    found: Mapping[str, FoundFile]
    """Path -> file, for all of them."""
    kept: Mapping[str, str]
    """Path of a file or folder that stays -> why."""
    unfinished_uploads: tuple[str, ...] = ()
    """Names of objects whose unfinished uploads go."""

    def report(self) -> RemovalReport:
        """Return the report of the planned removal."""
        removed = {name: self.found[name].size for phase in self.phases for name in phase}
        return RemovalReport(self.place, removed, dict(sorted(self.kept.items())), self.unfinished_uploads)

    def check_same(self, now: RemovalPlan) -> None:
        """Check that the files that go are still those that were shown.

        Raises:
            CheckpointChangedError: They are not.
        """
        if now.found != self.found:
            changed = sorted({name for name, _ in now.found.items() ^ self.found.items()})
            raise CheckpointChangedError(
                f"'{self.place}' changed after its files were listed ('{changed[0]}'). Nothing was removed. Retry "
                "when no save is running.",
                path=self.place,
            )


@dataclass(frozen=True, slots=True)
class Removal:
    """A removal that can be shown, and then carried out."""

    report: RemovalReport
    carry_out: Callable[[], None] = field(repr=False)
    """Removes what the report lists; if that has changed, raises CheckpointChangedError and removes nothing."""


def removal_of(
    make_plan: Callable[[], RemovalPlan],
    remove: Callable[[RemovalPlan], object],
    locked: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Removal:
    """Return the removal of a plan; it is built again when it is carried out, in a place that nobody else changes.

    Args:
        make_plan: Lists the place, and builds the plan.
        remove: Removes what a plan lists, in its order.
        locked: Locks the place.
    """
    plan = make_plan()

    def carry_out() -> None:
        with locked():
            now = make_plan()
            plan.check_same(now)
            remove(now)

    return Removal(plan.report(), carry_out)


def joined(removals: Sequence[Removal], place: str) -> Removal:
    """Join removals of one place into one that carries them out in turn; the first one's reason for a file counts.

    One that has found nothing is left out: it takes no lock.
    """

    def carry_out() -> None:
        for one in removals:
            if not one.report.is_empty:
                one.carry_out()

    removed = {name: size for one in removals for name, size in one.report.removed.items()}
    kept: dict[str, str] = {}
    for one in reversed(removals):
        kept |= {name: why for name, why in one.report.kept.items() if name not in removed}
    uploads = tuple(name for one in removals for name in one.report.unfinished_uploads)
    return Removal(RemovalReport(place, removed, kept, uploads), carry_out)


def in_phases(names: Collection[str], phase_of: Callable[[str], int]) -> list[list[str]]:
    """Sort names into phases by their numbers; phases without names are left out."""
    phases: dict[int, list[str]] = {}
    for name in sorted(names):
        phases.setdefault(phase_of(name), []).append(name)
    return [phases[number] for number in sorted(phases)]


def phase_of_weights(name: str, names: WeightNames) -> int:
    """Return the phase of a file of weights, so that no reader ever loads other weights in place of those that go.

    transformers and hfshard look for the single file, the index, and the same of pickles; huggingface_hub for the
    index, then for the only safetensors file. So pickles go first, while safetensors outrank them. Then shards go,
    while the index names them, which is an error for every reader; then the single file; then the index, which has
    been useless since the first shard went, but kept huggingface_hub from taking the last shard for all weights.
    """
    if name.endswith(BIN_SUFFIX):
        return 1 if name == names.bin_single else 0
    if name == names.bin_index:
        return 2
    if name == names.placeholder:
        return 7
    if name == names.single:
        return 5
    if name.endswith(SAFETENSORS_SUFFIX):
        return 4 if names.is_commit_temporary(name) else 3
    return 6 if INDEX_FILE.fullmatch(name) else OTHER_FILES


def is_of_weights(name: str) -> bool:
    """Return whether a file of this name has weights, or leads to some: then config files next to it stay."""
    return name.endswith(WEIGHTS_SUFFIXES) or INDEX_FILE.fullmatch(name) is not None or name == ADAPTER_CONFIG_NAME
